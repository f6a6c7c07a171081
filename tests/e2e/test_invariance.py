"""Loss and gradient norm depend on the global batch alone (SPEC §6, float32, 1e-5 relative)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import computed, metrics, sft_args

CASES = {
    "micro-batch": ["--micro-batch-size", "3"],
    "two processes": ["--processes", "2"],
    "three processes": ["--processes", "3"],  # the last steps leave a rank short of packs
    "recomputed activations": ["--gradient-checkpointing"],
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reference(
    ptc: Callable[..., Any],
    tiny_model: Path,
    sft_train: Path,
    sft_val: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    run = tmp_path_factory.mktemp("reference") / "run"
    done = ptc(*sft_args(tiny_model, sft_train, sft_val, run, "--epochs", "1"))
    assert done.code == 0, done.stderr
    return run


@pytest.mark.parametrize("case", CASES)
def test_how_a_step_is_split_changes_nothing(
    case: str,
    reference: Path,
    ptc: Callable[..., Any],
    tiny_model: Path,
    sft_train: Path,
    sft_val: Path,
    tmp_path: Path,
) -> None:
    args = sft_args(tiny_model, sft_train, sft_val, tmp_path / "run", "--epochs", "1")
    done = ptc(*args, *CASES[case])
    assert done.code == 0, done.stderr
    assert_close(reference, tmp_path / "run")


@pytest.mark.parametrize("lora", [True, False])
def test_packing_changes_nothing(
    lora: bool,
    ptc: Callable[..., Any],
    tiny_model: Path,
    sft_train: Path,
    sft_val: Path,
    tmp_path: Path,
) -> None:
    """All samples in one step, in packs or alone: the same sums."""
    for name, packing in (("packs", "--packing"), ("alone", "--no-packing")):
        args = sft_args(tiny_model, sft_train, sft_val, tmp_path / name, packing, "--epochs", "2",
                        "--batch-size", "48")  # fmt: skip
        if not lora:
            args += ["--lora-rank", "0", "--lora-dropout", "0"]
        done = ptc(*args)
        assert done.code == 0, done.stderr
    assert len(metrics(tmp_path / "packs")) == 2
    assert_close(tmp_path / "packs", tmp_path / "alone")


def assert_close(one: Path, other: Path) -> None:
    lines = list(zip(computed(one), computed(other), strict=True))
    assert lines
    for a, b in lines:
        assert a["train/tokens"] == b["train/tokens"]
        for name in {"train/loss", "train/grad_norm", "val/loss"} & a.keys():
            assert b[name] == pytest.approx(a[name], rel=1e-5), (a["step"], name)
