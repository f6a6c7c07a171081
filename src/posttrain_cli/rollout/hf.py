"""The Hugging Face engine: `generate` of transformers, for CPUs, small jobs and exactness.

Prompts are padded on the left and positions counted from the mask, so an answer is the same
alone and in a batch (float32). Nothing of the model's own generation config gets in.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from posttrain_cli.errors import RunError
from posttrain_cli.rollout.protocol import Completion, Request, Sampling
from posttrain_cli.rollout.sampling import gumbel_noise, token_logprobs

_END = object()


@dataclass(frozen=True, slots=True)
class HFEngine:
    """Generates with a transformers model that is in memory.

    Attributes:
        model: a causal language model (or PEFT model); put in eval mode while it generates.
        stop_ids: ids that end an answer.
        pad_id: fills rows on the left; masked, so any id will do.
        batch_size: sequences generated together.
    """

    model: Any
    stop_ids: frozenset[int]
    pad_id: int
    batch_size: int

    def generate(
        self, requests: Sequence[Request], sampling: Sampling
    ) -> Iterator[list[Completion]]:
        """The `sampling.n` answers of each request, in the order of the requests."""
        wanted = [(request, k) for request in requests for k in range(sampling.n)]
        answers: list[Completion] = []
        for start in range(0, len(wanted), self.batch_size):
            answers += self._batch(wanted[start : start + self.batch_size], sampling)
            while len(answers) >= sampling.n:
                yield answers[: sampling.n]
                del answers[: sampling.n]

    def stream(self, request: Request, sampling: Sampling) -> Iterator[int]:
        """The ids of one answer as they are drawn; closing the iterator stops the drawing."""
        sampling = replace(sampling, n=1)
        tap = _Tap()

        def work() -> None:
            try:
                self._batch([(request, 0)], sampling, tap)
                tap.ids.put(_END)
            except BaseException as error:  # handed to the reader below
                tap.ids.put(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            while (item := tap.ids.get()) is not _END:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            tap.closed = True
            thread.join()

    def _batch(
        self, wanted: list[tuple[Request, int]], sampling: Sampling, tap: _Tap | None = None
    ) -> list[Completion]:
        """Generate once for these (request, answer) pairs."""
        device = next(self.model.parameters()).device
        ids, mask = pad_left([request.prompt_ids for request, _ in wanted], self.pad_id)
        budgets = [self._budget(request, sampling) for request, _ in wanted]
        draw = _Draw([(request.row, k) for request, k in wanted], ids.shape[1], sampling)
        try:
            with _bare(self.model):
                found = self.model.generate(
                    input_ids=ids.to(device),
                    attention_mask=mask.to(device),
                    generation_config=self._config(max(budgets)),
                    logits_processor=[draw],
                    stopping_criteria=[tap.stop] if tap else None,
                    streamer=tap,
                )
        except torch.OutOfMemoryError as error:
            raise RunError(
                f"out of memory with {len(wanted)} sequences of up to "
                f"{ids.shape[1] + max(budgets):,} tokens",
                hint="lower --batch-size or --max-new-tokens",
            ) from error
        drawn = found[:, ids.shape[1] :].tolist()
        logprobs = torch.stack(draw.logprobs, dim=1).tolist()
        return [
            cut_answer(*row, self.stop_ids) for row in zip(drawn, logprobs, budgets, strict=True)
        ]

    def _budget(self, request: Request, sampling: Sampling) -> int:
        """Tokens that the answer may have: as asked for, and within the model's context."""
        context = getattr(self.model.config, "max_position_embeddings", None) or 1 << 30
        room = context - len(request.prompt_ids)
        assert room >= 1, f"row {request.row}: {len(request.prompt_ids)} of {context} tokens"
        return min(sampling.max_new_tokens, room)

    def _config(self, max_new_tokens: int) -> Any:
        from transformers import GenerationConfig

        # do_sample is off although tokens may be sampled: the noise is added by _Draw.
        return GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            eos_token_id=sorted(self.stop_ids) or None,
            pad_token_id=self.pad_id,
        )


def pad_left(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """(ids, mask), both (B, longest prompt), int64, with the padding on the left."""
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), pad_id, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt, dtype=torch.int64)
        mask[row, longest - len(prompt) :] = 1
    return ids, mask


def cut_answer(
    ids: list[int], logprobs: list[float], budget: int, stop_ids: frozenset[int]
) -> Completion:
    """The answer up to its first end token (kept) or to its budget."""
    stop = next((place for place, token in enumerate(ids[:budget]) if token in stop_ids), None)
    length = budget if stop is None else stop + 1
    finish = "length" if stop is None else "stop"
    return Completion(tuple(ids[:length]), tuple(logprobs[:length]), finish)  # type: ignore[arg-type]


@dataclass(slots=True)
class _Draw:
    """Logits processor: decides the next token of each row, and keeps its log-probability."""

    rows: list[tuple[int, int]]
    prompt_length: int
    sampling: Sampling
    logprobs: list[Tensor] = field(default_factory=list)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logprobs = token_logprobs(scores, self.sampling)
        chosen = logprobs
        if self.sampling.temperature > 0:
            position = input_ids.shape[1] - self.prompt_length
            noise = gumbel_noise(
                self.rows, position, self.sampling.seed, scores.shape[1], scores.device
            )
            chosen = logprobs + noise
        best = chosen.argmax(dim=-1, keepdim=True)
        self.logprobs.append(logprobs.gather(1, best).squeeze(1))
        return chosen


@dataclass(slots=True)
class _Tap:
    """Streamer: hands drawn ids to the reader, and stops generation when the reader is gone."""

    ids: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    prompt_seen: bool = False
    closed: bool = False

    def put(self, value: Tensor) -> None:
        if self.prompt_seen:
            for token in value.flatten().tolist():
                self.ids.put(token)
        self.prompt_seen = True  # the first call brings the prompt

    def end(self) -> None:
        """The last token was put."""

    def stop(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), self.closed, device=input_ids.device)


@contextmanager
def _bare(model: Any) -> Iterator[None]:
    """Eval mode and an empty generation config for the time of one call."""
    from transformers import GenerationConfig

    training, owner = model.training, _config_owner(model)
    own = owner.generation_config
    model.eval()
    owner.generation_config = GenerationConfig()
    try:
        yield
    finally:
        owner.generation_config = own
        model.train(training)


def _config_owner(model: Any) -> Any:
    """The module whose generation config `generate` reads: the one inside a PEFT wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
