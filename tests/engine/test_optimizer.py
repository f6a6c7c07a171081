from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain_cli.config import ModelConfig, OptimConfig
from posttrain_cli.engine.distributed import World
from posttrain_cli.engine.model import Policy, build
from posttrain_cli.engine.optimizer import (
    build_optimizer,
    checkpoint_tensors,
    learning_rate,
    set_updates,
    warmup_steps,
)
from posttrain_cli.runs.resolve import resolve_model

WORLD = World(0, 1, 0, torch.device("cpu"), None)


def config(**values: Any) -> OptimConfig:
    return OptimConfig(**{"lr": 2e-5, **values})


@pytest.fixture
def policy(tiny_factory: Callable[..., Path]) -> Policy:
    folder = tiny_factory(architecture="qwen2", layers=1, vocab=320)
    return build(resolve_model(folder), ModelConfig(), WORLD, seed=0)


# The learning rate


def test_warm_up_is_linear_as_the_article_prints_it() -> None:
    settings = config()  # peak 2e-5, a tenth of 1,000 steps warms up
    for step, rate in ((1, 2e-7), (10, 2e-6), (20, 4e-6), (50, 1e-5), (99, 1.98e-5), (100, 2e-5)):
        assert learning_rate(step, 1000, settings) == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("cosine", [1.0, 0.5 + 0.25 * math.sqrt(2), 0.5, 0.5 - 0.25 * math.sqrt(2)]),
        ("linear", [1.0, 0.75, 0.5, 0.25]),
        ("constant", [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_schedule_after_warm_up(schedule: Any, rates: list[float]) -> None:
    settings = config(lr=1.0, schedule=schedule, warmup_steps=2)
    found = [learning_rate(step, 6, settings) for step in range(1, 7)]
    assert found == pytest.approx([0.5, 1.0, *rates])


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize("total", [1, 2, 10, 1000])
def test_schedule_falls_to_almost_nothing_and_never_below(schedule: Any, total: int) -> None:
    settings = config(lr=1.0, schedule=schedule)
    rates = [learning_rate(step, total, settings) for step in range(1, total + 2)]
    warm = warmup_steps(settings, total)
    assert all(0 < rate <= 1 for rate in rates[:total])
    assert rates[warm:] == sorted(rates[warm:], reverse=True)
    if total > warm:
        assert rates[total] == pytest.approx(0.0, abs=1e-12)
        assert rates[total - 1] <= 1.001 / (total - warm)


@pytest.mark.parametrize(
    ("values", "total", "steps"),
    [
        ({}, 100, 10),
        ({}, 70, 7),  # 0.1 × 70 is 7.000000000000001 in floats
        ({}, 11, 2),  # rounded up
        ({}, 1, 1),
        ({"warmup_steps_ratio": 0.0}, 100, 0),
        ({"warmup_steps_ratio": 1.0}, 100, 100),
        ({"warmup_steps": 3}, 100, 3),
        ({"warmup_steps": 0, "warmup_steps_ratio": 0.5}, 100, 0),
        ({"warmup_steps": 500}, 100, 100),
    ],
)
def test_warm_up_steps(values: dict[str, Any], total: int, steps: int) -> None:
    settings = config(**values)
    assert warmup_steps(settings, total) == steps
    assert learning_rate(max(1, steps), total, settings) == 2e-5


# AdamW


def test_weight_decay_touches_matrices_only(policy: Policy) -> None:
    optimizer = build_optimizer(policy, config(lr=0.1, weight_decay=0.5))
    before = {name: p.detach().clone() for name, p in policy.trainable.items()}
    for parameter in policy.trainable.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    decayed = {n for n, p in policy.trainable.items() if not torch.equal(p, before[n])}
    assert decayed == {n for n, p in before.items() if p.dim() == 2}
    assert any(name.endswith("bias") for name in set(before) - decayed)
    assert any(name.endswith("norm.weight") for name in set(before) - decayed)
    for name in decayed:
        assert torch.allclose(policy.trainable[name], before[name] * (1 - 0.1 * 0.5))


def test_steps_are_those_of_plain_adamw(policy: Policy) -> None:
    settings = config(lr=1e-2, weight_decay=0.0, betas=[0.8, 0.9], eps=1e-6)
    mine = build_optimizer(policy, settings)
    copies = [torch.nn.Parameter(p.detach().clone()) for p in policy.trainable.values()]
    plain = torch.optim.AdamW(copies, lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for parameter, copied in zip(policy.trainable.values(), copies, strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            copied.grad = parameter.grad.clone()
        mine.step()
        plain.step()
    for parameter, copied in zip(policy.trainable.values(), copies, strict=True):
        assert torch.allclose(parameter, copied, rtol=1e-5, atol=1e-7)


def test_checkpoint_tensors_carry_everything_that_a_step_depends_on(
    policy: Policy, tiny_factory: Callable[..., Path]
) -> None:
    settings = config(lr=1e-2)

    def step(policy: Policy, optimizer: torch.optim.AdamW, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in policy.trainable.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()

    optimizer = build_optimizer(policy, settings)
    names = checkpoint_tensors(policy, optimizer)
    assert len(names) == 3 * len(policy.trainable)
    assert not any(t.any() for n, t in names.items() if n.startswith("optim."))  # there at once
    step(policy, optimizer, 1)
    step(policy, optimizer, 2)
    stored = {
        name: tensor.clone() for name, tensor in checkpoint_tensors(policy, optimizer).items()
    }
    folder = tiny_factory(architecture="qwen2", layers=1, vocab=320)
    other = build(resolve_model(folder), ModelConfig(), WORLD, seed=0)
    resumed = build_optimizer(other, settings)
    for name, tensor in checkpoint_tensors(other, resumed).items():
        tensor.copy_(stored[name])
    set_updates(resumed, 2)
    step(policy, optimizer, 3)
    step(other, resumed, 3)
    for name, parameter in policy.trainable.items():
        assert torch.equal(parameter, other.trainable[name])
    set_updates(resumed, 7)
    assert {float(state["step"]) for state in resumed.state.values()} == {7.0}
