"""Killed anywhere and resumed = never stopped, bit by bit (SPEC §6)."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import support
from tests.e2e.support import adapter_hash, computed, lines_written, sft_args, start, wait_for

STEPS = 18  # three an epoch: 3 is the last of the first, 4 the first of the second


@pytest.fixture(scope="module")
def unbroken(
    ptc: Callable[..., Any],
    tiny_model: Path,
    sft_train: Path,
    sft_val: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[int], Path]:
    """`unbroken(processes)`: a run that nobody disturbed."""
    made: dict[int, Path] = {}

    def make(processes: int) -> Path:
        if processes not in made:
            run = tmp_path_factory.mktemp("unbroken") / "run"
            args = sft_args(tiny_model, sft_train, sft_val, run, "--processes", str(processes))
            done = ptc(*args)
            assert done.code == 0, done.stderr
            made[processes] = run
        return made[processes]

    return make


def in_checkpoint(run: Path, step: int) -> bool:
    return (run / "checkpoints" / f".tmp-step_{step:08d}").exists()


def moments(run: Path, processes: int) -> list[tuple[str, Callable[[], bool]]]:
    """Whom to kill, and when: at steps, during a checkpoint write, around an epoch's end."""
    draw = random.Random(processes)
    whom = ["launcher", "worker", "tree"]
    chosen: list[tuple[str, Callable[[], bool]]] = [
        ("tree", lambda: lines_written(run) >= 1),
        ("tree", lambda: in_checkpoint(run, 2)),
        ("worker", lambda: lines_written(run) >= 3),
        ("launcher", lambda: lines_written(run) >= 4),
        ("tree", lambda: in_checkpoint(run, 6)),
    ]
    later = sorted(draw.sample(range(7, STEPS), 5))
    chosen += [(draw.choice(whom), lambda step=step: lines_written(run) >= step) for step in later]
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_ten_kills_change_no_bit(
    processes: int,
    unbroken: Callable[[int], Path],
    ptc: Callable[..., Any],
    tiny_model: Path,
    sft_train: Path,
    sft_val: Path,
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    args = sft_args(tiny_model, sft_train, sft_val, run, "--processes", str(processes))
    kills = 0
    for whom, moment in moments(run, processes):
        process = start(args)
        wait_for(moment, process)
        kills += process.poll() is None
        support.kill(process, whom)
        args = ["resume", str(run)] if (run / "run.json").exists() else args
    done = ptc(*args)
    assert done.code == 0, done.stderr
    assert kills >= 8, "most kills must hit a living run"
    assert computed(run) == computed(unbroken(processes))
    assert adapter_hash(run) == adapter_hash(unbroken(processes))
    assert not list((run / "checkpoints").glob(".tmp-*"))


@pytest.mark.slow
def test_other_numbers_of_processes_see_the_same_batches(
    unbroken: Callable[[int], Path],
    ptc: Callable[..., Any],
    tiny_model: Path,
    sft_train: Path,
    sft_val: Path,
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    args = sft_args(tiny_model, sft_train, sft_val, run, "--max-steps", "5")
    assert ptc(*args).code == 0
    for processes, until in (("2", "11"), ("1", "18")):
        done = ptc("resume", run, "--processes", processes, "--max-steps", until)
        assert done.code == 0, done.stderr
    # The learning rate depends on the total, so the runs to compare with are cut the same way.
    whole = tmp_path / "whole"
    args = sft_args(tiny_model, sft_train, sft_val, whole, "--max-steps", "5")
    assert ptc(*args).code == 0
    for until in ("11", "18"):
        assert ptc("resume", whole, "--max-steps", until).code == 0
    for one, other in zip(computed(whole), computed(run), strict=True):
        assert one["train/tokens"] == other["train/tokens"]
        assert other["train/loss"] == pytest.approx(one["train/loss"], rel=1e-5)
        assert other["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=1e-5)


@pytest.mark.slow
def test_verify_trains_the_last_stretch_again(
    unbroken: Callable[[int], Path], ptc: Callable[..., Any], tmp_path: Path
) -> None:
    run = tmp_path / "moved"  # a run directory may be copied
    shutil.copytree(unbroken(1), run)
    before = sorted(p.relative_to(run) for p in run.rglob("*"))
    assert ptc("resume", run, "--verify").code == 0
    assert sorted(p.relative_to(run) for p in run.rglob("*")) == before
    text = (run / "metrics.jsonl").read_text()
    last = text.splitlines()[-1]
    (run / "metrics.jsonl").write_text(
        text.replace(last, last.replace('"train/loss":', '"train/loss":1'))
    )
    done = ptc("resume", run, "--verify")
    assert done.code == 1
    assert "18" in done.stderr
