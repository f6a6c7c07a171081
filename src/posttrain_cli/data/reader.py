"""Files to records: JSON lines, JSON, CSV, TSV and Parquet, row by row, whatever stands in them.

A bad row never stops the reading: it comes as a `Row` with its findings and no record. Text is
read as bytes and split on 0x0A only.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import orjson

from posttrain_cli.data import storage
from posttrain_cli.data.encoding import BOM, bad_bytes, transcoded
from posttrain_cli.data.jsonarray import elements
from posttrain_cli.data.records import place
from posttrain_cli.data.scan import JsonError, Problem, Scan, scan
from posttrain_cli.data.sniff import look
from posttrain_cli.diagnostics import Finding

_INT64 = 2.0**63
_DEEPEST = 64
_LOOK_AGAIN = -1 << 60

BLANK = Problem("PTC106", "blank line, skipped", column=1)
MARK = Problem(
    "PTC101",
    "UTF-8 byte-order mark at the start of the file",
    column=1,
    hint="save as UTF-8 without BOM; `ptc validate --fix` and `ptc preprocess` strip it",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file.

    Attributes:
        row: 1-based number of the record; blank lines have the number of the record before.
        line: 1-based line where the row starts, or None where the format has no lines.
        record: the fields, or None when the row cannot be read.
        findings: what reading it found (PTC1xx).
    """

    row: int
    line: int | None
    record: dict[str, Any] | None
    findings: tuple[Finding, ...] = ()


def read_rows(path: str, encoding: str | None = None) -> Iterator[Row]:
    """Yield every row of `path` in order; the format follows the content, then the suffix.

    Args:
        path: a file as `storage.expand` names it; gzip and zstd are seen by content.
        encoding: Python codec of a text file; UTF-8 if absent.

    Raises:
        UsageError: the file cannot be opened, or the encoding is unknown.
    """
    seen = look(path, encoding)
    if seen.fault is not None:
        yield Row(0, 1, None, (finding(path, seen.fault, 1, 1, None),))
        return
    if seen.format == "parquet":
        from posttrain_cli.data.parquetrows import parquet_rows

        yield from parquet_rows(path)
        return
    with storage.open_bytes(path) as raw:
        stream = transcoded(raw, encoding)
        if seen.format == "jsonl":
            yield from _json_lines(path, stream, encoding)
        elif seen.format == "json":
            yield from _json_elements(path, stream)
        else:
            from posttrain_cli.data.csvrows import csv_rows

            yield from csv_rows(path, stream, "\t" if seen.format == "tsv" else ",")


