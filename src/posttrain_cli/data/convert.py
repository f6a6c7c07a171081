"""Presets: how the rows of well-known data sets become rows of the contract.

| preset | reads | gives |
|---|---|---|
| gsm8k | question, answer | sft, prompt (with the number after `####` as the answer) |
| alpaca | instruction, input, output; system, history | sft, prompt |
| sharegpt | conversations; chosen, rejected | sft, preference, prompt |
| messages | messages; prompt, chosen, rejected | sft, preference, prompt |
| hh-rlhf | chosen, rejected (whole dialogues) | preference, sft, prompt |
| oasst | prompt (a tree of messages) | sft (best path), preference (ranked siblings), prompt |
| article | instruction, best_response, worst_response | preference, sft, prompt |

A preset reads structure; the contract check behind it judges the texts. Preference rows and
prompts hold flat text: several turns in front of an answer are written as one transcript, or
kept as turns with `--chat`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from posttrain_cli.data import oasst
from posttrain_cli.data.lines import encode
from posttrain_cli.data.records import (
    Keys,
    Kind,
    Message,
    Pair,
    Refusal,
    conversation,
    detect_kind,
    pair,
    place,
    prompt_messages,
    read_turns,
    text_problem,
)
from posttrain_cli.data.scan import Problem
from posttrain_cli.data.transcript import read_transcript, transcript

Preset = Literal["gsm8k", "alpaca", "sharegpt", "messages", "hh-rlhf", "oasst", "article"]
Record = dict[str, Any]

KINDS: dict[Preset, tuple[Kind, ...]] = {  # the first one is what `--kind auto` means
    "gsm8k": ("sft", "prompt"),
    "alpaca": ("sft", "prompt"),
    "sharegpt": ("sft", "preference", "prompt"),
    "messages": ("sft", "preference", "prompt"),
    "hh-rlhf": ("preference", "sft", "prompt"),
    "oasst": ("sft", "preference", "prompt"),
    "article": ("preference", "sft", "prompt"),
}
FIELDS: dict[Preset, tuple[str, ...]] = {  # what a preset reads, so that it is not carried too
    "gsm8k": ("question", "answer"),
    "alpaca": ("instruction", "input", "output", "system", "history"),
    "sharegpt": ("conversations", "chosen", "rejected"),
    "messages": ("messages", "prompt", "chosen", "rejected"),
    "hh-rlhf": ("chosen", "rejected"),
    "oasst": ("prompt", "message_tree_id"),
    "article": ("instruction", "best_response", "worst_response"),
}

AS_TRANSCRIPT = "turns written as one text"
NO_RANKS = "answers without ranks"
NO_ANSWER = "question without an answer"
NO_PAIR = "no two answers to compare"
_PAIR = ("prompt", "chosen", "rejected")
_FINAL = re.compile(r"####\s*([^\n]*\S)\s*\Z")


@dataclass(frozen=True, slots=True)
class Made:
    """One row for the contract check.

    Attributes:
        record: the contract's fields, and `metadata` if the preset knows something.
        group: what must stay on one side of a split: the first thing the user says; None when
            `opening` finds it in the record.
        changes: names of what was done beyond renaming fields.
    """

    record: Record
    group: str | None = None
    changes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Refused:
    """A row, or a part of one, that cannot be used: `reason` is a code or a phrase."""

    reason: str
    message: str
    field: str | None = None
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """What rows are made into: their kind, and whether lists of turns stay lists."""

    kind: Kind
    chat: bool = False


Output = list[Made | Refused]


def default_kind(preset: Preset | None, record: Record) -> Kind:
    """What `--kind auto` means for a data set that has this record."""
    if preset is None:
        return detect_kind(record, Keys())
    if preset in ("sharegpt", "messages") and "chosen" in record and "rejected" in record:
        return "preference"
    return KINDS[preset][0]


def convert(record: Record, preset: Preset | None, target: Target) -> Output:
    """The rows that `preset` makes of one record; a tree gives several, most presets one."""
    try:
        match preset:
            case None:
                return [_as_it_is(record, target)]
            case "gsm8k":
                return [_gsm8k(record, target)]
            case "alpaca":
                return [_alpaca(record, target)]
            case "sharegpt":
                return [_chat(record, target, "conversations")]
            case "messages":
                return [_chat(record, target, "messages")]
            case "hh-rlhf":
                return [_hh_rlhf(record, target)]
            case "oasst":
                return _oasst(record, target)
            case "article":
                return [_article(record, target)]
    except Refusal as refusal:
        return [refused(refusal.problem)]


def refused(problem: Problem) -> Refused:
    """`problem` as the reason to leave a row out."""
    return Refused(problem.code, problem.message, place(problem.path) or None, problem.hint)


def _as_it_is(record: Record, target: Target) -> Made:
    """The contract's own fields, under the names that the record has for them."""
    keys = Keys(chat=target.chat)
    names: tuple[str, ...]
    match target.kind:
        case "preference":
            names = _PAIR
        case "sft" if record.get(keys.found("messages", record)) is not None:
            names = (keys.found("messages", record),)
        case "sft":
            names = keys.found("prompt", record), keys.found("response", record)
        case "prompt":
            prompt = keys.found("prompt", record)
            names = (prompt if prompt in record else keys.found("messages", record),)
    return Made({name: record[name] for name in names if name in record})


