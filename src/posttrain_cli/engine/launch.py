"""Start the local workers of a run, watch them, and tell the truth about how they ended.

The parent imports no torch. Each worker is a process in its own session with its own log file,
so it can save and speak after the parent is gone. The first rank that fails decides the error;
a signal of our own is forwarded once, and a second one kills.

    launch(argv, n) ─ spawn ─ watch ─┬─ all ended with 0          → return 0
                                     ├─ a rank failed             → DataError, UsageError, RunError
                                     └─ SIGINT, SIGTERM, SIGHUP   → Interrupted (128 + n)
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from posttrain_cli.engine.logs import following, last_lines
from posttrain_cli.engine.worker import (
    EXPLAINED,
    PARENT,
    SCRATCH,
    STORE,
    Report,
    read_report,
    report_path,
)
from posttrain_cli.errors import Interrupted, RunError, UsageError

_POLL = 0.02  # seconds between two looks at the workers
_SETTLE = 0.3  # seconds for the cause to show up when a mere consequence was seen first
_AGAIN = 0.5  # a second signal within this many seconds is the same key press, delivered twice
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class NodePlan:
    """This machine's place among several.

    Attributes:
        nodes: how many machines take part, each with the same number of processes.
        rank: number of this machine, from 0.
        endpoint: `host:port` of machine 0, where all processes meet.
    """

    nodes: int
    rank: int
    endpoint: str

    def address(self) -> tuple[str, str]:
        """Host and port of `endpoint`; UsageError when it has another form."""
        host, colon, port = self.endpoint.rpartition(":")
        if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
            raise UsageError(
                f"`--rdzv-endpoint {self.endpoint}` is not of the form `host:port`",
                hint="name machine 0 and a free port there, such as `node0:29400`",
            )
        if not 0 <= self.rank < self.nodes:
            raise UsageError(
                f"`--node-rank {self.rank}` is not below `--nnodes {self.nodes}`",
                hint="the machines are numbered from 0",
            )
        return host.strip("[]"), port


@dataclass(frozen=True, slots=True)
class _Worker:
    """One started process; its log from byte `log_start` on is of this session."""

    rank: int
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    report: Path


@dataclass(frozen=True, slots=True)
class _Ending:
    """How one worker ended: its return code (negative: signal) and what it reported."""

    worker: _Worker
    code: int
    report: Report | None


@dataclass(slots=True)
class _Signals:
    """What this process was told: the first signal, and whether somebody insisted."""

    first: int = 0
    since: float = 0.0
    insisted: bool = False

    def handle(self, signum: int, _frame: FrameType | None) -> None:
        """Note the signal; `launch` acts on it between two looks at the workers."""
        if not self.first:
            self.first, self.since = signum, time.monotonic()
        elif time.monotonic() - self.since > _AGAIN:
            self.insisted = True


def launch(
    argv: Sequence[str],
    n: int,
    *,
    log_dir: Path,
    env: Mapping[str, str],
    grace: float = 120.0,
    fail_grace: float = 10.0,
    follow: Callable[[str], None],
    node: NodePlan | None = None,
) -> int:
    """Run `argv` in `n` processes until all have ended; return 0.

    Args:
        argv: the command of a worker, whose process calls `worker.run_worker`.
        n: processes on this machine.
        log_dir: folder of `rank-N.log`; each worker appends its stdout and stderr.
        env: added to the environment, stronger than it and than our defaults
            (`PYTHONHASHSEED` belongs here, see `worker_environment`).
        grace: seconds the workers get to save after SIGINT or SIGTERM.
        fail_grace: seconds the other ranks get to end after one failed.
        follow: called with each new line of this machine's first rank, from a thread.
        node: this machine's place among several; None for one machine.

    Raises:
        DataError, UsageError, RunError: as the first failing rank reported it, or RunError with
            that rank's signal or exit code and the end of its log.
        Interrupted: this process or the workers were told to stop by a signal.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ptc-") as scratch, _listening() as signals:
        shared = _shared_environment(n, Path(scratch), node) | dict(env)
        first_rank = node.rank * n if node else 0
        workers: list[_Worker] = []
        try:
            for local_rank in range(n):
                ranks = {"RANK": str(first_rank + local_rank), "LOCAL_RANK": str(local_rank)}
                workers.append(_start(argv, shared | ranks, log_dir, Path(scratch)))
            with following(workers[0].log, workers[0].log_start, follow):
                _Watch(workers, signals, grace, fail_grace).run()
        finally:
            _send(workers, signal.SIGKILL)
            for each in workers:
                each.process.wait()
    return 0


