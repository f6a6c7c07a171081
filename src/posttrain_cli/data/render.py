"""The one function that decides which ids a sample becomes and which of them are trained.

validate, preprocess, sft, dpo, ppo and infer all come here, so they cannot disagree:

1. the template gives the text of the conversation;
2. the text is cut where answers begin and end, and the parts are encoded one by one, so the
   ids of a prompt are the ids that the same prompt has at inference;
3. a token is trained by the part it comes from, never by its id;
4. each trained answer has exactly one end token, and none is made up where a text is cut.

What the template or the generation prompt supplies (headers, empty think blocks, the newline
after the end token) is not trained. A control token's text inside a message stays text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from posttrain_cli.data.tokenizer import Message, TemplateRefusal, Tokenizer

Overlong = Literal["keep", "drop", "truncate", "error"]
TrainOn = Literal["assistant", "last", "all"]

_OWN_FORM = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
_UNTOLD = ", so the trained tokens cannot be told from the others"


@dataclass(frozen=True, slots=True)
class Policy:
    """How conversations become ids.

    Attributes:
        max_length: tokens a sample may have; None for no limit.
        overlong: `truncate` cuts at max_length, `keep` leaves longer samples whole; `drop` and
            `error` leave them whole, too: the caller acts on `Rendered.too_long`.
        train_on: every assistant turn, the last one, or all text.
        add_eos: None adds the end token for the plain template and expects others to bring it
            (PTC403); True adds it where it is missing; False never adds it.
    """

    max_length: int | None = 2048
    overlong: Overlong = "truncate"
    train_on: TrainOn = "assistant"
    add_eos: bool | None = None


@dataclass(frozen=True, slots=True)
class Rendered:
    """One sample as ids.

    Attributes:
        ids: token ids, cut at max_length if the policy says so.
        mask: for each id whether it is trained.
        length: tokens before any cut.
        too_long: whether `length` exceeds max_length.
        problems: (code, message) of what is wrong: PTC401 to PTC405.
    """

    ids: list[int]
    mask: list[bool]
    length: int
    too_long: bool
    problems: tuple[tuple[str, str], ...] = ()

    @property
    def trained(self) -> int:
        """Number of trained tokens (the first token of a sample is never a target)."""
        return sum(self.mask[1:])


@dataclass(frozen=True, slots=True)
class _Part:
    """A stretch of text encoded on its own. `tail` is what the template puts after an answer.

    Its `pieces` are the text, cut inside every control text that a message holds.
    """

    pieces: list[str]
    trained: bool = False
    tail: bool = False


@dataclass(frozen=True, slots=True)
class _Plan:
    parts: list[_Part]
    problems: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class _Answer:
    """Where a rendered text has an answer (`start`, `end`), and where its turn ends (`stop`)."""

    start: int
    end: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Turns:
    """A conversation ready for the template.

    Attributes:
        messages: the turns, with `cut` inside every control text that they hold.
        cut: a character that no turn holds; texts are cut where it stands.
        probe: another such character, which stands for an answer.
    """

    messages: list[Message]
    cut: str
    probe: str


def render_conversations(
    conversations: Sequence[list[Message]], tokenizer: Tokenizer, policy: Policy
) -> list[Rendered]:
    """Ids and mask of each conversation (lists of `{role, content}`), encoded in one batch."""
    plans = [_try_plan(messages, tokenizer, policy) for messages in conversations]
    encoded = _encode([plan.parts for plan in plans], tokenizer)
    return [
        _assemble(plan, ids, tokenizer, policy) for plan, ids in zip(plans, encoded, strict=True)
    ]


def render_conversation(messages: list[Message], tokenizer: Tokenizer, policy: Policy) -> Rendered:
    """Ids and mask of one conversation."""
    return render_conversations([messages], tokenizer, policy)[0]


def render_prompt(messages: list[Message], tokenizer: Tokenizer) -> list[int]:
    """Ids after which the model answers: exactly those that precede an answer in training."""
    turns = _shield(messages, tokenizer)
    text = tokenizer.render(turns.messages, generation_prompt=True)
    if text == tokenizer.render(turns.messages, generation_prompt=False):
        head, _ = _around_answer(turns, len(messages), tokenizer)  # it ignores the switch
        text = head if head.startswith(text) and head[len(text) :].strip() else text
    answers, _ = _find_answers(turns, text, tokenizer, ())
    (encoded,) = _encode([_parts(text, turns.cut, answers)], tokenizer)
    return [i for ids in encoded for i in ids]


def _try_plan(messages: list[Message], tokenizer: Tokenizer, policy: Policy) -> _Plan:
    try:
        return _plan(messages, tokenizer, policy)
    except TemplateRefusal as refusal:
        return _Plan([], (("PTC205", refusal.message),))


def _plan(messages: list[Message], tokenizer: Tokenizer, policy: Policy) -> _Plan:
    """Cut the rendered text at the places where answers begin and end."""
    turns = _shield(messages, tokenizer)
    full = tokenizer.render(turns.messages, generation_prompt=False)
    chosen = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    if policy.train_on == "last":
        chosen = chosen[-1:]
    answers, lost = _find_answers(turns, full, tokenizer, chosen)
    if lost:
        return _Plan(_parts(full, turns.cut, {}), (("PTC405", lost),))
    return _Plan(_parts(full, turns.cut, answers, chosen))


def _shield(messages: list[Message], tokenizer: Tokenizer) -> _Turns:
    """Make control texts inside the turns unreadable for the tokenizer, by a mark to cut at."""
    text = "\n".join(_texts(messages))
    unused = (c for c in map(chr, range(0xFDD0, 0x110000)) if c not in text)  # noncharacters first
    cut, probe = next(unused), next(unused)
    controls = [c for c in tokenizer.control_texts if len(c) > 1 and c in text]
    return _Turns(_marked(messages, controls, cut) if controls else messages, cut, probe)


def _texts(value: Any) -> Iterator[str]:
    """Every text inside a turn or a list of turns."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _marked(value: Any, controls: list[str], cut: str) -> Any:
    """`value` with `cut` behind the first character of every control text in it."""
    if isinstance(value, dict):
        return {key: _marked(item, controls, cut) for key, item in value.items()}
    if isinstance(value, list):
        return [_marked(item, controls, cut) for item in value]
    if isinstance(value, str):
        for control in controls:
            while control in value:
                value = value.replace(control, control[0] + cut + control[1:])
    return value


