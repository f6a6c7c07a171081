"""A global step: what is logged and applied is the token mean, however the step is split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from posttrain_cli.config import Config, ModelConfig
from posttrain_cli.data.plan import deal
from posttrain_cli.engine.batch import make_batch
from posttrain_cli.engine.distributed import World
from posttrain_cli.engine.loop import Sums, Work, train_step
from posttrain_cli.engine.model import build
from posttrain_cli.runs.resolve import resolve_model

CPU = torch.device("cpu")
WORLD = World(0, 1, 0, CPU, None)
PROMPTS = [2, 9, 4, 1, 6, 3]
ANSWERS = [40, 1, 2, 25, 1, 7]  # so unequal that a mean of means is far off


class Samples:
    """Random prompts and answers; the answers are trained."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.rows = [
            random.integers(4, 320, p + a).astype(np.int32)
            for p, a in zip(PROMPTS, ANSWERS, strict=True)
        ]
        self.lengths = np.array([len(row) for row in self.rows])

    def ids(self, sample: int) -> NDArray[np.int32]:
        return self.rows[sample]

    def mask(self, sample: int) -> NDArray[np.bool_]:
        return np.arange(len(self.rows[sample])) >= PROMPTS[sample]


@pytest.fixture(scope="module")
def folder(tiny_factory: Callable[..., Path]) -> Path:
    return tiny_factory(layers=1, vocab=320)


@pytest.fixture(scope="module")
def offline(folder: Path) -> tuple[list[float], float, dict[str, Tensor]]:
    """Mean loss of each sample, of all trained tokens, and its gradients, by transformers."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    samples, losses = Samples(), []
    for number, row in enumerate(samples.rows):
        ids = torch.from_numpy(row.astype(np.int64))
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        per_token = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        losses.append(per_token[torch.from_numpy(samples.mask(number)[1:])])
    mean = torch.cat(losses).mean()
    mean.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return [float(x.detach().mean()) for x in losses], float(mean.detach()), gradients


@pytest.fixture(scope="module")
def step(folder: Path) -> Callable[..., tuple[Sums, dict[str, Tensor]]]:
    policy = build(resolve_model(folder), ModelConfig(), WORLD, seed=0)

    def run(bins: list[list[int]], micro: int, clip: float = 0) -> tuple[Sums, dict[str, Tensor]]:
        samples = Samples()
        arrays = tuple(np.array(members) for members in bins)
        (share,) = deal(arrays, samples.lengths, 1, micro)
        batches = [make_batch(group, samples, seed=0, step=1, device=CPU) for group in share]
        job: Any = SimpleNamespace(
            policy=policy,
            loss=policy.cross_entropy,
            world=WORLD,
            config=Config.model_validate({"optim": {"clip_grad_norm": clip}}),
            flops=SimpleNamespace(of=lambda batch: 10.0 * batch.tokens),
        )
        policy.module.zero_grad()
        sums = train_step(job, Work(batches, sum(ANSWERS), 1.0, list), first=True)
        grads = {n: p.grad.clone() for n, p in policy.trainable.items() if p.grad is not None}
        return sums, grads

    return run


SPLITS = {
    "one row": ([[0, 1, 2, 3, 4, 5]], 1),
    "one sample a micro-batch": ([[n] for n in range(6)], 1),
    "four and two": ([[n] for n in range(6)], 4),
    "packs": ([[0], [3, 1, 2], [4, 5]], 1),
    "packs in one row": ([[0], [3, 1, 2], [4, 5]], 3),
}


@pytest.mark.parametrize("split", SPLITS)
def test_loss_norm_and_gradients_are_those_of_the_token_mean(
    offline: tuple[list[float], float, dict[str, Tensor]],
    step: Callable[..., tuple[Sums, dict[str, Tensor]]],
    split: str,
) -> None:
    of_samples, mean, gradients = offline
    sums, found = step(*SPLITS[split])
    assert sums.loss == pytest.approx(mean, rel=1e-5)
    norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
    assert sums.norm == pytest.approx(float(norm), rel=1e-5)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (found[name] - gradient).norm() < 1e-5 * norm
    assert sums.tokens == sum(PROMPTS) + sum(ANSWERS)
    assert abs(sum(of_samples) / 6 - mean) > 1e-3 * mean  # what a mean of means would log


def test_the_norm_is_logged_before_clipping(
    step: Callable[..., tuple[Sums, dict[str, Tensor]]],
) -> None:
    sums, free = step([[n] for n in range(6)], 2)
    clipped_sums, clipped = step([[n] for n in range(6)], 2, clip=sums.norm / 4)
    assert clipped_sums.norm == pytest.approx(sums.norm, rel=1e-6)
    for name, gradient in free.items():
        assert torch.allclose(clipped[name], gradient / 4, rtol=1e-3, atol=1e-7)


def test_a_step_without_trained_tokens_is_a_broken_invariant() -> None:
    job: Any = SimpleNamespace()
    with pytest.raises(AssertionError, match="a step without trained tokens"):
        train_step(job, Work([], 0, 1.0, list), first=False)
