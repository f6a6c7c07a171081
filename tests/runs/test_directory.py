"""The run directory: refused when in use, whole when written, silent about secrets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from posttrain_cli.config import Config
from posttrain_cli.errors import UsageError
from posttrain_cli.runs import directory, lineage
from posttrain_cli.runs.directory import RunDirectory, create_run, open_run, refuse_run
from posttrain_cli.settings import load


def config(**trainer: object) -> Config:
    sections = {
        "data": {"train_files": "rows.jsonl"},
        "optim": {"lr": 2e-5, "betas": [0.9, 0.95]},
        "trainer": {"type": "sft", "total_epochs": 1, "project_name": "zähl"} | trainer,
    }
    return Config.model_validate(sections)


def create(path: Path, overwrite: bool = False) -> RunDirectory:
    return create_run(path, config(), {"state": "running"}, overwrite=overwrite)


def test_a_new_run_has_its_record_config_and_folders(tmp_path):
    run = create(tmp_path / "deep" / "run")
    assert json.loads(run.record.read_text()) == {"state": "running"}
    written = yaml.safe_load(run.config.read_text())
    assert written["trainer"] == written["trainer"] | {"type": "sft", "project_name": "zähl"}
    assert run.logs.is_dir()
    assert run.checkpoints.is_dir()
    assert not run.model.exists()


def test_the_config_reads_back_through_the_settings_to_the_same_config(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    given = tmp_path / "given.yaml"
    given.write_text(
        "data: {train_files: rows.jsonl, max_length: 64}\n"
        "model: {partial_pretrain: ./model, lora_rank: 4}\n"
        "optim: {lr: 2e-5}\n"
        "trainer: {type: sft, default_local_dir: ./run}\n"
    )
    first = load("sft", flags={}, sets=[], config_file=given, cwd=tmp_path).config
    run = create_run(tmp_path / "run", first, {}, overwrite=False)
    again = load(None, flags={}, sets=[], config_file=run.config, cwd=Path("/")).config
    assert again == first
    assert lineage.config_hash(again) == lineage.config_hash(first)


@pytest.mark.parametrize(
    "left", ["run.json", "config.yaml", "metrics.jsonl", "checkpoints", "model", "tensorboard"]
)
def test_a_directory_that_holds_a_run_or_its_remains_is_refused(tmp_path, left):
    (tmp_path / left).mkdir()
    with pytest.raises(UsageError) as caught:
        create(tmp_path)
    assert caught.value.message == f"`{tmp_path}` holds a run already"
    assert f"`ptc resume {tmp_path}`" in caught.value.hint
    assert "--overwrite" in caught.value.hint


def test_a_file_is_refused_even_with_overwrite(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file, expected a directory"):
        refuse_run(tmp_path / "file", overwrite=True)


def test_overwrite_removes_the_old_run_and_nothing_else(tmp_path):
    run = create(tmp_path)
    (run.checkpoints / "step_00000001").mkdir()
    run.metrics.write_text('{"step": 1}\n')
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    run.model.symlink_to(elsewhere)
    (tmp_path / "notes.txt").write_text("mine")
    create(tmp_path, overwrite=True)
    assert list(run.checkpoints.iterdir()) == []
    assert not run.metrics.exists()
    assert not run.model.is_symlink()
    assert (elsewhere / "kept").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_directory_with_other_files_can_become_a_run(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    create(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(("make", "words"), [(True, "has no `run.json`"), (False, "no directory")])
def test_what_is_no_run_is_said(tmp_path, make, words):
    path = tmp_path / "run"
    if make:
        path.mkdir()
    with pytest.raises(UsageError, match=words) as caught:
        open_run(path)
    assert f"`{path}`" in caught.value.message


@pytest.mark.parametrize(
    ("text", "words"), [('{"state"', "is not JSON"), ("[]", "is not a JSON object")]
)
def test_a_broken_record_is_said(tmp_path, text, words):
    run = create(tmp_path)
    run.record.write_text(text)
    with pytest.raises(UsageError, match=words):
        directory.read_record(open_run(tmp_path))


def test_states_are_noted_with_their_time(tmp_path):
    run = create(tmp_path)
    directory.set_state(run, "interrupted", error="stopped")
    record = directory.read_record(run)
    assert record["state"] == "interrupted"
    assert record["error"] == "stopped"
    assert record["stopped_at"].endswith("+00:00")
    directory.set_state(run, "running")
    assert directory.read_record(run)["stopped_at"] is None


def test_a_record_that_cannot_be_written_stays_as_it_was(tmp_path):
    run = create(tmp_path)
    with pytest.raises(TypeError):
        directory.update_record(run, step=object())
    assert directory.read_record(run) == {"state": "running"}
    assert [path.name for path in tmp_path.iterdir() if ".tmp" in path.name] == []


def test_credentials_in_addresses_are_not_kept(tmp_path):
    run = create(tmp_path)
    directory.update_record(run, command="ptc sft --train s3://key:secret@bucket/rows.jsonl")
    text = run.record.read_text()
    assert "secret" not in text
    assert "s3://***@bucket/rows.jsonl" in text


def test_the_record_says_what_the_run_was_made_of(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "README.md").write_text("words")
    identity = lineage.folder_identity(model)
    record = lineage.run_record(
        command=["ptc", "sft", "--train", "my rows.jsonl"],
        config=config(),
        datasets=[{"role": "train", "path": "rows.jsonl", "sha256": "0" * 64, "rows": 2}],
        tokenizer={"sha256": "1" * 64},
        model=identity,
        devices=["cpu", "cpu"],
        threads=3,
    )
    assert json.loads(json.dumps(record)) == record
    assert record["state"] == "running"
    assert record["command"] == "ptc sft --train 'my rows.jsonl'"
    assert record["type"] == "sft"
    assert record["datasets"][0]["rows"] == 2
    assert (record["processes"], record["threads"], record["seed"]) == (2, 3, 42)
    assert record["packages"]["torch"].startswith("2.")
    checkout = (Path(__file__).parents[2] / ".git").exists()
    assert len(record["code"].get("git_commit", "")) == (40 if checkout else 0)
    assert record["host"]["python"].startswith("3.")
    assert set(identity["files"]) == {"config.json", "model.safetensors"}
    assert identity["files"]["model.safetensors"] == {
        "size": 7,
        "sha256": "9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c",
    }
    assert "hf_secret" not in json.dumps(record)


def test_the_config_hash_follows_values_only():
    assert lineage.config_hash(config()) == lineage.config_hash(config(seed=42))
    assert lineage.config_hash(config()) != lineage.config_hash(config(seed=43))
