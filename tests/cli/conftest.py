"""`shell("sft", "--help")` runs one command line in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from posttrain_cli.cli import app


@dataclass(frozen=True)
class Answer:
    """How one command line ended."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """The one JSON object on stdout."""
        return json.loads(self.out)


@pytest.fixture
def shell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Answer]:
    """Run `ptc ARGS` in an empty folder of its own (`tmp_path`), without a process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def run(*args: str | Path) -> Answer:
        capsys.readouterr()
        code = app.run([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return Answer(code, out, err)

    return run
