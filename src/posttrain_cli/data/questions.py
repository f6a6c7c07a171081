"""Rows to questions: what a model is asked, and what a right answer would be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from posttrain_cli.data.reader import finding, read_rows
from posttrain_cli.data.records import Keys, Message, Refusal, prompt_messages
from posttrain_cli.diagnostics import Finding
from posttrain_cli.errors import UsageError


@dataclass(frozen=True, slots=True)
class Question:
    """One record to be answered.

    Attributes:
        row: its place among the records of the input, from 0.
        record: the input fields; `response` is called `reference` here.
        messages: the turns to answer.
        reference: text of a right answer, or empty.
        line: where it starts in the file, from 1, or None.
    """

    row: int
    record: dict[str, Any]
    messages: list[Message]
    reference: str
    line: int | None


@dataclass(frozen=True, slots=True)
class Unusable:
    """One record that cannot be answered, and why."""

    findings: tuple[Finding, ...]


def read_questions(path: str, keys: Keys, system: str = "") -> Iterator[Question | Unusable]:
    """Every record of `path` in order; blank lines are skipped.

    Args:
        path: a file as `storage.expand` names it.
        keys: names of the fields.
        system: a system turn for records that bring none.
    """
    row = 0
    for read in read_rows(path):
        errors = tuple(found for found in read.findings if found.severity == "error")
        if errors:
            yield Unusable(errors)
        if read.record is None or errors:
            continue
        try:
            messages = prompt_messages(read.record, keys)
        except Refusal as refusal:
            yield Unusable((finding(path, refusal.problem, None, read.line, read.row),))
            continue
        reference = _reference(read.record, keys)
        record, turns = rename_response(read.record), with_system(messages, system)
        yield Question(row, record, turns, reference, read.line)
        row += 1


def with_system(messages: list[Message], system: str) -> list[Message]:
    """`messages` behind a system turn, unless they begin with one or there is none to add."""
    if not system or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def rename_response(record: dict[str, Any]) -> dict[str, Any]:
    """The record with its `response` as `reference`, so that the model's answer has its place."""
    if "response" not in record:
        return record
    if "reference" in record:
        raise UsageError(
            "the input has both `response` and `reference`: the answer of the data is kept as "
            "`reference`, since `response` is the model's",
            hint="rename one of them, for example with `ptc preprocess --map expected=reference`",
        )
    return {("reference" if key == "response" else key): value for key, value in record.items()}


def _reference(record: dict[str, Any], keys: Keys) -> str:
    """The answer that the data brings: its response or answer, or its last assistant turn."""
    for name in (keys.found("response", record), "answer", "reference"):
        value = record.get(name)
        if isinstance(value, str) and value:
            return value
    turns = record.get(keys.found("messages", record))
    last = turns[-1] if isinstance(turns, list) and turns else None
    if isinstance(last, dict) and last.get("role", last.get("from")) in ("assistant", "gpt"):
        text = last.get("content", last.get("value"))
        return text if isinstance(text, str) else ""
    return ""
