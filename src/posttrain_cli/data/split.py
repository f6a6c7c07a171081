"""Deterministic splits that keep all rows of one prompt on one side."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from posttrain_cli.errors import DataError

Groups = NDArray[np.uint64]


def group_hash(text: str) -> int:
    """64 bits that name a prompt; case and white space do not count."""
    import xxhash

    return xxhash.xxh3_64_intdigest(" ".join(text.split()).casefold().encode())


def validation_rows(groups: Groups, wanted: int, seed: int) -> NDArray[np.bool_]:
    """Choose whole groups, in an order given by `seed`, until `wanted` rows are reached.

    A group that would exceed the number is passed over, so the result is exact unless the
    groups are too large for it.

    Args:
        groups: (N,) group of each row.
        wanted: rows for validation.
        seed: decides which groups come first.

    Returns:
        (N,) True for validation rows.

    Raises:
        DataError: one of the two sides would be empty.
    """
    names, sizes = np.unique(groups, return_counts=True)
    mixed = (names ^ np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    left = wanted
    chosen = np.zeros(len(names), bool)
    for place in np.argsort(mixed, kind="stable"):
        if sizes[place] <= left:
            chosen[place] = True
            left -= int(sizes[place])
        if left == 0:
            break
    rows: NDArray[np.bool_] = chosen[np.searchsorted(names, groups)]
    if not rows.any() or rows.all():
        raise DataError(
            f"{len(groups):,} rows with {len(names):,} different prompts cannot be split "
            f"into {len(groups) - wanted:,} and {wanted:,}",
            hint="rows with the same prompt stay on one side; ask for another number of rows",
        )
    return rows
