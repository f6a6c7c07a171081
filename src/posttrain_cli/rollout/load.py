"""A model in memory for generation, from whatever the user named, with nothing missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from posttrain_cli.config import ModelConfig
from posttrain_cli.errors import UsageError
from posttrain_cli.runs.resolve import ModelSource


def load_model(source: ModelSource, device: torch.device, dtype: torch.dtype) -> Any:
    """Load `source` whole on one device, an adapter unmerged as in training.

    Raises:
        UsageError: an unknown architecture, a damaged file, or tensors that do not fit.
    """
    model = _load_base(source.base or source.weights, dtype)
    if source.form == "adapter":
        model = _load_adapter(model, source)
    if source.form == "sharded":
        model = _load_checkpoint(model, source)
    return model.to(device).eval()


def changes_nothing(model: Any) -> bool:
    """Whether the model has an adapter whose every B matrix is zero: it answers as its base."""
    upper = [p for name, p in model.named_parameters() if ".lora_B." in name]
    return bool(upper) and not any(bool(p.any()) for p in upper)


def _load_base(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        # Soft-capped attention exists in the eager implementation only.
        capped = getattr(config, "attn_logit_softcapping", None)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation="eager" if capped else "sdpa",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises whatever its parts raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(
            f"the model in `{folder}` cannot be loaded: {lines[0]}",
            hint="is the folder complete, and its architecture one of this transformers version?",
        ) from error
    model, found = loaded
    missing = sorted(found["missing_keys"])
    if missing:
        raise UsageError(
            f"the weights in `{folder}` do not fit the architecture: `{missing[0]}` is missing"
            + (f", and {len(missing) - 1} more" if len(missing) > 1 else ""),
            hint="the folder may be damaged, or store its weights under other names",
        )
    return model


def _load_adapter(model: Any, source: ModelSource) -> Any:
    from posttrain_cli.engine import weights

    model = _with_lora(model, source, ModelConfig())
    weights.load_adapter(model, source.weights)
    return model


def _load_checkpoint(model: Any, source: ModelSource) -> Any:
    """Put the trained tensors of a checkpoint, stored sharded, over the model of its start."""
    from posttrain_cli.engine import checkpoint, dcp

    problem = checkpoint.damage(source.weights)
    if problem:
        raise UsageError(
            f"checkpoint `{source.weights}` is damaged: {problem}", hint="use another checkpoint"
        )
    settings = _run_settings(source)
    if source.adapter is not None or settings.lora_rank:
        model = _with_lora(model, source, settings)
        trained = {n: p for n, p in model.named_parameters() if ".lora_" in n}
    else:
        trained = dict(model.named_parameters())
    stored = dcp.shapes(dcp.read_index(source.weights))
    tensors = {
        f"model.{name}": torch.empty_like(
            parameter, dtype=stored.get(f"model.{name}", (None, parameter.dtype))[1]
        )
        for name, parameter in trained.items()
    }
    unexpected = {n for n in stored if n.startswith("model.")} - set(tensors)
    if unexpected:
        raise UsageError(
            f"checkpoint `{source.weights}` holds `{min(unexpected)}`, which this model lacks",
            hint="name the base that the run was started from with --base DIR",
        )
    dcp.read(source.weights, tensors, partial=True)
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(tensors[f"model.{name}"])
    return model


def _run_settings(source: ModelSource) -> ModelConfig:
    """The `model` section of the run that a checkpoint belongs to."""
    from posttrain_cli.settings import load

    assert source.run is not None, source
    config_file = source.run / "config.yaml"
    return load(None, flags={}, config_file=config_file, cwd=source.run).config.model


def _with_lora(model: Any, source: ModelSource, settings: ModelConfig) -> Any:
    """Wrap `model` by PEFT in the adapter's own shape, without dropout."""
    from posttrain_cli.engine.model import adapter_config, inject_lora

    shape = adapter_config(source, settings)
    assert shape is not None, source
    shape.lora_dropout = 0.0
    return inject_lora(model, shape)
