"""What a run says about its steps: the same values in three places, and only once."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from posttrain_cli.engine import metrics
from posttrain_cli.engine.metrics import MetricsWriter, console_line, parse_loggers
from posttrain_cli.runs.directory import RunDirectory
from posttrain_cli.runs.metrics import cut_metrics

VALUES = {
    "epoch": 0.25,
    "train/loss": 2.1434,
    "train/lr": 2e-6,
    "train/grad_norm": 1.312,
    "train/tokens": 1200,
    "train/tokens_per_second": 18511.7,
}


def writer(
    folder: Path, loggers: str = "console,tensorboard", done: int = 0, **changes: object
) -> tuple[MetricsWriter, list[str]]:
    """A writer whose clock ticks a second a step, and what it said."""
    said: list[str] = []
    ticks: Iterator[int] = count()
    options = {"total": 20, "interval": 10, "active": True} | changes
    made = MetricsWriter(
        RunDirectory(folder),
        parse_loggers(loggers),
        done=done,
        say=said.append,
        clock=lambda: float(next(ticks)),
        **options,
    )
    return made, said


def board(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: (step, value) of each metric."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder / "tensorboard"))
    shown.Reload()
    return {
        tag: [(each.step, each.value) for each in shown.Scalars(tag)]
        for tag in shown.Tags()["scalars"]
    }


def test_the_console_line_is_as_promised():
    line = console_line(10, VALUES, 761.4)
    assert line == (
        "step 10 | train/loss 2.143 | lr 2.00e-06 | grad_norm 1.31 | tokens/s 18,512 | eta 0:12:41"
    )


def test_the_console_line_shows_what_there_is():
    values = {"train/loss": math.nan, "val/loss": 1.5, "dpo/accuracy": 0.75, "other": 1.0}
    assert console_line(3, values, 3600 * 30 + 61) == (
        "step 3 | train/loss nan | val/loss 1.500 | dpo/accuracy 0.750 | eta 30:01:01"
    )
    assert console_line(3, {}, -1.0) == "step 3 | eta 0:00:00"


def test_every_step_is_written_and_every_tenth_is_said(tmp_path):
    made, said = writer(tmp_path, total=25)
    for step in range(1, 26):
        made.write(step, VALUES | {"train/loss": 1 / step})
    made.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 26))
    assert lines[6] == {"step": 7} | VALUES | {"train/loss": 1 / 7}
    assert [line.split(" | ")[0] for line in said] == ["step 10", "step 20", "step 25"]
    assert [line.split(" | ")[-1] for line in said] == ["eta 0:00:15", "eta 0:00:05", "eta 0:00:00"]
    shown = board(tmp_path)
    assert set(shown) == set(VALUES)
    assert [step for step, _ in shown["train/loss"]] == list(range(1, 26))
    assert shown["train/loss"][6][1] == pytest.approx(1 / 7, rel=1e-6)


def test_a_resumed_run_goes_on_without_gaps_or_repeats(tmp_path):
    first, _ = writer(tmp_path)
    for step in range(1, 8):
        first.write(step, {"train/loss": float(step)})
    first.sync()  # killed here: never closed, five steps after its checkpoint at step 5
    cut_metrics(tmp_path / "metrics.jsonl", 5)
    second, said = writer(tmp_path, done=5)
    for step in range(6, 11):
        second.write(step, {"train/loss": step + 0.5})
    second.close()
    first.close()
    expected = [(step, step + (0.5 if step > 5 else 0.0)) for step in range(1, 11)]
    assert board(tmp_path)["train/loss"] == expected
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["train/loss"]) for line in lines] == expected
    assert said[0].endswith("eta 0:00:10")  # from this session's pace alone


@pytest.mark.parametrize(
    ("loggers", "console", "tensorboard"),
    [("jsonl", False, False), ("console", True, False), ("tensorboard", False, True), ("", 0, 0)],
)
def test_loggers_choose_and_metrics_are_always_written(tmp_path, loggers, console, tensorboard):
    made, said = writer(tmp_path, loggers, interval=1)
    made.write(1, VALUES)
    made.close()
    assert (tmp_path / "metrics.jsonl").stat().st_size > 0
    assert bool(said) == bool(console)
    assert (tmp_path / "tensorboard").exists() == bool(tensorboard)


def test_other_ranks_write_nothing(tmp_path):
    made, said = writer(tmp_path, active=False, interval=1)
    made.write(1, VALUES)
    made.sync()
    made.close()
    assert list(tmp_path.iterdir()) == []
    assert said == []


def test_a_missing_tensorboard_is_said_and_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    made, said = writer(tmp_path)
    made.write(1, VALUES)
    made.close()
    assert said == ["tensorboard is not installed: its values are in metrics.jsonl all the same"]
    assert (tmp_path / "metrics.jsonl").stat().st_size > 0


def test_loggers_are_named_in_a_list_or_a_text():
    assert parse_loggers("tensorboard, console,console") == {"console", "tensorboard"}
    assert parse_loggers(["jsonl"]) == {"jsonl"}
    assert parse_loggers("") == set()
