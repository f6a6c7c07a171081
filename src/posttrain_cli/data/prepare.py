"""From contract files to token ids on disk, ready to be mapped by every training process.

The result is keyed by the content of the files, the tokenizer, the template and every option,
so a changed input can never meet an old cache. Rows are counted: read = kept + dropped.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrain_cli import __version__
from posttrain_cli.data.pack import Ints
from posttrain_cli.data.reader import Row, read_rows
from posttrain_cli.data.records import Keys, conversation
from posttrain_cli.data.render import Policy, Rendered, render_conversations
from posttrain_cli.data.tokenizer import Tokenizer
from posttrain_cli.diagnostics import CODES, Finding
from posttrain_cli.errors import DataError
from posttrain_cli.files import atomic_write, fsync_dir

_BLOCK = 512  # rows encoded at once
FORMAT = 1  # raise when the files below change


@dataclass(frozen=True, slots=True)
class Source:
    """What is prepared: files with their content hashes, and how rows become ids."""

    files: tuple[str, ...]
    hashes: tuple[str, ...]
    keys: Keys
    policy: Policy
    weight_key: str | None = None

    def key(self, tokenizer: Tokenizer) -> str:
        """Identity of the result: two equal keys mean equal bytes."""
        parts = asdict(self) | {"files": None, "version": __version__, "format": FORMAT}
        text = json.dumps([parts, tokenizer.sha256, tokenizer.template_name], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of the rows.

    Attributes:
        read: rows in the files.
        kept: samples to train on.
        dropped: rows left out, by reason.
        cut: kept samples that were cut at max_length.
        tokens: tokens of the kept samples.
        trained: trained tokens among them.
        longest: tokens of the longest sample before any cut.
    """

    read: int = 0
    kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    cut: int = 0
    tokens: int = 0
    trained: int = 0
    longest: int = 0

    def describe(self) -> str:
        """One line for people."""
        dropped = "".join(f", dropped {n:,} ({why})" for why, n in sorted(self.dropped.items()))
        cut = f", cut {self.cut:,}" if self.cut else ""
        share = 100 * self.trained / max(1, self.tokens)
        return (
            f"read {self.read:,} rows, kept {self.kept:,}{dropped}{cut}; "
            f"{self.tokens:,} tokens, {share:.1f} % of them trained; longest {self.longest:,}"
        )


