"""Blocks of rows through the refiner, in one process or in several, always in input order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice

from posttrain_cli.data import storage
from posttrain_cli.data.encoding import transcoded
from posttrain_cli.data.linerows import Block, count_rows
from posttrain_cli.data.pool import in_order
from posttrain_cli.data.ranges import lines_of_stream
from posttrain_cli.data.reader import ends_early, read_rows
from posttrain_cli.data.refine import Batch, Refiner, Steps
from posttrain_cli.data.sniff import look

ROWS = 512  # rows worked on at once in formats that are read row by row


def gather(
    files: Sequence[str], steps: Steps, encoding: str | None, workers: int
) -> Iterator[Batch]:
    """Refine every row of `files`; the batches come in input order whatever `workers` is.

    Raises:
        RunError: a worker process was killed.
    """
    return in_order(partial(_refine_with, steps), _blocks(files, encoding), workers)


def _refine_with(steps: Steps) -> Callable[[Block], Batch]:
    return Refiner(steps).refine


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
