"""Read the log files that workers write: follow one as it grows, quote the end of one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_POLL = 0.02  # seconds between two looks at a log
_TAIL = 15  # lines that are quoted
_TAIL_BYTES = 16384


@contextmanager
def following(log: Path, start: int, follow: Callable[[str], None]) -> Iterator[None]:
    """Pass each line that is written to `log` while the block runs to `follow`, from a thread.

    Args:
        log: a file that others append to.
        start: byte from which on lines are new.
        follow: called without the line end; when its reader has gone away (a closed pipe), the
            following ends and the block goes on.
    """
    over = threading.Event()
    thread = threading.Thread(target=_follow, args=(log, start, over, follow), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2.0)


def last_lines(log: Path, start: int) -> str:
    """The last lines written to `log` from byte `start` on."""
    with log.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(start, size - _TAIL_BYTES))
        lines = stream.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-_TAIL:])


def _follow(log: Path, start: int, over: threading.Event, follow: Callable[[str], None]) -> None:
    rest = b""
    with log.open("rb") as stream, suppress(BrokenPipeError):
        stream.seek(start)
        while True:
            last = over.is_set()
            chunk = stream.read()
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                follow(line.decode(errors="replace"))
            if last and not chunk:
                break
            if not chunk:
                over.wait(_POLL)
        if rest:
            follow(rest.decode(errors="replace"))
