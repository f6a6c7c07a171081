"""One user at a time for a run directory: a lock that no crash can leave behind.

The kernel holds the lock for as long as a process keeps the file open. The workers of a run
inherit it, so the run stays locked until the last of them has ended, whatever happens to their
parent. A moved directory keeps its lock, a copied one has none.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from posttrain_cli.errors import UsageError

_NAME = ".lock"
_POLL = 0.1
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def run_lock(path: Path, say: Callable[[str], None], wait: float = 60.0) -> Iterator[None]:
    """Hold the lock of the run directory `path` while the block runs; it is made if absent.

    Processes started inside the block with inheritable files hold it too, until they end.

    Args:
        path: the run directory.
        say: called with one sentence when it has to wait, or when locks do not work here.
        wait: seconds to wait for processes that are still ending.

    Raises:
        UsageError: another process still holds it after `wait` seconds (it is named), or the
            directory cannot be made or written.
    """
    lock = path / _NAME
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UsageError(
            f"`{path.absolute()}` cannot be used as a run directory: {error.strerror}",
            hint="name a directory that you may write with `--output-dir`",
        ) from error
    try:
        _acquire(descriptor, lock, say, wait)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        os.set_inheritable(descriptor, True)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, lock: Path, say: Callable[[str], None], wait: float) -> None:
    """Take the lock, waiting for those that hold it."""
    deadline = time.monotonic() + wait
    waiting = False
    while not _try(descriptor, lock, say):
        if time.monotonic() >= deadline:
            raise UsageError(
                f"`{lock.parent.absolute()}` is in use by {_holders(lock)}",
                hint="wait until it has ended, or end it",
            )
        if not waiting:
            say(f"waiting for {_holders(lock)} to leave `{lock.parent}`")
            waiting = True
        time.sleep(_POLL)


def _try(descriptor: int, lock: Path, say: Callable[[str], None]) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        say(f"the file system of `{lock.parent}` has no locks: do not start a run there twice")
    return True


def _holders(lock: Path) -> str:
    """The processes that hold the lock, with their commands, as words."""
    wanted = lock.stat()
    found = [
        f"process {process.name} ({_command(process)})"
        for process in Path("/proc").glob("[0-9]*")
        if int(process.name) != os.getpid() and _holds(process, wanted)
    ]
    return ", ".join(found) or f"process {lock.read_text().strip() or 'unknown'}"


def _holds(process: Path, wanted: os.stat_result) -> bool:
    """Whether `process` (a folder of /proc that we may read) holds a lock on the file."""
    with suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with suppress(OSError):
                info = process / "fdinfo" / descriptor.name
                if os.path.samestat(descriptor.stat(), wanted) and "FLOCK" in info.read_text():
                    return True
    return False


def _command(process: Path) -> str:
    with suppress(OSError):
        words = (process / "cmdline").read_bytes().split(b"\0")
        return b" ".join(words).decode(errors="replace").strip()[:120]
    return "ending"