def opening(record: Record, kind: Kind, keys: Keys) -> str:
    """The first thing the user says in a record that fulfils the contract."""
    if kind == "sft":
        return _first_said(conversation(record, keys))
    if kind == "prompt":
        return _first_said(prompt_messages(record, keys))
    return _first_said(pair(record, keys).prompt)


def _first_said(turns: list[Message]) -> str:
    said = [turn["content"] for turn in turns if turn["role"] == "user"]
    return str(said[0]) if said else ""


def _gsm8k(record: Record, target: Target) -> Made:
    question, answer = _texts(record, "question", "answer")
    final = _FINAL.search(answer)
    if final is None:
        message = "field 'answer' does not end in a line `#### N`"
        raise Refusal(Problem("PTC201", message, ("answer",)))
    number = final.group(1).replace(",", "")
    if target.kind == "prompt":
        fields = {"prompt": question, "answer": number, "metadata": {"source": "gsm8k"}}
    else:
        metadata = {"source": "gsm8k", "answer": number}
        fields = {"prompt": question, "response": answer, "metadata": metadata}
    return Made(fields, question)


def _alpaca(record: Record, target: Target) -> Made:
    (instruction,) = _texts(record, "instruction")
    if isinstance(record.get("input"), str | None):
        more = record.get("input") or ""
    else:
        (more,) = _texts(record, "input")
    question = f"{instruction}\n\n{more}" if more.strip() else instruction
    context = _earlier_turns(record)
    turns = [*context, {"role": "user", "content": question}]
    if target.kind == "prompt":
        made = _prompt_row(turns, target)
        made.record.update({"answer": record["output"]} if record.get("output") else {})
        return made
    (answer,) = _texts(record, "output")
    if not context:
        return Made({"prompt": question, "response": answer}, question)
    messages = [*turns, {"role": "assistant", "content": answer}]
    return Made({"messages": messages}, _first_said(messages))


def _earlier_turns(record: Record) -> list[Message]:
    """The turns of `system` and `history` (pairs of texts), which some Alpaca files have."""
    turns: list[Message] = []
    if record.get("system"):
        (system,) = _texts(record, "system")
        turns.append({"role": "system", "content": system})
    history = record.get("history") or []
    for exchange in history if isinstance(history, list) else [history]:
        if not (isinstance(exchange, list) and len(exchange) == 2):
            message = "field 'history' is expected to hold pairs of a question and an answer"
            raise Refusal(Problem("PTC205", message, ("history",)))
        roles = ("user", "assistant")
        turns += [
            {"role": role, "content": text} for role, text in zip(roles, exchange, strict=True)
        ]
    return read_turns(turns, ("history",)) if turns else []


def _article(record: Record, target: Target) -> Made:
    prompt, best = _texts(record, "instruction", "best_response")
    if target.kind == "prompt":
        return Made({"prompt": prompt, "answer": best}, prompt)
    if target.kind == "sft":
        return Made({"prompt": prompt, "response": best}, prompt)
    (worst,) = _texts(record, "worst_response")
    return Made({"prompt": prompt, "chosen": best, "rejected": worst}, prompt)


def _chat(record: Record, target: Target, field: str) -> Made:
    """Lists of turns under `field`, or beside `chosen` and `rejected` under `prompt`."""
    if target.kind == "preference":
        sides: Record = {key: record[key] for key in ("chosen", "rejected") if key in record}
        context = record.get(field, record.get("prompt"))
        fields = {"prompt": context, **sides} if context else sides
        return _pair_row(pair(fields, Keys(chat=True)), target)
    if field not in record:
        raise Refusal(Problem("PTC201", f"field {field!r} is missing", (field,)))
    if target.kind == "prompt":
        turns = prompt_messages({"messages": record[field]}, Keys())
        return _prompt_row(turns, target)
    turns = read_turns(record[field], (field,))
    if turns[-1]["role"] == "user" and record.get("chosen"):
        answer = record["chosen"]
        answers = answer if isinstance(answer, list) else [answer]
        turns += read_turns(answers, ("chosen",))
    return Made({"messages": turns}, _first_said(turns))


