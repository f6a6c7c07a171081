"""Blocks of a file over worker processes; results come back in the order of the file."""

from __future__ import annotations

import collections
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from posttrain_cli.data.blocks import Checks, check_lines
from posttrain_cli.data.ranges import lines_of_range
from posttrain_cli.data.tally import Result, Tally
from posttrain_cli.errors import RunError

RANGE = 16 << 20  # bytes of a file in one task
SMALL = 8 << 20  # files below this are not worth a pool
_AHEAD = 2  # tasks a worker may have waiting


@dataclass(frozen=True, slots=True)
class Rules:
    """What a worker needs to know beside the bytes: the checks, and which codes count."""

    checks: Checks
    wanted: frozenset[str]
    errors: frozenset[str]
    limit: int | None = None

    def tally(self) -> Tally:
        """An empty tally under these rules."""
        return Tally(self.wanted, self.errors, self.limit)


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a file: a byte range of `path`, or the lines themselves."""

    path: str
    start: int = 0
    end: int = 0
    lines: bytes | None = None


def default_workers() -> int:
    """The processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ranges(path: str, size: int, block: int) -> list[Block]:
    """The byte ranges of a local file of `size` bytes."""
    return [Block(path, start, min(start + block, size)) for start in range(0, size, block)]


def check_block(block: Block, rules: Rules) -> Result:
    """Check one block in this process."""
    tally = rules.tally()
    if block.lines is not None:
        check_lines(block.lines, block.start == 0, rules.checks, tally)
    else:
        at_start = block.start == 0
        for lines in lines_of_range(block.path, block.start, block.end):
            check_lines(lines, at_start, rules.checks, tally)
            at_start = False
    return tally.result()


def check_blocks(blocks: Iterable[Block], rules: Rules, workers: int) -> Iterator[Result]:
    """Check blocks in order, over `workers` processes if there are more than one.

    Raises:
        RunError: a worker process was killed, most likely for memory.
    """
    if workers <= 1:
        for block in blocks:
            yield check_block(block, rules)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, _start, (rules,)) as pool:
        waiting: collections.deque[Future[Result]] = collections.deque()
        try:
            for block in blocks:
                waiting.append(pool.submit(_run, block))
                if len(waiting) >= workers * _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise RunError(
                "a worker process was killed while it read the data",
                hint="the machine may be out of memory: try --workers 1",
            ) from error
        finally:
            for future in waiting:
                future.cancel()


_rules: Rules | None = None  # of this worker process


def _start(rules: Rules) -> None:
    global _rules
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops the pool
    _rules = rules


def _run(block: Block) -> Result:
    assert _rules is not None
    return check_block(block, _rules)
