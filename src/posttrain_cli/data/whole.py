"""What only all rows together tell: duplicates, contradictions, leakage, near duplicates."""

from __future__ import annotations

import bisect
import tempfile
from collections.abc import Sequence
from typing import IO

import numpy as np

from posttrain_cli.data.dedup import SLOTS, Signatures, first_near
from posttrain_cli.data.filestate import FileState
from posttrain_cli.data.index import Match, RowIndex
from posttrain_cli.data.scan import Problem
from posttrain_cli.data.tally import Result


class Whole:
    """Gathers the keys and signatures of all rows in order; a context that frees them.

    Args:
        wanted: the codes that count.
        errors: the codes that make a row bad.

    Attributes:
        comparable: rows that have a key.
    """

    def __init__(self, wanted: frozenset[str], errors: frozenset[str]) -> None:
        self._wanted = wanted
        self._errors = errors
        self._index = RowIndex()
        self.comparable = 0
        self._signatures: IO[bytes] | None = None

    def __enter__(self) -> Whole:
        return self

    def __exit__(self, *exception: object) -> None:
        self._index.close()
        if self._signatures is not None:
            self._signatures.close()

    def add(self, result: Result) -> None:
        """Add the rows of the next block."""
        self._index.add(result.keys)
        self.comparable += int(np.count_nonzero(result.keys[:, 0]))
        if result.signatures:
            if self._signatures is None:
                self._signatures = tempfile.TemporaryFile()  # noqa: SIM115 lives as long as self
            self._signatures.write(result.signatures)

    def report(self, reference: Sequence[FileState], files: Sequence[FileState]) -> int:
        """Add what was found to the states of `files`; the number of exact duplicates.

        Args:
            reference: the files of the other split, added before all others.
            files: the files that are checked, in the order they were added.
        """
        states = [*reference, *files]
        held_out = sum(state.rows for state in reference)
        near = dict(self._near_rows(held_out))
        duplicates = 0
        for match in self._index.matches(held_out):
            self._tell(_PROBLEMS[match.kind], match, states)
            if match.kind == "duplicate":
                duplicates += 1
                near.pop(match.row, None)  # an exact duplicate is told as that
        for row, earlier in near.items():
            self._tell(_NEAR, Match(row, earlier, "duplicate"), states)
        return duplicates

    def _tell(self, what: tuple[str, str, str], match: Match, states: list[FileState]) -> None:
        code, message, hint = what
        if code not in self._wanted:
            return
        state, row = _locate(match.row, states)
        other, earlier = _locate(match.earlier, states)
        state.add_late(Problem(code, message.format(other.describe(earlier)), hint=hint), row)
        if code in self._errors:
            state.mark_bad(row)

    def _near_rows(self, held_out: int) -> list[tuple[int, int]]:
        """(row, earlier row) of rows that nearly equal an earlier one of the checked files."""
        if self._signatures is None:
            return []
        self._signatures.flush()
        stored: Signatures = np.memmap(self._signatures, np.uint16, "r").reshape(-1, SLOTS)
        rows = np.flatnonzero(stored.any(axis=1))
        rows = rows[rows >= held_out]
        first = rows[first_near(stored[rows])]
        later = np.flatnonzero(first != rows)
        return list(zip(rows[later].tolist(), first[later].tolist(), strict=True))


_PROBLEMS = {
    "duplicate": ("PTC303", "exact duplicate of {}", "`ptc preprocess --dedup exact` keeps one"),
    "contradiction": (
        "PTC305", "the same two answers as {}, the other way round",
        "keep the pair that is right, or neither",
    ),
    "leak": ("PTC501", "the row is also in {}", "remove it from one of the two files"),
}  # fmt: skip
_NEAR = ("PTC304", "near duplicate of {}", "`ptc preprocess --dedup near` keeps one")


def _locate(row: int, states: list[FileState]) -> tuple[FileState, int]:
    """The file that holds row `row` of all, counted from 0, and the row's number there."""
    bases = [state.base for state in states]
    state = states[bisect.bisect_right(bases, row) - 1]
    return state, row - state.base + 1
