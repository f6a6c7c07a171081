"""What is installed: light at the base, typed, licensed, whole; and usable without the extras."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from posttrain_cli import __version__
from posttrain_cli.extras import EXTRAS, extra_of, missing

ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "transformers", "peft", "vllm", "datasets", "polars", "ray", "pandas"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[>=<~ ;]", line)[0] for line in requirements}


def test_the_base_install_is_light(project: dict[str, Any]) -> None:
    assert not names(project["dependencies"]) & HEAVY
    assert project["requires-python"] == ">=3.11"


def test_the_extras_are_those_that_messages_name(project: dict[str, Any]) -> None:
    extras = project["optional-dependencies"]
    assert set(extras) == {"train", "vllm", "gpu", "s3", "ray", "dev"}
    assert set(EXTRAS) == set(extras) - {"dev"}
    assert names(extras["train"]) == set(EXTRAS["train"])
    assert "torch>=2.11" in extras["train"]
    assert "transformers>=5.17" in extras["train"]
    assert {"flash-attn-4", "liger-kernel"} <= names(extras["gpu"])


def test_every_requirement_has_a_lowest_version(project: dict[str, Any]) -> None:
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    for line in (line for lines in lists for line in lines):
        assert ">=" in line or line.startswith(("posttrain-cli[", "types-")), line


def test_modules_of_extras() -> None:
    assert extra_of("torch") == "train"
    assert extra_of("s3fs") == "s3"
    assert extra_of("json") == ""
    assert missing("train") == []


def test_the_installed_package_has_the_script_and_the_version() -> None:
    assert importlib.metadata.version("posttrain-cli") == __version__
    scripts = importlib.metadata.entry_points(group="console_scripts", name="ptc")
    assert [script.value for script in scripts] == ["posttrain_cli.__main__:main"]


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
        licence = next(name for name in files if name.endswith("licenses/LICENSE"))
        assert b"Apache License" in archive.read(licence)
        metadata = archive.read(next(name for name in files if name.endswith("METADATA"))).decode()
    inside = {name for name in files if name.startswith("posttrain_cli/")}
    assert {name.split("/")[0] for name in files} == {
        "posttrain_cli",
        f"posttrain_cli-{__version__}.dist-info",
    }
    source = ROOT / "src" / "posttrain_cli"
    expected = {
        f"posttrain_cli/{path.relative_to(source).as_posix()}"
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside == expected
    assert "posttrain_cli/py.typed" in inside
    assert "License-Expression: Apache-2.0" in metadata


HIDING = """
import sys
from importlib.machinery import PathFinder

real = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name in {hidden!r} else real(name, *rest)

from posttrain_cli.cli.app import run

sys.exit(run({args!r}))
"""


def run_bare(tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """`ptc ARGS` in a Python where the packages of all extras cannot be imported."""
    hidden = {name for modules in EXTRAS.values() for name in modules} | HEAVY
    code = HIDING.format(hidden=hidden, args=list(args))
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_data_commands_work_on_the_base_install(tmp_path: Path) -> None:
    made = run_bare(tmp_path, "gen-synthetic", "--n", "20", "--out", "raw.jsonl")
    assert made.returncode == 0, made.stderr
    made = run_bare(tmp_path, "preprocess", "raw.jsonl", "--out", "train.parquet")
    assert made.returncode == 0, made.stderr
    checked = run_bare(tmp_path, "validate", "train.parquet")
    assert checked.returncode == 0, checked.stderr


def test_training_on_the_base_install_says_what_to_install(tmp_path: Path) -> None:
    refused = run_bare(tmp_path, "sft", "--gpus", "0")
    assert refused.returncode == 2
    assert "pip install 'posttrain-cli[train]'" in refused.stderr
    assert "Traceback" not in refused.stderr
    looked = run_bare(tmp_path, "doctor", "--need", "train")
    assert looked.returncode == 1
    assert "pip install 'posttrain-cli[train]'" in looked.stderr


def test_ci_is_executable_and_does_what_the_readme_says() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text(encoding="utf-8")
    assert "make test" in (ROOT / "README.md").read_text(encoding="utf-8")
    subprocess.run(["bash", "-n", str(script)], check=True)
