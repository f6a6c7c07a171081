"""`s3://` against a server that speaks the S3 protocol on loopback."""

from __future__ import annotations

import gzip
import hashlib
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from posttrain_cli.data import storage
from posttrain_cli.data.reader import read_rows
from posttrain_cli.data.validate import ValidateOptions, validate
from posttrain_cli.errors import UsageError

BUCKET = "data"
ROWS = [{"prompt": f"p{i}", "response": f"r{i}"} for i in range(50)]
TEXT = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with one bucket, and the environment that names it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = (tmp_path_factory.mktemp("s3") / "log").open("w")
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=log,
        stderr=log,
    )
    address = f"http://127.0.0.1:{port}"
    patch = pytest.MonkeyPatch()
    for name, value in {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        patch.setenv(name, value)
    try:
        _wait(address)
        _put(f"{address}/{BUCKET}", b"")
        yield f"{address}/{BUCKET}"
    finally:
        server.terminate()
        server.wait(10)
        log.close()
        patch.undo()


def _wait(address: str) -> None:
    for _ in range(200):
        try:
            urllib.request.urlopen(f"{address}/moto-api/", timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise AssertionError("the S3 server did not start")


def _put(url: str, body: bytes) -> None:
    kind = {"Content-Type": "application/octet-stream"}
    urllib.request.urlopen(
        urllib.request.Request(url, body, kind, method="PUT"), timeout=60
    ).close()


def test_objects_globs_and_folders_are_read(bucket: str) -> None:
    _put(f"{bucket}/set/b.jsonl", TEXT)
    _put(f"{bucket}/set/a.jsonl.gz", gzip.compress(TEXT))
    _put(f"{bucket}/set/readme.txt", b"no data")
    both = ["s3://data/set/a.jsonl.gz", "s3://data/set/b.jsonl"]
    assert storage.expand(["s3://data/set/b.jsonl"]) == both[1:]
    assert storage.expand(["s3://data/set"]) == both
    assert storage.expand(["s3://data/set/*.jsonl*"]) == both
    for path in both:
        assert [row.record for row in read_rows(path)] == ROWS
    assert storage.sha256(both[1]) == hashlib.sha256(TEXT).hexdigest()


def test_validate_reads_objects_and_hashes_them(bucket: str) -> None:
    _put(f"{bucket}/bad.jsonl", TEXT + b'{"prompt": "p", "response": 3}\n')
    report = validate(["s3://data/bad.jsonl"], ValidateOptions())
    assert report.counts == {"PTC202": 1}
    assert [(f.path, f.line, f.column) for f in report.findings] == [
        ("s3://data/bad.jsonl", 51, 29)
    ]
    assert (report.files[0].rows, report.files[0].bad_rows) == (51, 1)
    assert report.files[0].sha256 == storage.sha256("s3://data/bad.jsonl")


def test_a_cut_object_is_ptc109(bucket: str) -> None:
    _put(f"{bucket}/cut.jsonl.gz", gzip.compress(TEXT)[:-12])
    report = validate(["s3://data/cut.jsonl.gz"], ValidateOptions())
    assert report.counts["PTC109"] == 1
    assert report.files[0].sha256 == storage.sha256("s3://data/cut.jsonl.gz")
    assert not report.ok


def test_what_is_not_there_is_named(bucket: str) -> None:
    with pytest.raises(UsageError) as caught:
        storage.expand(["s3://data/none.jsonl", "s3://data/set/*.csv"])
    assert caught.value.problems == (
        "`s3://data/none.jsonl` does not exist",
        "`s3://data/set/*.csv` does not exist",
    )


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(UsageError, match="need the package `s3fs`") as caught:
        storage.expand(["s3://data/x.jsonl"])
    assert caught.value.hint == "pip install 'posttrain-cli[s3]'"
