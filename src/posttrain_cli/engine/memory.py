"""How many bytes a device needs: exact for what is stored, an estimate for activations."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain_cli.config import Config
from posttrain_cli.errors import UsageError
from posttrain_cli.runs.resolve import ModelSource

_NEEDED = ("hidden_size", "num_hidden_layers", "vocab_size")
_CHUNK = 1024  # positions of the output layer computed at once (engine.losses.CHUNK)
_RUNTIME = {True: 0.8e9, False: 0.5e9}  # libraries, contexts and buffers on a GPU, on a CPU


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model decides its memory.

    Attributes:
        parameters: all parameters.
        trained: parameters that get gradients and moments.
        hidden: width of the residual stream.
        intermediate: width of the feed-forward layers.
        layers: decoder layers.
        vocabulary: rows of the output layer.
    """

    parameters: int
    trained: int
    hidden: int
    intermediate: int
    layers: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of one device by purpose; `activations` is an estimate."""

    weights: float
    gradients: float
    moments: float
    activations: float
    output_layer: float
    runtime: float

    @property
    def total(self) -> float:
        """Sum of all."""
        stored = self.weights + self.gradients + self.moments
        return stored + self.activations + self.output_layer + self.runtime


def shape_of(source: ModelSource, config: Config) -> Shape:
    """Read the shape of a model from its config and the headers of its weights; no torch."""
    folder = source.base or source.weights
    known: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    lacking = [key for key in _NEEDED if key not in known]
    if lacking:
        raise UsageError(
            f"`{folder / 'config.json'}` has no `{lacking[0]}`",
            hint="Llama, Qwen2, Qwen3, Mistral, SmolLM and OLMo2 style models are supported",
        )
    tensors = headers(folder)
    parameters = sum(_size(shape) for shape in tensors.values())
    trained = parameters
    rank, targets = config.model.lora_rank, config.model.target_modules
    if source.adapter is not None:
        found = json.loads((source.adapter / "adapter_config.json").read_text(encoding="utf-8"))
        rank, targets = int(found["r"]), found["target_modules"]
    if rank:
        trained = sum(rank * sum(shape) for shape in _targets(tensors, targets))
    return Shape(
        parameters + (trained if rank else 0),
        trained,
        int(known["hidden_size"]),
        int(known.get("intermediate_size", 4 * known["hidden_size"])),
        int(known["num_hidden_layers"]),
        int(known["vocab_size"]),
    )


def headers(folder: Path) -> dict[str, list[int]]:
    """Name and shape of every tensor in a folder's safetensors files, from their headers alone."""
    shapes: dict[str, list[int]] = {}
    listed = folder / "model.safetensors.index.json"
    paths = set(folder.glob("*.safetensors"))
    if listed.is_file():  # other files may hold the same weights under other names
        paths = {folder / name for name in json.loads(listed.read_bytes())["weight_map"].values()}
    for path in sorted(paths):
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        shapes |= {name: entry["shape"] for name, entry in header.items() if "shape" in entry}
    return shapes


def need(shape: Shape, config: Config, devices: int, gpu: bool) -> Need:
    """Bytes that one of `devices` needs to train with `config`."""
    half = config.model.dtype == "bfloat16" or (config.model.dtype == "auto" and gpu)
    width = 2 if half else 4
    lora = shape.trained < shape.parameters
    frozen = (shape.parameters - shape.trained) * (width if lora else 4)
    tokens = config.data.max_length * config.data.micro_batch_size_per_gpu
    layer = tokens * (12 * shape.hidden + 4 * shape.intermediate) * width
    if config.model.enable_gradient_checkpointing:
        activations = tokens * shape.layers * shape.hidden * width + layer
    else:
        activations = layer * shape.layers
    head = min(tokens, _CHUNK) * shape.vocabulary * 4 * 2
    if not lora:
        head += shape.vocabulary * shape.hidden * 4
    return Need(
        weights=(frozen + 4 * shape.trained) / devices,
        gradients=4 * shape.trained / devices,
        moments=8 * shape.trained / devices,
        activations=float(activations),
        output_layer=float(head),
        runtime=_RUNTIME[gpu],
    )


def available(gpu: bool, devices: int) -> float:
    """Free bytes of the smallest visible GPU, or this process's share of free host memory."""
    if gpu:
        from posttrain_cli.devices import visible_gpus

        return min((g.free_mb for g in visible_gpus()[:devices]), default=0) * 2.0**20
    info = Path("/proc/meminfo")
    if not info.is_file():
        return float("inf")
    lines = dict(line.split(":") for line in info.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024 / devices


def _targets(tensors: dict[str, list[int]], wanted: str | list[str]) -> list[list[int]]:
    """Shapes of the matrices that LoRA is put beside."""
    names = [wanted] if isinstance(wanted, str) else wanted
    inside = {
        name: shape for name, shape in tensors.items() if ".layers." in name and len(shape) == 2
    }
    if names == ["all-linear"]:
        return list(inside.values())
    return [shape for name, shape in inside.items() if name.split(".")[-2] in names]


def _size(shape: list[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
