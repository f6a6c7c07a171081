"""Lines of JSON to rows, a block at a time, with what the bytes alone tell about their texts."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson

from posttrain_cli.data.contract import has_rare, is_only_space
from posttrain_cli.data.encoding import BOM
from posttrain_cli.data.reader import (
    Row,
    blank_line,
    byte_order_mark,
    count_keys,
    exact_row,
    keys_are_unique,
)
from posttrain_cli.data.records import Kind
from posttrain_cli.data.suspects import Inspector, token_bytes
from posttrain_cli.diagnostics import Finding

Record = dict[str, Any]
_LINE_FEED, _BRACE = b"\n{"
_FLAT: dict[Kind, tuple[str, ...]] = {
    "sft": ("prompt", "response"),
    "preference": ("prompt", "chosen", "rejected"),
    "prompt": ("prompt",),
}


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a file.

    Attributes:
        path: the file.
        lines: whole lines of JSON, or None.
        rows: rows that were read already, when there are no lines.
        line, row: lines and rows of the file in front of the piece.
        encoding: codec that the lines were decoded from, for messages.
    """

    path: str
    lines: bytes | None = None
    rows: tuple[Row, ...] = ()
    line: int = 0
    row: int = 0
    encoding: str | None = None


class LineReader:
    """Reads blocks of lines.

    Args:
        tokens: control texts of a tokenizer, beside the well-known ones.
    """

    def __init__(self, tokens: tuple[str, ...]) -> None:
        self._inspector = Inspector(token_bytes(tokens))

    def read(self, block: Block) -> Iterator[tuple[Row, bool]]:
        """The rows of a block, each with whether its bytes are plain.

        The texts of a plain row hold no ASCII control character and no control token.
        """
        assert block.lines is not None
        lines, line, row = block.lines, block.line, block.row
        mark: tuple[Finding, ...] = ()
        if line == 0 and lines.startswith(BOM):
            lines = lines[len(BOM) :]
            mark = (byte_order_mark(block.path, 1),)
            if not lines:
                yield Row(0, 1, None, mark), False
        pieces = list(io.BytesIO(lines))
        ends = np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)))
        counts, looks = self._inspector.inspect(lines, ends)
        for piece, keys, look in zip(pieces, counts.tolist(), looks.tolist(), strict=True):
            line += 1
            record = _good_record(piece, keys)
            if record is not None:
                row += 1
                yield Row(row, line, record, mark), not look
            elif piece.isspace():
                yield Row(row, line, None, (*mark, blank_line(block.path, line))), False
            else:
                row += 1
                content = piece.removesuffix(b"\n")
                read = exact_row(block.path, content, line, row, block.encoding)
                yield replace(read, findings=mark + read.findings), False
            mark = ()


def count_rows(lines: bytes) -> int:
    """Lines that are not blank."""
    octets = np.frombuffer(lines, np.uint8)
    ends = np.flatnonzero(octets == _LINE_FEED)
    whole = len(ends) + int(octets[-1] != _LINE_FEED)
    starts = int((octets[ends[: whole - 1] + 1] == _BRACE).sum()) + int(octets[0] == _BRACE)
    if starts == whole:  # every line starts a record
        return whole
    return sum(not line.isspace() for line in io.BytesIO(lines.removeprefix(BOM)))


def is_flat_and_good(record: Record, kind: Kind) -> bool:
    """Whether a record of plain bytes certainly fulfils the contract, without a warning.

    False means that the contract check must look.
    """
    texts: list[Any] = [record.get(name) for name in _FLAT[kind]]
    for text in texts:
        if not isinstance(text, str) or not text or text.isspace() or has_rare(text):
            return False
    if kind != "preference":
        return True
    _, chosen, rejected = texts
    if chosen[0] != rejected[0] and not (chosen[0].isspace() or rejected[0].isspace()):
        return True
    return chosen != rejected and not is_only_space(chosen, rejected)


def _good_record(line: bytes, keys: int) -> Record | None:
    """The object on a line with `keys` keys written in it, if nothing is wrong with it."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if type(record) is not dict:
        return None
    found = count_keys(record)
    if found == keys or (found >= 0 and keys_are_unique(line)):
        return record
    return None
