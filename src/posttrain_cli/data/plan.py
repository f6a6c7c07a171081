"""Order by coordinates: which samples are in which step is a pure function of (seed, epoch).

A *bin* is what goes through the model as a unit: one sample, or a pack of whole samples. A
*global step* is a slice of the epoch's shuffled bins. Nothing here has state to save: a
checkpoint stores the step number, and any number of processes or micro-batch sees the same
global steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from posttrain_cli.data.pack import Ints, pack


@dataclass(frozen=True, slots=True)
class Step:
    """One global step.

    Attributes:
        number: 1-based step of the run.
        epoch: 0-based epoch it belongs to.
        fraction: epochs done after this step, e.g. 1.25.
        bins: sample indices of each bin.
        trained: trained tokens of the whole step, over all bins.
    """

    number: int
    epoch: int
    fraction: float
    bins: tuple[Ints, ...]
    trained: int


class Plan:
    """All global steps of a run, computed when asked.

    Args:
        lengths: (N,) tokens of each sample.
        trained: (N,) trained tokens of each sample.
        capacity: tokens of a pack, or None for one sample a bin.
        batch_size: bins of a global step.
        seed: seeds the order of every epoch.
        shuffle: False keeps the order of the file.
        weights: (N,) sampling weights; None uses each sample once an epoch.
    """

    def __init__(
        self,
        lengths: Ints,
        trained: Ints,
        *,
        capacity: int | None,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        weights: NDArray[np.float64] | None = None,
    ) -> None:
        assert len(lengths) == len(trained) > 0, (len(lengths), len(trained))
        self.lengths, self.trained = lengths, trained
        self.capacity, self.batch_size = capacity, batch_size
        self.seed, self.shuffle, self.weights = seed, shuffle, weights
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)
        self._sizes: dict[int, int] = {}  # bins of the epochs seen so far

    def bins(self, epoch: int) -> tuple[Ints, ...]:
        """Sample indices of every bin of `epoch`, in training order."""
        return self._epoch(epoch)

    def steps_in(self, epoch: int) -> int:
        """Global steps of `epoch`; the last may be shorter."""
        alike = 0 if self.weights is None else epoch  # epochs with equal numbers of bins
        if alike not in self._sizes:
            self._sizes[alike] = len(self._epoch(alike))
        return -(-self._sizes[alike] // self.batch_size)

    def total(self, epochs: int) -> int:
        """Global steps of the first `epochs` epochs."""
        if self.weights is None:
            return epochs * self.steps_in(0)
        return sum(self.steps_in(epoch) for epoch in range(epochs))

    def step(self, number: int) -> Step:
        """The global step `number`, from 1."""
        epoch, index = 0, number - 1
        if self.weights is None:
            epoch, index = divmod(index, self.steps_in(0))
        else:
            while index >= self.steps_in(epoch):
                index -= self.steps_in(epoch)
                epoch += 1
        first = index * self.batch_size
        chosen = self.bins(epoch)[first : first + self.batch_size]
        done = epoch + (index + 1) / self.steps_in(epoch)
        trained = int(sum(self.trained[samples].sum() for samples in chosen))
        return Step(number, epoch, done, chosen, trained)

    def _make_epoch(self, epoch: int) -> tuple[Ints, ...]:
        random = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
        order = self._order(random)
        if self.capacity is None:
            return tuple(order.reshape(-1, 1))
        sizes = np.minimum(self.lengths[order], self.capacity)  # a longer sample is a bin alone
        assignment, count = pack(sizes, self.capacity)
        places = random.permutation(count) if self.shuffle else np.arange(count)
        by_bin = np.argsort(places[assignment], kind="stable")
        edges = np.cumsum(np.bincount(places[assignment], minlength=count))[:-1]
        return tuple(np.split(order[by_bin], edges))

    def _order(self, random: np.random.Generator) -> Ints:
        """Sample indices of one epoch, before packing."""
        size = len(self.lengths)
        chosen = np.arange(size)
        if self.weights is not None:  # systematic sampling: counts differ from the weights by < 1
            edges = np.cumsum(self.weights / self.weights.sum()) * size
            chosen = np.searchsorted(edges, np.arange(size) + random.random(), side="right")
            chosen = np.minimum(chosen, size - 1)
        if self.shuffle:
            chosen = chosen[random.permutation(size)]
        order: Ints = chosen.astype(np.int64)
        return order


def deal(bins: tuple[Ints, ...], lengths: Ints, world: int, micro: int) -> list[list[list[Ints]]]:
    """Deal the bins of a step over ranks so that their token counts are even.

    Args:
        bins: sample indices of each bin.
        lengths: (N,) tokens of each sample.
        world: number of ranks.
        micro: bins of one forward pass.

    Returns:
        For each rank its micro-batches, each a list of bins. All ranks have the same number of
        micro-batches; a rank that is short of bins has empty ones at its end.
    """
    tokens = [int(lengths[samples].sum()) for samples in bins]
    heavy_first = sorted(range(len(bins)), key=lambda i: (-tokens[i], i))
    shares: list[list[Ints]] = [[] for _ in range(world)]
    for position, index in enumerate(heavy_first):
        lap, place = divmod(position, world)
        shares[place if lap % 2 == 0 else world - 1 - place].append(bins[index])
    rounds = -(-max(len(share) for share in shares) // micro)
    return [[share[i * micro : (i + 1) * micro] for i in range(rounds)] for share in shares]
