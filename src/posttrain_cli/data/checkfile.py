"""One file, block by block: byte ranges of JSON lines over workers, other formats row by row."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from posttrain_cli.data import storage
from posttrain_cli.data.blocks import add_row, finish
from posttrain_cli.data.contract import check_record
from posttrain_cli.data.encoding import is_utf8, transcoded
from posttrain_cli.data.filestate import FileState
from posttrain_cli.data.ranges import lines_of_stream
from posttrain_cli.data.reader import Row, read_rows
from posttrain_cli.data.records import Keys, Kind, detect_kind
from posttrain_cli.data.scan import Problem
from posttrain_cli.data.sniff import Look
from posttrain_cli.data.tally import Result, Tally
from posttrain_cli.data.workers import Block, Rules, check_block, check_blocks, ranges
from posttrain_cli.diagnostics import Finding

SMALL = 8 << 20  # files below this are not worth worker processes
_HEAD_ROWS = 64
_CHUNK = 4096  # rows checked at once in formats that are read row by row
_PIECE = 4 << 20  # bytes of a stream in one task


def head_kind(path: str, encoding: str | None, keys: Keys) -> Kind | None:
    """The kind of most of the first records; None when none can be read."""
    rows = itertools.islice(read_rows(path, encoding), 4 * _HEAD_ROWS)
    records = (row.record for row in rows if row.record is not None)
    kinds = Counter(detect_kind(record, keys) for record in itertools.islice(records, _HEAD_ROWS))
    if not kinds:
        return None
    best: Kind = max(sorted(kinds), key=kinds.__getitem__)
    return best


def check_file(
    state: FileState, look: Look, rules: Rules, workers: int, block: int
) -> Iterator[Result]:
    """Check a file and yield each block's result after adding it to `state`.

    Args:
        state: of the file; gets its counts, its findings and its hash.
        look: what the file is.
        rules: what is checked.
        workers: processes to use at most.
        block: bytes of a byte range.
    """
    if look.fault is not None:
        _note(state, look.fault, rules)
    else:
        if look.format != "jsonl":
            results = _row_results(state, rules)
        elif _only_from_the_start(state.path, rules.checks.encoding):
            results = _stream_results(state, rules, workers)
        else:
            results = _range_results(state, rules, workers, block)
        for result in results:
            state.add(result)
            yield result
        if state.rows == 0 and not state.counts["PTC109"]:
            _note(state, _NO_RECORDS, rules)
    state.sha256 = state.sha256 or storage.sha256(state.path)


_NO_RECORDS = Problem(
    "PTC110", "the file has no records", hint="check the path and the step that wrote the file"
)


def _only_from_the_start(path: str, encoding: str | None) -> bool:
    """Whether the lines of a file cannot be found from the middle of its bytes."""
    return storage.is_remote(path) or storage.is_compressed(path) or not is_utf8(encoding)


def _note(state: FileState, problem: Problem, rules: Rules, line: int = 1) -> None:
    if problem.code in rules.wanted:
        state.add_late(problem, None, line)


def _range_results(state: FileState, rules: Rules, workers: int, block: int) -> Iterator[Result]:
    """Byte ranges of a local file, over workers if that is worth it."""
    size = Path(state.path).stat().st_size
    blocks = ranges(state.path, size, block)
    if workers > 1 and size > SMALL:
        with ThreadPoolExecutor(1) as hasher:
            digest = hasher.submit(storage.sha256, state.path)
            yield from check_blocks(blocks, rules, workers)
            state.sha256 = digest.result()
        return
    read = hashlib.sha256()
    for one in blocks:
        yield check_block(one, rules, read)
    state.sha256 = read.hexdigest()


def _stream_results(state: FileState, rules: Rules, workers: int) -> Iterator[Result]:
    """Lines of a stream that can only be read from its start, hashed on the way."""
    damage: list[storage.DamagedStream] = []
    digest = hashlib.sha256()

    def blocks() -> Iterator[Block]:
        start = 0
        with storage.open_bytes(state.path, digest) as raw:
            try:
                for lines in lines_of_stream(transcoded(raw, rules.checks.encoding), _PIECE):
                    yield Block(state.path, start, lines=lines)
                    start += len(lines)
            except storage.DamagedStream as error:
                damage.append(error)

    yield from check_blocks(blocks(), rules, workers)
    if damage:
        problem = Problem(
            "PTC109", f"{damage[0].message} after {state.rows:,} whole records",
            hint="fetch or write the file again; nothing behind this place was checked",
        )  # fmt: skip
        _note(state, problem, rules, state.lines + 1)
    else:
        state.sha256 = digest.hexdigest()


def _row_results(state: FileState, rules: Rules) -> Iterator[Result]:
    """Rows of a format that one process reads in order."""
    rows = read_rows(state.path, rules.checks.encoding)
    first = lines = 0
    while chunk := list(itertools.islice(rows, _CHUNK)):
        tally = rules.tally()
        tally.placed, tally.first = True, first
        for row in chunk:
            _add(row, state, rules, tally)
        finish(rules.checks, tally)
        tally.lines = (chunk[-1].line or lines) - lines
        first, lines = first + tally.rows, lines + tally.lines
        yield tally.result()


def _add(row: Row, state: FileState, rules: Rules, tally: Tally) -> None:
    problems = [(found.column, _problem(found)) for found in row.findings]
    if row.row <= tally.first + tally.rows:  # no record of its own: a blank line, a fault between
        for finding, (column, problem) in zip(row.findings, problems, strict=True):
            tally.note(problem, finding.line, finding.row, column)
            if finding.code == "PTC106" and row.line is not None:
                tally.blanks.append(row.line)
        return
    if row.record is not None:
        column = 1 if state.has_lines else None
        broken = check_record(row.record, rules.checks.contract)
        problems += [(column, problem) for problem in broken]
    if state.has_lines and row.line is not None:
        tally.starts.append(row.line)
    add_row(row.record, problems, row.line, rules.checks, tally)


def _problem(found: Finding) -> Problem:
    path = (found.field,) if found.field else ()
    return Problem(found.code, found.message, path, hint=found.hint)
