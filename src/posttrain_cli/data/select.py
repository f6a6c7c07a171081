"""Decisions that need all rows: duplicates, and which rows go into validation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from posttrain_cli.data.dedup import Rows, first_near
from posttrain_cli.data.refine import Drop
from posttrain_cli.data.split import validation_rows
from posttrain_cli.data.spool import Flags, Spool

Dedup = Literal["none", "exact", "near"]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A row of the spool that repeats an earlier one."""

    row: int
    drop: Drop


def without_duplicates(spool: Spool, dedup: Dedup) -> tuple[Flags, list[Repeat]]:
    """Which rows stay, and the others, each with the earlier row it repeats."""
    alive = np.ones(len(spool), bool)
    if dedup == "none":
        return alive, []
    first = np.arange(len(spool))
    for match in spool.index.matches():
        if match.kind == "duplicate":
            first[match.row] = match.earlier
    drops = _drop(spool, alive, first, "PTC303", "same as")
    if dedup == "near":
        rows = np.flatnonzero(alive)
        first = np.arange(len(spool))
        first[rows] = rows[first_near(spool.signatures[rows])]
        drops += _drop(spool, alive, first, "PTC304", "nearly the same as")
    return alive, drops


def _drop(spool: Spool, alive: Flags, first: Rows, code: str, what: str) -> list[Repeat]:
    """Take out the living rows that are not the first of their kind."""
    repeats = np.flatnonzero(alive & (first != np.arange(len(first))))
    alive[repeats] = False
    earlier = spool.places(first[repeats])
    return [
        Repeat(row, Drop(place, code, f"{what} {other}", None, "", is_error=False))
        for row, place, other in zip(repeats.tolist(), spool.places(repeats), earlier, strict=True)
    ]


def validation(spool: Spool, alive: Flags, wanted: int, seed: int) -> Flags:
    """Which of the living rows are for validation.

    Raises:
        DataError: one side would be empty.
    """
    rows = np.flatnonzero(alive)
    chosen = np.zeros(len(spool), bool)
    chosen[rows] = validation_rows(spool.groups[rows], wanted, seed)
    return chosen
