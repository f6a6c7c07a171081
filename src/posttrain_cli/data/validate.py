"""`validate`: every row of every file against the contract, counted and placed exactly.

Order of work: for each file what it is (`sniff`), which kind of record it holds, its blocks over
worker processes (`checkfile`, `workers`, `blocks`); then what only the whole can tell (`whole`).
The report does not depend on the number of workers or on where blocks are cut.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from posttrain_cli.data.blocks import Checks
from posttrain_cli.data.checkfile import check_file, head_kind
from posttrain_cli.data.contract import Contract
from posttrain_cli.data.filestate import FileState
from posttrain_cli.data.pool import default_workers
from posttrain_cli.data.reader import finding, read_rows
from posttrain_cli.data.records import Keys, Kind
from posttrain_cli.data.sniff import look
from posttrain_cli.data.stats import Statistics
from posttrain_cli.data.whole import Whole
from posttrain_cli.data.workers import RANGE, Rules
from posttrain_cli.diagnostics import CODES, Finding, select_codes
from posttrain_cli.errors import DataError, UsageError

if TYPE_CHECKING:
    from posttrain_cli.data.contamination import Benchmark
    from posttrain_cli.data.tokencheck import TokenChecks

_SAMPLE = 512  # rows whose token lengths are measured for the statistics


@dataclass(frozen=True, slots=True)
class ValidateOptions:
    """What `validate` is asked.

    Attributes:
        kind: of the records; auto looks at the first of each file.
        keys: names of the fields, and whether chat lists are allowed.
        tokenizer: folder of a tokenizer; turns on the token checks.
        template: as in `load_tokenizer`.
        max_tokens: tokens a row may have; without a tokenizer what exceeds it is estimated.
        against: files of the other split.
        decontaminate: benchmark files that rows must not overlap.
        near_duplicates: whether PTC304 is looked for.
        select: codes (or their beginnings) that count; all if empty.
        ignore: codes that do not count.
        strict: whether warnings count as errors.
        max_findings: how many findings the report holds; counts are always complete.
        encoding: codec of text files; UTF-8 if absent.
        workers: processes; None for one a processor.
        block_size: bytes of a file in one task.
    """

    kind: Literal["auto", "sft", "preference", "prompt"] = "auto"
    keys: Keys = field(default_factory=Keys)
    tokenizer: str | None = None
    template: str = "tokenizer"
    max_tokens: int = 2048
    against: tuple[str, ...] = ()
    decontaminate: tuple[str, ...] = ()
    near_duplicates: bool = False
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    strict: bool = False
    max_findings: int | None = None
    encoding: str | None = None
    workers: int | None = None
    block_size: int = RANGE


@dataclass(frozen=True, slots=True)
class FileReport:
    """One file: what it holds. `bad_rows` are records with an error."""

    path: str
    kind: Kind | None
    sha256: str
    rows: int
    good_rows: int
    bad_rows: int
    blank_lines: int


@dataclass(frozen=True, slots=True)
class Report:
    """The verdict on all files.

    Attributes:
        files: one entry a file, in order.
        counts: findings by code, complete.
        findings: in the order of files and lines; at most `max_findings`.
        stats: lengths, longest rows, duplicates, what a token limit would cut.
        ok: whether no error was found (no warning either, if strict).
    """

    files: list[FileReport]
    counts: dict[str, int]
    findings: list[Finding]
    stats: dict[str, Any]
    ok: bool

    def as_json(self) -> dict[str, Any]:
        """The JSON form of SPEC §2."""
        found = [
            {
                "path": f.path,
                "line": f.line,
                "column": f.column,
                "row": f.row,
                "code": f.code,
                "severity": f.severity,
                "field": f.field,
                "message": f.message,
                "hint": f.hint,
            }
            for f in self.findings
        ]
        files = [asdict(file) for file in self.files]
        return {
            "files": files,
            "counts": self.counts,
            "findings": found,
            "stats": self.stats,
            "ok": self.ok,
        }


def validate(files: Sequence[str], options: ValidateOptions | None = None) -> Report:
    """Check `files` (single files, as `storage.expand` names them).

    Raises:
        UsageError: a file cannot be opened, or an option cannot be used.
        DataError: no row of the other split can be compared.
    """
    options = options or ValidateOptions()
    if not files:
        raise UsageError("no files to check", hint="ptc validate FILE...")
    wanted = select_codes(options.select, options.ignore)
    errors = frozenset(c for c in wanted if options.strict or CODES[c].severity == "error")
    statistics, tokens, benchmark = Statistics(), _token_checks(options), _benchmark(options)
    states: list[FileState] = []
    with Whole(wanted, errors) as whole:
        reference = _read_reference(options, whole)
        base = sum(state.rows for state in reference)
        run = _Run(options, wanted, errors, whole, statistics, tokens, benchmark)
        for path in files:
            states.append(_read(path, base, run))
            base += states[-1].rows
        duplicates = whole.report(reference, states)
    stats = statistics.as_json(states, duplicates, options.max_tokens)
    if tokens is not None:
        over = sum(state.counts["PTC401"] for state in states)
        stats["tokens"] = {"rows_over": over, **_sample_tokens(states, options, tokens)}
    return _report(states, errors, stats, options.max_findings)


@dataclass(frozen=True, slots=True)
class _Run:
    """What is the same for every file of one side."""

    options: ValidateOptions
    wanted: frozenset[str]
    errors: frozenset[str]
    whole: Whole
    statistics: Statistics
    tokens: TokenChecks | None = None
    benchmark: Benchmark | None = None

    @property
    def controls(self) -> tuple[str, ...]:
        """Control texts of the tokenizer, if there is one."""
        return self.tokens.tokenizer.control_texts if self.tokens else ()


def _token_checks(options: ValidateOptions) -> TokenChecks | None:
    if options.tokenizer is None:
        return None
    from posttrain_cli.data.tokencheck import TokenChecks

    return TokenChecks(options.tokenizer, options.template, options.max_tokens)


def _benchmark(options: ValidateOptions) -> Benchmark | None:
    if not options.decontaminate:
        return None
    from posttrain_cli.data.contamination import read_benchmark

    return read_benchmark(options.decontaminate)


def _read_reference(options: ValidateOptions, whole: Whole) -> list[FileState]:
    """Take in the rows of the other split, which is not checked itself."""
    reference: list[FileState] = []
    run = _Run(options, frozenset(), frozenset(), whole, Statistics())
    for path in options.against:
        reference.append(_read(path, sum(state.rows for state in reference), run))
    if options.against and whole.comparable == 0:
        raise DataError(
            f"no row of {', '.join(f'`{path}`' for path in options.against)} can be compared",
            hint="check that file by itself with `ptc validate`",
        )
    return reference


def _read(path: str, base: int, run: _Run) -> FileState:
    """Check one file; its rows follow `base` others."""
    options = run.options
    seen = look(path, options.encoding)
    kind: Kind | None
    if options.kind != "auto":
        kind = options.kind
    else:
        kind = None if seen.fault else head_kind(path, options.encoding, options.keys)
    contract = Contract(kind or "sft", options.keys, run.controls)
    near = options.near_duplicates
    checks = Checks(contract, options.encoding, near, run.tokens, run.benchmark)
    rules = Rules(checks, run.wanted, run.errors, options.max_findings)
    state = FileState(path, kind, seen.format, base, options.max_findings)
    workers = default_workers() if options.workers is None else options.workers
    for result in check_file(state, seen, rules, workers, options.block_size):
        run.whole.add(result)
        run.statistics.add(result)
    return state


def _sample_tokens(
    states: list[FileState], options: ValidateOptions, tokens: TokenChecks
) -> dict[str, Any]:
    """Token statistics of the first good rows of the files."""
    from posttrain_cli.data.tokencheck import token_statistics

    contract = Contract(states[0].kind or "sft", options.keys)
    records = (
        row.record
        for state in states
        if state.kind == contract.kind
        for row in read_rows(state.path, options.encoding)
        if row.record is not None and not state.is_bad(row.row)
    )
    return token_statistics(list(itertools.islice(records, _SAMPLE)), contract, tokens)


def _report(
    states: list[FileState], errors: frozenset[str], stats: dict[str, Any], limit: int | None
) -> Report:
    counts: Counter[str] = Counter()
    findings: list[Finding] = []
    for state in states:
        counts += state.counts
        room = None if limit is None else max(0, limit - len(findings))
        findings += [
            finding(state.path, note.problem, note.column, note.line, note.row)
            for note in state.all_notes()[:room]
        ]
    files = [
        FileReport(
            path=state.path,
            kind=state.kind,
            sha256=state.sha256,
            rows=state.rows,
            good_rows=state.rows - state.bad_rows,
            bad_rows=state.bad_rows,
            blank_lines=state.blank,
        )
        for state in states
    ]
    found = {code: counts[code] for code in sorted(counts)}
    return Report(files, found, findings, stats, ok=not errors & found.keys())