class Prepared:
    """Samples on disk, mapped on demand.

    Args:
        folder: written by `prepare`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        self.key: str = summary["key"]
        self.counts = Counts(**summary["counts"])

    @cached_property
    def offsets(self) -> Ints:
        """(N+1,) edges of the samples in the flat arrays."""
        return self._read("offsets", np.int64)

    @cached_property
    def lengths(self) -> Ints:
        """(N,) tokens of each sample."""
        return np.diff(self.offsets)

    @cached_property
    def trained(self) -> Ints:
        """(N,) trained tokens of each sample."""
        return self._read("trained", np.int64)

    @cached_property
    def weights(self) -> NDArray[np.float64] | None:
        """(N,) sampling weights, if a weight key was given."""
        path = self.folder / "weights.bin"
        return np.fromfile(path, np.float64) if path.is_file() else None

    def ids(self, sample: int) -> NDArray[np.int32]:
        """(length,) token ids of one sample."""
        return self._flat_ids[self.offsets[sample] : self.offsets[sample + 1]]

    def mask(self, sample: int) -> NDArray[np.bool_]:
        """(length,) which tokens of one sample are trained."""
        return self._flat_mask[self.offsets[sample] : self.offsets[sample + 1]]

    def place(self, sample: int) -> tuple[int, int]:
        """(number of the file, 1-based row in it) of one sample."""
        file, row = self._read("places", np.int64).reshape(-1, 2)[sample]
        return int(file), int(row)

    @cached_property
    def _flat_ids(self) -> NDArray[np.int32]:
        return np.memmap(self.folder / "ids.bin", np.int32, "r")

    @cached_property
    def _flat_mask(self) -> NDArray[np.bool_]:
        return np.memmap(self.folder / "mask.bin", np.bool_, "r")

    def _read(self, name: str, kind: type[np.int64]) -> Ints:
        return np.fromfile(self.folder / f"{name}.bin", kind)


def prepare(source: Source, tokenizer: Tokenizer, folder: Path) -> tuple[Prepared, bool]:
    """Prepare `source` under `folder`, or reuse what an equal source left there.

    Returns:
        the samples, and whether they were reused.

    Raises:
        DataError: a row breaks the contract once rendered (PTC205, PTC403 to PTC405), is longer
            than allowed with `overlong: error`, or nothing is left to train on.
    """
    key = source.key(tokenizer)
    if (folder / "summary.json").is_file():
        known = Prepared(folder)
        if known.key == key:
            return known, True
    temporary = folder.with_name(f".{folder.name}.tmp")
    for leftover in (folder, temporary):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir(parents=True)
    counts = _write(source, tokenizer, temporary)
    summary = {"key": key, "counts": asdict(counts)}
    atomic_write(temporary / "summary.json", json.dumps(summary, indent=1) + "\n")
    temporary.rename(folder)
    fsync_dir(folder.parent)
    return Prepared(folder), False


def _write(source: Source, tokenizer: Tokenizer, folder: Path) -> Counts:
    """Stream every sample into the flat files of `folder`."""
    tally: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    findings: list[Finding] = []
    longest = 0
    names = ("ids", "mask", "trained", "offsets", "places", "weights")
    files = {name: (folder / f"{name}.bin").open("wb") for name in names}
    files["offsets"].write(np.zeros(1, np.int64).tobytes())
    for place, record, sample in _samples(source, tokenizer):
        tally["read"] += 1
        longest = max(longest, sample.length)
        reason = _drop_reason(sample, source.policy)
        findings += _findings(source, place, sample)
        if reason:
            dropped[reason] += 1
            continue
        tally["kept"] += 1
        tally["cut"] += len(sample.ids) < sample.length
        tally["tokens"] += len(sample.ids)
        tally["trained"] += sample.trained
        files["ids"].write(np.array(sample.ids, np.int32).tobytes())
        files["mask"].write(np.array(sample.mask, np.bool_).tobytes())
        files["trained"].write(np.int64(sample.trained).tobytes())
        files["offsets"].write(np.int64(tally["tokens"]).tobytes())
        files["places"].write(np.array(place, np.int64).tobytes())
        if source.weight_key:
            weight = _weight(record, source, place)
            files["weights"].write(np.float64(weight).tobytes())
    for stream in files.values():
        stream.close()
    if not source.weight_key:
        (folder / "weights.bin").unlink()
    counts = Counts(**tally, dropped=dict(dropped), longest=longest)
    _stop_on(findings, counts, source)
    return counts


def _samples(
    source: Source, tokenizer: Tokenizer
) -> Iterator[tuple[tuple[int, int], dict[str, Any], Rendered]]:
    """Every sample with its (file, row) and its record, rendered in blocks."""
    for number, path in enumerate(source.files):
        rows: Iterator[Row] = (row for row in read_rows(path) if row.record is not None)
        while block := list(itertools.islice(rows, _BLOCK)):
            records = [row.record for row in block if row.record is not None]
            ready = [record for record in records if "input_ids" not in record]
            turns = [conversation(record, source.keys) for record in ready]
            rendered = iter(render_conversations(turns, tokenizer, source.policy))
            for row, record in zip(block, records, strict=True):
                if "input_ids" in record:
                    for sample in _tokenized(record, source.policy):
                        yield (number, row.row), record, sample
                else:
                    yield (number, row.row), record, next(rendered)


def _tokenized(record: dict[str, Any], policy: Policy) -> Iterator[Rendered]:
    """Samples of one row that `preprocess --tokenize` wrote: a sample, or a pack of them."""
    ids, mask = record["input_ids"], record["loss_mask"]
    start = 0
    for length in record.get("lengths") or [len(ids)]:
        part = slice(start, start + length)
        cut = slice(start, start + min(length, policy.max_length or length))
        too_long = length > (policy.max_length or length)
        chosen = cut if policy.overlong == "truncate" else part
        marks = [bool(m) for m in mask[chosen]]
        problems = () if any(marks[1:]) else (("PTC402", "no trained token is left"),)
        yield Rendered(list(ids[chosen]), marks, length, too_long, problems)
        start += length


def _drop_reason(sample: Rendered, policy: Policy) -> str | None:
    if sample.too_long and policy.overlong in ("drop", "error"):
        return "PTC401 longer than max_length"
    if any(code == "PTC402" for code, _ in sample.problems):
        return "PTC402 no trained token is left"
    return None


def _findings(source: Source, place: tuple[int, int], sample: Rendered) -> list[Finding]:
    """What of a sample's problems must stop the run."""
    fatal = {code for code, _ in sample.problems if CODES[code].severity == "error"} - {"PTC402"}
    if source.policy.overlong == "error":
        fatal.add("PTC401")
    path, row = source.files[place[0]], place[1]
    return [
        Finding(path, code, message, row=row) for code, message in sample.problems if code in fatal
    ]


def _weight(record: dict[str, Any], source: Source, place: tuple[int, int]) -> float:
    """The sampling weight of a record: a finite number of at least 0 in its metadata."""
    assert source.weight_key is not None
    metadata = record.get("metadata")
    value = metadata.get(source.weight_key) if isinstance(metadata, dict) else None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e18:
        return float(value)
    raise DataError(
        f"{source.files[place[0]]}: row {place[1]}: `metadata.{source.weight_key}` is "
        f"{value!r}, expected a number of at least 0",
        hint="give each row a weight, or leave data.weight_key out",
    )


def _stop_on(findings: list[Finding], counts: Counts, source: Source) -> None:
    names = ", ".join(f"`{name}`" for name in source.files)
    if findings:
        raise DataError(
            f"{len(findings):,} of {counts.read:,} rows in {names} cannot be trained on",
            hint=f"`ptc validate --explain {findings[0].code}` tells what to do",
            findings=findings,
        )
    if counts.kept == 0:
        why = "".join(f"; dropped {n:,} ({reason})" for reason, n in counts.dropped.items())
        raise DataError(
            f"nothing is left to train on in {names}: read {counts.read:,} rows{why}",
            hint="raise --max-length, or check the data with `ptc validate --tokenizer`",
        )
