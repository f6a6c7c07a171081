"""Blocks of rows through the refiner, in one process or in several, always in input order."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import get_context

from posttrain_cli.data.reader import Row, read_rows
from posttrain_cli.data.refine import Batch, Refiner, Steps
from posttrain_cli.errors import RunError

BLOCK = 512  # rows worked on at once
_AHEAD = 2  # blocks waiting for each worker
_refiner: Refiner | None = None


def gather(
    files: Sequence[str], steps: Steps, encoding: str | None, workers: int
) -> Iterator[Batch]:
    """Refine every row of `files`; the batches come in input order whatever `workers` is.

    Raises:
        RunError: a worker process was killed.
    """
    if workers == 1:
        refiner = Refiner(steps)
        for path, rows in _blocks(files, encoding):
            yield refiner.refine(path, rows)
        return
    Refiner(steps)  # mistakes in the options show here, not in every worker
    pool = ProcessPoolExecutor(
        workers, get_context("spawn"), initializer=_start, initargs=(steps, os.getpid())
    )
    waiting: deque[Future[Batch]] = deque()
    try:
        for path, rows in _blocks(files, encoding):
            waiting.append(pool.submit(_refine, path, rows))
            if len(waiting) > _AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise RunError(
            "a worker process ended before its work was done",
            hint="it was probably killed for memory; try fewer `--workers`",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _blocks(files: Sequence[str], encoding: str | None) -> Iterator[tuple[str, list[Row]]]:
    for path in files:
        rows = read_rows(path, encoding)
        while block := list(islice(rows, BLOCK)):
            yield path, block


def _start(steps: Steps, parent: int) -> None:
    """Prepare a worker process, which ends when its parent is gone."""
    global _refiner
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _refiner = Refiner(steps)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _refine(path: str, rows: list[Row]) -> Batch:
    assert _refiner is not None
    return _refiner.refine(path, rows)
