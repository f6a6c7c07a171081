"""Raw files to contract data: read, refine, decide, write, report.

1. Every row is refined on its own (`refine`), its line put into a spool beside the output.
2. What needs all rows is decided on a few numbers a row: duplicates, then the split.
3. The chosen lines are written in input order. The files appear together, the output last.

The same inputs and options give the same bytes, whatever the number of processes.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from posttrain_cli.data import storage
from posttrain_cli.data.contamination import Benchmark, read_benchmark
from posttrain_cli.data.convert import Target, default_kind
from posttrain_cli.data.gather import gather
from posttrain_cli.data.lines import decode, encode
from posttrain_cli.data.mapping import parse_maps, rename
from posttrain_cli.data.pool import default_workers
from posttrain_cli.data.reader import read_rows
from posttrain_cli.data.reasons import title
from posttrain_cli.data.records import Kind
from posttrain_cli.data.refine import FATAL, Batch, Drop, Steps
from posttrain_cli.data.report import Counts, build_report
from posttrain_cli.data.request import Request, check_request, fit_options, parse_shard
from posttrain_cli.data.samples import samples, write_samples
from posttrain_cli.data.select import validation, without_duplicates
from posttrain_cli.data.spool import Flags, Spool, nameless_file
from posttrain_cli.data.tokenizer import load_tokenizer
from posttrain_cli.data.writer import (
    Outputs,
    Sink,
    check_outputs,
    output_format,
    write_blocks,
    write_records,
)
from posttrain_cli.errors import DataError, UsageError, did_you_mean

Report = dict[str, Any]
_SHOWN = 100  # errors that are listed when the run stops for them
_HEAD = 64  # rows that decide which kind a data set is of
_FILE_FOR_PROCESSES = 32 << 20  # input bytes from which several processes pay off


def preprocess(request: Request, advance: Callable[[int], None] = lambda rows: None) -> Report:
    """Do what `request` asks and return the report that lies beside the output.

    Args:
        request: inputs, output and options.
        advance: told the number of rows after each block.

    Raises:
        UsageError: the options or files cannot be used; nothing was written.
        DataError: rows cannot be used and `on_error` is fail, or no row is left.
        RunError: a worker process was killed.
    """
    check_request(request)
    files = _inputs(request)
    steps = _steps(request, files)
    workers = request.workers or _worker_count(files)
    counts = Counts()
    spool, rejects = Spool(request.out.parent), _Rejects(request)
    with closing(spool), closing(rejects):
        for batch in gather(files, steps, request.encoding, workers):
            _count(batch, counts, request)
            for drop in batch.drops:
                rejects.write(drop, drop.record)
            spool.add(batch)
            advance(batch.rows)
        _stop_for_errors(counts, request)
        alive, repeats = without_duplicates(spool, request.dedup)
        for repeat in repeats:
            drop = repeat.drop
            counts.dropped.add(drop.reason, drop.place.example(message=drop.message))
            rejects.write(drop, spool.record(repeat.row))
        _stop_if_empty(alive, counts)
        with Outputs() as outputs:
            written = _write(request, steps, spool, alive, outputs)
            report = build_report(request, files, steps, counts, spool, alive, written)
            report["rejects"] = rejects.finish(outputs)
            outputs.open(beside(request.out, "report.json")).write(_pretty(report))
    return report


def beside(out: Path, name: str) -> Path:
    """`OUT.name`, next to `out`."""
    return out.with_name(f"{out.name}.{name}")


def _inputs(request: Request) -> list[str]:
    """The input files; outputs are refused that exist or are inputs."""
    files = storage.expand(request.inputs)
    targets = [target for target in (request.out, request.val_out) if target is not None]
    names = {os.path.realpath(path) for path in files if not storage.is_remote(path)}
    for target in targets:
        if os.path.realpath(target) in names:
            raise UsageError(
                f"`{target.absolute()}` is an input and an output",
                hint="write to another folder, or name the inputs one by one",
            )
    check_outputs(*targets, overwrite=request.overwrite)
    return files


def _steps(request: Request, files: Sequence[str]) -> Steps:
    kind = request.kind if request.kind != "auto" else _first_kind(request, files)
    carry = request.carry
    if carry is None and kind != "prompt":
        carry = ()
    benchmark: Benchmark | None = None
    if request.decontaminate:
        benchmark = read_benchmark(storage.expand(request.decontaminate))
    return Steps(
        target=Target(kind, request.chat),
        preset=request.preset,
        renames=parse_maps(request.maps),
        clean=request.clean,
        carry=None if carry == ("all",) else carry,
        benchmark=benchmark,
        fit=fit_options(request, kind),
        near=request.dedup == "near",
        split=request.splits,
        keep_refused=request.on_error == "skip",
        shard=parse_shard(request.shard),
    )


def _first_kind(request: Request, files: Sequence[str]) -> Kind:
    """The kind of most of the first rows that can be read."""
    renames = parse_maps(request.maps)
    rows = (row for path in files for row in read_rows(path, request.encoding))
    records = (row.record for row in islice(rows, 4 * _HEAD) if row.record is not None)
    kinds = Counter(
        default_kind(request.preset, rename(record, renames)) for record in islice(records, _HEAD)
    )
    return min(kinds, key=lambda kind: (-kinds[kind], kind), default="sft")


def _worker_count(files: Sequence[str]) -> int:
    local = [path for path in files if not storage.is_remote(path)]
    if sum(Path(path).stat().st_size for path in local) < _FILE_FOR_PROCESSES:
        return 1
    return default_workers()


def _count(batch: Batch, counts: Counts, request: Request) -> None:
    """Add up one batch; stop at once for a file that cannot be used at all."""
    counts.rows[batch.path] = counts.rows.get(batch.path, 0) + batch.rows
    counts.blank_lines[batch.path] = counts.blank_lines.get(batch.path, 0) + batch.blank_lines
    counts.changed.merge(batch.changed)
    counts.warnings.merge(batch.warnings)
    counts.left_out.merge(batch.left_out)
    counts.fields |= batch.fields
    for drop in batch.drops:
        if drop.reason in FATAL or drop.place.row == 0:
            raise DataError(
                f"`{drop.place.path}` cannot be used: {drop.message}",
                hint=drop.hint,
                findings=[drop.finding()],
            )
        example = drop.place.example(field=drop.field, message=drop.message)
        counts.dropped.add(drop.reason, example)
        if drop.is_error:
            counts.error_rows += 1
            if len(counts.errors) < _SHOWN:
                counts.errors.append(drop)


def _stop_for_errors(counts: Counts, request: Request) -> None:
    if counts.error_rows and request.on_error == "fail":
        rows = sum(counts.rows.values())
        raise DataError(
            f"{counts.error_rows:,} of {rows:,} rows cannot be used; nothing was written",
            hint="mend them, or pass --on-error skip to leave them out and list them with "
            f"their reasons in {beside(request.out, 'rejects.jsonl').name}",
            findings=[drop.finding() for drop in counts.errors],
        )
    for name in request.carry or ():
        if name != "all" and name not in counts.fields and counts.fields:
            raise UsageError(
                f"`--carry {name}`: no row has this field",
                hint=did_you_mean(name, counts.fields) or "it is a field of the input rows",
            )


def _stop_if_empty(alive: Flags, counts: Counts) -> None:
    if alive.any():
        return
    if not sum(counts.rows.values()):
        raise DataError("the input holds no records", hint="check the files that were named")
    reasons = ", ".join(f"{n:,} {title(why)}" for why, n in counts.dropped.rows.items())
    raise DataError(f"no usable record is left: dropped {reasons}", hint="nothing was written")


def _write(
    request: Request, steps: Steps, spool: Spool, alive: Flags, outputs: Outputs
) -> list[Report]:
    """Write the kept rows; describe each file."""
    chosen = np.zeros(len(spool), bool)
    targets = [(request.out, outputs.open(request.out))]
    if request.val_out is not None:
        wanted = request.val_rows or max(1, round((request.val_fraction or 0) * int(alive.sum())))
        chosen = validation(spool, alive, wanted, request.seed)
        targets.append((request.val_out, outputs.open(request.val_out)))
    written = []
    for (target, sink), rows in zip(targets, (alive & ~chosen, chosen), strict=False):
        count = _write_rows(request, steps, spool, rows, target, sink)
        written.append(
            {
                "path": str(target),
                "rows": count,
                "bytes": sink.size,
                "sha256": sink.sha256(),
            }
        )
    return written


def _write_rows(
    request: Request, steps: Steps, spool: Spool, rows: Flags, target: Path, sink: Sink
) -> int:
    if steps.fit is not None and steps.fit.output == "ids":
        tokenizer = load_tokenizer(steps.fit.tokenizer, steps.fit.template)
        identity = {"ptc.tokenizer": tokenizer.sha256, "ptc.template": tokenizer.template_name}
        ids = samples(spool, rows, request.pack, steps.fit.max_tokens)
        return write_samples(sink, target, ids, identity)
    if output_format(target) == "jsonl":
        write_blocks(sink, target, spool.blocks(rows))
        return int(rows.sum())
    return write_records(sink, target, lambda: map(decode, spool.lines(rows)))


class _Rejects:
    """`OUT.rejects.jsonl`: dropped rows with their reasons, if skipping was asked for."""

    def __init__(self, request: Request) -> None:
        self._target = beside(request.out, "rejects.jsonl")
        self._wanted = request.on_error == "skip"
        self._stream = nameless_file(request.out.parent)

    def write(self, drop: Drop, record: Report | None) -> None:
        """Append one dropped row."""
        if not self._wanted:
            return
        row = drop.place.example(
            reason=drop.reason,
            what=title(drop.reason),
            field=drop.field,
            message=drop.message,
            record=record,
        )
        self._stream.write(encode(row) + b"\n")

    def finish(self, outputs: Outputs) -> str | None:
        """Write the file and return its name; without rows remove that of an earlier run."""
        if self._stream.tell() == 0:
            self._target.unlink(missing_ok=True)
            return None
        self._stream.seek(0)
        shutil.copyfileobj(self._stream, outputs.open(self._target))
        return str(self._target)

    def close(self) -> None:
        """Give the disk space back."""
        self._stream.close()


def _pretty(report: Report) -> bytes:
    return orjson.dumps(report, option=orjson.OPT_INDENT_2) + b"\n"
