"""Renaming fields (`--map new=old`) and carrying fields that no contract knows (`--carry`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain_cli.errors import UsageError

Record = dict[str, Any]
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Rename:
    """One `--map`: field `new` gets the value at `old`, a name or a dotted path."""

    new: str
    old: str


def parse_maps(texts: Sequence[str]) -> tuple[Rename, ...]:
    """Read `new=old` texts.

    Raises:
        UsageError: one has no `=` or an empty side, or two give the same new field.
    """
    renames: list[Rename] = []
    problems: list[str] = []
    for text in texts:
        new, equals, old = text.partition("=")
        if not (equals and new.strip() and old.strip()):
            problems.append(f"`--map {text}` is not of the form new=old")
        elif new.strip() in {rename.new for rename in renames}:
            problems.append(f"`--map {text}` gives the field `{new.strip()}` a second time")
        else:
            renames.append(Rename(new.strip(), old.strip()))
    if problems:
        raise UsageError(
            problems[0],
            hint="such as --map prompt=instruction or --map output=instances.0.output",
            problems=problems,
        )
    return tuple(renames)


def rename(record: Record, renames: Iterable[Rename]) -> Record:
    """`record` with the renamed fields; a path that leads nowhere adds no field.

    A field of the record that was renamed is gone from its old name; what a path reaches into
    stays.
    """
    renames = tuple(renames)
    if not renames:
        return record
    found = {item.new: lookup(record, item.old) for item in renames}
    moved = {item.old for item in renames}
    kept = {key: value for key, value in record.items() if key not in moved and key not in found}
    return kept | {key: value for key, value in found.items() if value is not _ABSENT}


def lookup(record: Record, path: str) -> Any:
    """The value at `path`: a field of that very name, or keys and list places joined by dots."""
    if path in record:
        return record[path]
    value: Any = record
    for step in path.split("."):
        if isinstance(value, dict) and step in value:
            value = value[step]
        elif isinstance(value, list) and _is_place(step) and -len(value) <= int(step) < len(value):
            value = value[int(step)]
        else:
            return _ABSENT
    return value


def _is_place(step: str) -> bool:
    digits = step.removeprefix("-")
    return digits.isascii() and digits.isdigit() and len(digits) < 10


def carried(source: Record, read: Iterable[str], wanted: tuple[str, ...] | None) -> Record:
    """The fields of `source` to copy beside the contract's fields.

    Args:
        source: the renamed record.
        read: fields that the contract or the preset read already.
        wanted: names, or None for all.
    """
    taken = {"metadata", *read}
    names = source if wanted is None else [name for name in wanted if name in source]
    return {name: source[name] for name in names if name not in taken}