def exact(content: bytes, encoding: str | None = None) -> Scan:
    """Read one JSON text exactly; `value` is None unless the text is an object.

    Args:
        content: the text without its line feed and without a byte-order mark.
        encoding: the codec the file was decoded from, for the message.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        return Scan("", problems=[bad_bytes(content, error, encoding)])
    try:
        scanned = scan(text)
    except JsonError as error:
        return Scan(text, problems=[error.problem])
    if not isinstance(scanned.value, dict):
        scanned.problems.append(_not_an_object(scanned.value))
        scanned.value = None
    return scanned


def exact_row(
    path: str, content: bytes, line: int | None, row: int, encoding: str | None = None
) -> Row:
    """The row of one JSON text that `quick` did not pass, with all that reading finds."""
    scanned = exact(content, encoding)
    found = [finding(path, p, scanned.column(p), line, row) for p in scanned.problems]
    return Row(row, line, scanned.value, tuple(found))


def quick(content: bytes) -> dict[str, Any] | None:
    """The record when `content` is certainly one object without any fault of reading, else None.

    orjson refuses bad UTF-8, bad JSON, lone surrogates and NaN; a duplicate key shows as more
    keys in the text than in the record, a lost integer as a large float.
    """
    try:
        record = orjson.loads(content)
    except orjson.JSONDecodeError:
        return None
    if type(record) is not dict:
        return None
    keys = content.count(b'":') - content.count(b'\\":')
    if not _spaced_colon(content) and keys == count_keys(record):
        return record
    return record if count_keys(record) >= 0 and keys_are_unique(content) else None


def keys_are_unique(content: bytes) -> bool:
    """Whether no object of a JSON text that orjson reads has a key twice."""
    try:
        json.loads(content, object_pairs_hook=_refuse_twice)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse_twice(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) > 1 and len({key for key, _ in pairs}) < len(pairs):
        raise ValueError


def finding(
    path: str, problem: Problem, column: int | None, line: int | None, row: int | None
) -> Finding:
    """Give `problem` its place in a file."""
    return Finding(
        path=path,
        code=problem.code,
        message=problem.message,
        line=line,
        column=column,
        row=row,
        field=place(problem.path) or None,
        hint=problem.hint,
    )


def blank_line(path: str, line: int) -> Finding:
    """PTC106 for a line of white space only."""
    return finding(path, BLANK, 1, line, None)


def byte_order_mark(path: str, line: int | None) -> Finding:
    """PTC101 for the mark at the start of `path`."""
    return finding(path, MARK, None if line is None else 1, line, None)


def _json_lines(path: str, stream: io.BufferedReader, encoding: str | None) -> Iterator[Row]:
    row = line = 0
    try:
        for raw in stream:  # binary files end lines at 0x0A and nowhere else
            line += 1
            mark: tuple[Finding, ...] = ()
            content = raw.removesuffix(b"\n")
            if line == 1 and content.startswith(BOM):
                content = content[len(BOM) :]
                mark = (byte_order_mark(path, 1),)
            if not content or content.isspace():
                yield Row(row, line, None, (*mark, blank_line(path, line)))
                continue
            row += 1
            record = quick(content)
            if record is not None:
                yield Row(row, line, record, mark)
                continue
            read = exact_row(path, content, line, row, encoding)
            yield replace(read, findings=mark + read.findings)
    except storage.DamagedStream as damage:
        yield ends_early(path, damage, line + 1, row)


def _json_elements(path: str, stream: io.BufferedReader) -> Iterator[Row]:
    """The objects of one JSON array, or the one object of the file, as rows from 1."""
    row = 0
    try:
        for element in elements(stream):
            if isinstance(element, bytes):
                row += 1
                record = quick(element)
                read = Row(row, None, record) if record else exact_row(path, element, None, row)
                found = tuple(replace(item, column=None) for item in read.findings)
                yield replace(read, findings=found)
            elif element.code == "PTC101":
                yield Row(row, None, None, (byte_order_mark(path, None),))
            else:
                yield Row(row, None, None, (finding(path, element, None, None, None),))
    except storage.DamagedStream as damage:
        yield ends_early(path, damage, None, row)


def ends_early(path: str, damage: storage.DamagedStream, line: int | None, row: int) -> Row:
    """The row that ends a file whose stream is damaged (PTC109)."""
    message = f"{damage.message} after {row:,} whole records"
    hint = "fetch or write the file again; nothing behind this place was checked"
    column = None if line is None else 1
    return Row(
        row, line, None, (Finding(path, "PTC109", message, line=line, column=column, hint=hint),)
    )


def _not_an_object(value: Any) -> Problem:
    names = {list: "an array", str: "a text", bool: "true or false", type(None): "null"}
    found = names.get(type(value), "a number")
    return Problem(
        "PTC104",
        f"the line is {found}, expected an object",
        column=1,
        hint='each record is one object, such as {"prompt": "...", "response": "..."}',
    )


def _spaced_colon(content: bytes) -> bool:
    """Whether a key may be written in a way that counting `":` misses or takes for an escape."""
    return b'" :' in content or b'"\t:' in content or b'"\r:' in content or b'\\\\":' in content


def count_keys(value: Any, depth: int = 1) -> int:
    """Keys of all objects in `value`; hugely negative when it must be read exactly."""
    if depth > _DEEPEST:
        return _LOOK_AGAIN
    count = 0
    if type(value) is dict:
        count = len(value)
        value = value.values()
    for item in value:
        kind = type(item)
        if kind is dict or kind is list:
            count += count_keys(item, depth + 1)
        elif kind is float and not -_INT64 < item < _INT64:
            return _LOOK_AGAIN
    return count
