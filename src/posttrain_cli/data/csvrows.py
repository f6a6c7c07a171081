"""CSV and TSV rows with their lines: every cell is text, quoting as the csv module reads it."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator

from posttrain_cli.data import storage
from posttrain_cli.data.encoding import BOM, bad_bytes
from posttrain_cli.data.reader import Row, blank_line, byte_order_mark, ends_early, finding
from posttrain_cli.data.scan import Problem
from posttrain_cli.diagnostics import Finding


def csv_rows(path: str, stream: io.BufferedReader, delimiter: str) -> Iterator[Row]:
    """Yield the records behind the header line of `stream`.

    A row's `line` is where it starts. Too many or too few cells and a quote that is never closed
    are PTC111; a cell whose bytes are not UTF-8 is PTC102.
    """
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    lines = _Lines(stream)
    table = csv.reader(lines, delimiter=delimiter)
    header: list[str] | None = None
    row = 0
    try:
        while True:
            start = lines.number + 1
            lines.record = []
            cells = next(table, None)
            if start == 1 and lines.has_mark:
                yield Row(0, 1, None, (byte_order_mark(path, 1),))
            if cells is None:
                return
            if not cells:
                yield Row(row, start, None, (blank_line(path, start),))
            elif header is None:
                header = cells
                yield from _check_header(path, header, start)
            else:
                row += 1
                problem = _bad_row(lines, cells, header)
                if problem is None:
                    yield Row(row, start, dict(zip(header, cells, strict=True)))
                else:
                    at = start + problem.offset
                    yield Row(row, start, None, (finding(path, problem, problem.column, at, row),))
    except csv.Error as error:
        problem = Problem("PTC111", f"not readable as CSV: {error}", column=1)
        yield Row(row + 1, start, None, (finding(path, problem, 1, start, row + 1),))
    except storage.DamagedStream as damage:
        yield ends_early(path, damage, lines.number + 1, row)


class _Lines:
    """Feeds the csv reader line by line and remembers the lines of the record being read."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self._stream = stream
        self.number = 0
        self.record: list[bytes] = []
        self.ended = False
        self.has_mark = False

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._stream.readline()
        if not line:
            self.ended = True
            raise StopIteration
        self.number += 1
        if self.number == 1 and line.startswith(BOM):
            self.has_mark = True
            line = line[len(BOM) :]
        self.record.append(line)
        return line.decode("utf-8", "surrogateescape")


def _bad_row(lines: _Lines, cells: list[str], header: list[str]) -> Problem | None:
    """What is wrong with a record; `offset` counts lines from the record's first."""
    if lines.ended:  # the reader asked for a line in the middle of the record
        return _unclosed_quote(lines, cells[-1])
    for number, line in enumerate(lines.record):
        try:
            line.decode()
        except UnicodeDecodeError as error:
            problem = bad_bytes(line, error)
            return Problem(
                "PTC102", problem.message, column=problem.column, offset=number, hint=problem.hint
            )
    if len(cells) == len(header):
        return None
    count = f"{len(cells)} field{'s' if len(cells) > 1 else ''}"
    if len(cells) > len(header):
        hint = "put text that holds the delimiter in double quotes"
    else:
        missing = header[len(cells) :]
        hint = f"no value for {', '.join(f'`{name}`' for name in missing)}"
    return Problem(
        "PTC111", f"the row has {count}, the header has {len(header)}", column=1, hint=hint
    )


def _unclosed_quote(lines: _Lines, cell: str) -> Problem:
    """PTC111 at the quote that opened the last cell, found from the cell's own line count."""
    inside = cell.split("\n")
    opened = len(lines.record) - len(inside)
    if cell.endswith("\n"):
        opened += 1
    line = lines.record[opened].decode("utf-8", "surrogateescape").rstrip("\n")
    column = len(line) - len(inside[0].replace('"', '""'))
    return Problem(
        "PTC111",
        f"quote opened here is never closed; {len(inside):,} lines were read as one field",
        column=max(column, 1),
        offset=opened,
        hint='close the quote, or write a quote inside text as `""`',
    )


def _check_header(path: str, header: list[str], line: int) -> Iterator[Row]:
    found: list[Finding] = []
    for index, name in enumerate(header):
        if name in header[:index]:
            problem = Problem(
                "PTC107", f"column {name!r} appears twice; the last value is used", (name,)
            )
            found.append(finding(path, problem, 1, line, None))
    if found:
        yield Row(0, line, None, tuple(found))
