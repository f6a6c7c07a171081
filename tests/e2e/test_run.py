"""What a run leaves, and what it refuses (SPEC §1, §2, §5)."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.support import (
    adapter_hash,
    children,
    lines_written,
    metrics,
    sft_args,
    start,
    wait_for,
)

Ptc = Callable[..., Any]


@pytest.fixture(scope="module")
def run(
    ptc: Ptc,
    tiny_model: Path,
    sft_train: Path,
    sft_val: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A finished run: 18 steps, a checkpoint every 2."""
    path = tmp_path_factory.mktemp("run") / "first"
    args = sft_args(tiny_model, sft_train, sft_val, path, "--log-interval", "5")
    done = ptc(*args, "--json")
    assert done.code == 0, done.stderr
    assert done.json()["steps"] == 18
    assert [line for line in done.stderr.splitlines() if line.startswith("step 5 | ")]
    return path


def test_every_step_is_a_line_and_the_loss_falls(run: Path) -> None:
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, 19))
    assert lines[-1]["train/loss"] < lines[0]["train/loss"]
    assert lines[-1]["epoch"] == 6
    for name in ("train/lr", "train/grad_norm", "train/tokens", "train/tokens_per_second"):
        assert all(line[name] > 0 for line in lines), name


def test_validation_is_in_the_line_of_its_step_and_before_training_in_the_record(run: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    before = record["before_training"]["val/loss"]
    validated = {line["step"]: line["val/loss"] for line in metrics(run) if "val/loss" in line}
    assert list(validated) == [3, 6, 9, 12, 15, 18]
    assert validated[18] < before


def test_the_record_traces_the_model_back_to_its_rows(run: Path, sft_train: Path) -> None:
    import hashlib

    record = json.loads((run / "run.json").read_text())
    assert record["state"] == "finished"
    data = {entry["role"]: entry for entry in record["datasets"]}
    assert data["train"]["sha256"] == hashlib.sha256(sft_train.read_bytes()).hexdigest()
    assert data["train"]["rows"] == 48
    assert record["samples"]["train"]["kept"] == 48
    assert record["seed"] == 42
    assert record["packages"]["torch"]
    assert record["stopped_at"] >= record["started_at"]


def test_checkpoints_are_kept_as_told_and_the_best_beside_them(run: Path) -> None:
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["step_00000014", "step_00000016", "step_00000018"]
    for name in names:
        assert (run / "checkpoints" / name / "MANIFEST.json").is_file()


def test_the_same_values_are_in_tensorboard(run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    shown = {event.step: event.value for event in board.Scalars("train/loss")}
    for line in metrics(run):
        assert shown[line["step"]] == pytest.approx(line["train/loss"], rel=1e-6)


def test_the_config_repeats_the_run(run: Path, ptc: Ptc, tmp_path: Path) -> None:
    config = run / "config.yaml"
    assert yaml.safe_load(config.read_text())["optim"]["lr"] == 1e-3
    done = ptc("train", "--config", config, "--output-dir", tmp_path / "again", cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert adapter_hash(tmp_path / "again") == adapter_hash(run)


def test_plain_peft_loads_the_adapter_with_the_logits_of_training(
    run: Path, tiny_model: Path
) -> None:
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    ids = torch.arange(4, 40).unsqueeze(0)
    with torch.no_grad():
        untuned = base(ids).logits
    model = PeftModel.from_pretrained(base, run / "model")
    saved = set(load_file(run / "model" / "adapter_model.safetensors"))
    known = {n.replace(".default.", ".") for n, _ in model.named_parameters() if ".lora_" in n}
    assert saved == known
    with torch.no_grad():
        tuned = model(ids).logits
    assert (tuned - untuned).abs().max() > 1e-3
    assert torch.allclose(tuned, engine_logits(run, ids), atol=1e-5)


def engine_logits(run: Path, ids: Any) -> Any:
    """Log-probabilities of the engine's own model, from the last checkpoint."""
    import numpy as np
    import torch

    from posttrain_cli.config import ModelConfig
    from posttrain_cli.engine.distributed import World
    from posttrain_cli.engine.model import build
    from posttrain_cli.runs.resolve import resolve_model

    source = resolve_model(run / "checkpoints" / "step_00000018")
    world = World(0, 1, 0, torch.device("cpu"), None)
    settings = ModelConfig(lora_rank=8, lora_alpha=16.0, target_modules="all-linear")
    policy = build(source, settings, world, seed=42)
    policy.module.eval()
    base = policy.module.get_base_model()  # type: ignore[operator]
    length = ids.shape[1]
    edges = torch.tensor(np.array([0, length]), dtype=torch.int32)
    with torch.no_grad():
        return base(ids, cu_seq_lens_q=edges, max_length_q=length, use_cache=False).logits


def test_full_training_exports_what_transformers_loads(
    ptc: Ptc, tiny_factory: Callable[..., Path], sft_train: Path, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = tiny_factory(architecture="qwen2", layers=1)
    done = ptc(
        "sft", "--gpus", "0", "--processes", "2", "--model", model, "--train", sft_train,
        "--output-dir", tmp_path / "run", "--max-steps", "2", "--lr", "1e-3",
    )  # fmt: skip
    assert done.code == 0, done.stderr
    tuned, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "run" / "model", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    moved = [
        not torch.equal(a, b) for a, b in zip(tuned.parameters(), before.parameters(), strict=True)
    ]
    assert all(moved)
    assert tuned.generation_config.eos_token_id is not None


def test_a_finished_run_is_left_alone(run: Path, ptc: Ptc) -> None:
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}
    done = ptc("resume", run)
    assert done.code == 0
    assert "finished" in done.stderr
    after = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}
    assert {p.name for p in after if before.get(p) != after[p]} <= {".lock"}


def test_a_used_directory_is_refused(
    run: Path, ptc: Ptc, tiny_model: Path, sft_train: Path, sft_val: Path
) -> None:
    before = adapter_hash(run)
    done = ptc(*sft_args(tiny_model, sft_train, sft_val, run))
    assert done.code == 2
    assert "ptc resume" in done.stderr
    assert adapter_hash(run) == before


def test_a_longer_run_goes_on(run: Path, ptc: Ptc, tmp_path: Path) -> None:
    import shutil

    longer = tmp_path / "longer"
    shutil.copytree(run, longer)
    done = ptc("resume", longer, "--epochs", "7")
    assert done.code == 0, done.stderr
    assert [line["step"] for line in metrics(longer)] == list(range(1, 22))
    assert metrics(longer)[:18] == metrics(run)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--set", "trainer.seed=7"], "trainer.seed"),
        (["--set", "data.max_length=128"], "data.max_length"),
        (["--set", "model.lora_rank=4"], "model.lora_rank"),
    ],
)
def test_what_would_change_order_or_model_is_refused(
    change: list[str], named: str, run: Path, ptc: Ptc
) -> None:
    done = ptc("resume", run, "--epochs", "8", *change)
    assert done.code == 2
    assert named in done.stderr
    assert "--force" in done.stderr


