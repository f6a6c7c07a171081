from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain_cli.data.pack import Ints
from posttrain_cli.data.plan import Plan, deal

RANDOM = np.random.default_rng(0)
LENGTHS = RANDOM.integers(5, 60, 103)
TRAINED = RANDOM.integers(1, 5, 103)


def make(**options: Any) -> Plan:
    defaults: dict[str, Any] = {"capacity": 64, "batch_size": 4, "seed": 42}
    return Plan(LENGTHS, TRAINED, **{**defaults, **options})


def members(bins: tuple[Ints, ...]) -> list[int]:
    return [int(sample) for samples in bins for sample in samples]


def as_lists(bins: tuple[Ints, ...]) -> list[list[int]]:
    return [samples.tolist() for samples in bins]


@pytest.mark.parametrize("capacity", [None, 64, 200])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_is_seen_once_an_epoch(capacity: int | None, shuffle: bool) -> None:
    plan = make(capacity=capacity, shuffle=shuffle)
    for epoch in range(3):
        assert sorted(members(plan.bins(epoch))) == list(range(103))
        fills = [int(LENGTHS[samples].sum()) for samples in plan.bins(epoch)]
        if capacity is None:
            assert [len(samples) for samples in plan.bins(epoch)] == [1] * 103
        else:
            assert max(fills) <= capacity
            assert len(fills) <= -(-LENGTHS.sum() // capacity) * 1.06 + 1


def test_order_is_a_function_of_seed_and_epoch_alone() -> None:
    orders = {}
    for seed in (0, 42):
        for epoch in (0, 1, 5):
            plan, other = make(seed=seed), make(seed=seed, batch_size=9)
            other.bins(3), other.bins(0)  # what was asked before does not matter
            orders[seed, epoch] = str(as_lists(plan.bins(epoch)))
            assert str(as_lists(other.bins(epoch))) == orders[seed, epoch]
    assert len(set(orders.values())) == 6
    order = [np.random.Generator(np.random.Philox(key=[42, 0])).permutation(103).tolist()]
    assert [members(make(capacity=None).bins(0))] == order  # the same in every version


def test_without_shuffle_samples_come_in_file_order() -> None:
    plan = make(capacity=None, shuffle=False)
    assert members(plan.bins(0)) == members(plan.bins(7)) == list(range(103))
    packed = make(shuffle=False)
    assert as_lists(packed.bins(0)) == as_lists(packed.bins(1))
    assert all((np.diff(samples) > 0).all() for samples in packed.bins(0))


def test_steps_are_slices_of_epochs_and_the_last_is_shorter() -> None:
    plan = make(capacity=None)  # 103 bins: 25 steps of 4, and one of 3
    assert plan.steps_in(0) == plan.steps_in(1) == 26
    assert plan.total(3) == 78
    for number, epoch, index in ((1, 0, 0), (26, 0, 25), (27, 1, 0), (78, 2, 25), (80, 3, 1)):
        step = plan.step(number)
        assert (step.number, step.epoch) == (number, epoch)
        assert as_lists(step.bins) == as_lists(plan.bins(epoch))[4 * index : 4 * index + 4]
        assert step.trained == TRAINED[members(step.bins)].sum()
        assert step.fraction == pytest.approx(epoch + (index + 1) / 26)
    assert len(plan.step(26).bins) == 3
    assert plan.step(26).fraction == 1.0
    assert plan.step(78).fraction == 3.0
    seen = Counter(m for number in range(1, 79) for m in members(plan.step(number).bins))
    assert seen == dict.fromkeys(range(103), 3)


def test_fewer_rows_than_one_batch_are_one_step() -> None:
    plan = Plan(np.array([5, 6]), np.array([1, 2]), capacity=64, batch_size=32, seed=0)
    assert plan.total(2) == 2
    assert sorted(members(plan.step(1).bins)) == [0, 1]
    assert plan.step(1).trained == 3


def test_a_sample_longer_than_a_pack_is_alone() -> None:
    lengths = np.array([3, 100, 3, 64, 90])
    plan = Plan(lengths, np.ones(5, np.int64), capacity=64, batch_size=1, seed=0)
    assert sorted(sorted(samples) for samples in as_lists(plan.bins(0))) == [[0, 2], [1], [3], [4]]


@pytest.mark.parametrize("capacity", [None, 64])
def test_weights_set_how_often_samples_come(capacity: int | None) -> None:
    weights = np.where(np.arange(103) < 10, 4.0, 1.0)
    weights[50] = 0.0
    plan = make(capacity=capacity, weights=weights)
    expected = weights / weights.sum() * 103
    total: Counter[int] = Counter()
    for epoch in range(20):
        counts = Counter(members(plan.bins(epoch)))
        assert sum(counts.values()) == 103
        assert max(abs(counts[i] - expected[i]) for i in range(103)) < 1
        total += counts
    assert total[50] == 0
    assert max(abs(total[i] / 20 - expected[i]) for i in range(103)) < 0.35
    assert as_lists(plan.bins(3)) == as_lists(make(capacity=capacity, weights=weights).bins(3))
    assert as_lists(plan.bins(3)) != as_lists(plan.bins(4))


def test_steps_of_weighted_epochs_follow_their_own_lengths() -> None:
    plan = make(weights=RANDOM.random(103) + 0.01)
    steps = [plan.steps_in(epoch) for epoch in range(6)]
    assert plan.total(6) == sum(steps)
    number = 0
    for epoch, count in enumerate(steps):
        for index in range(count):
            number += 1
            step = plan.step(number)
            assert (step.epoch, step.fraction) == (epoch, epoch + (index + 1) / count)
            assert as_lists(step.bins) == as_lists(plan.bins(epoch))[4 * index : 4 * index + 4]


def test_late_steps_of_weighted_runs_cost_no_more_than_early_ones() -> None:
    lengths = np.random.default_rng(4).integers(1, 64, 50_000)
    weights = np.ones(50_000)
    plan = Plan(lengths, lengths, capacity=64, batch_size=64, seed=0, weights=weights)
    first = plan.total(6) + 1
    start = time.process_time()
    for number in range(first, first + 60):
        assert plan.step(number).epoch == 6
    assert time.process_time() - start < 1.5


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    sizes=st.lists(st.lists(st.integers(1, 500), min_size=1, max_size=4), min_size=1, max_size=40),
    world=st.integers(1, 8),
    micro=st.integers(1, 4),
)
def test_deal_loses_nothing_and_gives_every_rank_the_same_rounds(
    sizes: list[list[int]], world: int, micro: int
) -> None:
    lengths = np.array([size for pack in sizes for size in pack])
    edges = np.cumsum([len(pack) for pack in sizes])[:-1]
    bins = tuple(np.split(np.arange(len(lengths)), edges))
    shares = deal(bins, lengths, world, micro)
    assert len(shares) == world
    assert len({len(share) for share in shares}) == 1
    assert len(shares[0]) == math.ceil(math.ceil(len(bins) / world) / micro)
    assert max(len(batch) for share in shares for batch in share) <= micro
    dealt = [samples.tolist() for share in shares for batch in share for samples in batch]
    assert sorted(dealt) == sorted(samples.tolist() for samples in bins)
    assert deal(bins, lengths, world, micro)[0][0][0].tolist() == shares[0][0][0].tolist()


def test_deal_evens_out_the_tokens() -> None:
    lengths = np.random.default_rng(3).integers(1, 1000, 64)
    bins = tuple(np.arange(64).reshape(-1, 1))
    for world in (2, 4, 8):
        loads = [
            sum(int(lengths[samples].sum()) for batch in share for samples in batch)
            for share in deal(bins, lengths, world, 2)
        ]
        assert max(loads) < 1.05 * lengths.sum() / world


def test_ranks_short_of_bins_have_empty_micro_batches() -> None:
    shares = deal((np.array([0]),), np.array([5]), 3, 2)
    assert [[[s.tolist() for s in batch] for batch in share] for share in shares] == [
        [[[0]]],
        [[]],
        [[]],
    ]
