"""Checkpoints that are written while training goes on.

Training waits for a copy to the CPU only. The files are then written, verified and renamed by a
thread, whose collectives use a process group of their own. One checkpoint is in flight at most;
what it raised is raised by the next `save` or `wait`, on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain_cli.engine import checkpoint
from posttrain_cli.engine.distributed import World, apart

if TYPE_CHECKING:
    import torch


class BackgroundSaver:
    """Saves as `checkpoint.save` does, without waiting for the disk.

    Args:
        world: the processes that take part; every rank makes one and calls its methods alike.
    """

    def __init__(self, world: World) -> None:
        self._world = apart(world)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def save(
        self,
        folder: Path,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        state: dict[str, Any],
        then: Callable[[Path], None],
        extras: Callable[[Path], None] | None = None,
    ) -> None:
        """Begin the checkpoint of `step`; `tensors` may change as soon as this returns.

        Args:
            folder: see `checkpoint.save`, as for the rest.
            step: optimizer steps done.
            tensors: flat names to plain or sharded tensors.
            state: what else the loop needs, as JSON values.
            then: called on every rank, from the thread, with the finished folder: retention.
            extras: called on rank 0 before this returns.

        Raises:
            RunError: on all ranks; this or the checkpoint before could not be written.
        """
        from posttrain_cli.engine import dcp

        self.wait()
        unfinished = checkpoint.begin(folder, step, tensors, state, self._world, extras)
        self._pending = self._pool.submit(self._complete, unfinished, dcp.stage(tensors), then)

    def wait(self) -> None:
        """Wait until the checkpoint in flight is whole; raise what kept it from it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the checkpoint in flight and end the thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def _complete(
        self, unfinished: Path, tensors: dict[str, Any], then: Callable[[Path], None]
    ) -> None:
        then(checkpoint.complete(unfinished, tensors, self._world))
