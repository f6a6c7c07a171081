"""An output that grows unit by unit and survives a kill: no record is torn, lost or doubled.

While it is written, the records are in `OUT.part`, and `OUT.part.json` says what they were made
with. Each unit of records is one write and one fsync. Started again with the same plan, what
was cut off is removed and the work goes on behind the last whole unit, so that the units are
those of an unbroken attempt; with another plan it is refused. `OUT` itself appears by a rename
when everything is there.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Self

from posttrain_cli.data.lines import decode, encode
from posttrain_cli.errors import UsageError
from posttrain_cli.files import atomic_write, fsync_dir, refuse_existing, sha256_file


class AnswerFile:
    """Records on their way to `target`; a context manager that holds a lock on them.

    Args:
        target: the file that appears at the end.
        plan: everything that decides the records, as JSON values.
        unit: records that are made together.
        overwrite: replace `target`, and forget what an earlier attempt left.

    Raises:
        UsageError: `target` is there, an attempt with another plan is, or one is running.
    """

    def __init__(
        self, target: Path, plan: Mapping[str, Any], unit: int, *, overwrite: bool
    ) -> None:
        refuse_existing(target, overwrite)
        self.target = target
        self.part = target.with_name(f"{target.name}.part")
        self.plan = target.with_name(f"{target.name}.part.json")
        target.parent.mkdir(parents=True, exist_ok=True)
        self._stream: IO[bytes] = self.part.open("ab+")
        try:
            self._lock()
            if overwrite:
                self._stream.truncate(0)
            elif self._size():
                self._compare(plan)
            atomic_write(self.plan, json.dumps(plan, indent=1) + "\n")
            self.done = self._repair(unit)
        except BaseException:
            self._stream.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        if self.part.exists() and not self.part.stat().st_size:
            self._forget()

    def kept(self) -> Iterator[dict[str, Any]]:
        """The records that are there, in order."""
        with self.part.open("rb") as stream:
            yield from map(decode, stream)

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add one unit of records; when this returns they survive a loss of power."""
        self._stream.write(b"".join(encode(record) + b"\n" for record in records))
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def finish(self) -> str:
        """Give the file its name and return its SHA-256."""
        digest = sha256_file(self.part)
        os.replace(self.part, self.target)
        fsync_dir(self.target.parent)
        self.plan.unlink()
        return digest

    def _lock(self) -> None:
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another process is writing `{self.target.absolute()}`",
                hint="wait for it, or name another output",
            ) from None

    def _size(self) -> int:
        return os.fstat(self._stream.fileno()).st_size

    def _compare(self, plan: Mapping[str, Any]) -> None:
        """Refuse to mix the records of two plans in one file."""
        try:
            earlier = json.loads(self.plan.read_bytes())
        except (OSError, ValueError):
            earlier = {}
        wanted = json.loads(json.dumps(plan))
        differing = sorted(
            key for key in wanted.keys() | earlier.keys() if wanted.get(key) != earlier.get(key)
        )
        if differing:
            raise UsageError(
                f"`{self.part.absolute()}` holds the beginning of other answers: "
                f"{', '.join(f'`{key}`' for key in differing)} differed",
                hint="use the same options to go on with it, or pass --overwrite to start anew",
            )

    def _repair(self, unit: int) -> int:
        """Cut off what is behind the last whole unit; return the number of records left."""
        self._stream.seek(0)
        size = kept = read = 0
        for count, line in enumerate(self._stream, 1):
            if not line.endswith(b"\n") or not _is_record(line):
                break
            read += len(line)
            if count % unit == 0:
                size, kept = read, count
        self._stream.truncate(size)
        self._stream.seek(0, os.SEEK_END)
        return kept

    def _forget(self) -> None:
        self.part.unlink()
        self.plan.unlink(missing_ok=True)


def _is_record(line: bytes) -> bool:
    try:
        decode(line)
    except (ValueError, AssertionError):
        return False
    return True
