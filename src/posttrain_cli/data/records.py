"""The data contract: what a record is, and how its fields become turns of a conversation.

Turns come as `{role, content}` or ShareGPT's `{from, value}`. Roles are known under these names,
in any letter case:

| role | names |
|---|---|
| user | user, human, prompter |
| assistant | assistant, gpt, chatgpt, bing, bard, model, function_call |
| system | system, developer |
| tool | tool, function, observation, function_response, tool_response, ipython |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from posttrain_cli.data.scan import Path, Problem
from posttrain_cli.errors import DataError, did_you_mean

Kind = Literal["sft", "preference", "prompt"]
Message = dict[str, Any]  # {"role": str, "content": str, ...what else the turn carries}

ROLES = {
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "model": "assistant", "function_call": "assistant",
    "system": "system", "developer": "system",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool",
    "tool_response": "tool", "ipython": "tool",
}  # fmt: skip

_ALIASES = {"prompt": "question", "response": "answer", "messages": "conversations"}
_CHOSEN_NAMES = (
    "better", "best_response", "response_a", "accepted", "preferred", "positive", "winner",
    "chosen_response", "response_chosen", "good", "output",
)  # fmt: skip
_REJECTED_NAMES = (
    "worse", "worst_response", "response_b", "rejected_response", "response_rejected",
    "dispreferred", "negative", "loser", "bad",
)  # fmt: skip
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "prompt": ("question", "instruction", "query", "input", "context", "user"),
    "response": ("answer", "completion", "output", "reply", "target", "assistant"),
    "chosen": _CHOSEN_NAMES,
    "rejected": _REJECTED_NAMES,
}


class Refusal(DataError):
    """A record that breaks the contract; `problem` says how."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(f"{problem.code}: {problem.message}", problem.hint)
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Keys:
    """The names of the fields, and whether chat lists may stand where flat text is expected."""

    prompt: str = "prompt"
    response: str = "response"
    chosen: str = "chosen"
    rejected: str = "rejected"
    messages: str = "messages"
    chat: bool = False

    def found(self, role: Literal["prompt", "response", "messages"], record: Any) -> str:
        """The name under which `record` holds the field: the key itself, or its known alias."""
        key: str = getattr(self, role)
        alias = _ALIASES[role]
        if key == role and key not in record and alias in record:
            return alias
        return key


