"""Which package comes with which extra, and what is missing here."""

from __future__ import annotations

import importlib.util

# Module names by extra of `pip install 'posttrain-cli[EXTRA]'`.
EXTRAS: dict[str, tuple[str, ...]] = {
    "train": ("torch", "transformers", "peft", "safetensors", "tensorboard"),
    "vllm": ("vllm",),
    "gpu": ("flash_attn", "liger_kernel"),
    "s3": ("fsspec", "s3fs"),
    "ray": ("ray",),
}


def extra_of(module: str) -> str:
    """The extra that brings `module`, or an empty string."""
    return next((extra for extra, modules in EXTRAS.items() if module in modules), "")


def missing(extra: str) -> list[str]:
    """The modules of `extra` that are not installed; nothing is imported."""
    return [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]
