"""Checking a block of JSON lines: a fast path that only says clean, and an exact second look.

Most rows are parsed by orjson, pass a few cheap tests and are done. Every other row goes to the
contract and, if that finds anything or the text is not plain, to the exact scanner: these two
alone decide what is wrong and where.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from posttrain_cli.data.contract import Contract, check_record, has_rare, is_only_space
from posttrain_cli.data.dedup import SLOTS, signature
from posttrain_cli.data.encoding import BOM
from posttrain_cli.data.reader import BLANK, MARK, count_keys, exact, keys_are_unique
from posttrain_cli.data.records import Refusal
from posttrain_cli.data.rowkeys import digest, row_digests, row_texts
from posttrain_cli.data.scan import Problem
from posttrain_cli.data.suspects import Inspector, token_bytes
from posttrain_cli.data.tally import Tally

if TYPE_CHECKING:
    from posttrain_cli.data.contamination import Benchmark, Overlap
    from posttrain_cli.data.tokencheck import TokenChecks

_NO_KEY = (bytes(16), bytes(16), bytes(16))
_NO_SIGNATURE = bytes(2 * SLOTS)


@dataclass(frozen=True)
class Checks:
    """What is looked for in every row of a file.

    Attributes:
        contract: kind, keys and control texts.
        encoding: codec the file was decoded from, for messages.
        near: whether rows get a signature, for near duplicates.
        tokens: the tokenizer and the limit, for the token checks.
        benchmark: what rows must not overlap.
    """

    contract: Contract
    encoding: str | None = None
    near: bool = False
    tokens: TokenChecks | None = None
    benchmark: Benchmark | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: what is derived from them is made again in each process."""
        return {part.name: getattr(self, part.name) for part in fields(self)}

    @cached_property
    def inspector(self) -> Inspector:
        """The byte tests for blocks of lines."""
        return Inspector(token_bytes(self.contract.tokens))

    @cached_property
    def without_texts(self) -> Contract:
        """The contract for rows whose bytes hold nothing that a text is searched for."""
        return replace(self.contract, texts=False)

    @cached_property
    def only_bytes(self) -> bool:
        """Whether rows need no more than their bytes and fields tested."""
        return not self.near and self.tokens is None and self.benchmark is None

    @cached_property
    def flat_fields(self) -> tuple[str, str, str]:
        """Prompt, answer and other answer of a flat record; where there is no other, again."""
        keys = self.contract.keys
        if self.contract.kind == "preference":
            return keys.prompt, keys.chosen, keys.rejected
        if self.contract.kind == "sft":
            return keys.prompt, keys.response, keys.response
        return "", "", ""  # prompts carry what their reward needs: never flat


def check_lines(block: bytes, at_start: bool, checks: Checks, tally: Tally) -> None:
    """Check a block of whole lines and add what is found to `tally`.

    Args:
        block: bytes of the lines; the last may lack its line feed.
        at_start: whether the block starts the file, where a byte-order mark may stand.
        checks: what to look for.
        tally: collects counts, findings, keys and lengths, lines counted from its own.
    """
    if at_start and block.startswith(BOM):
        tally.note(MARK, 1, None, 1)
        block = block[len(BOM) :]
    lines = list(io.BytesIO(block))
    ends = np.cumsum(np.fromiter(map(len, lines), np.int64, len(lines)))
    counts, looks = checks.inspector.inspect(block, ends)
    loads, flat = orjson.loads, checks.only_bytes
    first, second, third = checks.flat_fields
    paired = second != third
    width = 3 if paired else 2
    digests, sizes, number = tally.digests, tally.sizes, tally.lines
    for line, keys, look in zip(lines, counts.tolist(), looks.tolist(), strict=True):
        number += 1
        try:
            record = loads(line)
        except orjson.JSONDecodeError:
            record = None
        if flat and not look and type(record) is dict:
            prompt, one, other = record.get(first), record.get(second), record.get(third)
            if (
                type(prompt) is str is type(one) is type(other)
                and prompt and one and other
                and not (prompt.isspace() or one.isspace() or other.isspace())
                and (prompt.isascii() or not has_rare(prompt))
                and (one.isascii() or not has_rare(one))
                and (other.isascii() or not has_rare(other))
                and (not paired or _differ(one, other))
                and keys == (width if len(record) == width else count_keys(record))
            ):  # fmt: skip
                texts = prompt.encode(), one.encode(), other.encode() if paired else b""
                sizes.append(len(texts[0]) + len(texts[1]) + len(texts[2]))
                digests += map(digest, texts)
                continue
        tally.lines = number
        _look_again(line, record, keys, look, checks, tally)
    tally.lines = number
    finish(checks, tally)


