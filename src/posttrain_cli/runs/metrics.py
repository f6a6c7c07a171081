"""`metrics.jsonl`: one object every optimizer step, from step 1 on, without gaps or repeats.

JSON has no NaN: such values are the texts "nan", "inf" and "-inf", and read back as floats.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson

from posttrain_cli.files import atomic_writer

Value = float | int | str


@dataclass(frozen=True, slots=True)
class Cut:
    """What `cut_metrics` did.

    Attributes:
        kept: lines kept, from step 1 on.
        dropped: whole lines removed because their step is later.
        torn: whether an unfinished or unreadable line was removed.
    """

    kept: int
    dropped: int
    torn: bool


class MetricsFile:
    """Appends to `metrics.jsonl`: a line is in the kernel's hands when `append` returns.

    Killing the process loses no line. `sync` puts them on the disk; it is called before a
    checkpoint is finished, so that after a power cut no checkpoint is ahead of its metrics.
    """

    def __init__(self, path: Path) -> None:
        self._stream: IO[bytes] = path.open("ab", buffering=0)

    def append(self, step: int, values: Mapping[str, float | int]) -> None:
        """Append the line of `step`."""
        record = {"step": step} | {name: _plain(value) for name, value in values.items()}
        self._stream.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))

    def sync(self) -> None:
        """Make all lines durable."""
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Make all lines durable and close the file."""
        self.sync()
        self._stream.close()


def cut_metrics(path: Path, step: int) -> Cut:
    """Keep the lines up to `step`, and repair the last line if it was torn.

    The file is replaced as a whole, and only if something has to go; a missing one is made.
    """
    kept: list[bytes] = []
    dropped, torn = 0, False
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        at = _step(line)
        if at is None:
            torn = True
        elif at <= step:
            kept.append(line)
        else:
            dropped += 1
    if dropped or torn or not path.exists():
        with atomic_writer(path) as stream:
            stream.writelines(kept)
    return Cut(len(kept), dropped, torn)


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of `metrics.jsonl` in order; a torn last line is left out."""
    with path.open("rb") as stream:
        for line in stream:
            if _step(line) is not None:
                record: dict[str, Any] = orjson.loads(line)
                yield {name: _number(value) for name, value in record.items()}


def _step(line: bytes) -> int | None:
    """The step of a whole line, or None for one that was torn."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) and line.endswith(b"\n") else None


def _plain(value: float | int) -> Value:
    """`value` as JSON can hold it."""
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _number(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value
