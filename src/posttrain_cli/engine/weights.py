"""Weights in and out of safetensors files, slice by slice, with strict names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from posttrain_cli.errors import UsageError


@dataclass(frozen=True, slots=True)
class Index:
    """Which file of a folder holds which tensor."""

    folder: Path
    files: Mapping[str, str]


def index(folder: Path) -> Index:
    """Names of all tensors in the safetensors files of a Hugging Face folder."""
    from safetensors import SafetensorError, safe_open

    listed = folder / "model.safetensors.index.json"
    if listed.is_file():
        return Index(folder, json.loads(listed.read_text(encoding="utf-8"))["weight_map"])
    files: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as stream:
                files.update(dict.fromkeys(stream.keys(), path.name))
        except SafetensorError as error:
            raise UsageError(
                f"`{path}` is not a whole safetensors file: {error}", hint="copy it again"
            ) from error
    return Index(folder, files)


def base_name(name: str) -> str:
    """Name in the base model's files of a parameter that PEFT has wrapped."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def materialize(model: Any, device: torch.device) -> None:
    """Give a meta model memory, its ties, and its buffers their values."""
    model.to_empty(device=device)
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    if base.config.tie_word_embeddings and head.weight is not embedding.weight:
        base.tie_weights()
    for module in model.modules():
        if any(True for _ in module.buffers(recurse=False)):
            _fresh_buffers(module, device)


def _fresh_buffers(module: nn.Module, device: torch.device) -> None:
    """Buffers are computed, not stored: take them from a new module of the same kind."""
    config: Any = getattr(module, "config", None)
    assert config is not None, f"{type(module).__name__} has buffers that cannot be computed"
    build: Any = type(module)
    fresh = build(config)
    for name, buffer in module.named_buffers(recurse=False):
        buffer.copy_(fresh.get_buffer(name).to(device))
    for name in ("attention_scaling", "rope_type"):
        if hasattr(fresh, name):
            setattr(module, name, getattr(fresh, name))


def load(model: nn.Module, source: Index, rename: Callable[[str], str]) -> list[str]:
    """Fill parameters from files, each rank reading its own slices only.

    Args:
        model: materialised, sharded or not.
        source: the files.
        rename: parameter name to tensor name.

    Returns:
        names of the parameters that the files do not hold.
    """
    from safetensors import safe_open

    by_file: dict[str, list[tuple[str, nn.Parameter]]] = {}
    left = []
    for name, parameter in model.named_parameters():
        file = source.files.get(rename(name))
        if file is None:
            left.append(name)
        else:
            by_file.setdefault(file, []).append((name, parameter))
    for file, members in by_file.items():
        with safe_open(source.folder / file, framework="pt") as stream:
            for name, parameter in members:
                piece = stream.get_slice(rename(name))
                found, wanted = tuple(piece.get_shape()), tuple(parameter.shape)
                if found != wanted:
                    raise UsageError(
                        f"`{name}` in `{source.folder / file}` has shape {found}, "
                        f"expected {wanted}",
                        hint="is it the base that this adapter or config belongs to?",
                    )
                copy_slice(parameter, piece)
    return left


def copy_slice(parameter: Tensor, full: Any) -> None:
    """Copy this rank's part of `full` (a tensor, or a slice view of a file) into `parameter`."""
    with torch.no_grad():
        if not isinstance(parameter, DTensor):
            parameter.copy_(full[:] if parameter.dim() else full)
            return
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        part = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
        parameter.to_local().copy_(full[part])


def load_adapter(model: nn.Module, folder: Path) -> None:
    """Fill LoRA parameters from a PEFT adapter; a missing or unexpected tensor is an error."""
    source = index(folder)
    names = {n: adapter_name(n) for n, _ in model.named_parameters() if ".lora_" in n}
    missing = sorted(set(names.values()) - set(source.files))
    unexpected = sorted(set(source.files) - set(names.values()))
    if missing or unexpected:
        word, name = ("lacks", missing[0]) if missing else ("has the unexpected", unexpected[0])
        raise UsageError(
            f"the adapter `{folder}` does not fit this base: it {word} `{name}`",
            hint="name the base that it was trained on",
        )
    load(model, source, lambda name: names.get(name, ""))


def adapter_name(name: str) -> str:
    """Name of a LoRA parameter in an adapter file."""
    return name.replace(".default.", ".")


def whole(tensor: Tensor) -> Tensor:
    """The whole of a (sharded) tensor; a collective, so call it on every rank."""
    full: Tensor = tensor.detach()
    return full.full_tensor() if isinstance(full, DTensor) else full
