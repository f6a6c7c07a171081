"""The data gate of training: the checks of `ptc validate`, then token ids, both counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from posttrain_cli.config import Config
from posttrain_cli.data import storage
from posttrain_cli.data.prepare import Prepared, Source, prepare
from posttrain_cli.data.records import Keys
from posttrain_cli.data.render import Policy
from posttrain_cli.data.tokenizer import Tokenizer
from posttrain_cli.data.validate import ValidateOptions, validate
from posttrain_cli.errors import DataError, UsageError

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Split:
    """One side of the data.

    Attributes:
        role: `train` or `val`.
        files: in the order they are read.
        hashes: SHA-256 of each file.
        rows: rows of each file.
    """

    role: str
    files: tuple[str, ...]
    hashes: tuple[str, ...]
    rows: tuple[int, ...]


def check(config: Config, say: Say) -> list[Split]:
    """Check the training and validation files as `ptc validate` does.

    Returns:
        the splits that the config names, training first.

    Raises:
        DataError: the contract is broken; `findings` holds every error.
        UsageError: a file is missing.
    """
    if config.data.kind not in ("auto", config.trainer.type):
        raise UsageError(
            f"`data.kind` is `{config.data.kind}`, expected `{config.trainer.type}`",
            hint="take `data.kind` out: it follows the method",
        )
    named = {"train": config.data.train_files, "val": config.data.val_files}
    splits = []
    for role, files in named.items():
        if files is not None:
            splits.append(_check_split(role, [files] if isinstance(files, str) else files, config))
    if len(splits) == 2 and set(splits[0].hashes) & set(splits[1].hashes):
        say("warning: the validation data is the training data: its loss shows no generalisation")
    return splits


def _check_split(role: str, patterns: list[str], config: Config) -> Split:
    files = _of_split(storage.expand(patterns), config.data.split if role == "train" else None)
    report = validate(files, ValidateOptions(kind="sft", keys=keys_of(config)))
    errors = [finding for finding in report.findings if finding.severity == "error"]
    if not report.ok:
        bad = sum(file.bad_rows for file in report.files)
        raise DataError(
            f"the {role} data breaks the contract: {bad:,} bad rows",
            hint="`ptc validate` shows every finding; `ptc preprocess --on-error skip` sets bad "
            "rows aside",
            findings=errors,
        )
    return Split(
        role,
        tuple(files),
        tuple(file.sha256 for file in report.files),
        tuple(file.rows for file in report.files),
    )


def _of_split(files: list[str], split: str | None) -> list[str]:
    """The files of a hub-style split: `train-00000.parquet`, `train/…`; one file has no splits."""
    if split is None or len(files) == 1:
        return files
    chosen = [f for f in files if Path(f).name.startswith(split) or split in Path(f).parent.parts]
    if not chosen:
        raise UsageError(
            f"no file of split `{split}` among {len(files)} files, such as `{files[0]}`",
            hint="file names start with their split, or lie in a folder of that name",
        )
    return chosen


def keys_of(config: Config) -> Keys:
    """The field names of the config."""
    data = config.data
    return Keys(
        prompt=data.prompt_key,
        response=data.response_key,
        chosen=data.chosen_key,
        rejected=data.rejected_key,
        messages=data.messages_key,
        chat=data.chat,
    )


def tokenize(
    splits: list[Split], config: Config, tokenizer: Tokenizer, folder: Path, say: Say
) -> dict[str, Prepared]:
    """Token ids of every split under `folder`, made or reused.

    Raises:
        DataError: a row cannot be trained on, or none is left.
    """
    data = config.data
    prepared = {}
    for split in splits:
        policy = Policy(data.max_length, data.overlong, data.train_on, data.add_eos_token)
        weight_key = data.weight_key if split.role == "train" else None
        source = Source(split.files, split.hashes, keys_of(config), policy, weight_key)
        found, reused = prepare(source, tokenizer, folder / split.role)
        prepared[split.role] = found
        say(f"{split.role}: {found.counts.describe()}" + (" (reused)" if reused else ""))
    if len(prepared) == 2:
        _warn_of_leaks(prepared["train"], prepared["val"], say)
    return prepared


def _warn_of_leaks(train: Prepared, val: Prepared, say: Say) -> None:
    """Rows that are in both splits are a loud warning, since somebody may want it so."""
    known = {xxhash.xxh3_128_digest(val.ids(i).tobytes()) for i in range(len(val.lengths))}
    same = sum(
        xxhash.xxh3_128_digest(train.ids(i).tobytes()) in known for i in range(len(train.lengths))
    )
    if same:
        say(
            f"warning: {same:,} training rows are in the validation data, too: "
            "its loss is too good to be true"
        )
