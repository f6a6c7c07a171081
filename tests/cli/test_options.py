"""Flags come from the schema, reach the config, and say in the help what they take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain_cli.cli import preflight, train
from posttrain_cli.cli.options import flag_settings
from posttrain_cli.config import METHODS
from posttrain_cli.schema import Setting, settings
from posttrain_cli.settings import Resolved, value_of

Shell = Callable[..., Any]


@pytest.fixture
def resolve(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Resolved]:
    """`resolve("sft", "--lr", "1e-5")`: what the command resolved, caught before it checks."""
    caught: list[Resolved] = []
    monkeypatch.setattr(train, "_start", lambda resolved, **_: caught.append(resolved))

    def run(*args: str | Path) -> Resolved:
        answer = shell(*args)
        assert answer.code == 0, answer.err
        return caught[-1]

    return run


def sample(row: Setting) -> tuple[list[str], Any]:
    """Arguments that give a setting another value than its default, and that value."""
    if row.key in ("data.train_files", "data.val_files"):
        return [row.flag, "/x/a.jsonl"], "/x/a.jsonl"
    if bool in row.types:
        name = row.flag.removeprefix("--")
        return ([f"--no-{name}"], False) if row.default is True else ([row.flag], True)
    if row.key == "trainer.n_gpus_per_node":
        return [row.flag, "0"], 0
    if row.key == "trainer.logger":
        return [row.flag, "console,jsonl"], ["console", "jsonl"]
    if row.key == "model.target_modules":
        return [row.flag, "q_proj,v_proj"], ["q_proj", "v_proj"]
    if row.choices:
        other = next(choice for choice in row.choices if choice != row.default)
        return [row.flag, other], other
    if int in row.types:
        return [row.flag, "17"], 17
    if float in row.types:
        return [row.flag, "0.25"], 0.25
    return [row.flag, "/x/text"], "/x/text"


@pytest.mark.parametrize("row", flag_settings("sft"), ids=lambda row: row.flag)
def test_every_flag_of_sft_reaches_the_config(resolve: Shell, row: Setting) -> None:
    arguments, value = sample(row)
    if row.section == "model" and row.name.startswith(("lora_", "target_")):
        arguments = ["--lora-rank", "4", *arguments]
    resolved = resolve("sft", *arguments)
    assert value_of(resolved.config, row.key) == value
    assert resolved.origins[row.key] == f"flag {row.flag}"


@pytest.mark.parametrize("method", METHODS)
def test_a_methods_flags_are_those_of_the_settings_it_reads(method: Any) -> None:
    wanted = [row.key for row in settings().values() if row.flag and method in row.methods]
    assert [row.key for row in flag_settings(method)] == wanted


def test_train_offers_what_every_method_reads(resolve: Shell, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("trainer: {type: sft}\n")
    resolved = resolve("train", "--config", "run.yaml", "--lr", "1e-4", "--set", "optim.eps=1e-6")
    assert (resolved.config.optim.lr, resolved.config.optim.eps) == (1e-4, 1e-6)
    assert "--train-on" not in {row.flag for row in flag_settings(None)}


def test_second_names_of_flags(resolve: Shell, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("optim: {lr: 3e-5}\n")
    resolved = resolve("sft", "--config_path", "run.yaml", "--dataset_path", "t.jsonl")
    assert resolved.config.optim.lr == 3e-5
    assert resolved.config.data.train_files == str(tmp_path / "t.jsonl")


def test_several_training_files(resolve: Shell, tmp_path: Path) -> None:
    resolved = resolve("sft", "--train", "a.jsonl", "--train", "b.jsonl", "--val", "c.jsonl")
    data = resolved.config.data
    assert data.train_files == [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    assert data.val_files == str(tmp_path / "c.jsonl")


def test_all_linear_stays_a_word(resolve: Shell) -> None:
    resolved = resolve("sft", "--lora-rank", "4", "--target-modules", "all-linear")
    assert resolved.config.model.target_modules == "all-linear"


def test_the_project_file_is_read(resolve: Shell, tmp_path: Path) -> None:
    (tmp_path / "ptc.yaml").write_text("trainer:\n  seed: 7\n")
    resolved = resolve("sft")
    assert resolved.config.trainer.seed == 7
    assert resolved.origins["trainer.seed"] == "ptc.yaml:2"


def test_help_shows_type_default_and_choices(shell: Shell) -> None:
    text = " ".join(shell("sft", "--help").out.split())
    assert "--max-length N tokens a sample or pack may have [default: 2048]" in text
    assert "--overlong keep|drop|truncate|error" in text
    assert "--packing / --no-packing" in text
    assert "--train, --dataset-path FILE" in text
    assert "--lr X peak learning rate (default by method)" in text
    assert "--gpus N|auto|0" in text


def test_mistakes_of_flags_files_and_sets_are_told_together(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data:\n  packin: true\n")
    answer = shell(
        "sft", "--config", "run.yaml", "--set", "optim.lrr=1", "--lr", "fast", "--max-length", "2"
    )
    assert answer.code == 2
    assert answer.out == ""
    assert answer.err.splitlines() == [
        "error: run.yaml:2: unknown key `data.packin`; did you mean `packing`?",
        "error: --set optim.lrr: unknown key `optim.lrr`; did you mean `lr`?",
        "error: flag --lr: expected a number > 0, got `fast`",
        "error: flag --max-length: `data.max_length`: expected a whole number ≥ 8, got `2`",
    ]


def test_preflight_is_not_reached_with_a_bad_config(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("checked a config that was refused")

    monkeypatch.setattr(preflight, "check", forbidden)
    assert shell("sft", "--lr", "fast").code == 2