@dataclass(frozen=True, slots=True)
class Pair:
    """A preference record as turns: one context, two answers."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]


def detect_kind(record: dict[str, Any], keys: Keys) -> Kind:
    """What kind of record this is meant to be, also when a field is misspelt or missing."""
    if keys.chosen in record or keys.rejected in record:
        return "preference"
    if keys.found("messages", record) in record or keys.found("response", record) in record:
        answer_only = keys.found("response", record) == "answer"
        # {"prompt", "answer"} is a prompt with what its reward needs
        return "prompt" if answer_only and keys.prompt in record else "sft"
    names = record.keys()
    if any(name in names for name in _REJECTED_NAMES):
        return "preference"
    if near_name(keys.chosen, record) or near_name(keys.rejected, record):
        return "preference"
    if keys.found("prompt", record) not in record:
        return "sft"
    if near_name(keys.response, record) or any(n in names for n in OTHER_NAMES["response"]):
        return "sft"
    return "prompt"


def near_name(wanted: str, record: dict[str, Any]) -> str:
    """The field of `record` whose name looks like a misspelt `wanted`, or an empty string."""
    if wanted in record:
        return ""
    return did_you_mean(wanted, record).partition("`")[2].partition("`")[0]


def conversation(record: dict[str, Any], keys: Keys) -> list[Message]:
    """The turns of an sft record: its conversation, or its prompt and its response.

    Raises:
        Refusal: the record breaks the contract.
    """
    name = keys.found("messages", record)
    if record.get(name) is not None:
        return read_turns(record[name], (name,))
    prompt = _prompt(record, keys)
    answer = _text(record, keys.found("response", record))
    return [*prompt, {"role": "assistant", "content": answer}]


def prompt_messages(record: dict[str, Any], keys: Keys) -> list[Message]:
    """The turns that a model is to answer; answers at the end of a conversation are left out.

    Raises:
        Refusal: the record breaks the contract.
    """
    name = keys.found("messages", record)
    if keys.found("prompt", record) in record or name not in record:
        return _prompt(record, keys)
    turns = read_turns(record[name], (name,))
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    return turns


def pair(record: dict[str, Any], keys: Keys) -> Pair:
    """The context and the two answers of a preference record.

    A side is text, or with `keys.chat` a list of turns, which may repeat the context in front
    of the answer; then `prompt` may be missing.

    Raises:
        Refusal: the record breaks the contract, or its sides answer different prompts.
    """
    turns, problems = pair_problems(record, keys)
    if turns is None:
        raise Refusal(next(p for p in problems if p.code not in WARNINGS))
    return turns


def pair_problems(record: dict[str, Any], keys: Keys) -> tuple[Pair | None, list[Problem]]:
    """The pair, or None when it cannot be read, and what is wrong or unusual in its turns."""
    problems: list[Problem] = []
    contexts: list[list[Message]] = []
    answers: list[list[Message]] = []
    for key in (keys.chosen, keys.rejected):
        turns = _side(record, key, "assistant", keys.chat, problems)
        last = max((i for i, turn in enumerate(turns) if turn["role"] == "user"), default=-1)
        contexts.append(turns[: last + 1])
        answers.append(turns[last + 1 :])
        if turns and not any(turn["role"] == "assistant" for turn in answers[-1]):
            problems.append(Problem("PTC205", f"field {key!r} has no assistant turn", (key,)))
    prompt: list[Message] = []
    if keys.prompt in record or not all(contexts):
        prompt = _side(record, keys.prompt, "user", keys.chat, problems)
    if any(problem.code not in WARNINGS for problem in problems):
        return None, problems
    given = [turns for turns in (prompt, *contexts) if turns]
    if any(not same_context(given[0], other) for other in given[1:]):
        problems.append(_different_prompts(keys, contexts))
        return None, problems
    return Pair(max(given, key=len), answers[0], answers[1]), problems


def same_context(one: list[Message], other: list[Message]) -> bool:
    """Whether two contexts are the same; a single user turn stands for a context it ends."""
    texts = [[(turn["role"], turn["content"]) for turn in turns] for turns in (one, other)]
    if min(len(texts[0]), len(texts[1])) == 1:
        return texts[0][-1] == texts[1][-1]
    return texts[0] == texts[1]


def read_turns(value: Any, path: Path = ()) -> list[Message]:
    """The normalised turns of a chat list.

    Raises:
        Refusal: a turn has no known role or no text.
    """
    turns, problems = turns_problems(value, path)
    for problem in problems:
        if problem.code not in WARNINGS:
            raise Refusal(problem)
    return turns


WARNINGS = frozenset({"PTC206"})


def turns_problems(value: Any, path: Path) -> tuple[list[Message], list[Problem]]:
    """The turns of a chat list that can be read, and what is wrong with the others."""
    name = place(path)
    if not isinstance(value, list):
        message = f"field {name!r} is {type_name(value)}, expected a list of turns"
        return [], [Problem("PTC202", message, path, hint=_TURN)]
    if not value:
        return [], [Problem("PTC205", f"field {name!r} has no turns", path, hint=_TURN)]
    turns: list[Message] = []
    problems: list[Problem] = []
    for number, raw in enumerate(value):
        at = (*path, number)
        turn = _turn(raw, at, problems)
        if turn is not None:
            turns.append(turn)
    return turns, problems


_TURN = 'turns are objects such as {"role": "user", "content": "text"}'


def _turn(raw: Any, path: Path, problems: list[Problem]) -> Message | None:
    where = f"turn {int(path[-1]) + 1}"
    if not isinstance(raw, dict):
        message = f"{where} is {type_name(raw)}, expected an object with a role and text"
        problems.append(Problem("PTC205", message, path, hint=_TURN))
        return None
    role_key = "role" if "role" in raw else "from"
    text_key = "content" if "content" in raw or "value" not in raw else "value"
    name = raw.get(role_key)
    role = ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        problems.append(_bad_role(raw, role_key, path, where))
    calls = bool(raw.get("tool_calls") or raw.get("function_call")) and role == "assistant"
    text = _turn_text(raw.get(text_key), calls)
    if isinstance(text, Problem):
        at = (*path, text_key) if text_key in raw else path
        message = f"{where} {text.message}"
        problems.append(Problem(text.code, message, at, hint=text.hint))
        return None
    if role is None:
        return None
    if not text.strip() and role in ("user", "assistant") and not calls:
        problems.append(
            Problem("PTC204", f"{where} ({role}) is empty", (*path, text_key), hint=_EMPTY)
        )
    rest = {k: v for k, v in raw.items() if k not in (role_key, text_key) and v is not None}
    return {"role": role, "content": text, **rest}


_EMPTY = "a model trained on it learns to say nothing; remove the record or fill the text"


def _turn_text(value: Any, calls: bool) -> str | Problem:
    """The text of a turn; parts of type text are joined, null beside a tool call is empty."""
    if isinstance(value, str):
        return value
    if value is None:
        return "" if calls else Problem("PTC205", "has no text", hint=_TURN)
    if isinstance(value, list):
        parts: list[str] = []
        for part in value:
            text = part.get("text") if isinstance(part, dict) else None
            if not isinstance(text, str):
                kind = part.get("type") if isinstance(part, dict) else type_name(part)
                return Problem("PTC205", f"has a part that is no text ({kind})", hint=_TURN)
            parts.append(text)
        return "".join(parts)
    code = "PTC203" if isinstance(value, dict) else "PTC202"
    return Problem(code, f"has {type_name(value)} for its text, expected text", hint=_TURN)


def _bad_role(raw: dict[str, Any], role_key: str, path: Path, where: str) -> Problem:
    known = "known are user, assistant, system, tool and their ShareGPT names"
    if role_key not in raw:
        return Problem("PTC205", f"{where} has no role", path, hint=_TURN)
    name = raw[role_key]
    if not isinstance(name, str):
        message = f"{where} has {type_name(name)} for its role"
    else:
        message = f"{where} has the unknown role {name!r}"
        known = "; ".join(part for part in (did_you_mean(name, ROLES), known) if part)
    return Problem("PTC205", message, (*path, role_key), hint=known)


def _prompt(record: dict[str, Any], keys: Keys) -> list[Message]:
    problems: list[Problem] = []
    turns = _side(record, keys.found("prompt", record), "user", keys.chat, problems)
    for problem in problems:
        raise Refusal(problem)
    return turns


def _side(
    record: dict[str, Any], key: str, role: str, chat: bool, problems: list[Problem]
) -> list[Message]:
    """The turns of one field: a list if `chat` allows it, else one turn of `role`."""
    value = record.get(key)
    if chat and isinstance(value, dict):
        value = [value]
    if chat and isinstance(value, list):
        turns, found = turns_problems(value, (key,))
        problems += found
        return turns
    problem = text_problem(record, key, chat=True)
    if problem is not None:
        problems.append(problem)
        return []
    return [{"role": role, "content": value}]


def _text(record: dict[str, Any], key: str) -> str:
    problem = text_problem(record, key)
    if problem is not None:
        raise Refusal(problem)
    text: str = record[key]
    return text


def text_problem(record: dict[str, Any], key: str, chat: bool = False) -> Problem | None:
    """Why field `key` is no text with something in it, or None.

    Args:
        record: the record.
        key: the field.
        chat: whether chat lists are switched on already, for the hint.
    """
    if key not in record:
        return Problem("PTC201", f"field {key!r} is missing", (key,))
    value = record[key]
    if isinstance(value, str):
        if value and not value.isspace():
            return None
        what = "only white space" if value else "empty"
        return Problem("PTC204", f"field {key!r} is {what}", (key,), hint=_EMPTY)
    message = f"field {key!r} is {type_name(value)}, expected text"
    if isinstance(value, dict | list):
        hint = "" if chat else _chat_hint(value)
        return Problem("PTC203", message, (key,), hint=hint)
    return Problem("PTC202", message, (key,), hint="write the value as text in double quotes")


def _chat_hint(value: Any) -> str:
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, dict) and ("role" in first or "from" in first):
        return "chat lists are read with --chat (data.chat: true in a config)"
    return "flatten it to text, for example with `ptc preprocess --map new=old.path`"


def _different_prompts(keys: Keys, contexts: list[list[Message]]) -> Problem:
    if all(contexts) and not same_context(contexts[0], contexts[1]):
        message = f"{keys.chosen!r} and {keys.rejected!r} answer different prompts"
    else:
        message = f"field {keys.prompt!r} is not the prompt that the two sides repeat"
    return Problem(
        "PTC309", message, (keys.chosen,), hint="both sides of a pair must answer the same prompt"
    )


def type_name(value: Any) -> str:
    """What `value` is, as JSON calls it, with its article."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    names = {dict: "an object", list: "an array", str: "text", int: "a number", float: "a number"}
    return names.get(type(value), f"a value of type {type(value).__name__}")


def place(path: Path) -> str:
    """`path` as people write it, such as `messages[2].content`."""
    name = ""
    for step in path:
        name += f"[{step}]" if isinstance(step, int) else f".{step}" if name else step
    return name
