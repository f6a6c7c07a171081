"""Synthetic tasks whose answers can be checked: each a pure function of (seed, index).

A recipe makes one `Task`; `data.synthetic` turns tasks into rows of a kind. Numbers are drawn
from a hash of their coordinates, so a row does not depend on the rows before it, on the number
of rows, or on the Python version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

Recipe = Literal["capitals", "arithmetic", "format", "extraction", "dialogue", "mixed"]
Check = Literal["number", "exact", "contains"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Task:
    """One task, its right answer and one known corruption of it.

    Attributes:
        recipe: the recipe that made it.
        turns: the conversation up to the question, user turn first and last.
        response: the right answer as text.
        answer: what a checker compares.
        check: how it compares: the number after `####`, the whole text, or text contained.
        corrupted: a wrong answer that differs from `response`.
        corruption: what was done to make `corrupted`.
    """

    recipe: Recipe
    turns: tuple[str, ...]
    response: str
    answer: str
    check: Check
    corrupted: str
    corruption: str


class Draw:
    """Draws that depend on (seed, recipe, index) and on how many were made before, only."""

    def __init__(self, seed: int, recipe: str, index: int) -> None:
        self._key = f"{seed}/{recipe}/{index}".encode()
        self._count = 0

    def below(self, limit: int) -> int:
        """A number from 0 to `limit` - 1."""
        self._count += 1
        digest = hashlib.blake2b(self._key + b"/%d" % self._count, digest_size=8).digest()
        return int.from_bytes(digest, "little") % limit

    def between(self, low: int, high: int) -> int:
        """A number from `low` to `high`, both included."""
        return low + self.below(high - low + 1)

    def choice(self, values: Sequence[T]) -> T:
        """One of `values`."""
        return values[self.below(len(values))]

    def sample(self, values: Sequence[T], count: int) -> list[T]:
        """`count` different ones of `values`, in drawn order."""
        left = list(values)
        return [left.pop(self.below(len(left))) for _ in range(count)]


NAMES = (
    *("Mia", "Omar", "Lena", "Kofi", "Ana", "Ravi", "Nora", "Igor", "Yuki", "Paul", "Sofia", "Tom"),
    *("Elif", "Hugo", "Zoe", "Ben", "Aisha", "Carl", "Mei", "Luca", "Ida", "Sam", "Vera", "Jon"),
)
THINGS = (
    *("apples", "pencils", "stamps", "marbles", "tickets", "shells", "cards", "coins", "books"),
    *("candles", "buttons", "postcards", "lemons", "ribbons", "bottles", "badges"),
)
WORDS = (
    *("river", "window", "garden", "copper", "violin", "winter", "ladder", "basket", "harbor"),
    *("pepper", "silver", "forest", "button", "marble", "saddle", "cotton", "lantern", "meadow"),
    *("pillow", "rocket", "timber", "velvet", "anchor", "bridge", "candle", "dragon", "engine"),
)
TOWNS = ("Berlin", "Madrid", "Rome", "Vienna", "Lisbon", "Oslo", "Dublin", "Athens", "Prague")


def capitals(draw: Draw, index: int) -> Task:
    """The rows of the second article's generator script, word for word."""
    town = draw.choice(TOWNS)
    return Task(
        recipe="capitals",
        turns=(f"Question {index}: What is the capital of France?",),
        response=f"Answer {index}: The capital of France is Paris.",
        answer="Paris",
        check="contains",
        corrupted=f"Answer {index}: The capital of France is {town}.",
        corruption="wrong town",
    )


