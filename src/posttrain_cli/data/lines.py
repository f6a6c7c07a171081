"""One record as one line of JSON and back: exact for integers of any size."""

from __future__ import annotations

import json
from typing import Any

import orjson

from posttrain_cli.data.reader import quick


def encode(value: Any) -> bytes:
    """`value` as compact JSON in UTF-8, without a line feed.

    What UTF-8 cannot hold (half of a surrogate pair) is written as the escape it was read from.
    """
    try:
        return orjson.dumps(value)
    except TypeError:  # an integer beyond 64 bits, or a lone surrogate
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def decode(line: bytes) -> dict[str, Any]:
    """The record of a line made by `encode`."""
    record = quick(line)
    if record is None:
        record = json.loads(line)
    assert isinstance(record, dict), line[:80]
    return record
