"""Equal rows among any number of rows, in at most 64 MB of memory: the rest is on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from posttrain_cli.data.rowkeys import Keys128

IN_MEMORY = 16 << 20  # of keys; finding equal ones takes over twice as much again
_BUCKETS = 64
_ORDER = np.uint64(1)  # the bit of a key that says which answer is preferred


_NONE = np.iinfo(np.int64).max
_SOME = 1 << 14

MatchKind = Literal["duplicate", "contradiction", "leak"]
_KINDS: tuple[MatchKind, ...] = get_args(MatchKind)


@dataclass(frozen=True, slots=True)
class Match:
    """Row `row` equals row `earlier`; rows count from 0 in the order they were added."""

    row: int
    earlier: int
    kind: MatchKind


class RowIndex:
    """Collects the keys of rows in order and finds equal ones.

    Args:
        in_memory: bytes of keys held before they go to temporary files.
    """

    def __init__(self, in_memory: int = IN_MEMORY) -> None:
        self._limit = in_memory
        self._held = bytearray()  # keys of the last rows, grown in place
        self._buckets: list[IO[bytes]] = []
        self.rows = 0

    def add(self, keys: Keys128) -> None:
        """Add the (N, 2) keys of the next N rows; a key of zeros is a row that is left out."""
        self._held += keys.tobytes()
        self.rows += len(keys)
        if len(self._held) > self._limit:
            self._spill()

    def matches(self, reference: int = 0) -> Iterator[Match]:
        """All equal rows, in order of `row`; the index is closed then.

        Args:
            reference: how many of the first rows belong to the other split: rows that equal
                one of them leak, and they are not compared among themselves.
        """
        parts = [_match(keys, rows, reference) for keys, rows in self._groups()]
        self.close()
        found = np.concatenate(parts) if parts else np.zeros((0, 3), np.int64)
        found = found[np.lexsort((found[:, 2], found[:, 0]))]
        for start in range(0, len(found), _SOME):  # as few objects at a time as may be
            for row, earlier, kind in found[start : start + _SOME].tolist():
                yield Match(row, earlier, _KINDS[kind])

    def close(self) -> None:
        """Give back memory and temporary files."""
        for bucket in self._buckets:
            bucket.close()
        self._held, self._buckets = bytearray(), []

    def _groups(self) -> Iterator[tuple[Keys128, NDArray[np.int64] | None]]:
        """Keys with their row numbers (None: 0, 1, …), equal keys always together."""
        if self._buckets:
            self._spill()
            for bucket in self._buckets:
                bucket.seek(0)
                stored = np.frombuffer(bucket.read(), np.uint64).reshape(-1, 3)
                yield stored[:, :2], stored[:, 2].astype(np.int64)
        elif self._held:
            keys = np.frombuffer(self._held, np.uint64).reshape(-1, 2)
            yield keys, None

    def _spill(self) -> None:
        """Move the keys in memory to temporary files, by their highest bits."""
        if not self._buckets:
            self._buckets = [tempfile.TemporaryFile() for _ in range(_BUCKETS)]  # noqa: SIM115
        keys = np.frombuffer(self._held, np.uint64).reshape(-1, 2)
        rows = np.arange(self.rows - len(keys), self.rows, dtype=np.uint64)
        places = keys[:, 0] >> np.uint64(58)
        order = np.argsort(places, kind="stable")
        cuts = np.searchsorted(places[order], np.arange(1, _BUCKETS, dtype=np.uint64))
        for bucket, chosen in zip(self._buckets, np.split(order, cuts), strict=True):
            bucket.write(np.column_stack([keys[chosen], rows[chosen]]).tobytes())
        self._held = bytearray()


def _match(keys: Keys128, rows: NDArray[np.int64] | None, reference: int) -> NDArray[np.int64]:
    """(M, 3) row, earlier row and kind of the matches among keys whose rows ascend."""
    order = np.argsort(keys[:, 0], kind="stable")
    ordered = keys[order, 0]
    twin = np.zeros(len(order), np.bool_)
    twin[1:] = (ordered[1:] == ordered[:-1]) & (ordered[1:] != 0)
    twin[:-1] |= twin[1:]
    chosen = order[twin]
    base = keys[chosen, 1] & ~_ORDER
    fine = np.lexsort((base, keys[chosen, 0]))
    chosen, base = chosen[fine], base[fine]
    first = keys[chosen, 0]
    new = np.ones(len(chosen), np.bool_)
    new[1:] = (first[1:] != first[:-1]) | (base[1:] != base[:-1])
    place = 2 * (np.cumsum(new) - 1)  # two places a group: one for each way round
    way = (keys[chosen, 1] & _ORDER).astype(np.int64)
    row = chosen if rows is None else rows[chosen]
    held_out = row < reference
    leaked = np.full(len(chosen) * 2, _NONE)
    np.minimum.at(leaked, (place + way)[held_out], row[held_out])
    place, way, row = place[~held_out], way[~held_out], row[~held_out]
    seen = np.full(len(chosen) * 2, _NONE)
    np.minimum.at(seen, place + way, row)
    same, other, leak = seen[place + way], seen[place + 1 - way], leaked[place + way]
    found = [
        (same < row, same),
        ((same == row) & (other < row), other),
        (leak < _NONE, leak),
    ]
    return np.concatenate(
        [
            np.column_stack([row[when], earlier[when], np.full(int(when.sum()), kind)])
            for kind, (when, earlier) in enumerate(found)
        ]
    )