def arithmetic(draw: Draw, index: int) -> Task:
    """A word problem of two steps, answered as GSM8K does: the steps, then `#### N`."""
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    a, b = draw.between(12, 98), draw.between(3, 97)
    match draw.below(3):
        case 0:
            c = draw.between(2, a + b - 1)
            question = (
                f"{name} has {a} {thing}, buys {b} more and gives {c} away. "
                f"How many {thing} does {name} have now?"
            )
            steps = [(f"{a} + {b}", a + b), (f"{a + b} - {c}", a + b - c)]
        case 1:
            c = draw.between(2, 60)
            question = (
                f"{name} packs {a} boxes with {b} {thing} in each, and {c} {thing} are left over. "
                f"How many {thing} are there in all?"
            )
            steps = [(f"{a} * {b}", a * b), (f"{a * b} + {c}", a * b + c)]
        case _:
            c = draw.between(2, 12)
            question = (
                f"{c} friends share what {name} sold: {a} {thing} at {b * c} coins each. "
                f"How many coins does each friend get?"
            )
            steps = [(f"{a} * {b * c}", a * b * c), (f"{a * b * c} / {c}", a * b)]
    first, last = steps
    right = last[1]
    if draw.below(2) and first[1] != right:
        wrong, corruption = _worked([first], first[1]), "last step left out"
    else:
        slip = right + draw.between(1, 9)
        wrong, corruption = _worked([first, (last[0], slip)], slip), "wrong number"
    return Task(
        recipe="arithmetic",
        turns=(question,),
        response=_worked(steps, right),
        answer=str(right),
        check="number",
        corrupted=wrong,
        corruption=corruption,
    )


def _worked(steps: Sequence[tuple[str, int]], final: int) -> str:
    lines = [f"{formula} = {value}" for formula, value in steps]
    return "\n".join([*lines, f"#### {final}"])


def format_task(draw: Draw, index: int) -> Task:
    """An instruction about the form of the answer, which one comparison can check."""
    words = draw.sample(WORDS, draw.between(4, 6))
    listed = ", ".join(words)
    match draw.below(4):
        case 0:
            prompt = f"Write these words in capital letters, separated by commas: {listed}"
            right = ", ".join(words).upper()
            wrong, corruption = listed, "small letters"
        case 1:
            prompt = f"Make a numbered list of these words, one on each line: {listed}"
            right = "\n".join(f"{place}. {word}" for place, word in enumerate(words, 1))
            wrong, corruption = "\n".join(f"- {word}" for word in words), "bullets for numbers"
        case 2:
            prompt = (
                f"Reply with one JSON object that maps each word to its number of letters, "
                f"in this order: {listed}"
            )
            right = "{" + ", ".join(f'"{word}": {len(word)}' for word in words) + "}"
            wrong, corruption = right[:-1], "closing brace left out"
        case _:
            prompt = f"Put the last of these words between <answer> and </answer>: {listed}"
            right = f"<answer>{words[-1]}</answer>"
            wrong, corruption = words[-1], "tags left out"
    return Task("format", (prompt,), right, right, "exact", wrong, corruption)


def extraction(draw: Draw, index: int) -> Task:
    """A note with several facts, one of which is asked for."""
    name, town, thing = draw.choice(NAMES), draw.choice(TOWNS), draw.choice(THINGS)
    order = f"{chr(65 + draw.below(26))}-{draw.between(1000, 9999)}"
    facts = {
        "name of the customer": name,
        "town": town,
        "order number": order,
        "goods": f"{draw.between(2, 90)} {thing}",
    }
    note = f"Order {order}: {facts['goods']} for {name}, to be sent to {town}."
    asked, other = draw.sample(list(facts), 2)
    return Task(
        recipe="extraction",
        turns=(f"Reply with the {asked} only.\n\nNote: {note}",),
        response=facts[asked],
        answer=facts[asked],
        check="exact",
        corrupted=facts[other],
        corruption=f"{other} for {asked}",
    )


def dialogue(draw: Draw, index: int) -> Task:
    """Three turns: facts are given, acknowledged, and asked for again."""
    name, other = draw.sample(NAMES, 2)
    thing = draw.choice(THINGS)
    mine, theirs = draw.sample(range(10, 99), 2)
    told = f"{name} has {mine} {thing} and {other} has {theirs} {thing}. Please remember that."
    asked = f"How many {thing} does {name} have?"
    return Task(
        recipe="dialogue",
        turns=(told, "I will remember that.", asked),
        response=f"{name} has {mine} {thing}.",
        answer=str(mine),
        check="contains",
        corrupted=f"{name} has {theirs} {thing}.",
        corruption="the other person's number",
    )