def test_changed_data_is_refused(
    ptc: Ptc, tiny_model: Path, sft_train: Path, sft_val: Path, tmp_path: Path
) -> None:
    train = tmp_path / "train.jsonl"
    train.write_bytes(sft_train.read_bytes())
    run = tmp_path / "run"
    assert ptc(*sft_args(tiny_model, train, sft_val, run, "--max-steps", "2")).code == 0
    train.write_bytes(train.read_bytes().replace(b"plus 1 ", b"plus 2 "))
    done = ptc("resume", run, "--max-steps", "4")
    assert done.code == 2
    assert str(train) in done.stderr


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_at_the_next_step(
    signum: int,
    code: int,
    tiny_model: Path,
    sft_train: Path,
    sft_val: Path,
    tmp_path: Path,
    ptc: Ptc,
) -> None:
    run = tmp_path / "run"
    args = sft_args(
        tiny_model, sft_train, sft_val, run, "--max-steps", "4000", "--save-interval", "5000"
    )
    process = start(args)
    wait_for(lambda: lines_written(run) >= 3, process)
    os.kill(process.pid, signum)
    assert process.wait(timeout=60) == code
    assert not children(process.pid)
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert checkpoint.name == f"step_{lines_written(run):08d}"
    assert json.loads((run / "run.json").read_text())["state"] == "interrupted"


def test_a_bad_row_stops_training_before_the_model_is_loaded(
    ptc: Ptc, tiny_model: Path, sft_train: Path, tmp_path: Path
) -> None:
    train = tmp_path / "train.jsonl"
    train.write_bytes(sft_train.read_bytes() + b'{"prompt": "x", "response": {"text": "y"}}\n')
    done = ptc(
        "sft",
        "--gpus",
        "0",
        "--model",
        tiny_model,
        "--train",
        train,
        "--output-dir",
        tmp_path / "run",
    )
    assert done.code == 1
    assert "PTC203" in done.stdout + done.stderr
    assert ":49:" in done.stdout + done.stderr
    assert not (tmp_path / "run").exists()


