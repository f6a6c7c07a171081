"""One record as one line of JSON and back: exact for integers of any size."""

from __future__ import annotations

import json
from typing import Any

import orjson

from posttrain_cli.data.reader import quick


def encode(value: Any) -> bytes:
    """`value` as compact JSON in UTF-8, without a line feed."""
    try:
        return orjson.dumps(value)
    except TypeError:  # an integer beyond 64 bits
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def decode(line: bytes) -> dict[str, Any]:
    """The record of a line made by `encode`."""
    record = quick(line)
    if record is None:
        record = json.loads(line)
    assert isinstance(record, dict), line[:80]
    return record
