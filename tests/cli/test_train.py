"""`ptc sft`, `train` and `resume` as shells: what is missing, what is refused, what is printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain_cli.cli import preflight, train
from posttrain_cli.engine import resume as resuming
from posttrain_cli.engine import verify as verifying
from posttrain_cli.engine.api import Outcome
from posttrain_cli.engine.launch import NodePlan
from posttrain_cli.engine.verify import Verdict

Shell = Callable[..., Any]


@pytest.fixture(autouse=True)
def outside_any_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


# --- what is missing ----------------------------------------------------------------------------


def test_an_empty_directory_is_told_in_three_lines(shell: Shell, tmp_path: Path) -> None:
    answer = shell("sft", "--gpus", "4", "--lora-rank", "64")
    assert answer.code == 2
    assert answer.out == ""
    model, data, gpus = answer.err.splitlines()
    assert model.startswith("error: no model to start from: pass `--model DIR`")
    assert data.startswith("error: no training data: pass `--train FILE`")
    assert "ptc gen-synthetic --kind sft --out train.jsonl" in data
    assert gpus.startswith("error: 4 GPUs asked for, 0 found here")
    assert "`--gpus 0` for the CPU" in gpus
    assert list(tmp_path.iterdir()) == []


def test_missing_packages_share_the_line_of_the_machine(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "missing", lambda extra: ["torch", "peft"])
    answer = shell("sft", "--gpus", "4")
    assert len(answer.err.splitlines()) == 3
    assert answer.err.splitlines()[2].startswith(
        "error: not installed: `torch`, `peft`; pip install 'posttrain-cli[train]'; 4 GPUs asked"
    )
    answer = shell("resume", "runs/x")
    assert answer.code == 2
    assert answer.err == (
        "error: not installed: `torch`, `peft`; pip install 'posttrain-cli[train]'\n"
    )


def test_missing_files_and_folders_are_told_together(shell: Shell, tmp_path: Path) -> None:
    answer = shell("sft", "--model", "./none", "--train", "a.jsonl", "--val", "b.jsonl")
    assert answer.code == 2
    model, first, second = answer.err.splitlines()
    assert str(tmp_path / "none") in model
    assert str(tmp_path / "a.jsonl") in first
    assert str(tmp_path / "b.jsonl") in second


def test_hidden_gpus_are_mentioned(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    answer = shell("sft", "--gpus", "1")
    assert "1 GPUs asked for, 0 found here (CUDA_VISIBLE_DEVICES=3)" in answer.err


def test_json_lists_every_problem(shell: Shell) -> None:
    error = shell("sft", "--gpus", "4", "--json").json()["error"]
    assert error["exit_code"] == 2
    assert len(error["problems"]) == 3


# --- several machines ---------------------------------------------------------------------------


def test_several_machines_need_a_meeting_point(tmp_path: Path) -> None:
    from posttrain_cli.errors import UsageError
    from posttrain_cli.settings import load

    def node(nodes: int, rank: int, endpoint: str) -> NodePlan | None:
        flags = {"trainer.nnodes": str(nodes)}
        return preflight.node(load("sft", flags=flags, cwd=tmp_path).config, rank, endpoint)

    assert node(1, 0, "") is None
    assert node(2, 1, "host:29400") == NodePlan(2, 1, "host:29400")
    with pytest.raises(UsageError, match="`--nnodes 2` needs `--rdzv-endpoint HOST:PORT`"):
        node(2, 0, "")
    with pytest.raises(UsageError, match="are for several machines"):
        node(1, 1, "")
    with pytest.raises(UsageError, match="not of the form `host:port`"):
        node(2, 0, "host")


def test_a_rank_of_another_launcher_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttrain_cli.settings import load

    monkeypatch.setenv("RANK", "1")
    config = load("sft", flags={"trainer.nnodes": "2"}, cwd=tmp_path).config
    assert preflight.node(config, 0, "") is None


# --- train and resume ---------------------------------------------------------------------------


def test_train_needs_a_type_and_a_trainer_that_is_there(shell: Shell, tmp_path: Path) -> None:
    answer = shell("train")
    assert answer.code == 2
    assert answer.err.startswith("error: `trainer.type` is missing")
    (tmp_path / "run.yaml").write_text("trainer:\n  type: ppo\nrl: {kl_coef: 0.1}\n")
    answer = shell("train", "--config", "run.yaml")
    assert answer.code == 2
    assert answer.err == (
        "error: run.yaml:2: this version has no `ppo` trainer\n\nhint: it trains sft\n"
    )
    answer = shell("sft", "--config", "run.yaml")
    assert answer.code == 2
    assert "`trainer.type` is `ppo` but the command is `ptc sft`" in answer.err


def test_resume_hands_its_changes_over(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Any] = []

    def resume(run: Path, changes: resuming.Changes, say: Any) -> Outcome:
        seen.append((run, changes))
        return Outcome(run, 9, {"step": 9}, already_finished=True)

    monkeypatch.setattr(resuming, "resume", resume)
    answer = shell(
        "resume", "runs/x", "--gpus", "0", "--processes", "2", "--max-steps", "9",
        "--set", "trainer.save_interval=5", "--force",
    )  # fmt: skip
    assert (answer.code, answer.out, answer.err) == (0, f"{tmp_path}/runs/x/model\n", "")
    ((run, changes),) = seen
    assert run == Path("runs/x")
    assert changes.flags == {
        "trainer.n_gpus_per_node": "0",
        "trainer.processes": "2",
        "trainer.total_epochs": None,
        "trainer.max_steps": "9",
    }
    assert changes.sets == ("trainer.save_interval=5",)
    assert changes.force is True


def test_resume_of_what_is_no_run(shell: Shell, tmp_path: Path) -> None:
    answer = shell("resume", "runs/none")
    assert answer.code == 2
    assert str(tmp_path / "runs" / "none") in answer.err


def test_verify_says_the_same_or_what_differs(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = {"same": Verdict(3, 7, (), ()), "other": Verdict(3, 7, (5,), ("a", "b"))}
    monkeypatch.setattr(verifying, "verify", lambda run, say: verdicts[run.name])
    answer = shell("resume", "same", "--verify")
    assert (answer.code, answer.out) == (
        0,
        "steps 3 to 7: the same losses and weights, bit for bit\n",
    )
    answer = shell("resume", "other", "--verify", "-v")
    assert (answer.code, answer.out) == (1, "steps 3 to 7: 1 steps and 2 tensors differ\n")
    assert answer.err == "  5\n  a\n  b\n"
    answer = shell("resume", "other", "--verify", "--json")
    assert answer.code == 1
    assert answer.json() == {
        "ok": False,
        "first": 3,
        "last": 7,
        "different_steps": [5],
        "different_tensors": ["a", "b"],
    }


# --- what is printed ----------------------------------------------------------------------------


@pytest.fixture
def started(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[Any, Any]]:
    """`started("--overwrite")`: run `ptc sft` with an engine that only notes its orders."""
    from posttrain_cli.engine import api

    seen: list[Any] = []

    def start(resolved: Any, options: Any, say: Any) -> Outcome:
        seen.append(options)
        say("training")
        return Outcome(tmp_path / "run", 1200, {"step": 1200, "train/loss": 1.5})

    monkeypatch.setattr(api, "start", start)
    monkeypatch.setattr(preflight, "check", lambda *_, **__: None)

    def run(*args: str) -> tuple[Any, Any]:
        return shell("sft", *args), seen[-1]

    return run


def test_the_models_folder_is_the_result(started: Shell, tmp_path: Path) -> None:
    answer, options = started("--overwrite", "--resume-from-checkpoint", "--allow-download")
    assert answer.code == 0
    assert answer.out == f"{tmp_path / 'run' / 'model'}\n"
    assert answer.err == (
        f"training\ndone: 1,200 steps; try `ptc infer --model {tmp_path / 'run'}`\n"
    )
    assert (options.overwrite, options.resume, options.allow_download) == (True, True, True)
    assert options.command[:2] == ("ptc", "sft")
    assert options.node is None


def test_json_result_of_a_run(started: Shell, tmp_path: Path) -> None:
    answer, _ = started("--json", "-q")
    assert answer.json() == {
        "ok": True,
        "run": str(tmp_path / "run"),
        "model": str(tmp_path / "run" / "model"),
        "steps": 1200,
        "already_finished": False,
        "metrics": {"step": 1200, "train/loss": 1.5},
    }
    assert answer.err == ""


def test_only_rank_0_of_a_joined_world_speaks(
    started: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    answer, _ = started()
    assert answer.out == ""
    monkeypatch.setenv("RANK", "0")
    answer, _ = started()
    assert answer.out.endswith("model\n")


PLAN = {
    "settings": {
        "optim.lr": {"value": 2e-05, "origin": "default (sft)"},
        "trainer.max_steps": {"value": None, "origin": "default"},
        "trainer.seed": {"value": 7, "origin": "flag --seed"},
    },
    "run": "/x/run",
    "data": {
        "train": {
            "read": 1200,
            "kept": 1190,
            "dropped": {"no trained token": 10},
            "cut": 3,
            "tokens": 50000,
            "trained": 20000,
            "longest": 900,
        }
    },
    "steps": 1500,
    "tokens_per_step": 4096,
    "devices": {"processes": 2, "gpu": False},
    "parameters": {"all": 135000000, "trained": 1000000},
    "memory": {"weights": 1e9, "output_layer": 5e8, "total": 1.5e9, "available": 1e9},
    "fits": False,
    "sample": "Hi⟦ there⟧",
}


def test_a_plan_in_words_and_as_json(
    shell: Shell, started: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttrain_cli.engine import dryrun

    monkeypatch.setattr(dryrun, "plan", lambda *_: PLAN)
    answer = shell("sft", "--dry-run")
    assert answer.code == 0
    lines = answer.out.splitlines()
    assert "  optim.lr      2e-05  default (sft)" in lines
    assert "  trainer.seed  7      flag --seed" in lines
    assert not any("max_steps" in line for line in lines)
    assert "  train: 1,200 rows read = 1,190 kept + 10 dropped; 10 no trained token; 3 cut" in lines
    assert "  steps            1,500" in lines
    assert "  devices          2 × CPU process" in lines
    assert "  memory a device  1.50 GB (weights 1.00 GB, output layer 0.50 GB)" in lines
    assert any(line.startswith("  fits             no: lower --micro-batch-size") for line in lines)
    assert json.loads(shell("sft", "--dry-run", "--json").out) == {"ok": True, "plan": PLAN}


def test_the_trainers_that_are_there_are_commands() -> None:
    from posttrain_cli.cli.app import COMMANDS

    assert set(train._TRAINERS) <= {row.name for row in COMMANDS}
