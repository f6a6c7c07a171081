"""The checks of one record against the contract of its kind: PTC201 to PTC206, PTC301 to PTC309.

Every reader and every fast path comes here for its verdicts, so this is the only definition.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from posttrain_cli.data.records import (
    OTHER_NAMES,
    WARNINGS,
    Keys,
    Kind,
    Message,
    near_name,
    pair_problems,
    text_problem,
    turns_problems,
)
from posttrain_cli.data.scan import Path, Problem

# What the first article's script removes: all below the blank but tab, line feed, carriage
# return; and DEL.
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
REPLACEMENT = "\ufffd"
# Control tokens of the common shape; a tokenizer adds its own.
KNOWN_TOKENS = re.compile(r"<\|[^|<>]{1,60}\|>|<｜[^｜<>]{1,60}｜>")


@dataclass(frozen=True, slots=True)
class Contract:
    """What records are held against.

    Attributes:
        kind: the kind of record.
        keys: names of the fields, and whether chat lists are allowed.
        tokens: control texts of the tokenizer in use, beside the well-known ones.
        texts: whether all texts are searched for control characters and the like; a caller
            that has seen no suspicious byte switches it off, and only `has_rare` texts are.
    """

    kind: Kind
    keys: Keys = dataclasses.field(default_factory=Keys)
    tokens: tuple[str, ...] = ()
    texts: bool = True


def check_record(record: dict[str, Any], contract: Contract) -> list[Problem]:
    """Everything that is wrong or unusual in one record, in the order of its fields."""
    if contract.kind == "preference":
        return _check_preference(record, contract)
    if contract.kind == "sft" and "input_ids" in record:
        return _check_ids(record)
    keys = contract.keys
    name = keys.found("messages", record)
    wants_turns = record.get(name) is not None or (keys.messages != "messages" and name in record)
    if contract.kind == "prompt" and keys.found("prompt", record) in record:
        wants_turns = False
    if wants_turns:
        return _check_turns(record, name, contract)
    fields = [keys.found("prompt", record)]
    if contract.kind == "sft":
        fields.append(keys.found("response", record))
    problems: list[Problem] = []
    for field in fields:
        problems += _check_field(record, field, contract)
    return _with_hints(problems, record, contract)


def is_only_space(one: str, other: str) -> bool:
    """Whether two texts differ in white space and in nothing else (PTC308)."""
    left, right = "".join(one[:48].split()), "".join(other[:48].split())
    shared = min(len(left), len(right))
    if left[:shared] != right[:shared]:
        return False
    return "".join(one.split()) == "".join(other.split())


def _check_ids(record: dict[str, Any]) -> list[Problem]:
    """A row that `ptc preprocess --tokenize` wrote: ids, a mask of the same length, lengths."""
    ids, mask = record["input_ids"], record.get("loss_mask")
    lengths = record.get("lengths")
    for field, value in (("input_ids", ids), ("loss_mask", mask), ("lengths", lengths)):
        if field == "loss_mask" and field not in record:
            return [Problem("PTC201", f"field {field!r} is missing", (field,), hint=_IDS)]
        if value is None and field == "lengths":
            continue
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            message = f"field {field!r} is no list of integers"
            return [Problem("PTC202", message, (field,), hint=_IDS)]
    for field, count in (("loss_mask", len(mask or ())), ("lengths", sum(lengths or [len(ids)]))):
        if count != len(ids):
            message = f"field {field!r} covers {count:,} ids, expected {len(ids):,}"
            return [Problem("PTC202", message, (field,), hint=_IDS)]
    return []


_IDS = "`ptc preprocess --tokenize` writes input_ids, loss_mask and lengths that fit together"


def has_rare(text: str) -> bool:
    """Whether a text holds a character that PTC306 or PTC307 may be about, beyond ASCII."""
    return not text.isascii() and (REPLACEMENT in text or "｜" in text)


def text_warnings(text: str, path: Path, contract: Contract) -> Iterator[Problem]:
    """PTC301, PTC306 and PTC307 of one text, each at its first place."""
    if not contract.texts and not has_rare(text):
        return
    name = _name(path)
    control = CONTROL.search(text)
    if control:
        count = len(CONTROL.findall(text))
        more = f" and {count - 1} more" if count > 1 else ""
        found = f"U+{ord(control.group()):04X}"
        yield Problem(
            "PTC301", f"{name} holds the control character {found}{more}", path,
            offset=control.start(), hint="`ptc preprocess --clean safe` removes them",
        )  # fmt: skip
    token, at = _first_token(text, contract.tokens)
    if token:
        yield Problem(
            "PTC306", f"{name} holds the control token `{token}`", path, offset=at,
            hint="ptc keeps it plain text; other tools may end the turn there",
        )  # fmt: skip
    at = text.find(REPLACEMENT)
    if at >= 0:
        count = text.count(REPLACEMENT)
        holds = "a replacement character" if count == 1 else f"{count} replacement characters"
        yield Problem(
            "PTC307", f"{name} holds {holds} (U+FFFD)", path, offset=at,
            hint="the text was decoded wrongly earlier; decode the source again",
        )  # fmt: skip


def _first_token(text: str, tokens: tuple[str, ...]) -> tuple[str, int]:
    known = KNOWN_TOKENS.search(text)
    best = (known.group(), known.start()) if known else ("", len(text))
    for token in tokens:
        at = text.find(token)
        if 0 <= at < best[1]:
            best = (token, at)
    return best


def _check_field(record: dict[str, Any], field: str, contract: Contract) -> list[Problem]:
    """One field that holds text, or with `chat` a list of turns."""
    value = record.get(field)
    if contract.keys.chat and isinstance(value, list):
        turns, problems = turns_problems(value, (field,))
        return [*problems, *_turn_warnings(turns, value, (field,), contract)]
    problem = text_problem(record, field, contract.keys.chat)
    if problem is not None and problem.code != "PTC204":
        return [problem]
    found = [] if problem is None else [problem]
    return [*found, *text_warnings(record[field], (field,), contract)]


def _check_turns(record: dict[str, Any], field: str, contract: Contract) -> list[Problem]:
    value = record[field]
    turns, problems = turns_problems(value, (field,))
    if any(problem.code == "PTC202" and problem.path == (field,) for problem in problems):
        return problems
    problems = [*problems, *_turn_warnings(turns, value, (field,), contract)]
    roles = [turn["role"] for turn in turns]
    broken = any(problem.code not in WARNINGS | {"PTC204"} for problem in _errors(problems))
    if broken:  # roles are only judged when every turn has one
        return problems
    needed = ("user", "assistant") if contract.kind == "sft" else ("user",)
    for role in needed:
        if role not in roles:
            problems.append(
                Problem("PTC205", f"field {field!r} has no {role} turn", (field,), hint=_NEEDED)
            )
    if all(role in roles for role in needed):
        problems += _unusual(roles, field, contract.kind)
    return problems


_NEEDED = "a conversation needs a user turn and an assistant turn"


def _errors(problems: list[Problem]) -> list[Problem]:
    return [problem for problem in problems if problem.code.startswith("PTC2")]


def _unusual(roles: list[str], field: str, kind: Kind) -> Iterator[Problem]:
    """PTC206, each kind at the turn where it first shows."""
    first = next(i for i, role in enumerate(roles) if role != "system")
    if roles[first] == "assistant":
        yield _warn(field, first, "the conversation starts with an assistant turn")
    for i in range(1, len(roles)):
        if roles[i] == roles[i - 1] and roles[i] in ("user", "assistant"):
            yield _warn(field, i, f"two {roles[i]} turns follow each other")
            break
    late = next((i for i in range(first, len(roles)) if roles[i] == "system"), None)
    if late is not None:
        yield _warn(field, late, "a system turn stands behind the start")
    last = len(roles) - 1
    if kind == "sft" and roles[last] == "user":
        yield _warn(field, last, "the conversation ends with a user turn, which has no answer")
    if kind == "prompt" and roles[last] == "assistant":
        yield _warn(field, last, "the prompt ends with an assistant turn, which is left out")


def _warn(field: str, turn: int, message: str) -> Problem:
    return Problem(
        "PTC206", f"{message} (turn {turn + 1})", (field, turn),
        hint="many chat templates refuse or misprint such turns",
    )  # fmt: skip


def _turn_warnings(
    turns: list[Message], raw: Any, path: Path, contract: Contract
) -> Iterator[Problem]:
    """Warnings about the texts of a chat list, at the text in the raw record."""
    if not isinstance(raw, list):
        return
    for number, item in enumerate(raw):
        if isinstance(item, dict):
            key = "content" if "content" in item or "value" not in item else "value"
            if isinstance(item.get(key), str):
                yield from text_warnings(item[key], (*path, number, key), contract)


def _check_preference(record: dict[str, Any], contract: Contract) -> list[Problem]:
    keys = contract.keys
    fields = (keys.prompt, keys.chosen, keys.rejected)
    lists = keys.chat and any(isinstance(record.get(field), list | dict) for field in fields)
    if lists:
        turns, problems = pair_problems(record, keys)
        for field in fields:
            value = record.get(field)
            raw = [value] if isinstance(value, dict) else value
            if isinstance(value, str):
                problems += text_warnings(value, (field,), contract)
            else:
                problems += _turn_warnings([], raw, (field,), contract)
        if turns is not None:
            problems += _same_sides(
                "\0".join(turn["content"] for turn in turns.chosen),
                "\0".join(turn["content"] for turn in turns.rejected),
                keys,
            )
        return _with_hints(problems, record, contract)
    problems = [p for field in fields for p in _check_field(record, field, contract)]
    chosen, rejected = record.get(keys.chosen), record.get(keys.rejected)
    if isinstance(chosen, str) and isinstance(rejected, str) and chosen.strip():
        problems += _same_sides(chosen, rejected, keys)
    return _with_hints(problems, record, contract)


def _same_sides(chosen: str, rejected: str, keys: Keys) -> Iterator[Problem]:
    if chosen == rejected:
        yield Problem(
            "PTC302", f"{keys.chosen!r} and {keys.rejected!r} are the same", (keys.rejected,),
            hint="remove the pair: it has no preference",
        )  # fmt: skip
    elif is_only_space(chosen, rejected):
        yield Problem(
            "PTC308", f"{keys.chosen!r} and {keys.rejected!r} differ only in white space",
            (keys.rejected,), hint="remove the pair, unless formatting is what it is about",
        )  # fmt: skip


def _with_hints(
    problems: list[Problem], record: dict[str, Any], contract: Contract
) -> list[Problem]:
    """`problems` with what to do about missing fields, or about a whole layout."""
    missing = [str(problem.path[0]) for problem in problems if problem.code == "PTC201"]
    preset = _preset(record, contract)
    if not missing and not preset:
        return problems
    maps = _maps(missing, record, contract.keys)
    hinted: list[Problem] = []
    for problem in problems:
        if preset and problem.code in ("PTC201", "PTC203"):
            problem = replace(problem, hint=preset)
        elif problem.code == "PTC201":
            problem = replace(problem, hint=_hint(str(problem.path[0]), maps, record, contract))
        hinted.append(problem)
    return hinted


def _maps(missing: list[str], record: dict[str, Any], keys: Keys) -> dict[str, str]:
    """For each missing field the field of `record` that seems to be meant, if there is one."""
    roles = {keys.prompt: "prompt", keys.response: "response", "question": "prompt"}
    roles |= {keys.chosen: "chosen", keys.rejected: "rejected", "answer": "response"}
    maps: dict[str, str] = {}
    for field in missing:
        names = (name for name in OTHER_NAMES.get(roles.get(field, ""), ()) if name in record)
        old = near_name(field, record) or next((n for n in names if n not in maps.values()), "")
        if old:
            maps[field] = old
    return maps


def _hint(field: str, maps: dict[str, str], record: dict[str, Any], contract: Contract) -> str:
    """What to do about one missing field; the command renames all that can be told."""
    renames = "".join(f" --map {new}={old}" for new, old in maps.items())
    command = f"`ptc preprocess --kind {contract.kind}{renames}`"
    if field not in maps:
        has = ", ".join(f"`{name}`" for name in list(record)[:8]) or "no fields"
        return f"the record has {has}" + (f"; {command} renames the others" if maps else "")
    if near_name(field, record) == maps[field]:
        return f"did you mean `{maps[field]}`? {command} renames it"
    return f"`{maps[field]}` seems to be meant; {command} renames it"


def _preset(record: dict[str, Any], contract: Contract) -> str:
    """The preset for a well-known layout that is not the contract, or an empty string."""
    name = ""
    if "instruction" in record and "output" in record:
        name = "alpaca"
    elif "message_tree_id" in record:
        name = "oasst"
    elif contract.kind == "preference" and "conversations" in record:
        name = "sharegpt"
    elif "\n\nHuman:" in str(record.get(contract.keys.chosen, ""))[:200]:
        name = "hh-rlhf"
    return f"`ptc preprocess --preset {name}` reads this layout" if name else ""


def _name(path: Path) -> str:
    """A text's name in a message: `field 'chosen'`, or the turn it belongs to."""
    if len(path) == 3:
        return f"turn {int(path[1]) + 1}"
    return f"field {path[0]!r}"
