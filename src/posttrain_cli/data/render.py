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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from posttrain_cli.data.tokenizer import Message, TemplateRefusal, Tokenizer

Overlong = Literal["keep", "drop", "truncate", "error"]
TrainOn = Literal["assistant", "last", "all"]


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
    """A stretch of text encoded on its own. `tail` is what the template puts after an answer."""

    text: str
    trained: bool = False
    literal: bool = False
    tail: bool = False
    first: bool = False


@dataclass(frozen=True, slots=True)
class _Plan:
    parts: list[_Part]
    problems: tuple[tuple[str, str], ...] = ()


def render_conversations(
    conversations: Sequence[list[Message]], tokenizer: Tokenizer, policy: Policy
) -> list[Rendered]:
    """Ids and mask of each conversation (lists of `{role, content}`), encoded in one batch."""
    plans = [_try_plan(messages, tokenizer, policy) for messages in conversations]
    ids = iter(_encode([part for plan in plans for part in plan.parts], tokenizer))
    return [_assemble(plan, [next(ids) for _ in plan.parts], tokenizer, policy) for plan in plans]


def render_conversation(messages: list[Message], tokenizer: Tokenizer, policy: Policy) -> Rendered:
    """Ids and mask of one conversation."""
    return render_conversations([messages], tokenizer, policy)[0]


def render_prompt(messages: list[Message], tokenizer: Tokenizer) -> list[int]:
    """Ids after which the model answers: exactly those that precede an answer in training."""
    text = tokenizer.render(messages, generation_prompt=True)
    parts = _untrained(text, messages, tokenizer)
    return [i for ids in _encode(parts, tokenizer) for i in ids]


def _try_plan(messages: list[Message], tokenizer: Tokenizer, policy: Policy) -> _Plan:
    try:
        return _plan(messages, tokenizer, policy)
    except TemplateRefusal as refusal:
        return _Plan([], (("PTC205", refusal.message),))


def _plan(messages: list[Message], tokenizer: Tokenizer, policy: Policy) -> _Plan:
    """Cut the rendered text at the places where trained answers begin and end."""
    full = tokenizer.render(messages, generation_prompt=False)
    answers = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    trained = answers[-1:] if policy.train_on == "last" else answers
    parts: list[_Part] = []
    done = 0  # characters of `full` that are in `parts`
    turn = 0  # messages whose text is in `parts`
    for k in trained:
        prefix = tokenizer.render(messages[:k], generation_prompt=True)
        whole = tokenizer.render(messages[: k + 1], generation_prompt=False)
        content, start = _find(messages[k], full, len(prefix))
        end = start + len(content)
        honest = full.startswith(prefix) and full.startswith(whole) and start >= 0
        if not honest or end > len(whole):
            return _Plan([_Part(full)], (("PTC405", _rewrite_message(tokenizer, k)),))
        parts += _untrained(full[done:start], messages[turn:k], tokenizer, done == 0)
        literal = tokenizer.has_control_text(content) is not None
        parts.append(_Part(content, trained=True, literal=literal))
        parts.append(_Part(full[end : len(whole)], tail=True))
        done, turn = len(whole), k + 1
    parts += _untrained(full[done:], messages[turn:], tokenizer, done == 0)
    return _Plan(parts)


def _find(message: Message, full: str, start: int) -> tuple[str, int]:
    """The answer's text as the template prints it, and where: (text, position or -1)."""
    content = message["content"]
    if message.get("tool_calls"):  # printed in the template's own way: all of it is the answer
        return "", start
    for text in (content, content.strip()):
        at = full.find(text, start)
        if at >= 0:
            return text, at
    return content, -1


def _rewrite_message(tokenizer: Tokenizer, turn: int) -> str:
    return (
        f"the chat template `{tokenizer.template_name}` prints turn {turn + 1} in another way "
        "once later turns follow, so the trained tokens cannot be told from the others"
    )


def _untrained(
    text: str, messages: Iterable[Message], tokenizer: Tokenizer, first: bool = True
) -> list[_Part]:
    """Template text and other people's turns; messages with control texts are kept literal."""
    parts: list[_Part] = []
    for message in messages:
        content = message.get("content") or ""
        if tokenizer.has_control_text(content) is None:
            continue
        before, found, after = text.partition(content)
        if found:
            parts += [_Part(before), _Part(content, literal=True)]
            text = after
    parts.append(_Part(text))
    if first:
        parts[0] = replace(parts[0], first=True)
    return parts


def _encode(parts: list[_Part], tokenizer: Tokenizer) -> list[list[int]]:
    """Ids of each part, in order, in as few calls as the library's switches allow."""
    ids: list[list[int]] = [[] for _ in parts]
    for literal in (False, True):
        chosen = [i for i, part in enumerate(parts) if part.literal == literal and part.text]
        if not chosen:
            continue
        anchors = ["" if literal or parts[i].first else tokenizer.anchor for i in chosen]
        texts = [anchor + parts[i].text for anchor, i in zip(anchors, chosen, strict=True)]
        found = tokenizer.encode(texts, literal)
        for i, anchor, encoded in zip(chosen, anchors, found, strict=True):
            ids[i] = encoded[1:] if anchor else encoded
    return ids


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
