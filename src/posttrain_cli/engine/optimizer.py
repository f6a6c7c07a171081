"""AdamW with state that exists from the start, and a learning rate that is a function of the step.

A rate computed from the step has nothing to save and nothing to lose on resume; moments that
exist before the first step let a checkpoint be read straight into them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posttrain_cli.config import OptimConfig
from posttrain_cli.engine.model import Policy


def build_optimizer(policy: Policy, settings: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; weight decay on matrices only."""
    parameters = list(policy.trainable.values())
    matrices = [p for p in parameters if p.dim() >= 2]
    others = [p for p in parameters if p.dim() < 2]
    assert settings.lr is not None
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=(settings.betas[0], settings.betas[1]),
        eps=settings.eps,
        fused=True,
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def checkpoint_tensors(policy: Policy, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """Everything of a run that is a tensor, by flat name: weights and moments."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in policy.trainable.items():
        tensors[f"model.{name}"] = parameter.detach()
        for moment in ("exp_avg", "exp_avg_sq"):
            tensors[f"optim.{name}.{moment}"] = optimizer.state[parameter][moment]
    return tensors


def set_updates(optimizer: torch.optim.AdamW, updates: int) -> None:
    """Set how many updates the moments have seen (their bias correction depends on it)."""
    for state in optimizer.state.values():
        state["step"].fill_(updates)


def warmup_steps(settings: OptimConfig, total: int) -> int:
    """Steps that warm up: the number given, or the share of all steps, rounded up."""
    if settings.warmup_steps is not None:
        return min(settings.warmup_steps, total)
    return math.ceil(round(settings.warmup_steps_ratio * total, 6))  # 0.1 × 70 is 7, not 7.000…1


def learning_rate(step: int, total: int, settings: OptimConfig) -> float:
    """The rate of 1-based `step`: linear warm-up to the peak, then the schedule down to 0."""
    assert settings.lr is not None
    warm = warmup_steps(settings, total)
    if step <= warm:
        return settings.lr * step / warm
    done = min(1.0, (step - 1 - warm) / max(1, total - warm))
    if settings.schedule == "cosine":
        return settings.lr * 0.5 * (1.0 + math.cos(math.pi * done))
    return settings.lr * (1.0 - done) if settings.schedule == "linear" else settings.lr
