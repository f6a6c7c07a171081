"""The run directory: where everything of a run lies, and its record.

    RUN/
      run.json  config.yaml  metrics.jsonl  tensorboard/  logs/  checkpoints/  model/

`run.json` is replaced as a whole at each change. It holds what happened, never the environment.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from posttrain_cli import settings
from posttrain_cli.config import Config
from posttrain_cli.errors import UsageError
from posttrain_cli.files import atomic_write

State = Literal["running", "finished", "interrupted", "failed"]

_PARTS = (
    "run.json",
    "config.yaml",
    "metrics.jsonl",
    "tensorboard",
    "logs",
    "checkpoints",
    "model",
    "bad_steps",
)
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The places in a run directory; they need not exist yet."""

    path: Path

    @property
    def record(self) -> Path:
        """`run.json`: what this run is and how it stands."""
        return self.path / "run.json"

    @property
    def config(self) -> Path:
        """`config.yaml`: the resolved config."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """`metrics.jsonl`: one object an optimizer step."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """`tensorboard`: the same values as event files."""
        return self.path / "tensorboard"

    @property
    def logs(self) -> Path:
        """`logs`: what each process said."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        """`checkpoints`: one folder a checkpoint."""
        return self.path / "checkpoints"

    @property
    def prepared(self) -> Path:
        """`.prepared`: token ids of the data sets while the run needs them."""
        return self.path / ".prepared"

    @property
    def model(self) -> Path:
        """`model`: the result."""
        return self.path / "model"


def holds_run(path: Path) -> bool:
    """Whether `path` holds a run or what is left of one."""
    return any((path / part).exists() for part in _PARTS)


def create_run(
    path: Path, config: Config, record: Mapping[str, Any], *, overwrite: bool
) -> RunDirectory:
    """Make a run directory with its record and config; call it with the run's lock held.

    Args:
        path: the directory; other files in it are left alone.
        config: the resolved config.
        record: the first content of `run.json`, see `lineage.run_record`.
        overwrite: remove the run that `path` holds.

    Raises:
        UsageError: `path` holds a run, or cannot be a directory.
    """
    run = RunDirectory(path)
    refuse_run(path, overwrite)
    remove_run(path)
    for folder in (run.logs, run.checkpoints):
        folder.mkdir(parents=True)
    atomic_write(run.config, dump_config(config))
    atomic_write(run.record, _dump(record))
    return run


def remove_run(path: Path) -> None:
    """Remove the run that `path` holds; other files in it are left alone."""
    for part in _PARTS:
        _remove(path / part)


def refuse_run(path: Path, overwrite: bool) -> None:
    """Raise UsageError unless a new run may be started in `path`."""
    if path.exists() and not path.is_dir():
        raise UsageError(
            f"`{path.absolute()}` is a file, expected a directory for the run",
            hint="name another one with `--output-dir`",
        )
    if holds_run(path) and not overwrite:
        raise UsageError(
            f"`{path.absolute()}` holds a run already",
            hint=f"continue it with `ptc resume {path}`, replace it with `--overwrite`, "
            "or name another `--output-dir`",
        )


def open_run(path: Path) -> RunDirectory:
    """The run in `path`.

    Raises:
        UsageError: there is none.
    """
    run = RunDirectory(path)
    if not run.record.is_file():
        what = "has no `run.json`" if path.is_dir() else "is no directory"
        raise UsageError(
            f"`{path.absolute()}` {what}, expected a run directory",
            hint="name the directory that `--output-dir` named when the run was started",
        )
    return run


def read_record(run: RunDirectory) -> dict[str, Any]:
    """The content of `run.json`.

    Raises:
        UsageError: it cannot be read as one JSON object.
    """
    try:
        record = json.loads(run.record.read_bytes())
    except ValueError as error:
        raise UsageError(f"`{run.record.absolute()}` is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise UsageError(f"`{run.record.absolute()}` is not a JSON object")
    return record


def update_record(run: RunDirectory, **changes: Any) -> dict[str, Any]:
    """Replace or add keys of `run.json`, whole or not at all; returns the new content."""
    record = read_record(run) | changes
    atomic_write(run.record, _dump(record))
    return record


def set_state(run: RunDirectory, state: State, **changes: Any) -> None:
    """Note in `run.json` how the run stands, and when it ended if it did."""
    ended = None if state == "running" else now()
    update_record(run, state=state, stopped_at=ended, **changes)


def now() -> str:
    """The time in UTC, to the second, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def dump_config(config: Config) -> str:
    """`config` as YAML that `ptc train --config` reads back; only what its method reads."""
    return settings.dump(config)


def _dump(record: Mapping[str, Any]) -> str:
    return _CREDENTIALS.sub("***", json.dumps(record, indent=2, ensure_ascii=False)) + "\n"


def _remove(path: Path) -> None:
    """Remove a file or folder of an earlier run, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
