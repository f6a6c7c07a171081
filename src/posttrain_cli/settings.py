"""From flags, `--set`, config files and defaults to one checked config, each value with its origin.

Precedence: flag, then `--set key.path=value`, then `--config FILE`, then `ptc.yaml` in the working
directory, then the default. Every mistake is collected and shown at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from posttrain_cli import values
from posttrain_cli.config import METHODS, Config, Method
from posttrain_cli.defaults import fill
from posttrain_cli.errors import UsageError
from posttrain_cli.schema import sections, settings
from posttrain_cli.sources import Given, from_file, from_flags, from_sets

PROJECT_FILE = "ptc.yaml"


@dataclass(frozen=True, slots=True)
class Resolved:
    """A checked config, its method, and where each value came from.

    Attributes:
        config: every value filled in; paths are absolute, hub ids as written.
        method: sft, dpo or ppo.
        origins: each `section.key` that the method reads, to `flag --lr`, `--set optim.lr`,
            `sft.yaml:12`, `default (LoRA)` …
    """

    config: Config
    method: Method
    origins: dict[str, str]


def load(
    method: Method | None,
    *,
    flags: Mapping[str, Any],
    sets: Sequence[str] = (),
    config_file: Path | None = None,
    cwd: Path | None = None,
) -> Resolved:
    """Resolve a config.

    Args:
        method: the command's method; None takes it from `trainer.type` (`ptc train`).
        flags: `section.key` to text, bool or list of texts; None means not given.
        sets: the `section.key=value` texts of `--set`.
        config_file: the file of `--config`.
        cwd: the working directory: `ptc.yaml` is looked for there, flags are relative to it.

    Raises:
        UsageError: with every mistake in `problems`.
    """
    folder = (cwd or Path.cwd()).absolute()
    problems: list[str] = []
    layers = [_read(file, problems) for file in _files(config_file, folder)]
    layers.append(from_sets(sets, folder, problems))
    layers.append(from_flags(flags, folder, problems))
    given = {item.key: item for layer in layers for item in layer}  # a later layer wins
    chosen = _method(method, given, problems)
    if chosen is None:
        raise mistakes(problems)
    for layer in layers:
        problems += _unread(layer, chosen)
    config = _validate(given, chosen, problems)
    origins = {
        key: given[key].origin if key in given else "default"
        for key, row in settings().items()
        if chosen in row.methods
    }
    if config is not None:
        config, filled = fill(config, chosen, given=given, folder=folder, problems=problems)
        origins.update(filled)
    if problems or config is None:
        raise mistakes(problems)
    return Resolved(config, chosen, origins)


def dump(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """A resolved config as YAML that `ptc train --config` repeats.

    Only what its method reads is written, so that the file loads without complaint.

    Args:
        config: a resolved config.
        origins: where each value came from, for comments behind the values.
    """
    method = config.trainer.type
    assert method is not None, "a resolved config names its trainer"
    lines = []
    for section in sections():
        rows = [row for row in settings().values() if row.section == section]
        body = [
            _dump_line(row.name, value, origins[row.key] if origins else "")
            for row in rows
            if (value := value_of(config, row.key)) is not None and method in row.methods
        ]
        if body:
            lines += [f"{section}:", *body]
    return "\n".join(lines) + "\n"


def value_of(config: Config, key: str) -> Any:
    """The value of `section.key`."""
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def mistakes(problems: Sequence[str]) -> UsageError:
    """One error that lists every problem once; those of a file in the order of its lines."""
    unique = tuple(sorted(dict.fromkeys(problems), key=_place))
    return UsageError("; ".join(unique), problems=unique)


def _files(config_file: Path | None, folder: Path) -> list[Path]:
    """The config files, weakest first; ptc.yaml counts once even when --config names it."""
    project = folder / PROJECT_FILE
    named = config_file is not None and config_file.exists() and project.exists()
    if named and config_file is not None and config_file.samefile(project):
        return [config_file]
    files = [Path(PROJECT_FILE) if folder == Path.cwd() else project] if project.exists() else []
    return [*files, config_file] if config_file is not None else files


def _read(file: Path, problems: list[str]) -> list[Given]:
    """The values of a file; a file that cannot be read is a problem beside the others."""
    try:
        return from_file(file, problems)
    except UsageError as exc:
        problems.append("; ".join(part for part in (exc.message, exc.hint) if part))
        return []


def _method(
    method: Method | None, given: Mapping[str, Given], problems: list[str]
) -> Method | None:
    """The method that runs; a `trainer.type` that contradicts the command is a problem."""
    written = given.get("trainer.type")
    if method is None and written is None:
        if not problems:  # otherwise it may stand in what could not be read
            problems.append(
                "`trainer.type` is missing: it says which trainer `ptc train` starts; "
                f"set it to one of {', '.join(METHODS)} in the config"
            )
        return None
    if written is None or written.value is None:
        return method
    if method is not None and written.value != method:
        problems.append(
            f"{written.origin}: `trainer.type` is `{written.value}` but the command is "
            f"`ptc {method}`; change one of them"
        )
        return method
    return written.value  # type: ignore[no-any-return]


def _unread(layer: Sequence[Given], method: Method) -> Iterator[str]:
    """A setting that this method never reads is a mistake, not something to ignore."""
    for item in layer:
        readers = settings()[item.key].methods
        if method not in readers:
            names = " and ".join(f"`ptc {reader}`" for reader in readers)
            yield (
                f"{item.origin}: `{item.key}` is read by {names} only; "
                f"`ptc {method}` would ignore it, so take it out"
            )


def _validate(given: Mapping[str, Given], method: Method, problems: list[str]) -> Config | None:
    """The config of the given values, or None with a problem for each value out of bounds."""
    tree: dict[str, dict[str, Any]] = {section: {} for section in sections()}
    for key, item in given.items():
        section, name = key.split(".")
        tree[section][name] = item.value
    tree["trainer"]["type"] = method
    try:
        return Config.model_validate(tree)
    except ValidationError as exc:
        bad = dict.fromkeys(f"{error['loc'][0]}.{error['loc'][1]}" for error in exc.errors())
    for key in bad:
        item = given[key]
        problems.append(f"{item.origin}: `{key}`: {values.explain(item.written, settings()[key])}")
    return None


def _place(problem: str) -> tuple[str, int]:
    """Where a problem lies, for sorting: (file, line) for `file:line: …`, the end for the rest."""
    file, _, rest = problem.partition(":")
    line, _, _ = rest.partition(":")
    return (file, int(line)) if line.isdigit() else ("\U0010ffff", 0)


def _dump_line(name: str, value: Any, origin: str) -> str:
    comment = f"  # {origin}" if origin else ""
    return f"  {name}: {_written(value)}{comment}"


def _written(value: Any) -> str:
    """A value as YAML; text is always quoted, so that it is never read as something else."""
    if isinstance(value, list):
        return f"[{', '.join(_written(item) for item in value)}]"
    if isinstance(value, str):
        return yaml.safe_dump(value, default_style='"', allow_unicode=True, width=10**9).strip()
    return json.dumps(value)
