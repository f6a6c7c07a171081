from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import zstandard

from posttrain_cli.data.lines import decode, encode
from posttrain_cli.data.reader import read_rows
from posttrain_cli.data.writer import Outputs, check_outputs, output_format, write_records
from posttrain_cli.errors import UsageError

ROWS: list[dict[str, Any]] = [
    {"prompt": "a\u2028b", "response": "x", "metadata": {"n": 1, "who": "A"}},
    {"prompt": "c", "response": "日本", "metadata": {"n": 2, "tags": ["t"]}, "id": 7},
    {"prompt": "d", "response": "z"},
]


def write(target: Path, rows: list[dict[str, Any]]) -> str:
    with Outputs() as outputs:
        sink = outputs.open(target)
        assert write_records(sink, target, lambda: rows) == len(rows)
    return sink.sha256()


def read(path: Path) -> list[dict[str, Any]]:
    """The records of `path`; Parquet has every column in every row, null where there is none."""
    records = [row.record or {} for row in read_rows(str(path))]
    return [{key: value for key, value in row.items() if value is not None} for row in records]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "A.PARQUET"])
def test_rows_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    digest = write(tmp_path / name, ROWS)
    assert read(tmp_path / name) == ROWS
    assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digest


def test_compression_follows_the_suffix(tmp_path: Path) -> None:
    plain = b"".join(encode(row) + b"\n" for row in ROWS)
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst"):
        write(tmp_path / name, ROWS)
    assert (tmp_path / "a.jsonl").read_bytes() == plain
    assert gzip.decompress((tmp_path / "a.jsonl.gz").read_bytes()) == plain
    packed = (tmp_path / "a.jsonl.zst").read_bytes()
    assert zstandard.ZstdDecompressor().decompressobj().decompress(packed) == plain


def test_a_column_first_seen_late_is_there(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": str(i)} for i in range(9000)]
    rows[8999]["late"] = {"score": 0.5}
    write(tmp_path / "a.parquet", rows)
    assert read(tmp_path / "a.parquet") == rows


def test_values_of_different_types_become_json_text_and_numbers_floats(tmp_path: Path) -> None:
    rows = [
        {"a": 1, "b": "x", "c": 2**70, "d": {}, "e": [1], "f": True},
        {"a": 0.5, "b": {"k": 1}, "c": 1, "d": {}, "e": [{"z": 1}], "f": None},
    ]
    write(tmp_path / "a.parquet", rows)
    assert pq.read_table(tmp_path / "a.parquet").to_pylist() == [
        {"a": 1.0, "b": '"x"', "c": str(2**70), "d": "{}", "e": ["1"], "f": True},
        {"a": 0.5, "b": '{"k":1}', "c": "1", "d": "{}", "e": ['{"z":1}'], "f": None},
    ]


def test_an_object_with_hundreds_of_keys_is_json_text(tmp_path: Path) -> None:
    rows = [{"metadata": {f"key{i}": i}} for i in range(300)]
    write(tmp_path / "a.parquet", rows)
    column = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert json.loads(column[299]["metadata"]) == {"key299": 299}


def test_large_integers_survive_a_line() -> None:
    record = {"id": 123456789012345678901234567890, "x": [1.5, -3]}
    assert decode(encode(record)) == record


def test_no_file_appears_when_the_block_fails(tmp_path: Path) -> None:
    def fail() -> None:
        with Outputs() as outputs:
            outputs.open(tmp_path / "one.jsonl").write(b"{}\n")
            outputs.open(tmp_path / "two.jsonl").write(b"{}\n")
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_the_first_output_appears_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    order: list[str] = []
    replace = os.replace

    def note(source: str, target: Path) -> None:
        order.append(target.name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", note)
    with Outputs() as outputs:
        for name in ("main", "val", "report"):
            outputs.open(tmp_path / name)
    assert order == ["report", "val", "main"]


def test_outputs_are_refused_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a directory, `--out` needs a file name"):
        output_format(tmp_path)
    with pytest.raises(UsageError, match="is not a local file"):
        output_format(Path("s3://bucket/a.jsonl"))
    same = tmp_path / "a.jsonl"
    with pytest.raises(UsageError, match="two outputs have the name"):
        check_outputs(same, tmp_path / "." / "a.jsonl", overwrite=True)