def _hh_rlhf(record: Record, target: Target) -> Made:
    """Dialogues that are the same up to the last answer: all before it is the prompt."""
    turns = _dialogue(record, "chosen")
    match target.kind:
        case "sft":
            return Made({"messages": turns}, _first_said(turns))
        case "prompt":
            return _prompt_row(turns[:-1], target)
    other = _dialogue(record, "rejected")
    if turns[:-1] != other[:-1]:
        message = "'chosen' and 'rejected' answer different prompts"
        raise Refusal(Problem("PTC309", message, ("chosen",)))
    return _pair_row(Pair(turns[:-1], turns[-1:], other[-1:]), target)


def _dialogue(record: Record, name: str) -> list[Message]:
    """The turns of an HH-RLHF text, which ends with an answer to something."""
    (text,) = _texts(record, name)
    turns = read_transcript(text)
    if len(turns) < 2 or turns[-1]["role"] != "assistant":
        message = f"field {name!r} is no dialogue of `Human:` and `Assistant:` turns with an answer"
        raise Refusal(Problem("PTC205", message, (name,)))
    return read_turns(turns, (name,))


def _oasst(record: Record, target: Target) -> Output:
    root = record.get("prompt")
    if not oasst.is_tree(root):
        message = "field 'prompt' is no tree of messages with role, text and replies"
        raise Refusal(Problem("PTC205", message, ("prompt",)))
    metadata: Record = {"source": "oasst"}
    if "message_tree_id" in record:
        metadata["message_tree_id"] = record["message_tree_id"]
    opening = root["text"]
    if target.kind == "prompt":
        return [Made({"prompt": opening, "metadata": metadata}, opening)]
    if target.kind == "sft":
        turns = oasst.best_path(root)
        if not turns:
            return [Refused(NO_ANSWER, "nobody answered the first message", "prompt")]
        return [Made({"messages": turns, "metadata": metadata}, opening)]
    return _ranked(root, metadata, target) or [
        Refused(NO_PAIR, "no message has two answers", "prompt")
    ]


def _ranked(root: Record, metadata: Record, target: Target) -> Output:
    made: Output = []
    for found in oasst.pairs(root):
        if isinstance(found, oasst.Unranked):
            where = f"turn {found.turn} has {found.answers} answers without a rank"
            made.append(Refused(NO_RANKS, where, "prompt"))
            continue
        chosen, rejected = (
            [{"role": "assistant", "content": text}] for text in (found.chosen, found.rejected)
        )
        row = _pair_row(Pair(found.turns, chosen, rejected), target)
        made.append(Made({**row.record, "metadata": metadata}, root["text"], row.changes))
    return made


def _pair_row(sides: Pair, target: Target) -> Made:
    if target.chat:
        fields: Record = {
            "prompt": sides.prompt,
            "chosen": sides.chosen,
            "rejected": sides.rejected,
        }
        return Made(fields, _first_said(sides.prompt))
    fields = {
        "prompt": transcript(_spoken(sides.prompt)),
        "chosen": _answer_text(sides.chosen),
        "rejected": _answer_text(sides.rejected),
    }
    plain = max(map(len, (sides.prompt, sides.chosen, sides.rejected))) == 1
    return Made(fields, _first_said(sides.prompt), _note(plain))


def _prompt_row(turns: list[Message], target: Target) -> Made:
    if target.chat:
        return Made({"prompt": turns}, _first_said(turns))
    return Made({"prompt": transcript(_spoken(turns))}, _first_said(turns), _note(len(turns) == 1))


def _note(plain: bool) -> frozenset[str]:
    return frozenset() if plain else frozenset({AS_TRANSCRIPT})


def _answer_text(turns: list[Message]) -> str:
    return "\n\n".join(str(turn["content"]) for turn in _spoken(turns))


def _spoken(turns: list[Message]) -> list[Message]:
    """Turns whose tool calls are part of their text, as JSON."""
    return [
        {"role": turn["role"], "content": _with_calls(turn)} if "tool_calls" in turn else turn
        for turn in turns
    ]


def _with_calls(turn: Message) -> str:
    calls = encode(turn["tool_calls"]).decode()
    return f"{turn['content']}\n{calls}" if turn["content"] else calls


def _texts(record: Record, *names: str) -> list[str]:
    """The named fields, which must be text with something in it."""
    for name in names:
        problem = text_problem(record, name, chat=True)
        if problem is not None:
            raise Refusal(problem)
    return [record[name] for name in names]
