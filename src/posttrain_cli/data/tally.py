"""What checking one block of rows brings: counts, the first findings, keys and lengths."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrain_cli.data.rowkeys import Keys128, join
from posttrain_cli.data.scan import Problem

BINS_AN_OCTAVE = 8
LENGTH_BINS = 40 * BINS_AN_OCTAVE
LONGEST = 10


@dataclass(frozen=True, slots=True)
class Note:
    """A problem at its place: line and row count from 1 within the block or the file."""

    line: int | None
    row: int | None
    column: int | None
    problem: Problem


@dataclass(slots=True)
class Tally:
    """What is gathered while a block is read.

    Attributes:
        wanted: the codes that count; others are as good as not found.
        errors: the codes among them that make a row bad.
        limit: how many notes are kept; None for all. The counts are always complete.
        lines: lines of the block; bad: rows with an error that counts.
        blanks: lines that are blank.
        starts: the line where each row starts, for formats whose rows span lines.
        counts: findings by code.
        notes: the first findings, and token_notes the first of the token checks.
        digests: three a row, for `rowkeys.join`.
        sizes: bytes of text in each row, 0 for bad rows.
        signatures: near-duplicate signature of each row.
        pending: rows that wait for the token checks: (line, row, record).
        placed: whether lines and rows count as in the file, not from the start of the block.
        first: rows of the file in front of this block, if `placed`.
    """

    wanted: frozenset[str]
    errors: frozenset[str]
    limit: int | None = None
    lines: int = 0
    bad: list[int] = field(default_factory=list)
    blanks: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    notes: list[Note] = field(default_factory=list)
    token_notes: list[Note] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    signatures: list[bytes] = field(default_factory=list)
    pending: list[tuple[int | None, int, dict[str, Any]]] = field(default_factory=list)
    placed: bool = False
    first: int = 0

    @property
    def rows(self) -> int:
        """Records so far."""
        return len(self.sizes)

    def note(self, problem: Problem, line: int | None, row: int | None, column: int | None) -> bool:
        """Record one finding; whether it makes its row bad."""
        return self._note(self.notes, problem, Note(line, row, column, problem))

    def note_tokens(self, problem: Problem, line: int | None, row: int) -> bool:
        """Record a finding of the token checks, which come after those of later rows."""
        return self._note(self.token_notes, problem, Note(line, row, 1 if line else None, problem))

    def _note(self, notes: list[Note], problem: Problem, note: Note) -> bool:
        if problem.code not in self.wanted:
            return False
        self.counts[problem.code] += 1
        if self.limit is None or len(notes) < self.limit:
            notes.append(note)
        return problem.code in self.errors

    def result(self) -> Result:
        """What travels to the parent: numbers in arrays, digests joined to keys."""
        sizes = np.array(self.sizes, np.int64)
        top = np.argsort(-sizes, kind="stable")[:LONGEST]
        longest = [(int(sizes[i]), int(i) + 1) for i in top if sizes[i] > 0]
        return Result(
            lines=self.lines,
            rows=self.rows,
            bad=np.unique(np.array(self.bad, np.int64)),
            blanks=np.array(self.blanks, np.int64),
            starts=np.array(self.starts, np.int64),
            counts=self.counts,
            notes=self.notes,
            token_notes=self.token_notes,
            keys=join(self.digests),
            lengths=histogram(sizes[sizes > 0]),
            size=int(sizes.sum()),
            longest=longest,
            signatures=b"".join(self.signatures),
            placed=self.placed,
        )


@dataclass(frozen=True, slots=True)
class Result:
    """A checked block, small enough to travel between processes.

    Lines and rows count from 1 within the block, unless it is `placed`: then as in the file.
    """

    lines: int
    rows: int
    bad: NDArray[np.int64]
    blanks: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: Counter[str]
    notes: list[Note]
    token_notes: list[Note]
    keys: Keys128
    lengths: NDArray[np.int64]
    size: int
    longest: list[tuple[int, int]]
    signatures: bytes
    placed: bool = False


def histogram(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """(LENGTH_BINS,) how many sizes fall into each bin; bins grow by a constant factor."""
    bins = (np.log2(np.maximum(sizes, 1)) * BINS_AN_OCTAVE).astype(np.int64)
    return np.bincount(bins, minlength=LENGTH_BINS).astype(np.int64)


def bin_start(index: int) -> float:
    """The size at which bin `index` starts."""
    return float(2.0 ** (index / BINS_AN_OCTAVE))
