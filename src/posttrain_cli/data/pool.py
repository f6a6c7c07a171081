"""Work shared out to processes; results come back in the order of the items."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

from posttrain_cli.errors import RunError

Item = TypeVar("Item")
Result = TypeVar("Result")

_AHEAD = 2  # items that wait for each worker
_work: Callable[[Any], Any] | None = None  # of this worker process


def default_workers() -> int:
    """The processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(
    make: Callable[[], Callable[[Item], Result]], items: Iterable[Item], workers: int
) -> Iterator[Result]:
    """Yield the result of each item, in order, worked on here or in `workers` processes.

    Args:
        make: makes the function that works on an item; called once in each process, so what
            the work needs is read or sent once. It must be picklable, such as a partial of a
            function of a module.
        items: what is worked on.
        workers: processes; with one the work is done in this one.

    Raises:
        RunError: a worker process was killed, most likely for memory.
    """
    work = make()  # mistakes show here, not in every worker
    if workers <= 1:
        yield from map(work, items)
        return
    context = get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_start, initargs=(make, os.getpid()))
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(_run, item))
            if len(waiting) >= _AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise RunError(
            "a worker process was killed before its work was done",
            hint="the machine may be out of memory: try --workers 1",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start(make: Callable[[], Callable[[Any], Any]], parent: int) -> None:
    """Prepare a worker process, which ends when its parent is gone."""
    global _work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops the pool
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _work = make()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _run(item: Any) -> Any:
    assert _work is not None
    return _work(item)
