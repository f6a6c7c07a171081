from __future__ import annotations

import random

import numpy as np
import pytest

from posttrain_cli.data.index import Match, RowIndex
from posttrain_cli.data.rowkeys import digest, join


def keys_of(rows: list[tuple[str, str, str] | None]):
    digests: list[bytes] = []
    for row in rows:
        digests += [bytes(16)] * 3 if row is None else [digest(text.encode()) for text in row]
    return join(digests)


def test_duplicates_name_the_first_row_and_swapped_answers_contradict() -> None:
    index = RowIndex()
    index.add(keys_of([("p", "a", "b"), ("p", "a", "c"), None, ("p", "b", "a")]))
    index.add(keys_of([None, ("p", "a", "b"), ("p", "b", "a"), ("q", "a", "b")]))
    assert list(index.matches()) == [
        Match(3, 0, "contradiction"),
        Match(5, 0, "duplicate"),
        Match(6, 3, "duplicate"),
    ]


def test_rows_of_the_other_split_leak_and_are_not_compared_among_themselves() -> None:
    index = RowIndex()
    index.add(keys_of([("p", "a", "b"), ("p", "a", "b"), ("q", "a", "b")]))
    index.add(keys_of([("p", "a", "b"), ("x", "a", "b"), ("p", "a", "b"), ("q", "b", "a")]))
    assert list(index.matches(reference=3)) == [
        Match(3, 0, "leak"),
        Match(5, 3, "duplicate"),
        Match(5, 0, "leak"),
    ]


def test_moving_text_between_fields_changes_the_key() -> None:
    keys = keys_of([("ab", "c", "d"), ("a", "bc", "d"), ("a", "b", "cd"), ("c", "ab", "d")])
    assert len(np.unique(keys, axis=0)) == 4
    assert not keys_of([None]).any()


@pytest.mark.parametrize("in_memory", [1, 1000, 50_000])
def test_matches_do_not_depend_on_memory(in_memory: int) -> None:
    random.seed(5)
    rows = [
        (str(random.randrange(40)), str(random.randrange(9)), str(random.randrange(9)))
        for _ in range(3000)
    ]
    whole, spilled = RowIndex(), RowIndex(in_memory)
    for start in range(0, 3000, 170):
        whole.add(keys_of(rows[start : start + 170]))
        spilled.add(keys_of(rows[start : start + 170]))
    found = list(whole.matches(reference=200))
    assert list(spilled.matches(reference=200)) == found
    first: dict[tuple[str, str, str], int] = {}
    expected = []
    for number, row in enumerate(rows[200:], 200):
        if row in first:
            expected.append((number, first[row]))
        first.setdefault(row, number)
    assert [(m.row, m.earlier) for m in found if m.kind == "duplicate"] == expected
    assert spilled.rows == 3000


def test_an_empty_index_has_no_matches() -> None:
    assert list(RowIndex().matches()) == []