def test_rows_without_a_trained_token_are_dropped_and_counted(
    ptc: Ptc, tiny_model: Path, sft_train: Path, tmp_path: Path
) -> None:
    train = tmp_path / "train.jsonl"
    long = json.dumps({"prompt": "word " * 400, "response": "yes"}) + "\n"
    train.write_bytes(long.encode() + sft_train.read_bytes())
    args = ["sft", "--gpus", "0", "--model", tiny_model, "--max-length", "128", "--max-steps", "1"]
    done = ptc(*args, "--train", train, "--output-dir", tmp_path / "run")
    assert done.code == 0, done.stderr
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    counts = record["samples"]["train"]
    assert counts["read"] == 49
    assert counts["kept"] == 48
    assert sum(counts["dropped"].values()) == 1
    train.write_text(long)
    done = ptc(*args, "--train", train, "--output-dir", tmp_path / "none")
    assert done.code == 1
    assert "nothing is left" in done.stderr
    assert not (tmp_path / "none").exists()


def test_training_on_the_validation_data_is_said_loudly(
    ptc: Ptc, tiny_model: Path, sft_train: Path, tmp_path: Path
) -> None:
    args = ["sft", "--gpus", "0", "--model", tiny_model, "--max-steps", "1"]
    done = ptc(*args, "--train", sft_train, "--val", sft_train, "--output-dir", tmp_path / "run")
    assert done.code == 0
    assert "warning" in done.stderr


def test_a_dry_run_writes_nothing(
    ptc: Ptc, tiny_model: Path, sft_train: Path, sft_val: Path, tmp_path: Path
) -> None:
    done = ptc(
        *sft_args(tiny_model, sft_train, sft_val, tmp_path / "run"),
        "--dry-run",
        "--json",
        cwd=tmp_path,
    )
    assert done.code == 0, done.stderr
    plan = done.json()["plan"]
    assert plan["steps"] == 18
    assert plan["data"]["train"]["kept"] == 48
    assert plan["settings"]["optim.lr"] == {"value": 1e-3, "origin": "flag --lr"}
    assert plan["fits"]
    assert "⟦" in plan["sample"]
    assert not list(tmp_path.iterdir())


def test_an_adapter_is_trained_further(
    run: Path, ptc: Ptc, sft_train: Path, tmp_path: Path
) -> None:
    done = ptc(
        "sft", "--gpus", "0", "--model", run, "--train", sft_train, "--max-steps", "1",
        "--max-length", "256", "--output-dir", tmp_path / "further",
    )  # fmt: skip
    assert done.code == 0, done.stderr
    first = metrics(tmp_path / "further")[0]["train/loss"]
    assert first < metrics(run)[0]["train/loss"] - 0.1
    config = json.loads((tmp_path / "further" / "model" / "adapter_config.json").read_text())
    assert config["r"] == 8


def test_steps_that_blow_up_are_skipped_kept_and_end_the_run(
    ptc: Ptc, tiny_model: Path, sft_train: Path, sft_val: Path, tmp_path: Path
) -> None:
    """A rate this high breaks the weights in the first update: every later loss is not finite."""
    run = tmp_path / "run"
    args = sft_args(tiny_model, sft_train, sft_val, run, "--lr", "1e30", "--rollback")
    done = ptc(*args, "--set", "trainer.max_bad_steps=3", "--set", "trainer.save_interval=1")
    assert done.code == 3
    assert "3 steps in a row had unusable gradients" in done.stderr
    assert "--lr" in done.stderr
    record = json.loads((run / "run.json").read_text())
    assert record["state"] == "failed"
    assert record["rolled_back"]["left_out"]
    kept = sorted((run / "bad_steps").iterdir())
    rows = json.loads(kept[0].read_text())["rows"]
    assert rows
    assert all(row["file"] == str(sft_train) and 1 <= row["row"] <= 48 for row in rows)
    assert any(line.get("train/skipped") for line in metrics(run))
    assert not (run / "model").exists()


def test_a_run_refused_at_its_start_leaves_the_folder_as_it_was(
    ptc: Ptc, tiny_model: Path, sft_train: Path, sft_val: Path, tmp_path: Path
) -> None:
    path = tmp_path / "refused"
    path.mkdir()
    (path / "mine.txt").write_text("mine")
    args = sft_args(tiny_model, sft_train, sft_val, path, "--target-modules", "nope")
    refused = ptc(*args)
    assert refused.code == 2
    assert "`nope` match no layer" in refused.stderr
    assert [found.name for found in path.iterdir()] == ["mine.txt"]
    assert ptc(*args).stderr == refused.stderr  # not "holds a run already"
