"""What a file is: its format by content, then by suffix, and faults of the file as a whole."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Literal

import orjson

from posttrain_cli.data import storage
from posttrain_cli.data.encoding import BOM, not_utf8_at_all, transcoded
from posttrain_cli.data.scan import Problem

Format = Literal["jsonl", "json", "csv", "tsv", "parquet"]

_LONGEST_LOOK = 1 << 26  # bytes of a first line; beyond it an array is taken for one array


@dataclass(frozen=True, slots=True)
class Look:
    """What a file is, and the fault that makes its rows unreadable, if there is one."""

    format: Format
    fault: Problem | None = None


def look(path: str, encoding: str | None = None) -> Look:
    """Decide how `path` is read.

    Parquet is known by its magic, CSV and TSV by their suffix, JSON by its first lines: a
    `.jsonl` is always lines (one JSON text in it is PTC105); under any other name a file that
    starts as one JSON array or object is read as that. A `.parquet` that is neither Parquet nor
    JSON is a damaged Parquet file.

    Raises:
        UsageError: the file cannot be opened, or the encoding is unknown.
    """
    suffix = storage.data_suffix(path)
    with storage.open_bytes(path) as raw:
        head = _head(raw)
    if head.startswith(b"PAR1") or (suffix == ".parquet" and head[:1] not in (b"{", b"[")):
        return Look("parquet")
    fault = not_utf8_at_all(head) if encoding is None else None
    if suffix in (".csv", ".tsv"):
        return Look("csv" if suffix == ".csv" else "tsv", fault)
    if fault is not None:
        return Look("jsonl", fault)
    with storage.open_bytes(path) as raw:
        whole = _one_json_text(transcoded(raw, encoding))
    if not whole:
        return Look("jsonl")
    return Look("jsonl", _not_lines(whole)) if suffix == ".jsonl" else Look("json")


def _head(raw: io.BufferedReader) -> bytes:
    try:
        return raw.read1(256)
    except storage.DamagedStream:
        return b""


def _one_json_text(stream: io.BufferedReader) -> str:
    """`array` or `object` when the stream is one JSON text over lines, else an empty string."""
    first, second = _two_lines(stream)
    if first.startswith(b"["):
        if _parses(first):
            return "" if second else "array"
        whole_row = second.startswith(b"{") and _parses(second)
        return "" if whole_row and first != b"[" else "array"
    if first == b"{" or (first.startswith(b"{") and first.endswith((b"{", b"[", b",", b":"))):
        return "object" if second.startswith(b'"') else ""
    return ""


def _two_lines(stream: io.BufferedReader) -> tuple[bytes, bytes]:
    """The first two lines that are not blank, stripped; empty where there are none."""
    lines: list[bytes] = []
    try:
        while len(lines) < 2 and (line := stream.readline(_LONGEST_LOOK)):
            if text := (line if lines else line.removeprefix(BOM)).strip():
                lines.append(text)
    except storage.DamagedStream:
        pass
    lines += [b"", b""]
    return lines[0], lines[1]


def _parses(line: bytes) -> bool:
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return True


def _not_lines(whole: str) -> Problem:
    return Problem(
        "PTC105",
        f"the file is one JSON {whole}, expected one object a line",
        column=1,
        hint="rename it to .json and it is read as it is, or convert it with "
        "`ptc validate --fix --out NEW.jsonl` or `jq -c '.[]'`"
        if whole == "array"
        else "rename it to .json and it is read as it is, or convert it with `jq -c .`",
    )
