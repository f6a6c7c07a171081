"""What generation engines take and give: token ids in, token ids out.

An engine knows no text and no template. It never takes a sampling value from a model's own
generation config, so every field of `Sampling` is set by the caller.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are drawn. No field has a default on purpose.

    Attributes:
        max_new_tokens: tokens an answer may have, its end token included.
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_p: share of probability kept, 1 for all; applied after `top_k`.
        top_k: number of tokens kept, 0 for all.
        n: answers a prompt.
        seed: with row, answer and position it decides the noise.
    """

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    n: int
    seed: int

    def __post_init__(self) -> None:
        assert self.max_new_tokens >= 1, self
        assert self.temperature >= 0, self
        assert 0 < self.top_p <= 1, self
        assert self.top_k >= 0, self
        assert self.n >= 1, self


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt. `row` is its place in the input, whatever batch it is put in."""

    row: int
    prompt_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer.

    Attributes:
        ids: token ids; the last one is the end token if `finish` is `stop`.
        logprobs: of each id under the distribution it was drawn from (temperature, top-k and
            top-p applied; for temperature 0 the model's own distribution).
        finish: `stop` at an end token, `length` at max_new_tokens or the model's context.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish


class RolloutEngine(Protocol):
    """Draws answers. Implemented on transformers (`hf`) and on vLLM."""

    def generate(
        self, requests: Sequence[Request], sampling: Sampling
    ) -> Iterator[list[Completion]]:
        """The `sampling.n` answers of each request, in the order of the requests."""
        ...

    def stream(self, request: Request, sampling: Sampling) -> Iterator[int]:
        """The ids of one answer, one by one as they are drawn."""
        ...


def noise_seed(*coordinates: int) -> int:
    """A 63-bit seed that is a function of the coordinates alone: (seed, row, answer, …)."""
    text = "/".join(map(str, coordinates))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
