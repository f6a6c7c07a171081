"""The Triton kernel of `head`: a row of logits becomes its cross-entropy gradient in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192


@triton.jit  # type: ignore[untyped-decorator]
def _softmax_gradient(
    logits: tl.tensor,
    labels: tl.tensor,
    losses: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    block: tl.constexpr,
) -> None:
    """One program a row: a pass for maximum and sum, a pass that writes softmax - one-hot."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    label = tl.load(labels + row)
    chosen = tl.load(base + label).to(tl.float32)
    high = float("-inf")
    total = 0.0
    for start in range(0, width, block):
        columns = start + tl.arange(0, block)
        values = tl.load(base + columns, mask=columns < width, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(high, tl.max(values))
        total = total * tl.exp(high - higher) + tl.sum(tl.exp(values - higher))
        high = higher
    normalizer = high + tl.log(total)
    tl.store(losses + row, normalizer - chosen)
    tl.debug_barrier()
    for start in range(0, width, block):
        columns = start + tl.arange(0, block)
        inside = columns < width
        values = tl.load(base + columns, mask=inside, other=float("-inf")).to(tl.float32)
        slope = tl.exp(values - normalizer) - tl.where(columns == label, 1.0, 0.0)
        tl.store(base + columns, slope.to(logits.dtype.element_ty), mask=inside)


def softmax_gradient_(logits: Tensor, labels: Tensor) -> Tensor:
    """Overwrite (C, V) CUDA logits by softmax minus one-hot; returns (C,) cross-entropies."""
    rows, width = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _softmax_gradient[(rows,)](
            logits, labels, losses, logits.stride(0), width, block=_BLOCK, num_warps=16
        )
    return losses
