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

from posttrain_cli.data import storage
from posttrain_cli.data.encoding import transcoded
from posttrain_cli.data.linerows import Block, count_rows
from posttrain_cli.data.ranges import lines_of_stream
from posttrain_cli.data.reader import ends_early, read_rows
from posttrain_cli.data.refine import Batch, Refiner, Steps
from posttrain_cli.data.sniff import look
from posttrain_cli.errors import RunError

ROWS = 512  # rows worked on at once in formats that are read row by row
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
        for block in _blocks(files, encoding):
            yield refiner.refine(block)
        return
    Refiner(steps)  # mistakes in the options show here, not in every worker
    pool = ProcessPoolExecutor(
        workers, get_context("spawn"), initializer=_start, initargs=(steps, os.getpid())
    )
    waiting: deque[Future[Batch]] = deque()
    try:
        for block in _blocks(files, encoding):
            waiting.append(pool.submit(_refine, block))
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


def _blocks(files: Sequence[str], encoding: str | None) -> Iterator[Block]:
    for path in files:
        seen = look(path, encoding)
        if seen.fault is None and seen.format == "jsonl":
            yield from _line_blocks(path, encoding)
            continue
        rows = read_rows(path, encoding)
        while block := tuple(islice(rows, ROWS)):
            yield Block(path, rows=block)


def _line_blocks(path: str, encoding: str | None) -> Iterator[Block]:
    """Blocks of lines; a stream that is damaged ends with a row that says so."""
    line = row = 0
    with storage.open_bytes(path) as raw:
        try:
            for lines in lines_of_stream(transcoded(raw, encoding)):
                yield Block(path, lines, line=line, row=row, encoding=encoding)
                line += lines.count(b"\n")
                row += count_rows(lines)
        except storage.DamagedStream as damage:
            yield Block(path, rows=(ends_early(path, damage, line + 1, row),))


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


def _refine(block: Block) -> Batch:
    assert _refiner is not None
    return _refiner.refine(block)
