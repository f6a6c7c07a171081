"""Join the processes of a run, agree on things, and stop together.

One process needs no process group. Several use gloo on CPUs, and NCCL for GPU tensors beside
gloo for everything small, so that agreeing on a flag never waits for the GPU.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from posttrain_cli.engine import worker
from posttrain_cli.errors import PtcError, RunError, UsageError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

T = TypeVar("T")

_TIMEOUT = timedelta(minutes=30)  # for a peer that is slow, say in reading a large model


@dataclass(frozen=True, slots=True)
class World:
    """The processes of a run and this one's place among them.

    Attributes:
        rank: number of this process among all, from 0.
        size: how many processes there are on all machines.
        local_rank: number of this process on its machine, from 0.
        device: where this process computes.
        backend: of the process group, or None for one process.
        group: the processes that `sums`, `gather` and `together` ask; None for all, at once.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    backend: str | None
    group: ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0


def join(gpu: bool) -> World:
    """Join the world that the environment describes, or be a world of one.

    `RANK` and `WORLD_SIZE` come from our launcher, torchrun, SLURM wrappers or Kubernetes.

    Args:
        gpu: compute on the GPU numbered by the local rank instead of the CPU.

    Raises:
        UsageError: the environment is incomplete, or this process has no GPU.
    """
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    rank, size = _variable("RANK", 0), _variable("WORLD_SIZE", 1)
    if ("RANK" in os.environ) != ("WORLD_SIZE" in os.environ):
        raise UsageError(
            "of `RANK` and `WORLD_SIZE` only one is set",
            hint="set both (torchrun does), or neither for one process",
        )
    local_rank = _variable("LOCAL_RANK", _local(rank, gpu))
    device = _gpu(local_rank) if gpu else torch.device("cpu")
    if size == 1:
        return World(rank, size, local_rank, device, None)
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    store = os.environ.get(worker.STORE)
    dist.init_process_group(
        backend,
        store=FileStore(store, size) if store else None,
        rank=rank if store else -1,
        world_size=size if store else -1,
        timeout=_TIMEOUT,
        device_id=device if gpu else None,
    )
    return World(rank, size, local_rank, device, backend)


def ensure_group(world: World) -> None:
    """Make a process group of one where there is none: device meshes need one."""
    import torch.distributed as dist

    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def apart(world: World) -> World:
    """The same processes over a gloo group of their own, for collectives in another thread."""
    import torch.distributed as dist

    if world.size == 1:
        return world
    return replace(world, group=dist.new_group(backend="gloo", timeout=_TIMEOUT))


def shutdown() -> None:
    """Leave the process group, if this process is in one."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def sums(world: World, values: Sequence[float]) -> list[float]:
    """Sum each of `values` over all ranks, in float64; every rank gets the same bits."""
    if world.size == 1:
        return [float(value) for value in values]
    import torch
    import torch.distributed as dist

    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total, group=world.group)
    return [float(value) for value in total.tolist()]


def barrier(world: World) -> None:
    """Wait until every rank is here."""
    sums(world, [0.0])


def gather(world: World, value: T) -> list[T]:
    """The `value` of every rank, in rank order, on every rank."""
    if world.size == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value, group=world.group)
    return values


def together(world: World, action: Callable[[], T]) -> T:
    """Run `action` on this rank; if it raises on any rank, raise on all ranks.

    No rank is left waiting in the next collective for one that has failed. The first failing
    rank's error is raised everywhere: itself where it happened, RunError elsewhere.
    """
    result: T | None = None
    mine: BaseException | None = None
    try:
        result = action()
    except BaseException as error:  # torch's CheckpointException is no Exception
        mine = error
    failures = [text for text in gather(world, _describe(mine)) if text is not None]
    if mine is not None:
        raise mine
    if failures:
        raise RunError(*failures[0])
    return result  # type: ignore[return-value]


def _describe(error: BaseException | None) -> tuple[str, str] | None:
    if error is None:
        return None
    if isinstance(error, PtcError):
        return error.message, error.hint
    return f"{type(error).__name__}: {error}", ""


class Stopper:
    """Remembers SIGINT or SIGTERM so that all ranks stop at the same step boundary.

    The handler only stores the signal: a step is never torn. Use it as a context manager around
    the loop, and ask `agreed` once a step on every rank.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._old[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for signum, handler in self._old.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        self.signum = self.signum or signum

    def agreed(self, world: World) -> int:
        """The signal that any rank has received, or 0; the same on every rank."""
        if world.size == 1:
            return self.signum
        import torch
        import torch.distributed as dist

        highest = torch.tensor(self.signum)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        return int(highest)


def _variable(name: str, default: int) -> int:
    """The whole number in environment variable `name`."""
    text = os.environ.get(name)
    if text is None:
        return default
    with suppress(ValueError):
        if (value := int(text)) >= 0:
            return value
    raise UsageError(
        f"environment variable `{name}` is `{text}`, expected a whole number",
        hint="torchrun and `ptc` set it; unset it for one process",
    )


def _local(rank: int, gpu: bool) -> int:
    """The local rank where the environment does not say: GPUs are dealt in rank order."""
    import torch

    return rank % max(1, torch.cuda.device_count()) if gpu else rank


def _gpu(local_rank: int) -> torch.device:
    """The GPU of this process, made current."""
    import torch

    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UsageError(
            f"process {local_rank} of this machine has no GPU: torch {torch.__version__} sees "
            f"{count} (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')})",
            hint="ask for fewer with `--gpus N`, or train on the CPU with `--gpus 0`; "
            "`ptc doctor` shows what is there",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
