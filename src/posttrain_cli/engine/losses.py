"""Losses as pure functions: tensors and floats in, sums out.

Nothing here knows configs, logging or other ranks. The caller divides once by the number of
trained tokens of the whole global step, so accumulation, packing and world size cannot change
a result. P: trained positions, H: hidden size, V: vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 1024  # positions whose logits exist at the same time


def sft_loss(logprobs: Tensor) -> Tensor:
    """Cross-entropy summed over trained tokens, -Σ log p(y_t | y_<t).

    Args:
        logprobs: (P,) log-probabilities of the trained tokens.

    Returns:
        () the sum; divide by the trained tokens of the global step.
    """
    return -logprobs.sum()


def linear_logprobs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Log-probabilities of `labels` under softmax(hidden @ weightᵀ), without full logits.

    Args:
        hidden: (P, H) final hidden states at the positions before the labels.
        weight: (V, H) output embedding.
        labels: (P,) token ids.

    Returns:
        (P,) float32; differentiable in `hidden` and `weight`.
    """
    apply: Any = _LinearLogprobs.apply
    result: Tensor = apply(hidden, weight, labels)
    return result


class _LinearLogprobs(torch.autograd.Function):
    """Logits live one chunk at a time; backward computes each chunk again from its log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        size = hidden.shape[0]
        logprobs = torch.empty(size, dtype=torch.float32, device=hidden.device)
        normalizer = torch.empty_like(logprobs)
        for start in range(0, size, CHUNK):
            part = slice(start, start + CHUNK)
            logits = (hidden[part] @ weight.t()).float()
            normalizer[part] = torch.logsumexp(logits, dim=-1)
            chosen = logits.gather(1, labels[part].unsqueeze(1)).squeeze(1)
            logprobs[part] = chosen - normalizer[part]
        ctx.save_for_backward(hidden, weight, labels, normalizer)
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight, labels, normalizer = ctx.saved_tensors
        (upstream,) = grads
        need_hidden, need_weight, _ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        for start in range(0, hidden.shape[0], CHUNK):
            part = slice(start, start + CHUNK)
            logits = (hidden[part] @ weight.t()).float()
            scale = upstream[part].unsqueeze(1)
            slope = logits.sub_(normalizer[part].unsqueeze(1)).exp_().mul_(-scale)
            slope.scatter_add_(1, labels[part].unsqueeze(1), scale)
            slope = slope.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = slope @ weight
            if grad_weight is not None:
                grad_weight += (slope.t() @ hidden[part]).float()
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None
