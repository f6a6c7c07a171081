"""Other ways into a world: torchrun, and two machines (both are this one here)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.support import computed, sft_args

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_all(commands: list[list[str]]) -> list[tuple[int, str]]:
    """Run commands side by side; (exit code, output) of each."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(c, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for c in commands
    ]
    texts = [process.communicate(timeout=240)[0] for process in started]
    return [(process.returncode, text) for process, text in zip(started, texts, strict=True)]


@pytest.fixture(scope="module")
def alone(
    tiny_model: Path, sft_train: Path, sft_val: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    run = tmp_path_factory.mktemp("alone") / "run"
    args = sft_args(tiny_model, sft_train, sft_val, run, "--epochs", "1")
    ((code, text),) = run_all([[sys.executable, "-m", "posttrain_cli", *args]])
    assert code == 0, text
    return run


def assert_same_curve(one: Path, other: Path) -> None:
    for a, b in zip(computed(one), computed(other), strict=True):
        assert b["train/loss"] == pytest.approx(a["train/loss"], rel=1e-5)
        assert b["train/tokens"] == a["train/tokens"]


def test_torchrun_is_joined(
    alone: Path, tiny_model: Path, sft_train: Path, sft_val: Path, tmp_path: Path
) -> None:
    args = sft_args(tiny_model, sft_train, sft_val, tmp_path / "run", "--epochs", "1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    port = ["--master_port", str(free_port())]
    ((code, text),) = run_all([[*torchrun, *port, "-m", "posttrain_cli", *args]])
    assert code == 0, text
    assert_same_curve(alone, tmp_path / "run")


def test_torchrun_passes_a_mistake_on(
    tiny_model: Path, sft_train: Path, sft_val: Path, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    args = sft_args(tiny_model, sft_train, sft_val, tmp_path / "run", "--epochs", "1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    port = ["--master_port", str(free_port())]
    ((code, text),) = run_all([[*torchrun, *port, "-m", "posttrain_cli", *args]])
    assert code != 0
    assert "holds a run already" in text
    assert (tmp_path / "run" / "run.json").read_text() == "{}"


def test_two_machines_are_one_world(
    alone: Path, tiny_model: Path, sft_train: Path, sft_val: Path, tmp_path: Path
) -> None:
    args = sft_args(tiny_model, sft_train, sft_val, tmp_path / "run", "--epochs", "1")
    port = free_port()
    commands = [
        [sys.executable, "-m", "posttrain_cli", *args, "--nnodes", "2",
         "--node-rank", str(rank), "--rdzv-endpoint", f"127.0.0.1:{port}"]
        for rank in (0, 1)
    ]  # fmt: skip
    for code, text in run_all(commands):
        assert code == 0, text
    assert_same_curve(alone, tmp_path / "run")
