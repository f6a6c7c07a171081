"""Dropout whose mask is a function of (seed, step, sample, position), never of the batch.

A global random stream would give another mask for another micro-batch, packing, number of
processes, or after a resume. Here each element's fate is a hash of where it stands, so nothing
has to be saved, and recomputed activations drop the same elements again.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

_MIX = (0x7FEB352D, 0x846CA68B - (1 << 32))  # Wellons' "lowbias32", as signed 32-bit factors
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(slots=True)
class Clock:
    """Where the present micro-batch stands: one key for each of its T tokens."""

    keys: Tensor | None = None  # (T,) int32


class CoordinateDropout(nn.Module):
    """Drops elements of (1, T, H) or (T, H) inputs by a hash of token key and column.

    Args:
        p: share of dropped elements; the others are scaled by 1/(1-p).
        name: module name; different modules drop different elements.
        clock: shared by all modules of a model and set before each forward pass.
    """

    def __init__(self, p: float, name: str, clock: Clock) -> None:
        super().__init__()
        self.p, self.salt, self.clock = p, zlib.crc32(name.encode()), clock

    def forward(self, x: Tensor) -> Tensor:
        """Input with dropped elements zeroed; the input itself in evaluation."""
        if not self.training or self.p == 0.0:
            return x
        keys = self.clock.keys
        assert keys is not None and keys.numel() == x.shape[-2], (x.shape, "no keys set")
        return x * self._keep(keys, x.shape[-1]).to(x.dtype).div_(1.0 - self.p)

    def _keep(self, keys: Tensor, width: int) -> Tensor:
        """(T, width) bool: which elements stay."""
        columns = torch.arange(width, dtype=torch.int64, device=keys.device)
        columns = ((columns * 0x85EBCA6B + self.salt) & 0xFFFFFFFF).to(torch.int32)
        bits = _scramble(keys.unsqueeze(1) ^ _scramble(columns))
        return bits >= round(self.p * 2**32) - 2**31


def _scramble(bits: Tensor) -> Tensor:
    """Mix int32 bits in place so that neighbouring inputs give independent outputs."""
    bits ^= (bits >> 16) & 0xFFFF
    bits *= _MIX[0]
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= _MIX[1]
    bits ^= (bits >> 16) & 0xFFFF
    return bits


def token_keys(
    seed: int, step: int, samples: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.int32]:
    """One key for each token of a row of whole samples.

    Args:
        seed: the run's seed.
        step: 1-based global step.
        samples: (S,) sample indices in the data set.
        lengths: (S,) their tokens.

    Returns:
        (sum of lengths,) int32, the same for a sample wherever it stands.
    """
    start = np.uint64(zlib.crc32(f"{seed}/{step}".encode()))
    with np.errstate(over="ignore"):
        base = (start + samples.astype(np.uint64)) * np.uint64(_GOLDEN)
        rows = np.repeat(base, lengths)
        places = np.concatenate([np.arange(n, dtype=np.uint64) for n in lengths])
        mixed = (rows ^ (rows >> np.uint64(29))) + places * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
    keys: NDArray[np.int32] = (mixed >> np.uint64(32)).astype(np.uint32).view(np.int32)
    return keys


def place(model: nn.Module, clock: Clock) -> int:
    """Replace every active nn.Dropout inside `model`; returns how many there were."""
    found = [
        (parent, child_name, f"{parent_name}.{child_name}", child.p)
        for parent_name, parent in model.named_modules()
        for child_name, child in parent.named_children()
        if isinstance(child, nn.Dropout) and child.p > 0
    ]
    for parent, child_name, name, p in found:
        if isinstance(parent, nn.ModuleDict):
            parent[child_name] = CoordinateDropout(p, name, clock)
        else:
            setattr(parent, child_name, CoordinateDropout(p, name, clock))
    return len(found)
