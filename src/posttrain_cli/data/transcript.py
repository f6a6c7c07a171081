"""Conversations as one flat text, for kinds whose fields are text: the HH-RLHF way of writing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_LABELS = {"user": "Human", "assistant": "Assistant", "system": "System", "tool": "Tool"}
_ROLES = {"Human": "user", "Assistant": "assistant"}
_MARKER = re.compile(r"\n\n(Human|Assistant):")


def transcript(turns: Sequence[dict[str, Any]]) -> str:
    """The turns in front of an answer as one text.

    A single user turn is its own text. More turns are written `Human: …`, `Assistant: …` with a
    blank line between, and the text ends in `Assistant:`, where the answer goes.
    """
    if len(turns) == 1 and turns[0]["role"] == "user":
        return str(turns[0]["content"])
    lines = [f"{_LABELS[turn['role']]}: {turn['content']}" for turn in turns]
    return "\n\n".join([*lines, "Assistant:"])


def read_transcript(text: str) -> list[dict[str, str]]:
    r"""The turns of an HH-RLHF text, marked by `\n\nHuman:` and `\n\nAssistant:`.

    One blank after a marker belongs to the marker. An empty list means that the text does not
    begin with a marker.
    """
    start, *pieces = _MARKER.split(text)
    if start or not pieces:
        return []
    pairs = zip(pieces[::2], pieces[1::2], strict=True)
    return [{"role": _ROLES[who], "content": said.removeprefix(" ")} for who, said in pairs]
