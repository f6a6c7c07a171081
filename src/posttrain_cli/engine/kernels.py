"""Optional faster kernels: Liger's, and compiled decoder layers. What is used is said."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from posttrain_cli.config import ModelConfig
from posttrain_cli.errors import UsageError


def use_liger(model: Any, settings: ModelConfig, device: torch.device) -> str:
    """Replace norms, rotary embeddings and feed-forward layers by Liger's where that works.

    Returns:
        what was done, or why not, for the log; empty if it was not asked for.
    """
    if not settings.use_liger:
        return ""
    if device.type != "cuda":
        return "use_liger: Liger's kernels need a GPU, plain ones are used"
    if importlib.util.find_spec("liger_kernel") is None:
        return "use_liger: liger-kernel is not installed (`pip install 'posttrain-cli[gpu]'`)"
    from liger_kernel.transformers.monkey_patch import (
        _apply_liger_kernel_to_instance,
    )

    _apply_liger_kernel_to_instance(
        model=model, cross_entropy=False, fused_linear_cross_entropy=False
    )
    return "use_liger: Liger's norm, rotary and feed-forward kernels are used"


def compile_blocks(blocks: list[nn.Module], settings: ModelConfig, device: torch.device) -> None:
    """Compile each decoder layer on its own: one small graph that all layers share."""
    if not settings.compile:
        return
    if device.type != "cuda":
        raise UsageError("`model.compile` needs a GPU", hint="leave it out on a CPU")
    for block in blocks:
        block.compile(dynamic=True)
