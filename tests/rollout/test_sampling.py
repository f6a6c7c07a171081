from __future__ import annotations

import math

import torch

from posttrain_cli.rollout.protocol import Sampling, noise_seed
from posttrain_cli.rollout.sampling import gumbel_noise, token_logprobs

CPU = torch.device("cpu")


def sampling(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> Sampling:
    return Sampling(
        max_new_tokens=1, temperature=temperature, top_p=top_p, top_k=top_k, n=1, seed=0
    )


def probabilities(weights: list[float], how: Sampling) -> list[float]:
    logits = torch.tensor([weights]).log()
    return [round(p, 4) for p in token_logprobs(logits, how).exp()[0].tolist()]


def test_temperature_top_k_and_top_p_by_hand() -> None:
    weights = [0.5, 0.3, 0.15, 0.05]
    assert probabilities(weights, sampling()) == weights
    assert probabilities(weights, sampling(temperature=0)) == weights
    halved = [w**2 for w in weights]
    assert probabilities(weights, sampling(temperature=0.5)) == [
        round(w / sum(halved), 4) for w in halved
    ]
    assert probabilities(weights, sampling(top_k=2)) == [0.625, 0.375, 0, 0]
    assert probabilities(weights, sampling(top_k=9)) == weights
    # The token that crosses top_p is kept: 0.5 alone is less than 0.6.
    assert probabilities(weights, sampling(top_p=0.6)) == [0.625, 0.375, 0, 0]
    assert probabilities(weights, sampling(top_p=0.4)) == [1, 0, 0, 0]
    # top_p works on what top_k left: of (0.625, 0.375) the first alone reaches 0.6.
    assert probabilities(weights, sampling(top_k=2, top_p=0.6)) == [1, 0, 0, 0]


def test_top_p_agrees_with_the_order_of_transformers() -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(0)) * 3
    expected = logits
    for warper in (TemperatureLogitsWarper(0.7), TopKLogitsWarper(40), TopPLogitsWarper(0.9)):
        expected = warper(None, expected)
    found = token_logprobs(logits, sampling(temperature=0.7, top_k=40, top_p=0.9))
    assert torch.equal(found.isfinite(), expected.isfinite())
    torch.testing.assert_close(found.exp(), expected.softmax(-1))


def test_noise_is_a_function_of_the_coordinates() -> None:
    both = gumbel_noise([(3, 0), (9, 1)], 5, 42, 1000, CPU)
    assert torch.equal(both[1:], gumbel_noise([(9, 1)], 5, 42, 1000, CPU))
    for rows, position, seed in [([(9, 0)], 5, 42), ([(9, 1)], 6, 42), ([(9, 1)], 5, 43)]:
        assert not torch.equal(both[1:], gumbel_noise(rows, position, seed, 1000, CPU))
    assert both.isfinite().all()
    assert noise_seed(1, 23) != noise_seed(12, 3)
    assert 0 <= noise_seed(2**40, 5, 6, 7) < 2**63


def test_largest_log_probability_plus_noise_is_a_draw_from_the_distribution() -> None:
    shares = torch.tensor([0.5, 0.3, 0.15, 0.05])
    noise = gumbel_noise([(row, 0) for row in range(20_000)], 0, 1, 4, CPU)
    counts = torch.bincount((shares.log() + noise).argmax(dim=-1), minlength=4)
    for count, share in zip(counts.tolist(), shares.tolist(), strict=True):
        spread = math.sqrt(20_000 * share * (1 - share))
        assert abs(count - 20_000 * share) < 4 * spread
