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
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from posttrain_cli import __version__
from posttrain_cli.data.pack import Ints
from posttrain_cli.data.reader import read_rows
from posttrain_cli.data.records import Keys, Refusal, conversation
from posttrain_cli.data.render import Policy, Rendered, render_conversations
from posttrain_cli.data.tokenizer import Message, Tokenizer
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
        ends = sorted(tokenizer.end_ids)
        text = json.dumps([parts, tokenizer.sha256, tokenizer.template_name, ends], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of the rows.

    Attributes:
        read: samples in the files (a row of packed token ids holds several).
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


class _Place(NamedTuple):
    """Where a row stands: number of its file, 1-based row, 1-based line in a text file."""

    file: int
    row: int
    line: int | None


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
        DataError: a row cannot be read, breaks the contract, or breaks it once rendered (PTC205,
            PTC403 to PTC405), is longer than allowed with `overlong: error`, has an unusable
            weight, or nothing is left to train on.
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
    try:
        counts = _write(source, tokenizer, temporary)
        summary = {"key": key, "counts": asdict(counts)}
        atomic_write(temporary / "summary.json", json.dumps(summary, indent=1) + "\n")
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    temporary.rename(folder)
    fsync_dir(folder.parent)
    return Prepared(folder), False


def _write(source: Source, tokenizer: Tokenizer, folder: Path) -> Counts:
    """Write every sample to `folder`, unless something forbids to train on them."""
    names = ["ids", "mask", "trained", "offsets", "places"]
    names += ["weights"] if source.weight_key else []
    with ExitStack() as stack:
        files = {n: stack.enter_context((folder / f"{n}.bin").open("wb")) for n in names}
        counts, findings = _stream(source, tokenizer, files)
    _stop_on(findings, counts, source)
    if source.weight_key and not np.fromfile(folder / "weights.bin").any():
        raise DataError(
            f"every `metadata.{source.weight_key}` is 0: no row would ever be trained on",
            hint="give some rows a weight above 0, or leave data.weight_key out",
        )
    return counts


def _stream(
    source: Source, tokenizer: Tokenizer, files: Mapping[str, BinaryIO]
) -> tuple[Counts, list[Finding]]:
    """Append every sample to the flat files; what was counted, and what must stop the run."""
    tally: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    findings: list[Finding] = []
    longest = 0
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
        files["places"].write(np.array(place[:2], np.int64).tobytes())
        if source.weight_key:
            weight = _weight(record, source, place)
            files["weights"].write(np.float64(weight).tobytes())
    return Counts(**tally, dropped=dict(dropped), longest=longest), findings


def _samples(
    source: Source, tokenizer: Tokenizer
) -> Iterator[tuple[_Place, dict[str, Any], Rendered]]:
    """Every sample with its (file, row) and its record, rendered in blocks."""
    for number, path in enumerate(source.files):
        records = _records(number, path)
        while block := list(itertools.islice(records, _BLOCK)):
            turns = [_turns(path, at, r, source.keys) for at, r in block if not _is_ids(r)]
            rendered = iter(render_conversations(turns, tokenizer, source.policy))
            for place, record in block:
                if not _is_ids(record):
                    yield place, record, next(rendered)
                    continue
                problem = _ids_problem(record, tokenizer.backend.get_vocab_size())
                if problem:
                    raise _refusal(path, "PTC202", problem, place)
                for sample in _tokenized(record, source.policy):
                    yield place, record, sample


def _records(number: int, path: str) -> Iterator[tuple[_Place, dict[str, Any]]]:
    """Every record with its place; one that cannot be read is an error, a blank line is not."""
    for row in read_rows(path):
        place = _Place(number, row.row, row.line)
        for finding in row.findings:
            if finding.severity == "error":
                raise _refusal(path, finding.code, finding.message, place)
        if row.record is not None:
            yield place, row.record


def _turns(path: str, place: _Place, record: dict[str, Any], keys: Keys) -> list[Message]:
    try:
        return conversation(record, keys)
    except Refusal as refusal:
        raise _refusal(path, refusal.problem.code, refusal.problem.message, place) from refusal


def _refusal(path: str, code: str, message: str, place: _Place) -> DataError:
    return DataError(
        f"`{path}` has a row that cannot be used: row {place.row:,}: {message}",
        hint="`ptc validate` shows every finding",
        findings=[Finding(path, code, message, line=place.line, row=place.row)],
    )


def _is_ids(record: dict[str, Any]) -> bool:
    return "input_ids" in record


def _ids_problem(record: dict[str, Any], vocabulary: int) -> str:
    """Why a row of token ids is none that `preprocess --tokenize` writes, or an empty string."""
    arrays = {}
    for name in ("input_ids", "loss_mask", "lengths"):
        value = _lengths(record) if name == "lengths" else record.get(name)
        numbers = isinstance(value, list) and all(type(item) in (int, bool) for item in value)
        if not numbers or not value or min(value) < 0:
            return f"`{name}` must be a list of whole numbers of at least 0, and not empty"
        arrays[name] = value
    ids, mask, lengths = arrays.values()
    if not len(ids) == len(mask) == sum(lengths):
        return (
            f"{len(ids):,} `input_ids`, {len(mask):,} `loss_mask` values and `lengths` that add "
            f"up to {sum(lengths):,}: expected the same number"
        )
    if max(ids) >= vocabulary:
        return f"token {max(ids):,} is not in the vocabulary of {vocabulary:,}: another tokenizer?"
    return ""


def _lengths(record: dict[str, Any]) -> Any:
    """Tokens of each sample in a row of token ids; without `lengths` the row is one sample."""
    return record["lengths"] if "lengths" in record else [len(record["input_ids"])]


def _tokenized(record: dict[str, Any], policy: Policy) -> Iterator[Rendered]:
    """Samples of one row that `preprocess --tokenize` wrote: a sample, or a pack of them."""
    start = 0
    for length in _lengths(record):
        limit = policy.max_length or length
        kept = min(length, limit) if policy.overlong == "truncate" else length
        part = slice(start, start + kept)
        ids, mask = record["input_ids"][part], [bool(mark) for mark in record["loss_mask"][part]]
        problems = []
        if length > limit:
            problems.append(("PTC401", f"{length:,} tokens, more than the limit of {limit:,}"))
        if not any(mask[1:]):
            problems.append(("PTC402", "no trained token is left"))
        yield Rendered(ids, mask, length, length > limit, tuple(problems))
        start += length


def _drop_reason(sample: Rendered, policy: Policy) -> str | None:
    if sample.too_long and policy.overlong in ("drop", "error"):
        return "PTC401 longer than max_length"
    if any(code == "PTC402" for code, _ in sample.problems):
        return "PTC402 no trained token is left"
    return None


def _findings(source: Source, place: _Place, sample: Rendered) -> list[Finding]:
    """What of a sample's problems must stop the run."""
    fatal = {code for code, _ in sample.problems if CODES[code].severity == "error"} - {"PTC402"}
    if source.policy.overlong == "error":
        fatal.add("PTC401")
    path = source.files[place.file]
    return [
        Finding(path, code, message, line=place.line, row=place.row)
        for code, message in sample.problems
        if code in fatal
    ]


def _weight(record: dict[str, Any], source: Source, place: _Place) -> float:
    """The sampling weight of a record: a finite number of at least 0 in its metadata."""
    assert source.weight_key is not None
    metadata = record.get("metadata")
    value = metadata.get(source.weight_key) if isinstance(metadata, dict) else None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e18:
        return float(value)
    raise DataError(
        f"{source.files[place.file]}: row {place.row}: `metadata.{source.weight_key}` is "
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
