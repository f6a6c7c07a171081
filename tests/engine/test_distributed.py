"""Joining a world, agreeing, and stopping together; two processes meet over gloo."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from posttrain_cli.engine import distributed, seeds
from posttrain_cli.engine.distributed import Stopper, World
from posttrain_cli.engine.launch import NodePlan, launch
from posttrain_cli.errors import DataError, RunError, UsageError

ALONE = World(0, 1, 0, torch.device("cpu"), None)

WORKER = """
import json, os, signal, sys, time
from pathlib import Path
from posttrain_cli.engine import distributed
from posttrain_cli.engine.worker import run_worker
from posttrain_cli.errors import DataError, RunError

def agree():
    import torch.distributed as dist
    world = distributed.join(gpu=False)
    seen = {"backend": world.backend, "rank": world.rank, "size": world.size}
    seen["sums"] = distributed.sums(world, [0.1 * (world.rank + 1), 2.0**60 + world.rank])
    seen["gathered"] = distributed.gather(world, {"rank": world.rank})
    distributed.barrier(world)

    def fail_on_one():
        if world.rank == 1:
            raise DataError("row 3 is broken", "mend it")
        return "fine"

    try:
        distributed.together(world, fail_on_one)
    except (DataError, RunError) as error:
        seen["together"] = [type(error).__name__, error.message, error.hint]
    seen["fine"] = distributed.together(world, lambda: world.rank * 10)
    with distributed.Stopper() as stopper:
        seen["before"] = stopper.agreed(world)
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        seen["after"] = stopper.agreed(world)
        seen["once more"] = stopper.agreed(world)
    distributed.shutdown()
    seen["left"] = not dist.is_initialized()
    Path(sys.argv[2], f"seen-{world.rank}.json").write_text(json.dumps(seen))

def lose_a_peer():
    world = distributed.join(gpu=False)
    distributed.barrier(world)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        distributed.barrier(world)

run_worker(globals()[sys.argv[1]])
"""


def run_two(folder: Path, body: str, node: NodePlan | None = None) -> list[dict]:
    script = folder / "worker.py"
    script.write_text(WORKER)
    launch(
        [sys.executable, str(script), body, str(folder)],
        2,
        log_dir=folder / "logs",
        env={"OMP_NUM_THREADS": "1"},
        follow=lambda line: None,
        node=node,
    )
    return [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in (0, 1)]


def check_agreement(seen: list[dict]) -> None:
    assert [each["rank"] for each in seen] == [0, 1]
    for each in seen:
        assert (each["backend"], each["size"]) == ("gloo", 2)
        assert each["sums"] == [0.1 + 0.2, 2.0**61 + 1.0]
        assert each["gathered"] == [{"rank": 0}, {"rank": 1}]
        assert each["fine"] == each["rank"] * 10
        assert (each["before"], each["after"], each["once more"]) == (0, 15, 15)
        assert each["left"] is True
    assert seen[0]["together"] == ["RunError", "row 3 is broken", "mend it"]
    assert seen[1]["together"] == ["DataError", "row 3 is broken", "mend it"]


def test_two_processes_agree_through_a_file(tmp_path):
    check_agreement(run_two(tmp_path, "agree"))


def test_two_processes_agree_through_an_address_as_under_torchrun(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    check_agreement(run_two(tmp_path, "agree", NodePlan(1, 0, f"127.0.0.1:{port}")))


def test_a_lost_peer_ends_the_run_and_is_the_one_named(tmp_path):
    began = time.monotonic()
    with pytest.raises(RunError, match="rank 1 was killed by SIGKILL"):
        run_two(tmp_path, "lose_a_peer")
    assert time.monotonic() - began < 30


def test_a_world_of_one_needs_no_process_group(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    world = distributed.join(gpu=False)
    assert world == ALONE
    assert world.is_main
    assert not torch.distributed.is_initialized()
    assert distributed.sums(world, [1, 2.5]) == [1.0, 2.5]
    assert distributed.gather(world, "x") == ["x"]
    distributed.shutdown()


def test_together_alone_raises_what_was_raised():
    def fail() -> None:
        raise DataError("no rows")

    with pytest.raises(DataError, match="no rows"):
        distributed.together(ALONE, fail)
    assert distributed.together(ALONE, lambda: 5) == 5


def test_half_an_environment_is_named(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UsageError, match="`RANK` and `WORLD_SIZE` only one is set"):
        distributed.join(gpu=False)


@pytest.mark.parametrize("value", ["one", "-1", ""])
def test_a_rank_that_is_no_number_is_named(monkeypatch, value):
    monkeypatch.setenv("RANK", value)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=f"`RANK` is `{value}`, expected a whole number"):
        distributed.join(gpu=False)


def test_a_missing_gpu_is_said_with_what_is_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UsageError) as caught:
        distributed.join(gpu=True)
    assert "process 0 of this machine has no GPU" in caught.value.message
    assert "CUDA_VISIBLE_DEVICES=" in caught.value.message
    assert "--gpus 0" in caught.value.hint


def test_the_first_signal_counts_and_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with Stopper() as stopper:
        assert stopper.agreed(ALONE) == 0
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stopper.agreed(ALONE) == signal.SIGTERM
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), torch.rand(1).item()]


def test_seeds_repeat_and_saved_states_go_on(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    cpu = torch.device("cpu")
    seeds.set_seeds(3)
    first = draws()
    np.random.standard_normal()  # leaves a cached second value behind
    state = json.loads(json.dumps(seeds.rng_state(cpu)))
    after = [*draws(), np.random.standard_normal()]
    seeds.set_seeds(3)
    assert draws() == first
    assert os.environ["PYTHONHASHSEED"] == "3"
    seeds.set_rng_state(state, cpu)
    assert [*draws(), np.random.standard_normal()] == after
    seeds.set_seeds(4)
    assert draws() != first


def test_deterministic_kernels_are_strict_and_do_not_fill_memory():
    try:
        seeds.make_deterministic()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
