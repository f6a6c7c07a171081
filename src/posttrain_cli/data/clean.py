"""Cleaning levels for text: what is removed, and nothing else.

`safe` (the default of `ptc preprocess`) removes the first article's set of control characters
and never touches white space, so code, tables and paragraphs survive. `article` gives what the
`clean_text` of the first article's script gives: control characters removed, ends stripped,
each run of white space made one blank. `none` changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["safe", "article", "none"]

# [\x00-\x08\x0b\x0c\x0e-\x1f\x7f]: all below the blank but tab, line feed and carriage return.
CONTROL = bytes([*range(0x09), 0x0B, 0x0C, *range(0x0E, 0x20), 0x7F])

CONTROLS_REMOVED = "control characters removed"
SPACE_COLLAPSED = "white space collapsed"


@dataclass(frozen=True, slots=True)
class Cleaned:
    """A cleaned value and the names of what was done to it (empty when nothing was)."""

    value: Any
    changes: frozenset[str]


NO_CHANGE: frozenset[str] = frozenset()
_CONTROLS = frozenset({CONTROLS_REMOVED})
_SPACE = frozenset({SPACE_COLLAPSED})


def without_controls(text: str) -> str:
    """`text` without the control characters of `CONTROL`; the same object when it has none.

    Bytes below 0x80 stand for themselves in UTF-8, so they can be deleted from the encoded
    text; this is several times faster than a regular expression over the characters.
    """
    raw = text.encode("utf-8", "surrogatepass")
    kept = raw.translate(None, CONTROL)
    return text if len(kept) == len(raw) else kept.decode("utf-8", "surrogatepass")


def collapse(text: str) -> str:
    r"""`text` stripped and with each run of white space (`\s+`) made one blank."""
    return " ".join(text.split())


def clean_text(text: str, level: Level, plain: bool = False) -> tuple[str, frozenset[str]]:
    """Clean one text: the new text and the names of what was changed.

    Args:
        text: what is cleaned.
        level: how far.
        plain: whether it is known to hold no control characters.
    """
    if level == "none":
        return text, NO_CHANGE
    cleaned = text if plain else without_controls(text)
    changes = NO_CHANGE if cleaned is text else _CONTROLS
    if level == "article":
        before, cleaned = cleaned, collapse(cleaned)
        if cleaned != before:
            changes = changes | _SPACE if changes else _SPACE
    return cleaned, changes


def clean_value(value: Any, level: Level, plain: bool = False) -> Cleaned:
    """Clean a contract field: text, or a list of turns (their `content` or `value`).

    Anything else is returned as it is; the contract check names it.
    """
    if isinstance(value, str):
        text, changes = clean_text(value, level, plain)
        return Cleaned(text, changes)
    if not isinstance(value, list):
        return Cleaned(value, NO_CHANGE)
    turns = [_clean_turn(turn, level) for turn in value]
    changes = NO_CHANGE.union(*(turn.changes for turn in turns))
    return Cleaned([turn.value for turn in turns], changes) if changes else Cleaned(value, changes)


def _clean_turn(turn: Any, level: Level) -> Cleaned:
    if not isinstance(turn, dict):
        return Cleaned(turn, NO_CHANGE)
    changes = NO_CHANGE
    for name in ("content", "value"):
        if isinstance(turn.get(name), str):
            text, done = clean_text(turn[name], level)
            if done:
                turn = {**turn, name: text}
                changes |= done
    return Cleaned(turn, changes)
