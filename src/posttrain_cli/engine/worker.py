"""The worker's side of `launch`: die with the parent, and report how it ended.

`run_worker` is what a started process calls first. Its errors reach the parent as a small JSON
file, so that the parent raises the same error without reading logs. Torch is imported by the
body only.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from posttrain_cli.errors import DataError, Interrupted, PtcError, RunError, UsageError
from posttrain_cli.files import atomic_write

SCRATCH = "PTC_SCRATCH"  # folder of the reports, made and removed by the parent
PARENT = "PTC_PARENT"  # process id of the parent
STORE = "PTC_STORE"  # file through which the workers of one machine meet

_PR_SET_PDEATHSIG = 1
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out")


@dataclass(frozen=True, slots=True)
class Report:
    """How a worker ended.

    Attributes:
        kind: DataError, UsageError, RunError, Interrupted, Crash (any other exception) or
            LostPeer (an exception because another rank went away).
        message: what happened.
        hint: what to do about it.
        problems: all mistakes found, for UsageError.
        signum: the signal, for Interrupted.
        time: monotonic clock when it was caught, comparable between processes of a machine.
    """

    kind: str
    message: str
    hint: str = ""
    problems: tuple[str, ...] = ()
    signum: int = 0
    time: float = 0.0


EXPLAINED: dict[str, Callable[[Report], PtcError]] = {
    "DataError": lambda report: DataError(report.message, report.hint),
    "UsageError": lambda report: UsageError(report.message, report.hint, report.problems),
    "RunError": lambda report: RunError(report.message, report.hint),
}


def report_path(scratch: Path, rank: int) -> Path:
    """Where rank `rank` writes its report."""
    return scratch / f"rank-{rank}.json"


def read_report(path: Path) -> Report | None:
    """The report of a worker that ended, or None if it could not write one."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return Report(**values | {"problems": tuple(values["problems"])})


def run_worker(body: Callable[[], None]) -> NoReturn:
    """Run `body` as a worker of `launch` and end the process.

    The process ends at once with the exit code of the error, without exit handlers that could
    wait for ranks that are gone: when `body` returns, everything must be written.
    """
    _die_with_parent()
    code = _guarded(body)
    sys.stdout.flush()
    sys.stderr.flush()
    if os.getppid() != int(os.environ[PARENT]):  # nobody else is left to remove it
        shutil.rmtree(os.environ[SCRATCH], ignore_errors=True)
    os._exit(code)


def _guarded(body: Callable[[], None]) -> int:
    """Run `body`; report what it raises and return the exit code."""
    try:
        body()
    except KeyboardInterrupt:
        return _report(Interrupted(signal.SIGINT))
    except BaseException as error:  # torch's CheckpointException is no Exception
        if not isinstance(error, PtcError):
            traceback.print_exc()
        return _report(error)
    return 0


def _report(error: BaseException) -> int:
    """Write the report of `error` for the parent and return the exit code."""
    now = time.monotonic()
    if isinstance(error, PtcError):
        kind = next(
            name
            for name, known in (
                ("Interrupted", Interrupted),
                ("DataError", DataError),
                ("UsageError", UsageError),
                ("RunError", PtcError),
            )
            if isinstance(error, known)
        )
        problems = error.problems if isinstance(error, UsageError) else ()
        signum = error.exit_code - 128 if isinstance(error, Interrupted) else 0
        report = Report(kind, error.message, error.hint, problems, signum, now)
    else:
        text = f"{type(error).__name__}: {error}".split("\n")[0]
        report = Report("LostPeer" if _lost_peer(error) else "Crash", text, time=now)
    scratch = Path(os.environ[SCRATCH])
    if scratch.is_dir():  # else the parent is gone, and its folder with it
        atomic_write(report_path(scratch, int(os.environ["RANK"])), json.dumps(asdict(report)))
    return int(error.exit_code) if isinstance(error, PtcError) else int(RunError.exit_code)


def _lost_peer(error: BaseException) -> bool:
    """Whether `error` only says that another rank went away."""
    of_torch = type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError")
    return of_torch or any(text in str(error) for text in _LOST_PEER)


def _die_with_parent() -> None:
    """Ask the kernel for SIGTERM when the parent dies; end if it has died already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(os.environ[PARENT]):
        os._exit(128 + signal.SIGTERM)
