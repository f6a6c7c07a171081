"""Arithmetic that training a batch needs, and what the device can do: their ratio is the MFU.

Recomputed activations are not counted: they are time spent, not work done. The peak is measured
on the device itself, a large matrix product in the compute type, so it is true for any device.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from posttrain_cli.engine.batch import Batch

_SIZE = {"cuda": 8192, "cpu": 1024}  # side of the square matrices of the measurement
_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Work:
    """Forward arithmetic of a model.

    Attributes:
        layers: FLOPs of all decoder layers for one token, without attention scores.
        scores: FLOPs of attention scores and their use, for one pair of tokens in all layers.
        head: FLOPs of the output layer for one trained token.
        passes: forward passes that training equals: 3 for all parameters, 2 for LoRA, whose
            frozen weights need no gradient.
    """

    layers: float
    scores: float
    head: float
    passes: float

    def of(self, batch: Batch) -> float:
        """FLOPs of training on `batch`."""
        if batch.tokens == 0:
            return 0.0
        pairs = batch.pairs / 2  # causal
        forward = self.layers * batch.tokens + self.scores * pairs
        return self.passes * (forward + self.head * batch.labels.numel())


def work_of(module: Any, config: Any, lora: bool) -> Work:
    """Count the arithmetic of a (wrapped) causal language model."""
    matrices = sum(
        p.numel() for name, p in module.named_parameters() if ".layers." in name and p.dim() == 2
    )
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return Work(
        layers=2.0 * matrices,
        scores=4.0 * width * config.num_hidden_layers,
        head=2.0 * config.vocab_size * config.hidden_size,
        passes=2.0 if lora else 3.0,
    )


def measure_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product on `device`, the best of a few rounds.

    The values are random: GPUs run the same product of equal values faster, on less power.
    """
    size = _SIZE[device.type]
    generator = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(size, size, generator=generator, device=device, dtype=dtype) for _ in range(2)
    )
    best = float("inf")
    for _ in range(_ROUNDS):
        _wait(device)
        started = time.perf_counter()
        torch.mm(left, right)
        _wait(device)
        best = min(best, time.perf_counter() - started)
    return 2.0 * size**3 / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
