"""A model to talk to: its tokenizer and template first, its weights when they are needed.

What a prompt becomes is decided by the same function as in training; the template and the end
ids are those of the artefact.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from posttrain_cli.data.records import Message, Refusal
from posttrain_cli.data.render import render_prompt
from posttrain_cli.data.scan import Problem
from posttrain_cli.data.tokenizer import TemplateRefusal, Tokenizer, load_tokenizer
from posttrain_cli.errors import UsageError
from posttrain_cli.files import sha256_file
from posttrain_cli.rollout.protocol import Completion, Request, RolloutEngine, Sampling
from posttrain_cli.runs.resolve import ModelSource

_BATCH = {"cpu": 16, "cuda": 64}


@dataclass(frozen=True)
class Session:
    """One model with what surrounds it. The weights are loaded on first use.

    Attributes:
        source: where the model lies.
        tokenizer: its tokenizer and template.
        context: tokens that prompt and answer may have together, or None if unknown.
        raw: prompts go to the model as they are, without the template.
        device: `cpu` or `cuda`.
        dtype: compute type, see `config.ModelConfig.dtype`.
        batch_size: sequences generated together.
    """

    source: ModelSource
    tokenizer: Tokenizer
    context: int | None
    raw: bool
    device: str
    dtype: str
    batch_size: int

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the prompt.

        Raises:
            Refusal: no room for an answer, nothing to answer, a conversation with `raw`, or
                turns that the template refuses.
        """
        if self.raw:
            if len(messages) != 1:
                raise _refusal("PTC203", "a conversation cannot be sent raw", "leave --raw out")
            ids = self.tokenizer.backend.encode(messages[0]["content"]).ids
        else:
            try:
                ids = render_prompt(list(messages), self.tokenizer)
            except TemplateRefusal as error:
                raise _refusal("PTC205", error.message, error.hint) from error
        if self.context is not None and len(ids) >= self.context:
            raise _refusal(
                "PTC401",
                f"the prompt has {len(ids):,} tokens, the model's context is {self.context:,}",
                "shorten the prompt: an answer needs room, too",
            )
        if not ids:
            raise _refusal("PTC204", "the prompt has no tokens", "write something into it")
        return ids

    def answer(
        self, prompts: Sequence[tuple[int, list[int]]], sampling: Sampling
    ) -> Iterator[list[Completion]]:
        """The answers to (row, ids) prompts, in order."""
        requests = [Request(row, ids) for row, ids in prompts]
        return self.engine.generate(requests, sampling)

    def text(self, completion: Completion) -> str:
        """The answer's text, without its end token."""
        return self.tokenizer.decode(list(completion.ids))

    def stream(self, row: int, ids: list[int], sampling: Sampling) -> Generator[str, None, None]:
        """The text of one answer in pieces; a character that is not whole yet waits."""
        from tokenizers.decoders import DecodeStream

        decoder = DecodeStream(skip_special_tokens=True)
        for token in self.engine.stream(Request(row, ids), sampling):
            piece = decoder.step(self.tokenizer.backend, token)
            if piece:
                yield piece

    @cached_property
    def engine(self) -> RolloutEngine:
        """The engine with the model in it."""
        import torch

        from posttrain_cli.engine.model import compute_dtype
        from posttrain_cli.rollout.hf import HFEngine
        from posttrain_cli.rollout.load import load_model

        device = torch.device(self.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise UsageError(
                "there is a GPU, but this torch cannot use it",
                hint="`ptc doctor` says why; `--gpus 0` generates on the CPU",
            )
        model = load_model(self.source, device, compute_dtype(self.dtype, device))
        return HFEngine(model, self.tokenizer.end_ids, self.tokenizer.pad_id, self.batch_size)

    @property
    def adapter_is_idle(self) -> bool:
        """Whether an adapter was loaded that changes nothing."""
        from posttrain_cli.rollout.hf import HFEngine
        from posttrain_cli.rollout.load import changes_nothing

        return isinstance(self.engine, HFEngine) and changes_nothing(self.engine.model)

    def changes(self) -> Iterator[str]:
        """What is no longer as the run recorded it: tokenizer and template, base model."""
        if self.source.run is None:
            return
        record = json.loads((self.source.run / "run.json").read_bytes())
        key = "tokenizer" if self.source.kind == "checkpoint" else "result_tokenizer"
        known = (record.get(key) or {}).get("sha256")
        if known not in (None, self.tokenizer.sha256):
            yield "tokenizer or chat template"
        base = self.source.base
        files = (record.get("model") or {}).get("files") or {}
        if base is None or "config.json" not in files:  # a whole model, or started on an adapter
            return
        weights = {n: entry for n, entry in files.items() if n.endswith(".safetensors")}
        weights["config.json"] = files["config.json"]
        if any(_differs(base / name, entry) for name, entry in weights.items()):
            yield f"base model `{base}`"

    def identity(self) -> dict[str, Any]:
        """What decides the answers: files of the weights, tokenizer, template, arithmetic."""
        folders = [self.source.weights, *([self.source.base] if self.source.base else [])]
        files = [path for folder in folders for path in sorted(folder.iterdir()) if path.is_file()]
        return {
            "model": [[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in files],
            "tokenizer": self.tokenizer.sha256,
            "raw": self.raw,
            "device": self.device,
            "dtype": self.dtype,
            "batch_size": self.batch_size,
        }


def open_session(
    source: ModelSource,
    *,
    raw: bool,
    device: str,
    dtype: str = "auto",
    batch_size: int | None = None,
) -> Session:
    """Read tokenizer and config of `source`; the weights wait."""
    tokenizer = load_tokenizer(source.tokenizer, source.template)
    return Session(
        source=source,
        tokenizer=tokenizer,
        context=_context(source),
        raw=raw,
        device=device,
        dtype=dtype,
        batch_size=batch_size or _BATCH[device],
    )


def choose_device(gpus: str) -> str:
    """`cpu` or `cuda` for `--gpus N|auto|0`.

    Raises:
        UsageError: no such number, or not as many GPUs here.
    """
    if gpus != "auto" and not gpus.isdigit():
        raise UsageError(f"`--gpus {gpus}` is neither a number nor `auto`")
    if gpus == "0":
        return "cpu"
    from posttrain_cli.devices import visible_gpus

    found = len(visible_gpus())
    if gpus == "auto":
        return "cuda" if found else "cpu"
    if int(gpus) > found:
        raise UsageError(
            f"{gpus} GPUs asked for, {found} found here",
            hint="use `--gpus auto` for what there is or `--gpus 0` for the CPU; `ptc doctor` "
            "shows the machine",
        )
    if int(gpus) > 1:
        raise UsageError(
            f"the engine `hf` generates on one GPU, not on {gpus}", hint="use `--gpus 1`"
        )
    return "cuda"


def _refusal(code: str, message: str, hint: str) -> Refusal:
    return Refusal(Problem(code, message, hint=hint))


def _context(source: ModelSource) -> int | None:
    path = (source.base or source.weights) / "config.json"
    value = json.loads(path.read_text(encoding="utf-8")).get("max_position_embeddings")
    return value if isinstance(value, int) else None


def _differs(path: Path, recorded: dict[str, Any]) -> bool:
    """Whether a file of the base is another one; weights are compared by size alone."""
    if not path.is_file() or path.stat().st_size != recorded["size"]:
        return True
    return path.suffix == ".json" and sha256_file(path) != recorded["sha256"]
