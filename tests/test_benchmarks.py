"""The benchmark of the first job runs, reads what was recorded and notices what is not equal."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def first_light() -> ModuleType:
    path = ROOT / "benchmarks" / "first_light.py"
    spec = importlib.util.spec_from_file_location("first_light", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def make_run(folder: Path, losses: list[float], weights: bytes = b"w") -> Path:
    """A finished run as far as comparisons look at it."""
    last = folder / "checkpoints" / "step_00000003"
    last.mkdir(parents=True)
    (folder / "model").mkdir()
    (folder / "model" / "model.safetensors").write_bytes(weights)
    files = {"__0_0.distcp": {"size": 1, "sha256": weights.hex()}}
    (last / "MANIFEST.json").write_text(json.dumps({"files": files}))
    lines = [
        {
            "step": step,
            "train/loss": loss,
            "train/grad_norm": 1.0,
            "train/tokens": step * 10,
            "train/tokens_per_second": 1000.0 * loss,
            "val/loss": loss,
        }
        for step, loss in enumerate(losses, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def bits(first_light: ModuleType, one: Path, other: Path) -> dict[str, Any]:
    job = first_light.Job("full", "killed", 1)
    found: dict[str, Any] = first_light.same_bits(
        job, first_light.Job("full", "unbroken", 1), one, other
    )
    return found


def test_equal_runs_are_equal_and_any_difference_is_named(
    first_light: ModuleType, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "a", [2.0, 1.5, 1.0])
    assert bits(first_light, run, make_run(tmp_path / "b", [2.0, 1.5, 1.0]))["ok"] is True
    loss = bits(first_light, run, make_run(tmp_path / "c", [2.0, 1.5000000000000002, 1.0]))
    assert (loss["ok"], loss["different_steps"]) == (False, [2])
    weights = bits(first_light, run, make_run(tmp_path / "d", [2.0, 1.5, 1.0], b"v"))
    assert (weights["ok"], weights["same_checkpoint"], weights["same_model"]) == (False,) * 3
    shorter = bits(first_light, run, make_run(tmp_path / "e", [2.0, 1.5]))
    assert (shorter["ok"], shorter["same_length"]) == (False, False)


def test_curves_are_compared_with_the_limit_of_their_type(
    first_light: ModuleType, tmp_path: Path
) -> None:
    one, two = first_light.Job("full", "unbroken", 1), first_light.Job("full", "unbroken", 2)
    a, b = make_run(tmp_path / "a", [2.0, 1.0]), make_run(tmp_path / "b", [2.0, 1.001])
    loose = first_light.distance(two, one, b, a, False)
    assert loose["ok"] is True
    assert loose["largest_relative_difference"]["train/loss"] == pytest.approx(1e-3)
    assert first_light.distance(two, one, b, a, True)["ok"] is False


@pytest.mark.slow
def test_a_killed_run_is_measured_and_equals_the_unbroken_one(
    first_light: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    small = "--steps 8 --batch-size 2 --max-length 512 --modes lora --kinds unbroken,killed"
    command = f"--device cpu --model tiny --devices 1 --out {out} --work {tmp_path / 'work'}"
    assert first_light.main([*command.split(), *small.split()]) == 0
    result = json.loads(out.read_text())
    killed = result["jobs"]["lora-killed-1"]
    assert killed["exit_of_killed"] == -9
    assert killed["resumed_after_step"] <= killed["killed_after_step"] < 8
    assert killed["tokens_per_second"] > 0
    assert [each["ok"] for each in result["comparisons"]] == [True]
    assert "lora-killed-1 = lora-unbroken-1, bit for bit" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "work")
