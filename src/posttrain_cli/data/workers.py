"""Blocks of a file over worker processes; results come back in the order of the file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from posttrain_cli.data.blocks import Checks, check_lines
from posttrain_cli.data.pool import in_order
from posttrain_cli.data.ranges import lines_of_range
from posttrain_cli.data.tally import Result, Tally

RANGE = 16 << 20  # bytes of a file in one task
SMALL = 8 << 20  # files below this are not worth a pool


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


def ranges(path: str, size: int, block: int) -> list[Block]:
    """The byte ranges of a local file of `size` bytes."""
    return [Block(path, start, min(start + block, size)) for start in range(0, size, block)]


def check_block(block: Block, rules: Rules, digest: Any = None) -> Result:
    """Check one block in this process; a hashlib object gets every byte of a range on the way."""
    tally = rules.tally()
    if block.lines is not None:
        check_lines(block.lines, block.start == 0, rules.checks, tally)
    else:
        at_start = block.start == 0
        for lines in lines_of_range(block.path, block.start, block.end):
            if digest is not None:
                digest.update(lines)
            check_lines(lines, at_start, rules.checks, tally)
            at_start = False
    return tally.result()


def check_blocks(blocks: Iterable[Block], rules: Rules, workers: int) -> Iterator[Result]:
    """Check blocks in order, over `workers` processes if there are more than one.

    Raises:
        RunError: a worker process was killed, most likely for memory.
    """
    return in_order(partial(_check_with, rules), blocks, workers)


def _check_with(rules: Rules) -> Callable[[Block], Result]:
    return partial(check_block, rules=rules)
