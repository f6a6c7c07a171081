from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain_cli.data.pack import Ints, pack


def fills(lengths: Ints, capacity: int) -> Ints:
    """Tokens in each bin, checked to be what `pack` promises."""
    assignment, count = pack(lengths, capacity)
    assert len(assignment) == len(lengths)
    fill = np.bincount(assignment, weights=lengths, minlength=count).astype(np.int64)
    assert len(fill) == count
    assert fill.sum() == lengths.sum()
    if count:
        assert 0 < fill.min() <= fill.max() <= capacity
    return fill


def best_fit_decreasing(lengths: list[int], capacity: int) -> int:
    """Bins that the textbook algorithm needs, item by item."""
    spaces: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [space for space in spaces if space >= length]
        if fitting:
            spaces.remove(min(fitting))
        spaces.append((min(fitting) if fitting else capacity) - length)
    return len(spaces)


PROBLEMS = st.integers(1, 24).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=40), st.just(capacity))
)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(problem=PROBLEMS)
def test_any_lengths_fit_in_as_few_bins_as_best_fit_decreasing(
    problem: tuple[list[int], int],
) -> None:
    lengths, capacity = problem
    bins = len(fills(np.array(lengths, np.int64), capacity))
    assert bins == best_fit_decreasing(lengths, capacity)


@pytest.mark.parametrize(
    ("lengths", "capacity", "bins"),
    [
        ([], 8, 0),
        ([8], 8, 1),
        ([1] * 9, 8, 2),
        ([5, 4, 4, 3], 8, 2),
        ([8, 8, 8], 8, 3),
        ([7, 1, 7, 1, 7, 1], 8, 3),
        ([6, 3, 3, 2, 2], 8, 2),
        ([7, 4, 3, 2, 2, 2], 10, 2),  # three when the emptiest bin is taken instead of the best
        ([8, 7, 4, 3, 2], 12, 2),
    ],
)
def test_small_cases(lengths: list[int], capacity: int, bins: int) -> None:
    assert len(fills(np.array(lengths, np.int64), capacity)) == bins


def test_lengths_of_real_data_fill_their_bins() -> None:
    random = np.random.default_rng(0)
    for low, high in ((20, 400), (100, 1500)):
        lengths = np.clip(random.lognormal(5.3, 0.7, 5000).astype(np.int64), low, high)
        fill = fills(lengths, 2048)
        bound = -(-int(lengths.sum()) // 2048)
        assert len(fill) <= bound + 1 + bound // 100


def test_bins_depend_on_the_lengths_and_members_on_their_order() -> None:
    random = np.random.default_rng(1)
    lengths = random.integers(1, 30, 2000)
    order = random.permutation(2000)
    assignment, count = pack(lengths, 64)
    shuffled, same = pack(lengths[order], 64)
    assert count == same
    neighbours = {frozenset(np.flatnonzero(assignment == b).tolist()) for b in range(count)}
    mixed = {frozenset(order[shuffled == b].tolist()) for b in range(count)}
    assert len(neighbours & mixed) < count / 10
    again, _ = pack(lengths, 64)
    assert (again == assignment).all()


def test_a_million_lengths_cost_a_fraction_of_a_second() -> None:
    lengths = np.random.default_rng(2).integers(1, 2049, 1_000_000)
    start = time.process_time()
    _, count = pack(lengths, 2048)
    assert time.process_time() - start < 1.5
    assert count < 1.001 * lengths.sum() / 2048 + 1


@pytest.mark.parametrize("lengths", [[0], [9], [3, 9]])
def test_lengths_that_fit_no_bin_are_a_broken_invariant(lengths: list[int]) -> None:
    with pytest.raises(AssertionError):
        pack(np.array(lengths, np.int64), 8)
