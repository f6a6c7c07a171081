"""The token checks PTC401 to PTC405, by the one render function that training uses.

A row whose bytes cannot make more tokens than the limit is passed without encoding it: a
byte-level vocabulary never has more tokens than bytes, and what the template adds is measured
once for each sequence of roles. Everything else is rendered and encoded exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from posttrain_cli.data.contract import Contract
from posttrain_cli.data.records import Message, Refusal, conversation, pair, prompt_messages
from posttrain_cli.data.render import Policy, Rendered, render_conversations, render_prompt
from posttrain_cli.data.scan import Problem
from posttrain_cli.data.tokenizer import TemplateRefusal, Tokenizer, load_tokenizer

_PROBE = "x"
_MARGIN = 8  # an end token that is added, a space that is prepended
_HINTS = {
    "PTC401": "training cuts it there; --max-tokens sets the limit",
    "PTC402": "raise --max-tokens, or leave the row out: `ptc preprocess --overlong drop`",
    "PTC403": "choose a template that ends the answer, or train with --add-eos",
    "PTC404": "let only the template print the begin token",
    "PTC405": "choose another template, or train with --train-on last",
    "PTC205": "choose another template with --template chatml or plain",
}


@dataclass(frozen=True)
class TokenChecks:
    """What rows are measured with.

    Attributes:
        folder: of the tokenizer.
        template: tokenizer, chatml, plain or a Jinja file.
        max_tokens: tokens a row may have; for a pair, each side with its prompt.
    """

    folder: str
    template: str = "tokenizer"
    max_tokens: int = 2048

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: what is derived from them is made again in each process."""
        return {part.name: getattr(self, part.name) for part in fields(self)}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Read once a process."""
        return load_tokenizer(self.folder, self.template)

    @cached_property
    def policy(self) -> Policy:
        """How training renders: cut at the limit."""
        return Policy(max_length=self.max_tokens, overlong="truncate")

    @cached_property
    def bytes_bound_tokens(self) -> bool:
        """Whether this vocabulary never makes more tokens than a text has bytes."""
        import json

        layout = json.loads(self.tokenizer.backend.to_str())
        normalizer = layout.get("normalizer") or {}
        parts = normalizer.get("normalizers", [normalizer] if normalizer else [])
        harmless = all(part.get("type") in ("NFC", "Prepend", "Replace") for part in parts)
        model = layout["model"]
        whole = model.get("byte_fallback") or "ByteLevel" in json.dumps(layout["pre_tokenizer"])
        return harmless and bool(whole) and model.get("type") == "BPE"

    @cached_property
    def _added(self) -> dict[tuple[str, ...], int]:
        return {}

    def bound(self, messages: list[Message]) -> int | None:
        """Most tokens that the conversation can have; None when it must be rendered to know."""
        roles = tuple(message["role"] for message in messages)
        if roles not in self._added:
            self._added[roles] = self._overhead(roles)
        added = self._added[roles]
        size = 0
        for message in messages:
            text = message["content"]
            if len(message) > 2 or not text or text[0].isspace() or text[-1].isspace():
                return None
            if "<think" in text or "</think" in text:
                return None
            if text.isascii():
                size += len(text)
            else:
                size += len(text.encode())
        return size + added if added >= 0 else None

    def _overhead(self, roles: tuple[str, ...]) -> int:
        """Most tokens that the template adds to turns of these roles; -1 when they must be seen."""
        if not self.bytes_bound_tokens:
            return -1
        messages: list[Message] = [{"role": role, "content": _PROBE} for role in roles]
        policy = replace(self.policy, max_length=None)
        if render_conversations([messages], self.tokenizer, policy)[0].problems:
            return -1
        text = self.tokenizer.render(messages, generation_prompt=False)
        controls = 0
        for control in sorted(self.tokenizer.control_texts, key=len, reverse=True):
            controls += text.count(control)
            text = text.replace(control, "")
        return controls + len(text.encode()) - len(roles) + _MARGIN


def check_tokens(
    records: Sequence[dict[str, Any]], contract: Contract, checks: TokenChecks
) -> Iterator[list[Problem]]:
    """For each good record what the token checks say, encoded in one batch."""
    jobs: list[tuple[int, str, list[Message]]] = []
    found: list[list[Problem]] = [[] for _ in records]
    for number, record in enumerate(records):
        for field, messages in _conversations(record, contract):
            bound = checks.bound(messages) if contract.kind != "prompt" else None
            if bound is None or bound > checks.max_tokens:
                jobs.append((number, field, messages))
    if contract.kind == "prompt":
        for number, field, messages in jobs:
            found[number] += _prompt_problems(messages, field, checks)
    else:
        turns = [messages for _, _, messages in jobs]
        rendered = render_conversations(turns, checks.tokenizer, checks.policy)
        for (number, field, _), sample in zip(jobs, rendered, strict=True):
            found[number] += _problems(sample, field)
    yield from found


def token_statistics(
    records: Sequence[dict[str, Any]], contract: Contract, checks: TokenChecks
) -> dict[str, Any]:
    """Lengths and the supervised share of a sample of records, each encoded."""
    turns = [messages for record in records for _, messages in _conversations(record, contract)]
    if contract.kind == "prompt":
        lengths = [len(render_prompt(messages, checks.tokenizer)) for messages in turns]
        trained = 0
    else:
        policy = replace(checks.policy, max_length=None)
        samples = render_conversations(turns, checks.tokenizer, policy)
        lengths = [sample.length for sample in samples]
        trained = sum(sample.trained for sample in samples)
    total = sum(lengths)
    return {
        "max_tokens": checks.max_tokens,
        "sampled_rows": len(records),
        "mean": round(total / len(lengths), 1) if lengths else 0,
        "median": int(np.median(lengths)) if lengths else 0,
        "max": max(lengths, default=0),
        "supervised_share": round(trained / total, 4) if total else 0.0,
    }


def _conversations(
    record: dict[str, Any], contract: Contract
) -> Iterator[tuple[str, list[Message]]]:
    """What is rendered of a record: (field concerned, turns); nothing if it cannot be read."""
    keys = contract.keys
    try:
        if "input_ids" in record:
            return
        if contract.kind == "prompt":
            yield keys.found("prompt", record), prompt_messages(record, keys)
        elif contract.kind == "sft":
            name = keys.found("messages", record)
            held = record.get(name) is not None
            yield (name if held else keys.found("response", record)), conversation(record, keys)
        else:
            turns = pair(record, keys)
            yield keys.chosen, [*turns.prompt, *turns.chosen]
            yield keys.rejected, [*turns.prompt, *turns.rejected]
    except Refusal:
        return


def _problems(sample: Rendered, field: str) -> list[Problem]:
    return [
        Problem(code, f"{message} (field {field!r})", (field,), hint=_HINTS.get(code, ""))
        for code, message in sample.problems
    ]


def _prompt_problems(messages: list[Message], field: str, checks: TokenChecks) -> list[Problem]:
    try:
        length = len(render_prompt(messages, checks.tokenizer))
    except TemplateRefusal as refusal:
        return [Problem("PTC205", refusal.message, (field,), hint=_HINTS["PTC205"])]
    if length <= checks.max_tokens:
        return []
    message = f"{length:,} tokens, more than the limit of {checks.max_tokens:,} (field {field!r})"
    return [Problem("PTC401", message, (field,), hint="--max-tokens sets the limit")]
