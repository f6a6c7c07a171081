from __future__ import annotations

import gzip
import hashlib
import io
import os
from pathlib import Path

import pytest
import zstandard

from posttrain_cli.data import storage
from posttrain_cli.errors import UsageError


def test_expand_keeps_names_as_given_and_sorts_folders_by_bytes(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.csv", "Z.parquet", "é.json", "c.jsonl.gz", ".hidden.jsonl"):
        (tmp_path / name).write_bytes(b"")
    for name in ("notes.txt", "a.report.json", "b.jsonl.rejects.jsonl"):
        (tmp_path / name).write_bytes(b"")
    found = [Path(path).name for path in storage.expand([str(tmp_path)])]
    assert found == ["Z.parquet", "a.csv", "b.jsonl", "c.jsonl.gz", "é.json"]
    relative = os.path.relpath(tmp_path / "b.jsonl")
    assert storage.expand([relative, relative]) == [relative, relative]


def test_expand_globs_and_prefers_a_name_that_exists(tmp_path: Path) -> None:
    for name in ("x[1].jsonl", "x1.jsonl", "x2.jsonl"):
        (tmp_path / name).write_bytes(b"")
    assert storage.expand(["x[1].jsonl"], base=tmp_path) == [str(tmp_path / "x[1].jsonl")]
    assert storage.expand(["x[12].jsonl"], base=tmp_path) == [
        str(tmp_path / "x1.jsonl"),
        str(tmp_path / "x2.jsonl"),
    ]


def test_expand_names_everything_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError) as caught:
        storage.expand(["no.jsonl", "*.csv", "empty"], base=tmp_path)
    assert caught.value.problems == (
        f"`{tmp_path}/no.jsonl` does not exist",
        f"`{tmp_path}/*.csv` matches no file",
        f"`{tmp_path}/empty` holds no data file ({', '.join(storage.SUFFIXES)}, also .gz or .zst)",
    )
    assert "relative paths start from" in caught.value.hint


def test_data_suffix_looks_below_compression() -> None:
    assert storage.data_suffix("a/b.JSONL.gz") == ".jsonl"
    assert storage.data_suffix("s3://bucket/x.csv.zst") == ".csv"
    assert storage.data_suffix("plain") == ""


def test_an_unreadable_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"cannot read `{tmp_path}/no`: No such file"):
        storage.open_raw(str(tmp_path / "no"))


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst", ".jsonl"])
def test_content_decides_on_compression_and_all_members_are_read(
    tmp_path: Path, suffix: str
) -> None:
    parts = [b"first\n" * 5000, b"", b"second\n" * 3]
    for name, pack in (("gzip", gzip.compress), ("zstd", zstandard.compress)):
        path = tmp_path / f"{name}{suffix}"
        path.write_bytes(b"".join(pack(part) for part in parts))
        with storage.open_bytes(str(path)) as stream:
            assert stream.read() == b"".join(parts)
        assert storage.is_compressed(str(path))


def test_zero_bytes_between_gzip_members_are_padding(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"a\n") + bytes(100) + gzip.compress(b"b\n") + bytes(7))
    with storage.open_bytes(str(path)) as stream:
        assert stream.read() == b"a\nb\n"


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_a_cut_stream_hands_out_what_it_has_and_then_says_so(tmp_path: Path, pack) -> None:
    text = b"".join(b"line %d %d\n" % (i, hash(i * 7919) % 10**9) for i in range(20000))
    path = tmp_path / "a"
    path.write_bytes(pack(text)[:-9])
    got: list[bytes] = []
    with (
        storage.open_bytes(str(path)) as stream,
        pytest.raises(storage.DamagedStream, match="the compressed stream ends early"),
    ):
        got.extend(iter(lambda: stream.read1(1 << 16), b""))
    got = b"".join(got)
    assert text.startswith(got)
    assert len(got) > len(text) // 2 or pack is zstandard.compress


def test_garbage_behind_a_member_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"a\n") + b"garbage!")
    with (
        storage.open_bytes(str(path)) as stream,
        pytest.raises(storage.DamagedStream, match="the compressed stream is damaged"),
    ):
        stream.read()


def test_sha256_is_of_the_stored_bytes_and_can_be_taken_while_reading(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"x" * 10**6))
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    digest = hashlib.sha256()
    with storage.open_bytes(str(path), digest) as stream:
        assert isinstance(stream, io.BufferedReader)
        assert len(stream.read()) == 10**6
    assert storage.sha256(str(path)) == digest.hexdigest() == expected
