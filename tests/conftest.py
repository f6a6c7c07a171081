"""What the tests share: tiny models, small data files, and a way to run `ptc`.

Everything is offline and single-threaded, here and in the processes the tests start.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
os.environ.update(ENVIRONMENT)
# A job in the background of a shell starts with SIGINT ignored, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True)
class Result:
    """How one `ptc` process ended."""

    code: int
    stdout: str
    stderr: str

    def json(self) -> Any:
        """The one JSON object on stdout."""
        return json.loads(self.stdout)


@pytest.fixture(scope="session")
def ptc() -> Callable[..., Result]:
    """Run `python -m posttrain_cli ARGS` in a process of its own.

    `ptc("validate", path, cwd=..., env={...}, stdin="...", timeout=60)`. Variables of `env`
    that are None are removed. NO_COLOR and friends of the caller do not get in.
    """

    def run(
        *args: str | Path,
        cwd: Path | None = None,
        env: dict[str, str | None] | None = None,
        stdin: str = "",
        timeout: float = 300,
    ) -> Result:
        merged: dict[str, str | None] = {**os.environ, **ENVIRONMENT, **(env or {})}
        for name in ("NO_COLOR", "FORCE_COLOR", "CI", "PYTEST_ADDOPTS"):
            if name not in (env or {}):
                merged.pop(name, None)
        done = subprocess.run(
            [sys.executable, "-m", "posttrain_cli", *map(str, args)],
            cwd=cwd,
            env={name: value for name, value in merged.items() if value is not None},
            input=stdin.encode(),
            capture_output=True,
            timeout=timeout,
            check=False,
        )
        return Result(done.returncode, done.stdout.decode(), done.stderr.decode())

    return run


@pytest.fixture(scope="session")
def tiny_factory(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_factory(architecture="qwen2", layers=1, …)`: a folder, made once per arguments."""
    from posttrain_cli.engine.tiny import make_tiny_model

    made: dict[tuple[tuple[str, Any], ...], Path] = {}

    def make(**shape: Any) -> Path:
        key = tuple(sorted(shape.items()))
        if key not in made:
            made[key] = make_tiny_model(tmp_path_factory.mktemp("tiny"), **shape)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_model(tiny_factory: Callable[..., Path]) -> Path:
    """The default tiny model: Llama, 2 layers, hidden 64. Read only: copy it to change it."""
    return tiny_factory()


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    """Write `records` as JSON lines and return `path`."""
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def addition_records(first: int, count: int) -> list[dict[str, Any]]:
    """`count` flat sft records of different lengths, different for each number from `first`."""
    return [
        {
            "prompt": f"What is {number} plus {number % 7}?" + " Think first." * (number % 3),
            "response": f"{number} plus {number % 7} is {number + number % 7}."
            + " That is all." * (number % 4),
            "metadata": {"number": number},
        }
        for number in range(first, first + count)
    ]


@pytest.fixture(scope="session")
def sft_train(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 flat sft records as JSONL. Read only."""
    return write_jsonl(tmp_path_factory.mktemp("data") / "train.jsonl", addition_records(0, 48))


@pytest.fixture(scope="session")
def sft_val(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 flat sft records, none of them in `sft_train`. Read only."""
    return write_jsonl(tmp_path_factory.mktemp("data") / "val.jsonl", addition_records(1000, 12))
