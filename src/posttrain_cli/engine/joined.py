"""Joining a world that somebody else started: torchrun, SLURM, Kubernetes, a second machine.

Rank 0 checks the data and lays out the run; the others wait for it in a gloo barrier of a day,
so that no GPU collective times out while one process tokenises.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from posttrain_cli.errors import PtcError, RunError
from posttrain_cli.runs.directory import RunDirectory

if TYPE_CHECKING:
    from posttrain_cli.engine.api import Outcome
    from posttrain_cli.engine.task import Order

_DAY = timedelta(days=1)
_FINISHED = "finished"
_HEARTBEAT = 60.0  # seconds between two words of a process that waits


def is_joined() -> bool:
    """Whether this process is a rank of a world that somebody else started."""
    return "RANK" in os.environ


def take_part(run: RunDirectory, gpu: bool, lay_out: Callable[[], bool]) -> Outcome:
    """Train as one rank of the world that is there.

    Args:
        run: the run directory, on a file system that all ranks share.
        gpu: compute on GPUs.
        lay_out: what rank 0 does before the others go on: check, prepare, make the directory;
            returns False when the run is finished and nothing is left to do.
    """
    from posttrain_cli.engine import api, distributed, train

    world = distributed.join(gpu)
    told, mine = "", None
    if world.is_main:
        try:
            told = "" if lay_out() else _FINISHED
        except PtcError as error:
            mine, told = error, error.message
    told = _told_by_main(told)
    if mine is not None:
        raise mine
    if told == _FINISHED:
        return api.outcome(run, already_finished=True)
    if told:
        raise RunError(f"rank 0 could not start the run: {told}")
    try:
        train.body(run, world)
    except PtcError as error:
        if world.is_main:
            api.set_ended(run, error)
        raise
    return api.finish(run) if world.is_main else api.outcome(run)


def _told_by_main(text: str) -> str:
    """What rank 0 says, on every rank, however long rank 0 takes."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return text
    patient = dist.new_group(backend="gloo", timeout=_DAY)
    told = [text]
    dist.broadcast_object_list(told, src=0, group=patient)
    return str(told[0])


def wait_for_order(run: RunDirectory, say: Callable[[str], None]) -> Order:
    """Wait until machine 0 has laid out the run in a directory that all machines share."""
    from posttrain_cli.engine.task import read_order

    began = spoke = time.monotonic()
    order = run.path / ".task.json"
    while not order.is_file():
        if time.monotonic() - began > _DAY.total_seconds():
            raise RunError(f"machine 0 did not lay out `{run.path}` within a day")
        if time.monotonic() - spoke > _HEARTBEAT:
            say(f"waiting for machine 0 to lay out `{run.path}`")
            spoke = time.monotonic()
        time.sleep(0.2)
    return read_order(run)
