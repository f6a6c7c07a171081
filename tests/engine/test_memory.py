from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain_cli.config import Config, OptimConfig
from posttrain_cli.engine.distributed import World
from posttrain_cli.engine.memory import Need, Shape, available, headers, need, shape_of
from posttrain_cli.engine.model import build
from posttrain_cli.engine.optimizer import build_optimizer
from posttrain_cli.runs.resolve import resolve_model

WORLD = World(0, 1, 0, torch.device("cpu"), None)
LORA = {"lora_rank": 4, "lora_alpha": 8}
SHAPE = Shape(
    parameters=1_000_000, trained=10_000, hidden=64, intermediate=128, layers=2, vocabulary=1024
)
FULL = Shape(1_000_000, 1_000_000, 64, 128, 2, 1024)


def config(**model: Any) -> Config:
    data = {"max_length": 512, "micro_batch_size_per_gpu": 4}
    return Config.model_validate({"model": model, "data": data})


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "model",
    [{}, LORA, LORA | {"target_modules": ["q_proj", "v_proj"]},
     LORA | {"target_modules": "down_proj"}],
    ids=["full", "all-linear", "two", "one"],
)  # fmt: skip
def test_stored_bytes_are_those_of_the_model_in_memory(
    tiny_factory: Callable[..., Path], architecture: str, tied: bool, model: dict[str, Any]
) -> None:
    source = resolve_model(tiny_factory(architecture=architecture, tied=tied, vocab=320))
    settings = config(**model)
    shape = shape_of(source, settings)
    policy = build(source, settings.model, WORLD, seed=0)
    optimizer = build_optimizer(policy, OptimConfig(lr=1e-3))
    trained = list(policy.trainable.values())
    assert shape.parameters == policy.parameters
    assert shape.trained == sum(p.numel() for p in trained)
    assert (shape.hidden, shape.intermediate, shape.layers, shape.vocabulary) == (64, 128, 2, 320)
    needed = need(shape, settings, 1, gpu=False)
    assert needed.weights == sum(p.numel() * p.element_size() for p in policy.module.parameters())
    assert needed.gradients == sum(p.numel() * p.element_size() for p in trained)
    moments = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    assert needed.moments == sum(t.numel() * t.element_size() for t in moments)


def test_an_adapter_that_is_trained_further_has_its_own_shape(
    tiny_model: Path, tmp_path: Path
) -> None:
    plain = shape_of(resolve_model(tiny_model), config())
    shutil.copytree(tiny_model, tmp_path / "adapter")
    (tmp_path / "adapter" / "config.json").unlink()
    (tmp_path / "adapter" / "model.safetensors").unlink()
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"")
    adapter = {"r": 3, "target_modules": ["q_proj"], "base_model_name_or_path": str(tiny_model)}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    shape = shape_of(resolve_model(tmp_path / "adapter"), config())
    assert shape.trained == 2 * 3 * (64 + 64)  # layers × rank × (in + out)
    assert shape.parameters == plain.parameters + shape.trained


def test_only_the_listed_weight_files_are_read(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    once = headers(folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    weights = dict.fromkeys(once, "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model-00001-of-00001.safetensors")
    save_file({f"other.{n}": t for n, t in tensors.items()}, folder / "consolidated.safetensors")
    assert headers(folder) == once
    assert once["model.embed_tokens.weight"] == [1024, 64]


def test_half_precision_halves_what_is_frozen_and_computed() -> None:
    single, half = (need(SHAPE, config(dtype=d), 1, True) for d in ("float32", "bfloat16"))
    assert single.weights == 4 * 1_000_000
    assert half.weights == 2 * 990_000 + 4 * 10_000  # what is trained stays in float32
    assert half.activations == single.activations / 2
    assert (half.gradients, half.moments) == (4 * 10_000, 8 * 10_000)
    assert need(SHAPE, config(), 1, gpu=True).weights == half.weights  # auto
    assert need(SHAPE, config(), 1, gpu=False).weights == single.weights
    assert need(FULL, config(dtype="bfloat16"), 1, gpu=True).weights == 4 * 1_000_000


def test_devices_share_what_is_stored_and_not_what_is_computed() -> None:
    one, four = (need(FULL, config(), devices, gpu=True) for devices in (1, 4))
    for name in ("weights", "gradients", "moments"):
        assert getattr(four, name) == getattr(one, name) / 4
    for name in ("activations", "output_layer", "runtime"):
        assert getattr(four, name) == getattr(one, name)


def test_what_saves_memory_is_seen() -> None:
    plain = need(FULL, config(), 1, gpu=True)
    recomputed = need(FULL, config(enable_gradient_checkpointing=True), 1, gpu=True)
    assert recomputed.activations < plain.activations
    shorter = Config.model_validate({"data": {"max_length": 64, "micro_batch_size_per_gpu": 1}})
    less = need(FULL, shorter, 1, gpu=True)
    assert less.activations == plain.activations * 64 / (512 * 4)
    assert less.output_layer < plain.output_layer
    adapter = need(SHAPE, config(), 1, gpu=True)
    assert adapter.output_layer == plain.output_layer - 1024 * 64 * 4  # a frozen head
    assert need(SHAPE, config(), 1, True).total < plain.total


def test_total_is_the_sum() -> None:
    assert Need(1, 2, 4, 8, 16, 32).total == 63


def test_memory_of_the_host_is_shared_by_its_processes() -> None:
    one, two = available(gpu=False, devices=1), available(gpu=False, devices=2)
    assert 1e7 < two < one
    assert one / two == pytest.approx(2, rel=0.2)


def test_the_smallest_gpu_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain_cli import devices

    gpus = [devices.Gpu(n, f"GPU-{n}", "H", 100, free, "1") for n, free in enumerate((90, 50, 10))]
    monkeypatch.setattr(devices, "visible_gpus", lambda: gpus)
    assert available(gpu=True, devices=2) == 50 * 2**20
    monkeypatch.setattr(devices, "visible_gpus", list)
    assert available(gpu=True, devices=2) == 0
