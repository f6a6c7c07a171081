"""OASST conversation trees: best paths for sft, ranked siblings for preference data.

A tree is a message with `text`, `role` (prompter or assistant) and `replies`; sibling answers
carry a `rank`, 0 the best. Messages marked `deleted` or that failed review are passed over with
all that follows them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeGuard

Node = dict[str, Any]
Turns = list[dict[str, str]]
_ROLES = {"prompter": "user", "assistant": "assistant"}
MAX_DEPTH = 200


@dataclass(frozen=True, slots=True)
class Ranked:
    """Two answers of one place in a tree, the better one first."""

    turns: Turns
    chosen: str
    rejected: str


@dataclass(frozen=True, slots=True)
class Unranked:
    """Some of several answers to turn `turn` (from 1), which cannot be compared."""

    turn: int
    answers: int


def best_path(root: Node) -> Turns:
    """Turns from the root to the last answer, at each fork the best-ranked reply.

    A user's turn is followed only if somebody answered it. Empty when nobody answered the root.
    """
    turns: Turns = []
    node: Node | None = root
    while node is not None:
        answer = _best(_replies(node, "assistant"))
        if answer is None:
            break
        turns += [_turn(node), _turn(answer)]
        node = _best([reply for reply in _replies(answer, "prompter") if _answered(reply)])
    return turns


def pairs(root: Node) -> Iterator[Ranked | Unranked]:
    """Every pair of ranked sibling answers, the better one first, in the order of the tree.

    Answers without a rank beside others are told as `Unranked`, so that they can be counted.
    Answers of equal rank are not compared.
    """
    yield from _pairs(root, [])


def _pairs(node: Node, above: Turns) -> Iterator[Ranked | Unranked]:
    turns = [*above, _turn(node)]
    answers = _replies(node, "assistant")
    ranked = sorted((a for a in answers if _rank(a) is not None), key=lambda a: a["rank"])
    if 1 < len(answers) != len(ranked):
        yield Unranked(len(turns), len(answers) - len(ranked))
    for better, worse in combinations(ranked, 2):
        if better["rank"] < worse["rank"]:
            yield Ranked(turns, better["text"], worse["text"])
    for answer in answers:
        for reply in _replies(answer, "prompter"):
            yield from _pairs(reply, [*turns, _turn(answer)])


def is_tree(value: Any, depth: int = 0) -> TypeGuard[Node]:
    """Whether `value` and all that hangs on it is a tree of messages, at most MAX_DEPTH deep."""
    if not isinstance(value, dict) or value.get("role") not in _ROLES or depth == MAX_DEPTH:
        return False
    replies = value.get("replies", [])
    return (
        isinstance(value.get("text"), str)
        and isinstance(replies, list)
        and all(is_tree(reply, depth + 1) for reply in replies)
    )


def _replies(node: Node, role: str) -> list[Node]:
    return [reply for reply in node.get("replies", []) if reply["role"] == role and _usable(reply)]


def _usable(node: Node) -> bool:
    return not node.get("deleted") and node.get("review_result") is not False


def _answered(node: Node) -> bool:
    return bool(_replies(node, "assistant"))


def _rank(node: Node) -> int | None:
    rank = node.get("rank")
    return rank if isinstance(rank, int) else None


def _best(nodes: list[Node]) -> Node | None:
    """The best-ranked node; the first of those that are alike."""
    return min(nodes, key=_place, default=None)


def _place(node: Node) -> float:
    rank = _rank(node)
    return math.inf if rank is None else rank


def _turn(node: Node) -> dict[str, str]:
    return {"role": _ROLES[node["role"]], "content": node["text"]}
