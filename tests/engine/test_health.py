from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from posttrain_cli.engine.health import (
    ENOUGH,
    EXPLODING,
    WINDOW,
    NormWatch,
    bad_steps,
    check_gradients,
    save_bad_rows,
)
from posttrain_cli.errors import RunError
from posttrain_cli.runs.directory import RunDirectory


@pytest.mark.parametrize(
    ("loss", "norm", "reason"),
    [
        (math.nan, 1.0, "loss nan, gradient norm 1.0"),
        (1.0, math.inf, "loss 1.0, gradient norm inf"),
        (-math.inf, math.nan, "loss -inf, gradient norm nan"),
    ],
)
def test_a_step_that_is_not_finite_is_skipped_from_the_first_on(
    loss: float, norm: float, reason: str
) -> None:
    watch = NormWatch()
    assert watch.judge(loss, norm) == reason
    assert watch.judge(1.0, 1.0) == ""
    assert list(watch.recent) == [1.0]


def test_an_exploding_norm_is_skipped_once_enough_are_known() -> None:
    watch = NormWatch()
    for _ in range(ENOUGH - 1):
        assert watch.judge(1.0, 2.0) == ""
    assert watch.judge(1.0, 1e9) == ""  # too early to tell
    assert watch.judge(1.0, 2.0 * EXPLODING) == ""  # the limit itself is allowed
    assert watch.judge(1.0, 2.0 * EXPLODING * 1.01) == (
        "gradient norm 2.02e+03 is over 1000 × the recent median"
    )
    assert watch.recent[-1] == 2.0 * EXPLODING  # a skipped norm is not remembered


def test_norms_may_grow_slowly_and_may_have_been_zero() -> None:
    watch = NormWatch()
    assert not any(watch.judge(1.0, 1.2**step) for step in range(100))
    still = NormWatch()
    assert not any(still.judge(0.0, 0.0) for _ in range(30))
    assert still.judge(1.0, 5.0) == ""


def test_replayed_metrics_judge_as_the_unbroken_run_does() -> None:
    live = NormWatch()
    lines: list[dict[str, Any]] = []
    random = torch.Generator().manual_seed(0)
    for step in range(1, 600):
        norm = float(torch.rand((), generator=random)) * (1e6 if 100 < step < 500 else 1.0)
        line: dict[str, Any] = {"step": step, "train/grad_norm": norm}
        if live.judge(1.0, norm):
            line["train/skipped"] = 1
        lines.append(line)
        if step % 37 == 0:
            lines.append({"step": step, "val/loss": 1.0, "train/skipped": 1})  # was left out
            lines.append({"step": step, "train/grad_norm": None, "train/skipped": 1})
        if step in (5, 60, 130, 450, 560):
            resumed = NormWatch()
            resumed.replay(json.loads(json.dumps(lines)))
            assert list(resumed.recent) == list(live.recent)
    assert sum("train/skipped" in line for line in lines) > 300
    assert len(live.recent) == WINDOW


def test_a_trained_tensor_without_gradient_stops_the_run_and_a_zero_one_does_not() -> None:
    trainable = {name: nn.Parameter(torch.zeros(2)) for name in ("a", "b", "c")}
    for name in ("a", "c"):
        trainable[name].grad = torch.zeros(2)
    with pytest.raises(RunError) as caught:
        check_gradients(trainable)
    assert caught.value.message == (
        "1 of 3 trainable tensors got no gradient in the first step, such as `b`"
    )
    assert "target_modules" in caught.value.hint
    assert caught.value.exit_code == 3
    trainable["b"].grad = torch.zeros(2)
    check_gradients(trainable)


def test_rows_of_a_skipped_step_are_kept_for_inspection(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert bad_steps(run) == frozenset()
    rows = [{"file": "train.jsonl", "row": 17}]
    path = save_bad_rows(run, 12, "loss nan", rows)
    assert path == tmp_path / "bad_steps" / "step_00000012.json"
    assert json.loads(path.read_text()) == {"step": 12, "reason": "loss nan", "rows": rows}
    save_bad_rows(run, 123456789, "loss nan", rows)
    assert bad_steps(run) == {12, 123456789}