def worker_environment(seed: int, n: int) -> dict[str, str]:
    """What must be fixed before a worker's Python starts, for results that repeat.

    Args:
        seed: becomes `PYTHONHASHSEED`, which has no effect once an interpreter runs.
        n: processes on this machine; they share its cores evenly.

    Returns:
        Variables for `launch(env=...)`; the user's own OMP and cuBLAS settings are kept.
    """
    threads = max(1, _cores() // n)
    return {
        "PYTHONHASHSEED": str(seed),
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }


def _cores() -> int:
    """Cores this process may use, which containers and batch systems limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _shared_environment(n: int, scratch: Path, node: NodePlan | None) -> dict[str, str]:
    """Environment that all workers of this machine share."""
    shared = dict(os.environ) | worker_environment(0, n)
    shared |= {
        "WORLD_SIZE": str(n * (node.nodes if node else 1)),
        "LOCAL_WORLD_SIZE": str(n),
        "GROUP_RANK": str(node.rank if node else 0),
        "PYTHONUNBUFFERED": "1",
        SCRATCH: str(scratch),
        PARENT: str(os.getpid()),
    }
    if node:
        shared["MASTER_ADDR"], shared["MASTER_PORT"] = node.address()
    else:
        shared[STORE] = str(scratch / "store")
        if Path("/sys/class/net/lo").exists():  # no host name has to resolve on one machine
            shared.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return shared


def _start(argv: Sequence[str], env: dict[str, str], log_dir: Path, scratch: Path) -> _Worker:
    """Start one worker in its own session, appending to its own log file."""
    rank = int(env["RANK"])
    log = log_dir / f"rank-{rank}.log"
    with log.open("ab") as stream:
        start = stream.tell()
        process = subprocess.Popen(
            list(argv),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            close_fds=False,  # only what was made inheritable on purpose: the run's lock
        )
    return _Worker(rank, process, log, start, report_path(scratch, rank))


@dataclass(slots=True)
class _Watch:
    """The loop that looks at the workers until all have ended."""

    workers: list[_Worker]
    signals: _Signals
    grace: float
    fail_grace: float
    deadline: float = float("inf")
    stopping: int = 0  # the signal that all workers were told to stop with
    killed: bool = False
    failures: list[_Ending] = field(default_factory=list)

    def run(self) -> None:
        """Wait for all workers; raise what the run ended with."""
        while len(endings := self._endings()) < len(self.workers):
            self._react(endings)
            time.sleep(_POLL)
        if not self.failures and not self.killed:
            self.failures = [each for each in endings if self._failed(each)]
        if self.failures:
            raise _error(min(self.failures, key=_suspicion))
        if any(each.code for each in endings):
            raise _interrupted(endings, self.stopping or self.signals.first, self.killed)

    def _react(self, endings: list[_Ending]) -> None:
        """Pass on a signal, end the others after a failure, kill when time is over."""
        if self.signals.insisted or time.monotonic() >= self.deadline:
            self.killed = True
            _send(self.workers, signal.SIGKILL)
        elif self.signals.first and not self.stopping:
            self._stop(self.signals.first)
        elif not self.failures and any(map(self._failed, endings)):
            self._fail()
        elif not self.stopping and (told := [s for e in endings if (s := _stopped_by(e))]):
            self._stop(told[0])

    def _stop(self, signum: int) -> None:
        """Tell every worker to save and end."""
        self.stopping = signum
        self.deadline = min(self.deadline, time.monotonic() + self.grace)
        _send(self.workers, signal.SIGTERM if signum == signal.SIGHUP else signum)

    def _fail(self) -> None:
        """Note who failed, wait a moment for the cause if need be, and end the rest."""
        until = time.monotonic() + _SETTLE
        while True:
            endings = self._endings()
            self.failures = [each for each in endings if self._failed(each)]
            cause_known = min(map(_suspicion, self.failures))[0] < _CONSEQUENCE
            if cause_known or len(endings) == len(self.workers) or time.monotonic() > until:
                break
            time.sleep(_POLL)
        self.deadline = min(self.deadline, time.monotonic() + self.fail_grace)
        _send(self.workers, signal.SIGTERM)

    def _endings(self) -> list[_Ending]:
        ended = ((each, each.process.poll()) for each in self.workers)
        return [
            _Ending(each, code, read_report(each.report) if code else None)
            for each, code in ended
            if code is not None
        ]

    def _failed(self, ending: _Ending) -> bool:
        """Neither done, nor stopped on purpose, nor ended by the very signal it was told."""
        stopping = self.stopping or self.signals.first
        told = {stopping, signal.SIGTERM} if stopping else set()
        by_signal = -ending.code if ending.code < 0 else ending.code - 128
        return bool(ending.code) and not _stopped_by(ending) and by_signal not in told


def _stopped_by(ending: _Ending) -> int:
    """The signal after which this worker saved and ended on purpose, or 0."""
    report = ending.report
    return report.signum if report and report.kind == "Interrupted" else 0


_CONSEQUENCE = 2


def _suspicion(ending: _Ending) -> tuple[int, float]:
    """Sort key that puts the likeliest cause first: its class, then when it was reported."""
    report = ending.report
    if report and report.kind in EXPLAINED:
        return 0, report.time
    if ending.code < 0 and -ending.code not in (signal.SIGABRT, signal.SIGTERM):
        return 1, 0.0
    lost_peer = ending.code < 0 or (report is not None and report.kind == "LostPeer")
    return (3 if lost_peer else _CONSEQUENCE), report.time if report else 0.0


def _error(ending: _Ending) -> Exception:
    """The exception that explains a failed worker."""
    each, report = ending.worker, ending.report
    if report and report.kind in EXPLAINED:
        return EXPLAINED[report.kind](report)
    if report:
        what = f"rank {each.rank} failed: {report.message}"
    elif ending.code < 0:
        what = f"rank {each.rank} was killed by {signal.Signals(-ending.code).name}"
    else:
        what = f"rank {each.rank} ended with code {ending.code}"
    if ending.code == -signal.SIGKILL:
        what += ", which is what the kernel does when memory runs out"
    tail = last_lines(each.log, each.log_start)
    said = f"; it ends:\n{tail}" if tail else ", which is empty"
    return RunError(what, hint=f"its log is `{each.log.absolute()}`{said}")


def _interrupted(endings: list[_Ending], signum: int, killed: bool) -> Interrupted:
    """The exception of a run that was told to stop."""
    if killed:
        name = signal.Signals(signum).name
        return Interrupted(
            signum,
            f"stopped by {name} and killed before it had saved",
            hint="the newest whole checkpoint counts: `ptc resume` continues from there",
        )
    reports = [each.report for each in endings if each.report and each.report.message]
    if not reports:
        return Interrupted(signum)
    return Interrupted(signum, reports[0].message, reports[0].hint)


def _send(workers: Sequence[_Worker], signum: int) -> None:
    """Send `signum` to the process groups of `workers`; SIGKILL also reaches what they left."""
    for each in workers:
        if signum == signal.SIGKILL or each.process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(each.process.pid, signum)


@contextmanager
def _listening() -> Iterator[_Signals]:
    """Take over the signals that end a run, and give the old handlers back."""
    signals = _Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    heard = [each for each in _SIGNALS if signal.getsignal(each) != signal.SIG_IGN]  # nohup, `&`
    old = {signum: signal.signal(signum, signals.handle) for signum in heard}
    try:
        yield signals
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)
