"""Output layer and cross-entropy in one: no full logits, no second forward in backward.

The gradient of a summed cross-entropy does not depend on what comes after it but for one
factor, so it is made in the forward pass, chunk by chunk, where the logits are anyway:

    logits = hidden @ weightᵀ → (softmax - one-hot) in place → @ weight, ᵀ @ hidden

On CUDA one Triton kernel turns a chunk of logits into its gradient in place; elsewhere torch
does. P: trained positions, H: hidden size, V: vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = {"cuda": 4096, "cpu": 1024}  # positions whose logits exist at the same time


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Σ -log softmax(hidden @ weightᵀ)[label], summed over positions.

    Args:
        hidden: (P, H) final hidden states at the positions before the labels.
        weight: (V, H) output embedding; no gradient is made for it when it is frozen.
        labels: (P,) token ids.

    Returns:
        () float32 sum; divide by the trained tokens of the global step.
    """
    if not torch.is_grad_enabled():  # inside the function below that cannot be seen
        hidden, weight = hidden.detach(), weight.detach()
    apply: Any = _LinearCrossEntropy.apply
    result: Tensor = apply(hidden, weight, labels)
    return result


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        need_hidden, need_weight, _ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        chunk = CHUNK[hidden.device.type]
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = hidden[part] @ weight.t()
            total += _to_gradient(logits, labels[part])
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[part])
            if grad_weight is not None:
                _accumulate(grad_weight, logits, hidden[part])
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        (upstream,) = grads
        if grad_hidden is not None:
            grad_hidden = grad_hidden.mul_(upstream)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(upstream).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None


def _to_gradient(logits: Tensor, labels: Tensor) -> Tensor:
    """Overwrite (C, V) logits by softmax minus one-hot; return the summed cross-entropy."""
    if logits.is_cuda:
        from posttrain_cli.engine.head_kernel import softmax_gradient_

        return softmax_gradient_(logits, labels).sum()
    column = labels.unsqueeze(1)
    chosen = logits.gather(1, column).float()
    normalizer = torch.logsumexp(logits.float(), dim=-1, keepdim=True)
    logits.sub_(normalizer).exp_()
    logits.scatter_add_(1, column, torch.full_like(chosen, -1.0).to(logits.dtype))
    return (normalizer - chosen).sum()


def _accumulate(total: Tensor, slope: Tensor, hidden: Tensor) -> None:
    """Add slopeᵀ @ hidden to `total`, in float32."""
    if slope.dtype == torch.float32:
        total.addmm_(slope.t(), hidden)
    elif slope.is_cuda:
        total += torch.mm(slope.t(), hidden, out_dtype=torch.float32)
    else:
        total += (slope.t() @ hidden).float()