def _find_answers(
    turns: _Turns, text: str, tokenizer: Tokenizer, needed: Sequence[int]
) -> tuple[dict[int, _Answer], str]:
    """Where the answers are in `text`, by turn, and why a needed one cannot be told, if so.

    Answers that are not needed are found, too, where that is possible: then what precedes an
    answer has the same ids whichever answers are trained.
    """
    found: dict[int, _Answer] = {}
    for k, message in enumerate(turns.messages):
        if message["role"] != "assistant":
            continue
        try:
            answer = _find(turns, k, text, tokenizer)
        except TemplateRefusal:
            if k in needed:
                raise
            continue
        if isinstance(answer, _Answer):
            found[k] = answer
        elif k in needed:
            return {}, f"the chat template `{tokenizer.template_name}` {answer}"
    return found, ""


def _find(turns: _Turns, k: int, text: str, tokenizer: Tokenizer) -> _Answer | str:
    """Where the answer of turn `k` is in `text`, or why that cannot be told."""
    turn = turns.messages[k]
    head, rest = _around_answer(turns, k, tokenizer)
    prompt = tokenizer.render(turns.messages[:k], generation_prompt=True) if k else head
    whole = tokenizer.render(turns.messages[: k + 1], generation_prompt=False)
    if not text.startswith(whole):
        return f"prints turn {k + 1} in another way once later turns follow" + _UNTOLD
    if not whole.startswith(prompt):
        return f"does not print the generation prompt in front of turn {k + 1}" + _UNTOLD
    start = len(head) if whole.startswith(head) else len(prompt)
    if not whole[len(prompt) : start].strip():  # white space that the model has to write itself
        start = len(prompt)
    end = len(whole) - len(rest)
    plain = whole.startswith(head) and whole.endswith(rest) and start <= end
    if plain and whole[start:end].strip() == turn["content"].strip():
        return _Answer(start, end, len(whole))
    ends = [at for at in (whole.find(t, start) for t in tokenizer.end_texts) if at >= 0]
    end = min(ends, default=max(start, len(whole.rstrip())))
    # Tool calls and reasoning are printed in the template's own way: all of it is the answer.
    same = whole[start:end].split() and _squeezed(whole[start:end]) == _squeezed(turn["content"])
    if same or any(turn.get(field) for field in _OWN_FORM):
        return _Answer(start, end, len(whole))
    return f"does not print turn {k + 1} as it is" + _UNTOLD


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _around_answer(turns: _Turns, k: int, tokenizer: Tokenizer) -> tuple[str, str]:
    """What the template prints before and behind a plain answer in the place of turn `k`."""
    answer = {"role": "assistant", "content": turns.probe}
    text = tokenizer.render([*turns.messages[:k], answer], generation_prompt=False)
    head, _, rest = text.partition(turns.probe)
    return head, rest


