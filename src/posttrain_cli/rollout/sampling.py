"""Drawing one token a row, so that neither the batch nor its order changes what is drawn.

The noise of a row is a function of its coordinates (Gumbel-max: the largest of log-probability
plus Gumbel noise is a draw from the distribution), not of one generator shared by the batch.
Two models given the same coordinates get the same noise, which makes their answers comparable.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain_cli.rollout.protocol import Sampling, noise_seed


def token_logprobs(logits: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities (B, V) that tokens are drawn from; -inf for those left out.

    Temperature first, then top-k, then top-p, as transformers and vLLM have it.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        return torch.log_softmax(logits, dim=-1)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if sampling.top_p < 1:
        ordered, places = logits.sort(dim=-1, descending=True, stable=True)
        shares = torch.softmax(ordered, dim=-1)
        before = shares.cumsum(dim=-1) - shares
        outside = (before >= sampling.top_p).scatter(-1, places, before >= sampling.top_p)
        logits = logits.masked_fill(outside, -torch.inf)
    return torch.log_softmax(logits, dim=-1)


def gumbel_noise(
    rows: Sequence[tuple[int, int]], position: int, seed: int, vocabulary: int, device: torch.device
) -> Tensor:
    """Gumbel noise (B, V) in float64 for each (row, answer) at `position` of its answer."""
    generator = torch.Generator(device)
    noise = torch.empty(len(rows), vocabulary, dtype=torch.float64, device=device)
    for index, (row, answer) in enumerate(rows):
        generator.manual_seed(noise_seed(seed, row, answer, position))
        noise[index].uniform_(generator=generator)
    # float64: in float32 a uniform is exactly 0 about once in 2**24 draws, and would always win.
    waiting = -torch.log1p(-noise)
    return -torch.log(waiting.clamp_min(1e-300))
