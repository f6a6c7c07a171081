"""The losses against float64 arithmetic on whole logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from posttrain_cli.engine import head, losses
from posttrain_cli.engine.head import linear_cross_entropy
from posttrain_cli.engine.losses import linear_logprobs, sft_loss

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def summed(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return sft_loss(linear_logprobs(hidden, weight, labels))


BOTH = pytest.mark.parametrize("loss", [summed, linear_cross_entropy])


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK", 8)
    monkeypatch.setitem(head.CHUNK, "cpu", 8)


def inputs(positions: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(positions)
    hidden = torch.randn(positions, 16, generator=generator)
    weight = torch.randn(40, 16, generator=generator)
    labels = torch.randint(0, 40, (positions,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def exact_logprobs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = hidden.double() @ weight.double().t()
    return torch.log_softmax(logits, dim=-1).gather(1, labels.unsqueeze(1)).squeeze(1)


def value(scalar: Tensor) -> float:
    return float(scalar.detach())


def relative(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None
    assert expected is not None
    assert found.shape == expected.shape
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("positions", [1, 7, 8, 9, 16, 37])
def test_logprobs_and_their_gradients_for_any_upstream_gradient(positions: int) -> None:
    hidden, weight, labels = inputs(positions)
    upstream = torch.randn(positions, generator=torch.Generator().manual_seed(1))
    exact = exact_logprobs(hidden, weight, labels)
    expected = torch.autograd.grad((exact * upstream).sum(), [hidden, weight])
    found = linear_logprobs(hidden, weight, labels)
    assert found.dtype == torch.float32
    assert found.shape == (positions,)
    assert (found - exact).abs().max() < 1e-5
    for mine, theirs in zip(
        torch.autograd.grad((found * upstream).sum(), [hidden, weight]), expected, strict=True
    ):
        assert relative(mine, theirs) < 1e-6


@BOTH
@pytest.mark.parametrize("positions", [1, 8, 9, 37])
def test_sum_and_gradients_of_cross_entropy(loss: Loss, positions: int) -> None:
    hidden, weight, labels = inputs(positions)
    exact = -exact_logprobs(hidden, weight, labels).sum()
    expected = torch.autograd.grad(exact / 7, [hidden, weight])
    found = loss(hidden, weight, labels)
    assert found.shape == ()
    assert value(found) == pytest.approx(value(exact), rel=1e-6)
    for mine, theirs in zip(
        torch.autograd.grad(found / 7, [hidden, weight]), expected, strict=True
    ):
        assert relative(mine, theirs) < 1e-6


@BOTH
def test_chunks_do_not_change_the_result(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for chunk in (1, 5, 37, 1000):
        monkeypatch.setattr(losses, "CHUNK", chunk)
        monkeypatch.setitem(head.CHUNK, "cpu", chunk)
        hidden, weight, labels = inputs(37)
        found = loss(hidden, weight, labels)
        found.backward()
        results.append((value(found), hidden.grad, weight.grad))
    for total, grad_hidden, grad_weight in results[1:]:
        assert total == pytest.approx(results[0][0], rel=1e-6)
        assert relative(grad_hidden, results[0][1]) < 1e-6
        assert relative(grad_weight, results[0][2]) < 1e-6


@BOTH
def test_frozen_sides_get_no_gradient(loss: Loss) -> None:
    hidden, weight, labels = inputs(9)
    loss(hidden, weight, labels).backward()
    both = hidden.grad, weight.grad
    frozen_head, _, _ = inputs(9)
    loss(frozen_head, weight.detach(), labels).backward()
    assert relative(frozen_head.grad, both[0]) == 0
    _, alone, _ = inputs(9)
    loss(hidden.detach(), alone, labels).backward()
    assert relative(alone.grad, both[1]) == 0


@BOTH
def test_a_batch_without_trained_tokens_gives_zero_not_a_missing_gradient(loss: Loss) -> None:
    hidden, weight, labels = inputs(3)
    nothing = loss(hidden[:0], weight, labels[:0])
    assert value(nothing) == 0.0
    nothing.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not hidden.grad.any()
    assert not weight.grad.any()


@BOTH
def test_bfloat16_is_close_and_keeps_its_type(loss: Loss) -> None:
    hidden, weight, labels = inputs(37, torch.bfloat16)
    exact = -exact_logprobs(hidden, weight, labels).sum()
    expected = torch.autograd.grad(exact, [hidden, weight])
    found = loss(hidden, weight, labels)
    assert found.dtype == torch.float32
    assert value(found) == pytest.approx(value(exact), rel=5e-3)
    found.backward()
    for mine, theirs in ((hidden.grad, expected[0]), (weight.grad, expected[1])):
        assert mine is not None
        assert mine.dtype == torch.bfloat16
        assert relative(mine, theirs) < 2e-2


@BOTH
def test_huge_logits_do_not_overflow(loss: Loss) -> None:
    hidden, weight, labels = inputs(9)
    big = (hidden.detach() * 1e4).requires_grad_()
    exact = -exact_logprobs(big, weight, labels).sum()
    found = loss(big, weight, labels)
    assert value(found) == pytest.approx(value(exact), rel=1e-5)
    found.backward()
    assert big.grad is not None
    assert big.grad.isfinite().all()


def test_evaluation_makes_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels = inputs(9)
    expected = value(linear_cross_entropy(hidden, weight, labels))
    made: list[Tensor] = []
    monkeypatch.setattr(head, "_accumulate", lambda total, *_: made.append(total))
    with torch.no_grad():
        found = linear_cross_entropy(hidden, weight, labels)
    assert value(found) == expected
    assert made == []
    assert not found.requires_grad


def test_sft_loss_is_the_negative_sum() -> None:
    assert float(sft_loss(torch.tensor([-0.5, -2.0, -0.25]))) == 2.75
    assert float(sft_loss(torch.zeros(0))) == 0.0
