"""Best-fit-decreasing packing on the histogram of lengths: fast, near the optimum, stateless.

Items of equal length are interchangeable, so whole runs of them are placed in whole runs of
equal bins; the cost depends on the number of distinct lengths, not of items. The number of
bins is a function of the lengths alone; which sample of a length goes where is decided by the
order of the items, so shuffling the items before packing shuffles the neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(slots=True)
class _Bins:
    """Open bins by free space: for each space a stack of [first bin, how many alike]."""

    groups: dict[int, list[list[int]]]
    spaces: int  # bit s is set when some bin has free space s

    def add(self, space: int, first: int, count: int) -> None:
        if space > 0:
            self.groups.setdefault(space, []).append([first, count])
            self.spaces |= 1 << space

    def best(self, length: int) -> int | None:
        """The smallest free space that holds `length`."""
        fitting = self.spaces >> length
        return (fitting & -fitting).bit_length() - 1 + length if fitting else None

    def take(self, space: int, wanted: int) -> tuple[int, int]:
        """Remove up to `wanted` bins of this space: (first bin, how many)."""
        stack = self.groups[space]
        first, count = stack[-1]
        taken = min(count, wanted)
        if taken == count:
            stack.pop()
            if not stack:
                self.spaces &= ~(1 << space)
        else:
            stack[-1] = [first + taken, count - taken]
        return first, taken


def pack(lengths: Ints, capacity: int) -> tuple[Ints, int]:
    """Assign items to bins of `capacity`.

    Args:
        lengths: (N,) item lengths, each from 1 to `capacity`.
        capacity: the size of a bin.

    Returns:
        (N,) bin of each item, and the number of bins. No bin is empty or too full.
    """
    if len(lengths) == 0:
        return np.zeros(0, np.int64), 0
    assert 1 <= lengths.min() <= lengths.max() <= capacity, (lengths.min(), lengths.max(), capacity)
    histogram = np.bincount(lengths, minlength=capacity + 1).tolist()
    bins, opened = _Bins({}, 0), 0
    runs: list[tuple[int, int, int]] = []  # (first bin, bins, items in each)
    for length in range(int(lengths.max()), 0, -1):
        left = histogram[length]
        while left:
            space = bins.best(length)
            if space is None:
                opened = _open(bins, runs, opened, (length, left, capacity))
                break
            first, taken = bins.take(space, left)
            runs.append((first, taken, 1))
            bins.add(space - length, first, taken)
            left -= taken
    assignment = np.empty(len(lengths), np.int64)
    assignment[np.argsort(-lengths, kind="stable")] = _expand(runs)
    return assignment, opened


def _open(
    bins: _Bins, runs: list[tuple[int, int, int]], opened: int, items: tuple[int, int, int]
) -> int:
    """Open bins for `left` items of one length, as many in each as fit; new number of bins."""
    length, left, capacity = items
    per_bin = capacity // length
    full, rest = divmod(left, per_bin)
    for count, inside in ((full, per_bin), (1 if rest else 0, rest)):
        if count:
            runs.append((opened, count, inside))
            bins.add(capacity - inside * length, opened, count)
            opened += count
    return opened


def _expand(runs: list[tuple[int, int, int]]) -> Ints:
    """Bin of every item, longest item first."""
    first, count, inside = (np.asarray(column, np.int64) for column in zip(*runs, strict=True))
    total = count * inside
    start = np.repeat(np.cumsum(total) - total, total)
    within = np.arange(int(total.sum())) - start
    placed: Ints = np.repeat(first, total) + within // np.repeat(inside, total)
    return placed
