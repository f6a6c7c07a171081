"""What is known of one file while it is checked: its counts, its findings, where rows lie."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from posttrain_cli.data.records import Kind
from posttrain_cli.data.scan import Problem
from posttrain_cli.data.sniff import Format
from posttrain_cli.data.tally import LONGEST, Note, Result


@dataclass(slots=True)
class FileState:
    """One file of a report.

    Attributes:
        path: as the user named it.
        kind: of its records; None when no record could be read.
        format: how it is read.
        base: rows of the files in front of it.
        sha256: of its stored bytes.
        notes: its findings, at most `limit` of each kind of check, lines as in the file.
    """

    path: str
    kind: Kind | None
    format: Format
    base: int
    limit: int | None = None
    sha256: str = ""
    lines: int = 0
    rows: int = 0
    blank: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    notes: list[Note] = field(default_factory=list)
    token_notes: list[Note] = field(default_factory=list)
    late: list[Note] = field(default_factory=list)
    longest: list[tuple[int, int]] = field(default_factory=list)
    bad: list[NDArray[np.int64]] = field(default_factory=list)
    late_bad: set[int] = field(default_factory=set)
    blanks: list[NDArray[np.int64]] = field(default_factory=list)
    starts: list[NDArray[np.int64]] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """Add the next block of the file."""
        lines, rows = (0, 0) if result.placed else (self.lines, self.rows)
        for found, kept in ((result.notes, self.notes), (result.token_notes, self.token_notes)):
            room = len(found) if self.limit is None else max(0, self.limit - len(kept))
            for note in found[:room]:
                line = note.line + lines if note.line is not None else None
                row = note.row + rows if note.row is not None else None
                kept.append(Note(line, row, note.column, note.problem))
        self.counts += result.counts
        if len(result.blanks):
            self.blanks.append(result.blanks + lines)
        if len(result.starts):
            self.starts.append(result.starts)
        largest = self.longest + [(size, row + self.rows) for size, row in result.longest]
        self.longest = sorted(largest, key=lambda at: (-at[0], at[1]))[:LONGEST]
        self.blank += len(result.blanks)
        if len(result.bad):
            self.bad.append(result.bad + rows)
        self.lines += result.lines
        self.rows += result.rows

    def add_late(self, problem: Problem, row: int | None, line: int = 1) -> None:
        """Add a finding that only the whole could tell, in the order of rows; `line` without."""
        self.counts[problem.code] += 1
        if self.limit is None or len(self.late) < self.limit:
            at = self.line_of(row) if row is not None else line if self.has_lines else None
            self.late.append(Note(at, row, 1 if at is not None else None, problem))

    def mark_bad(self, row: int) -> None:
        """Count a row as bad that only the whole shows to be so."""
        if not self.is_bad(row):
            self.late_bad.add(row)

    def is_bad(self, row: int) -> bool:
        """Whether a row has an error."""
        if len(self.bad) > 1:
            self.bad = [np.concatenate(self.bad)]
        at = int(np.searchsorted(self.bad[0], row)) if self.bad else 0
        known = bool(self.bad) and at < len(self.bad[0]) and self.bad[0][at] == row
        return bool(known) or row in self.late_bad

    @property
    def bad_rows(self) -> int:
        """How many rows have an error."""
        return sum(len(part) for part in self.bad) + len(self.late_bad)

    def all_notes(self) -> list[Note]:
        """Every finding that was kept, by line (or row) and column."""
        return sorted(self.notes + self.token_notes + self.late, key=_position)

    @property
    def has_lines(self) -> bool:
        """Whether places in this file are lines; rows of JSON arrays and Parquet have none."""
        return self.format in ("jsonl", "csv", "tsv")

    def line_of(self, row: int) -> int | None:
        """The line where record `row` starts."""
        if not self.has_lines:
            return None
        if self.starts:
            self.starts = [np.concatenate(self.starts)]
            return int(self.starts[0][row - 1])
        if not self.blanks:
            return row
        self.blanks = [np.concatenate(self.blanks)]
        before = self.blanks[0] - np.arange(1, len(self.blanks[0]) + 1)  # rows before each blank
        return row + int(np.searchsorted(before, row - 1, side="right"))

    def describe(self, row: int) -> str:
        """Record `row` as people name it: `train.jsonl line 17`, or its row."""
        line = self.line_of(row)
        return f"{self.path} row {row}" if line is None else f"{self.path} line {line}"


def _position(note: Note) -> tuple[int, int]:
    return note.line or note.row or 0, note.column or 0