def _parts(
    text: str, cut: str, answers: dict[int, _Answer], trained: Sequence[int] = ()
) -> list[_Part]:
    """The text in parts: what is between the answers, the answers, and what ends their turns."""
    parts: list[_Part] = []
    done = 0
    for k, answer in answers.items():
        chosen = k in trained
        parts.append(_Part(text[done : answer.start].split(cut)))
        parts.append(_Part(text[answer.start : answer.end].split(cut), trained=chosen))
        parts.append(_Part(text[answer.end : answer.stop].split(cut), tail=chosen))
        done = answer.stop
    return [*parts, _Part(text[done:].split(cut))]


def _encode(samples: Sequence[list[_Part]], tokenizer: Tokenizer) -> list[list[list[int]]]:
    """Ids of each part of each sample, in one call of the tokenizer."""
    texts = [[piece for part in parts for piece in part.pieces if piece] for parts in samples]
    encoded = map(iter, tokenizer.encode_pieces(texts))
    return [
        [[i for piece in part.pieces if piece for i in next(ids)] for part in parts]
        for parts, ids in zip(samples, encoded, strict=True)
    ]


def _assemble(
    plan: _Plan, encoded: list[list[int]], tokenizer: Tokenizer, policy: Policy
) -> Rendered:
    """Join the parts, place end tokens, mark trained tokens, cut, and say what is wrong."""
    ids: list[int] = []
    mask: list[bool] = []
    problems = list(plan.problems)
    for part, found in zip(plan.parts, encoded, strict=True):
        if not part.tail:
            ids += found
            mask += [part.trained] * len(found)
            continue
        stop = next((i for i, token in enumerate(found) if token in tokenizer.end_ids), None)
        if stop is None and policy.add_eos and tokenizer.end_id is not None:
            found, stop = [tokenizer.end_id, *found], 0
        if stop is None and policy.add_eos is not False:
            problems.append(("PTC403", _no_end_message(tokenizer)))
        wanted = -1 if stop is None else stop
        if stop is not None and policy.add_eos is False and tokenizer.template_name == "plain":
            found, wanted = found[:stop] + found[stop + 1 :], -1
        ids += found
        mask += [i <= wanted for i in range(len(found))]
    if policy.train_on == "all" and not plan.problems:
        mask = [True] * len(ids)
    return _cut(ids, mask, problems, tokenizer, policy)


def _no_end_message(tokenizer: Tokenizer) -> str:
    return (
        f"the chat template `{tokenizer.template_name}` ends an answer without an end token: "
        "a model trained on it never stops"
    )


def _cut(
    ids: list[int],
    mask: list[bool],
    problems: list[tuple[str, str]],
    tokenizer: Tokenizer,
    policy: Policy,
) -> Rendered:
    length = len(ids)
    limit = policy.max_length
    too_long = limit is not None and length > limit
    if tokenizer.bos_id is not None and ids[:2] == [tokenizer.bos_id] * 2:
        problems.append(("PTC404", "the rendered text starts with two begin tokens"))
    if too_long:
        problems.append(("PTC401", f"{length:,} tokens, more than the limit of {limit:,}"))
    if too_long and policy.overlong == "truncate":
        ids, mask = ids[:limit], mask[:limit]
    rendered = Rendered(ids, mask, length, too_long, tuple(problems))
    if rendered.trained == 0 and not {"PTC405", "PTC205"} & {code for code, _ in problems}:
        cut = f"after the cut at {limit:,} tokens " if too_long else ""
        problems.append(("PTC402", f"{cut}no trained token is left"))
        rendered = Rendered(ids, mask, length, too_long, tuple(problems))
    return rendered