def _differ(one: str, other: str) -> bool:
    """Whether two texts differ in more than white space."""
    a, b = one[0], other[0]
    if a != b and not a.isspace() and not b.isspace():
        return True
    return one != other and not is_only_space(one, other)


def _look_again(
    line: bytes, record: Any, keys: int, look: bool, checks: Checks, tally: Tally
) -> None:
    """Check a line by the contract, and exactly if that finds anything."""
    found = count_keys(record) if type(record) is dict else -1
    if found >= 0 and (found == keys or keys_are_unique(line)):
        contract = checks.contract if look else checks.without_texts
        if not check_record(record, contract):
            add_row(record, (), tally.lines, checks, tally)
            return
    content = line.removesuffix(b"\n")
    if not content or content.isspace():
        tally.blanks.append(tally.lines)
        tally.note(BLANK, tally.lines, None, 1)
        return
    scanned = exact(content, checks.encoding)
    problems = [(scanned.column(problem), problem) for problem in scanned.problems]
    if scanned.value is not None:
        broken = check_record(scanned.value, checks.contract)
        problems += [(scanned.column(problem), problem) for problem in broken]
    problems.sort(key=lambda at: at[0])
    add_row(scanned.value, problems, tally.lines, checks, tally)


def add_row(
    record: dict[str, Any] | None,
    problems: Sequence[tuple[int | None, Problem]],
    line: int | None,
    checks: Checks,
    tally: Tally,
) -> None:
    """Note what is wrong with the next row, and add its key, its size and its signature.

    Args:
        record: the row, or None when it cannot be read.
        problems: what is wrong, each with its column, in the order of the report.
        line: where the row starts, or None.
        checks: what is looked for.
        tally: where it is added.
    """
    row = tally.first + tally.rows + 1
    bad = [tally.note(problem, line, row, column) for column, problem in problems]
    if any(bad):
        tally.bad.append(row)
    halves = any(problem.code == "PTC108" for _, problem in problems)
    try:
        texts = [] if record is None or halves else row_texts(record, checks.contract)
    except Refusal:
        texts = []
    if record is None or not texts:
        tally.sizes.append(0)
        tally.digests += _NO_KEY
        if checks.near:
            tally.signatures.append(_NO_SIGNATURE)
        return
    tally.sizes.append(sum(len(text.encode()) for text in texts))
    tally.digests += row_digests(record, checks.contract)
    if checks.near:
        tally.signatures.append(signature("\n".join(texts)).tobytes())
    overlap = checks.benchmark.find(texts) if checks.benchmark else None
    if overlap is not None and tally.note(_overlaps(overlap), line, row, 1 if line else None):
        tally.bad.append(row)
    if checks.tokens is not None:
        tally.pending.append((line, row, record))


def finish(checks: Checks, tally: Tally) -> None:
    """Encode the rows that wait for it, in one batch."""
    if checks.tokens is None or not tally.pending:
        return
    from posttrain_cli.data.tokencheck import check_tokens

    records = [record for _, _, record in tally.pending]
    found = check_tokens(records, checks.contract, checks.tokens)
    for (line, row, _), problems in zip(tally.pending, found, strict=True):
        bad = [tally.note_tokens(problem, line, row) for problem in problems]
        if any(bad):
            tally.bad.append(row)
    tally.pending.clear()


def _overlaps(overlap: Overlap) -> Problem:
    return Problem(
        "PTC502", str(overlap), hint="`ptc preprocess --decontaminate FILE` leaves it out"
    )
