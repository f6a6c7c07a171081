"""Rows in, rows out: rename, convert, clean, check, compare with benchmarks, fit.

A block of rows is worked on without looking at any other row, so blocks can be shared out to
processes and the result does not depend on how.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from posttrain_cli.data.clean import Level, clean_value
from posttrain_cli.data.contamination import Benchmark, texts_of
from posttrain_cli.data.contract import Contract, check_record
from posttrain_cli.data.convert import (
    FIELDS,
    Made,
    Preset,
    Refused,
    Target,
    convert,
    opening,
    refused,
)
from posttrain_cli.data.dedup import Signatures, signature
from posttrain_cli.data.fit import CUT, FitOptions, Fitted, Fitter
from posttrain_cli.data.linerows import Block, LineReader, is_flat_and_good
from posttrain_cli.data.lines import encode
from posttrain_cli.data.mapping import Rename, carried, rename
from posttrain_cli.data.reader import Row
from posttrain_cli.data.reasons import Place, Reasons
from posttrain_cli.data.records import Keys
from posttrain_cli.data.rowkeys import row_digests, row_texts
from posttrain_cli.data.split import group_hash
from posttrain_cli.diagnostics import CODES, Finding

Record = dict[str, Any]
BOM_STRIPPED = "byte-order mark stripped"
# Codes by which a row is left out as the user asked, not because something is wrong with it.
POLICY = frozenset({"PTC303", "PTC304", "PTC401", "PTC402", "PTC502"})
FATAL = frozenset({"PTC105", "PTC109"})  # the file as a whole cannot be used


@dataclass(frozen=True, slots=True)
class Steps:
    """What is done to each row; the same in every process.

    Attributes:
        target: the kind of rows to make.
        preset: how the source is read, or None for rows that have the contract's fields.
        renames: `--map`.
        clean: the cleaning level.
        carry: fields to copy, or None for all.
        benchmark: texts that must not be in the rows, or None.
        fit: token limits, or None.
        near: whether signatures for near duplicates are wanted.
        keep_refused: whether dropped rows are handed back with their records.
        split: whether hashes of prompts are wanted.
        shard: (index from 0, number of shards).
    """

    target: Target
    preset: Preset | None = None
    renames: tuple[Rename, ...] = ()
    clean: Level = "safe"
    carry: tuple[str, ...] | None = ()
    benchmark: Benchmark | None = None
    fit: FitOptions | None = None
    near: bool = False
    split: bool = False
    keep_refused: bool = False
    shard: tuple[int, int] = (0, 1)


@dataclass(frozen=True, slots=True)
class Drop:
    """One row, or part of one, that is left out.

    Attributes:
        place: where it stands.
        reason: a code, or a phrase for what a preset passes over.
        message: what was found.
        field: the field concerned.
        hint: what to do about it.
        is_error: whether something is wrong with it, so that `--on-error fail` stops.
        record: the row as it was read, if wanted.
    """

    place: Place
    reason: str
    message: str
    field: str | None
    hint: str
    is_error: bool
    record: Record | None = None

    def finding(self) -> Finding:
        """As a finding, for errors."""
        where = self.place
        return Finding(
            path=where.path,
            code=self.reason,
            message=self.message,
            line=where.line,
            row=where.row,
            field=self.field,
            hint=self.hint,
        )


@dataclass(slots=True)
class Batch:
    """What came of a block of rows.

    Attributes:
        path: the file they stand in.
        rows, blank_lines: rows read and blank lines passed.
        drops: what was left out, in order.
        changed, warnings, left_out: counts of rows; `left_out` by field name.
        lines: kept rows as JSON.
        places: where they stand.
        digests: three for each of them, for `rowkeys.join`.
        groups: (K,) hashes of their prompts, if there is a split.
        tokens: (K, 2) tokens and trained tokens, if there is a tokenizer.
        signatures: (K, SLOTS), if near duplicates are wanted.
        fields: names of all fields seen.
    """

    path: str
    rows: int = 0
    blank_lines: int = 0
    drops: list[Drop] = field(default_factory=list)
    changed: Reasons = field(default_factory=Reasons)
    warnings: Reasons = field(default_factory=Reasons)
    left_out: Reasons = field(default_factory=Reasons)
    lines: list[bytes] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    groups: Any = None
    tokens: Any = None
    signatures: Signatures | None = None
    fields: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Candidate:
    """A row that passed the contract check."""

    place: Place
    record: Record  # contract fields only
    extra: Record  # metadata and carried fields
    group: str | None
    source: Record


class Refiner:
    """Works on blocks of rows by `steps`; holds the tokenizer if one is needed."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.keys = Keys(chat=steps.target.chat)
        tokens: tuple[str, ...] = ()
        self.fitter = None
        if steps.fit is not None:
            self.fitter = Fitter(steps.fit, steps.target.kind, self.keys)
            tokens = self.fitter.tokenizer.control_texts
        self.contract = Contract(steps.target.kind, self.keys, tokens)
        self._without_texts = replace(self.contract, texts=False)
        self._lines = LineReader(tokens)

    def refine(self, block: Block) -> Batch:
        """What comes of the rows of `block`."""
        batch = Batch(block.path)
        candidates: list[_Candidate] = []
        for row, plain in self._rows(block):
            if self._is_mine(row):
                candidates += self._read(Place(block.path, row.row, row.line), row, plain, batch)
        self._finish(candidates, batch)
        return batch

    def _rows(self, block: Block) -> Iterable[tuple[Row, bool]]:
        """The rows, each with whether its bytes hold nothing that texts are searched for."""
        if block.lines is None:
            return ((row, False) for row in block.rows)
        return self._lines.read(block)

    def _is_mine(self, row: Row) -> bool:
        """Whether the row is in this shard; what makes a file useless is in every shard."""
        index, shards = self.steps.shard
        if shards == 1 or row.row == 0 or any(f.code in FATAL for f in row.findings):
            return True
        return (row.row - 1) % shards == index

    def _read(self, place: Place, row: Row, plain: bool, batch: Batch) -> list[_Candidate]:
        """The candidates of one row; what is wrong with the row goes into the batch."""
        faults = self._sort_out(place, row.findings, batch) if row.findings else []
        if row.record is None and not faults:
            return []  # a blank line, or a mark without a row
        batch.rows += 1
        if row.record is None or faults:
            first = faults[0]
            reason = Refused(first.code, first.message, first.field, first.hint)
            self._drop(place, reason, row.record, batch)
            return []
        if self.steps.carry:
            batch.fields.update(row.record)
        source = rename(row.record, self.steps.renames)
        found = [
            self._check(place, made, source, plain, batch)
            for made in convert(source, self.steps.preset, self.steps.target)
        ]
        return [candidate for candidate in found if candidate is not None]

    def _sort_out(self, place: Place, findings: Iterable[Finding], batch: Batch) -> list[Finding]:
        """The errors of reading; marks, blank lines and warnings are counted."""
        faults = []
        for finding in findings:
            if finding.code == "PTC101":
                batch.changed.add(BOM_STRIPPED, place.example())
            elif finding.code == "PTC106":
                batch.blank_lines += 1
            elif finding.severity == "error":
                faults.append(finding)
            else:
                batch.warnings.add(finding.code, place.example(message=finding.message))
        return faults

    def _check(
        self, place: Place, made: Made | Refused, source: Record, plain: bool, batch: Batch
    ) -> _Candidate | None:
        """Clean one converted row and hold it against the contract."""
        if isinstance(made, Refused):
            self._drop(place, made, source, batch)
            return None
        metadata = made.record.pop("metadata", {})
        plain = plain and self.steps.preset not in _JOINING
        record, changes = self._clean(made, plain)
        if not (plain and is_flat_and_good(record, self.steps.target.kind)):
            contract = self._without_texts if plain else self.contract
            for problem in check_record(record, contract):
                if CODES[problem.code].severity == "error":
                    self._drop(place, self._explain(refused(problem)), source, batch)
                    return None
                batch.warnings.add(problem.code, place.example(message=problem.message))
        if self.steps.benchmark is not None:
            overlap = self.steps.benchmark.find(texts_of(record))
            if overlap is not None:
                self._drop(place, Refused("PTC502", str(overlap)), source, batch)
                return None
        for change in sorted(changes):
            batch.changed.add(change, place.example())
        extra = self._extra(place, source, record, metadata, batch)
        return _Candidate(place, record, extra, made.group, source)

    def _clean(self, made: Made, plain: bool) -> tuple[Record, frozenset[str]]:
        """The cleaned fields, and what was done to them."""
        level = self.steps.clean
        if level == "none" or (plain and level == "safe"):
            return made.record, made.changes
        record: Record = {}
        changes = made.changes
        for name, value in made.record.items():
            cleaned = clean_value(value, level, plain)
            record[name] = cleaned.value
            if cleaned.changes:
                changes |= cleaned.changes
        return record, changes

    def _explain(self, refusal: Refused) -> Refused:
        """Say which `--map` led nowhere when a renamed field is missing."""
        for item in self.steps.renames:
            if refusal.reason == "PTC201" and refusal.field == item.new:
                hint = f"`--map {item.new}={item.old}` finds nothing in this row"
                return Refused(refusal.reason, refusal.message, refusal.field, hint)
        return refusal

    def _extra(
        self, place: Place, source: Record, written: Record, metadata: Record, batch: Batch
    ) -> Record:
        """Metadata and carried fields; fields that go nowhere are counted."""
        if source.keys() == written.keys():
            return {"metadata": metadata} if metadata else {}
        preset = self.steps.preset
        read = {*written, *(FIELDS[preset] if preset else ())}
        extra = carried(source, read, self.steps.carry)
        own = source.get("metadata")
        if isinstance(own, dict):
            metadata = {**own, **metadata}
        elif own is not None and not metadata:
            metadata = own
        for name in source:
            if name not in read and name not in extra and name != "metadata":
                batch.left_out.add(name, place.example())
        return {"metadata": metadata, **extra} if metadata else extra

    def _drop(self, place: Place, why: Refused, source: Record | None, batch: Batch) -> None:
        is_error = why.reason in CODES and why.reason not in POLICY
        overlong = self.steps.fit.overlong if self.steps.fit else "keep"
        if why.reason == "PTC401" and overlong == "error":
            is_error = True
        record = source if self.steps.keep_refused else None
        batch.drops.append(
            Drop(place, why.reason, why.message, why.field, why.hint, is_error, record)
        )

    def _finish(self, candidates: list[_Candidate], batch: Batch) -> None:
        """Fit the candidates and write down all that later steps need to know of each."""
        records = [{**candidate.record, **candidate.extra} for candidate in candidates]
        fitted = [Fitted(record) for record in records]
        if self.fitter is not None:
            fitted = self.fitter.fit(records)
        kept: list[tuple[_Candidate, Record]] = []
        tokens: list[tuple[int, int]] = []
        for candidate, record, fit in zip(candidates, records, fitted, strict=True):
            if fit.record is None:
                self._drop(candidate.place, Refused(fit.code, fit.message), candidate.source, batch)
                continue
            if fit.cut:
                batch.changed.add(CUT, candidate.place.example(message=fit.message))
            elif fit.code:
                batch.warnings.add(fit.code, candidate.place.example(message=fit.message))
            kept.append((candidate, record))
            tokens.append((fit.length, fit.trained))
            batch.lines.append(encode(fit.record))
        batch.places = [candidate.place for candidate, _ in kept]
        for _, record in kept:
            batch.digests += row_digests(record, self.contract)
        if self.steps.split:
            batch.groups = np.fromiter(map(self._group, kept), np.uint64, len(kept))
        if self.fitter is not None:
            batch.tokens = np.array(tokens, np.int64).reshape(-1, 2)
        if self.steps.near:
            found = [signature("\n".join(row_texts(r, self.contract))) for _, r in kept]
            batch.signatures = np.array(found, np.uint16).reshape(len(kept), -1)

    def _group(self, kept: tuple[_Candidate, Record]) -> int:
        """The hash of a row's prompt."""
        candidate, record = kept
        if candidate.group is None:
            return group_hash(opening(record, self.steps.target.kind, self.keys))
        return group_hash(candidate.group)


_JOINING = frozenset({"messages", "sharegpt"})  # presets that join texts end to end
