"""Near duplicates over whole data sets, in numpy: 256 bytes a row, the same groups always.

A one-permutation MinHash over windows of 16 bytes: rows that share a band of the signature are
compared, and count as near when at least `NEAR` of their signature values agree.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Signatures = NDArray[np.uint16]  # (N, SLOTS)
Rows = NDArray[np.int64]

WINDOW = 16
SLOTS = 128
BAND = 8
NEAR = 0.8

_EMPTY = np.uint64(0xFFFFFFFFFFFFFFFF)
_MULTIPLIERS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))
_FINISH = np.uint64(0xBF58476D1CE4E5B9)
_VALUE_BITS = np.uint64(57)


def signature(text: str) -> NDArray[np.uint16]:
    """(SLOTS,) MinHash of the text's windows; runs of white space count as one blank."""
    raw = " ".join(text.split()).encode().ljust(WINDOW, b"\0")
    octets = np.frombuffer(raw, np.uint8)
    count = len(octets) - WINDOW + 1
    left = np.ndarray((count,), "<u8", octets, strides=(1,))
    right = np.ndarray((count,), "<u8", octets, offset=8, strides=(1,))
    hashes = (left * _MULTIPLIERS[0]) ^ (right * _MULTIPLIERS[1])
    hashes ^= hashes >> np.uint64(29)
    hashes *= _FINISH
    slots = np.full(SLOTS, _EMPTY, np.uint64)
    where = (hashes >> _VALUE_BITS).astype(np.intp)
    np.minimum.at(slots, where, hashes & ((np.uint64(1) << _VALUE_BITS) - np.uint64(1)))
    slots = _fill(slots)
    return (slots ^ (slots >> np.uint64(16))).astype(np.uint16)


def _fill(slots: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Give each empty slot the next full one's value plus its own place (short texts)."""
    empty = slots == _EMPTY
    if not empty.any():
        return slots
    full = np.flatnonzero(~empty)
    places = np.arange(SLOTS)
    donors = full[np.searchsorted(full, places) % len(full)]
    filled: NDArray[np.uint64] = np.where(empty, slots[donors] + places.astype(np.uint64), slots)
    return filled


def first_near(signatures: Signatures) -> Rows:
    """(N,) for each row the first row of its group of near duplicates (itself, if none).

    Groups are transitive: a row belongs with every row that is near to a member.
    """
    parent: Rows = np.arange(len(signatures))
    for start in range(0, SLOTS, BAND):
        keys = np.ascontiguousarray(signatures[:, start : start + BAND]).view("<u8")
        order = np.lexsort((keys[:, 1], keys[:, 0]))
        ordered = keys[order]
        same = np.flatnonzero((ordered[1:] == ordered[:-1]).all(axis=1))
        left, right = order[same], order[same + 1]
        agree = (signatures[left] == signatures[right]).mean(axis=1) >= NEAR
        for one, other in zip(left[agree].tolist(), right[agree].tolist(), strict=True):
            a, b = _root(parent, one), _root(parent, other)
            parent[max(a, b)] = min(a, b)
    for row in range(len(parent)):
        parent[row] = parent[parent[row]]  # parents come first, so theirs are final
    return parent


def _root(parent: Rows, row: int) -> int:
    while parent[row] != row:
        parent[row] = parent[parent[row]]
        row = int(parent[row])
    return row
