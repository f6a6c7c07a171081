"""Making rows fit a token limit, and writing them as rendered text or as token ids.

All lengths come from the one render function, so what fits here fits in training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from posttrain_cli.data.records import Keys, Kind, Message, conversation, pair, prompt_messages
from posttrain_cli.data.render import (
    Overlong,
    Policy,
    Rendered,
    TrainOn,
    render_conversations,
    render_prompt,
)
from posttrain_cli.data.tokenizer import TemplateRefusal, load_tokenizer
from posttrain_cli.diagnostics import CODES

Record = dict[str, Any]
CUT = "answer cut at the token limit"


@dataclass(frozen=True, slots=True)
class FitOptions:
    """How token lengths are judged and what is written.

    Attributes:
        tokenizer: folder of the tokenizer.
        template: tokenizer, chatml, plain or a Jinja file.
        max_tokens: tokens a row may have; for a pair, each side with its prompt.
        overlong: what happens to longer rows.
        add_eos: as in `render.Policy`.
        train_on: as in `render.Policy`.
        output: contract records, rendered text, or token ids.
    """

    tokenizer: Path
    template: str = "tokenizer"
    max_tokens: int = 2048
    overlong: Overlong = "keep"
    add_eos: bool | None = None
    train_on: TrainOn = "assistant"
    output: Literal["records", "text", "ids"] = "records"


@dataclass(frozen=True, slots=True)
class Fitted:
    """What became of one row.

    Attributes:
        record: what to write, or None when the row is dropped.
        length: tokens before any cut.
        trained: trained tokens that are left.
        code: why it is dropped, or is warned about.
        message: more about `code`.
        cut: whether an answer was cut.
    """

    record: Record | None
    length: int = 0
    trained: int = 0
    code: str = ""
    message: str = ""
    cut: bool = False


class Fitter:
    """Fits rows of one kind; holds the tokenizer.

    Args:
        options: what to do.
        kind: the kind of the rows.
        keys: names of their fields.
    """

    def __init__(self, options: FitOptions, kind: Kind, keys: Keys) -> None:
        self.options, self.kind, self.keys = options, kind, keys
        self.tokenizer = load_tokenizer(options.tokenizer, options.template)
        cut_ids = options.output == "ids" and options.overlong == "truncate"
        self.policy = Policy(
            max_length=options.max_tokens,
            overlong="truncate" if cut_ids else "keep",
            train_on=options.train_on,
            add_eos=options.add_eos,
        )

    def fit(self, records: list[Record]) -> list[Fitted]:
        """What becomes of each record (which has passed the contract check)."""
        if self.kind == "prompt":
            return [self._fit_prompt(record) for record in records]
        sides = [self._conversations(record) for record in records]
        flat = [messages for side in sides for messages in side]
        rendered = iter(render_conversations(flat, self.tokenizer, self.policy))
        return [
            self._fit_answers(record, side, [next(rendered) for _ in side])
            for record, side in zip(records, sides, strict=True)
        ]

    def _conversations(self, record: Record) -> list[list[Message]]:
        """One conversation, or one for each side of a pair."""
        if self.kind == "sft":
            return [conversation(record, self.keys)]
        sides = pair(record, self.keys)
        return [[*sides.prompt, *sides.chosen], [*sides.prompt, *sides.rejected]]

    def _fit_prompt(self, record: Record) -> Fitted:
        turns = prompt_messages(record, self.keys)
        try:
            length = len(render_prompt(turns, self.tokenizer))
        except TemplateRefusal as refusal:
            return Fitted(None, 0, 0, "PTC205", refusal.message)
        code, message = self._too_long(length)
        if code and self.options.overlong != "keep":
            return Fitted(None, length, 0, code, message)
        if self.options.output == "text":
            text = self.tokenizer.render(turns, generation_prompt=True)
            record = {**_without(record, self.keys.messages), "prompt": text}
        return Fitted(record, length, 0, code, message)

    def _fit_answers(
        self, record: Record, sides: list[list[Message]], rendered: list[Rendered]
    ) -> Fitted:
        length = max(side.length for side in rendered)
        trained = sum(side.trained for side in rendered)
        for code, message in (problem for side in rendered for problem in side.problems):
            if CODES[code].severity == "error":
                return Fitted(None, length, 0, code, message)
        code, message = self._too_long(length)
        if code and self.options.overlong in ("drop", "error"):
            return Fitted(None, length, 0, code, message)
        cut = bool(code) and self.options.overlong == "truncate"
        if self.options.output == "ids":
            return Fitted(_samples(rendered[0]), length, trained, code, message, cut)
        if cut:
            shorter = self._cut(record, sides)
            if shorter is None:
                return Fitted(None, length, 0, "PTC402", "the prompt alone fills the limit")
            record, sides = shorter
        if self.options.output == "text":
            record = self._as_text(record, sides)
        return Fitted(record, length, trained, code, message, cut)

    def _too_long(self, length: int) -> tuple[str, str]:
        limit = self.options.max_tokens
        if length <= limit:
            return "", ""
        return "PTC401", f"{length:,} tokens, more than the limit of {limit:,}"

    def _cut(
        self, record: Record, sides: list[list[Message]]
    ) -> tuple[Record, list[list[Message]]] | None:
        """The record with its last answers cut so that each side fits; None if none is left."""
        shorter = [self._cut_side(messages) for messages in sides]
        if not all(shorter):
            return None
        answers = [messages[-1]["content"] for messages in shorter]
        if self.kind == "preference":
            names = (self.keys.chosen, self.keys.rejected)
            texts = dict(zip(names, answers, strict=True))
            parts: Record = {name: _with_text(record[name], text) for name, text in texts.items()}
        elif (name := self.keys.found("messages", record)) in record:
            parts = {name: shorter[0]}
        else:
            parts = {self.keys.found("response", record): answers[0]}
        metadata = {**(record.get("metadata") or {}), "truncated": True}
        return {**record, **parts, "metadata": metadata}, shorter

    def _cut_side(self, messages: list[Message]) -> list[Message]:
        """The longest beginning that ends in a piece of an answer and fits; [] if there is none."""
        answers = [i for i, turn in enumerate(messages) if turn["role"] == "assistant"]
        for last in reversed(answers):
            text = messages[last]["content"]
            count = _largest(partial(self._fits, messages[: last + 1]), len(text))
            if text[:count].strip():
                return _shortened(messages[: last + 1], count)
        return []

    def _fits(self, messages: list[Message], count: int) -> bool:
        """Whether the messages fit when the last one has its first `count` characters only."""
        policy = replace(self.policy, overlong="keep")
        shorter = _shortened(messages, count)
        return not render_conversations([shorter], self.tokenizer, policy)[0].too_long

    def _as_text(self, record: Record, sides: list[list[Message]]) -> Record:
        """Rendered text: the prompt is all before the last answer."""
        prompt = self.tokenizer.render(sides[0][:-1], generation_prompt=True)
        answers = [self._answer_text(prompt, messages) for messages in sides]
        names = ("response",) if self.kind == "sft" else ("chosen", "rejected")
        rest = {key: record[key] for key in record if key not in _read_fields(self.keys)}
        return {"prompt": prompt, **dict(zip(names, answers, strict=True)), **rest}

    def _answer_text(self, prompt: str, messages: list[Message]) -> str:
        """What the template prints behind the prompt; with `add_eos` it ends in an end token."""
        whole = self.tokenizer.render(messages, generation_prompt=False)
        answer = whole.removeprefix(prompt)
        end = self.tokenizer.tokens.get("eos_token", "")
        ids = self.tokenizer.encode([answer])[0]
        if self.options.add_eos and end and not self.tokenizer.end_ids & set(ids):
            return answer + end
        return answer


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, by halving; 0 if none does."""
    if fits(most):
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _shortened(messages: list[Message], count: int) -> list[Message]:
    last = messages[-1]
    return [*messages[:-1], {**last, "content": last["content"][:count]}]


def _samples(rendered: Rendered) -> Record:
    mask = [int(trained) for trained in rendered.mask]
    return {"input_ids": rendered.ids, "loss_mask": mask, "lengths": [len(rendered.ids)]}


def _with_text(side: Any, text: str) -> Any:
    """A side of a pair with another text in its last turn."""
    if isinstance(side, str):
        return text
    turns = side if isinstance(side, list) else [side]
    return [*turns[:-1], {"role": "assistant", "content": text}]


def _read_fields(keys: Keys) -> set[str]:
    names = {keys.prompt, keys.response, keys.chosen, keys.rejected, keys.messages}
    return names | {"question", "answer", "conversations"}


def _without(record: Record, name: str) -> Record:
    return {key: value for key, value in record.items() if key != name}
