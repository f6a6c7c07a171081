"""Checkpoints that are whole or absent.

    step_00001000/        appears by one rename, when everything in it is on the disk
      .metadata  __0_0.distcp …   tensors of all ranks, by torch's distributed checkpoints
      state.json                  step, world size and the loop's own state
      rng-rank-0.json …           generator states of every rank
      MANIFEST.json               every file with size and SHA-256, written last

Until the rename the folder is called `.tmp-step_00001000`. Nothing older is removed before.
Importing this module costs no torch; saving and loading do.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain_cli.engine.distributed import World, gather, together
from posttrain_cli.errors import RunError, UsageError
from posttrain_cli.files import atomic_write, fsync_dir, fsync_file, sha256_file

if TYPE_CHECKING:
    import torch

MANIFEST = "MANIFEST.json"
STATE = "state.json"

_STEP = re.compile(r"step_(\d{8,})")
_TEMPORARY = ".tmp-"
_UNTOUCHED = "older checkpoints are untouched, and `ptc resume` continues from the newest"
_SPARE = 1 << 20  # bytes beyond the tensors: index, manifest, generator states
_SPARE_PER_TENSOR = 4096


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files are all there and unchanged.

    Attributes:
        path: its folder.
        step: optimizer steps done when it was written.
        world: number of processes that wrote it.
        state: what the loop handed to `save`.
    """

    path: Path
    step: int
    world: int
    state: dict[str, Any]


def step_name(step: int) -> str:
    """Folder name of the checkpoint after `step` optimizer steps."""
    return f"step_{step:08d}"


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    state: dict[str, Any],
    world: World,
    extras: Callable[[Path], None] | None = None,
) -> Path:
    """Write the checkpoint of `step`, whole or not at all; every rank calls it.

    Args:
        folder: the run's `checkpoints` folder, on a file system that all machines share.
        step: optimizer steps done.
        tensors: flat names to plain or sharded tensors, the same names on every rank.
        state: what else the loop needs, as JSON values.
        world: the processes that take part.
        extras: called on rank 0 with the unfinished folder, to add files of its own.

    Returns:
        The finished folder.

    Raises:
        RunError: on all ranks; no space, or a rank could not write. Older checkpoints are
            untouched, and what was written so far is removed.
    """
    unfinished = begin(folder, step, tensors, state, world, extras)
    return complete(unfinished, tensors, world)


def begin(
    folder: Path,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    state: dict[str, Any],
    world: World,
    extras: Callable[[Path], None] | None = None,
) -> Path:
    """The first half of `save`: make the unfinished folder and write all but the tensors."""
    unfinished = folder / f"{_TEMPORARY}{step_name(step)}"
    needed = needed_bytes(tensors, world)
    together(world, lambda: _open(folder, unfinished, needed) if world.is_main else None)
    with _removed_on_failure(unfinished, world):
        together(world, lambda: _write_state(unfinished, step, state, world, extras))
    return unfinished


def complete(unfinished: Path, tensors: Mapping[str, torch.Tensor], world: World) -> Path:
    """The second half of `save`: the tensors, the manifest, the rename."""
    from posttrain_cli.engine import dcp

    final = unfinished.with_name(unfinished.name.removeprefix(_TEMPORARY))
    with _removed_on_failure(unfinished, world):
        dcp.write(unfinished, tensors, world)
        own = together(world, lambda: _describe_own(unfinished, world))
        files = {name: entry for part in gather(world, own) for name, entry in part.items()}
        together(world, lambda: _finish(unfinished, final, files) if world.is_main else None)
    return final


def newest(
    folder: Path, say: Callable[[str], None], world: World | None = None
) -> Checkpoint | None:
    """The whole checkpoint of the highest step, every byte verified, or None.

    Args:
        folder: the run's `checkpoints` folder; it need not exist.
        say: called with one sentence for each folder that is passed over.
        world: let rank 0 verify and the others take its word; every rank calls it then.
    """
    if world is not None and world.size > 1:
        found = together(world, lambda: newest(folder, say) if world.is_main else None)
        step = gather(world, found.step if found else None)[0]
        return None if step is None else _open_checkpoint(folder / step_name(step))
    if folder.is_dir():
        for path in sorted(folder.glob(f"{_TEMPORARY}*")):
            say(f"`{path}` was never finished and is passed over")
    for step in sorted(steps(folder), reverse=True):
        path = folder / step_name(step)
        problem = damage(path)
        if not problem:
            return _open_checkpoint(path)
        say(f"checkpoint `{path}` is damaged and passed over: {problem}")
    return None


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in `path`, every byte verified.

    Raises:
        UsageError: it is not whole.
    """
    problem = damage(path)
    if problem:
        raise UsageError(
            f"checkpoint `{path}` is damaged: {problem}", hint="use an older one of its run"
        )
    return _open_checkpoint(path)


def load(
    checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor], *, partial: bool = False
) -> None:
    """Fill `tensors` in place; every rank calls it, and their number may differ from then.

    Args:
        checkpoint: from `newest`.
        tensors: as handed to `save`: same names, global shapes and types.
        partial: the checkpoint may hold more than `tensors`.

    Raises:
        UsageError: names, shapes or types differ, or its index cannot be trusted.
        RunError: a rank could not read.
    """
    from posttrain_cli.engine import dcp

    dcp.read(checkpoint.path, tensors, partial=partial)


def restore_rng(checkpoint: Checkpoint, world: World) -> bool:
    """Put back this rank's generator states; False if another number of processes wrote them."""
    from posttrain_cli.engine import seeds

    if checkpoint.world != world.size:
        return False
    path = checkpoint.path / _rng_name(world.rank)
    seeds.set_rng_state(json.loads(path.read_bytes()), world.device)
    return True


def prune(folder: Path, keep: int, protect: Collection[int] = ()) -> list[int]:
    """Remove whole checkpoints beyond the `keep` newest; call it on rank 0, after `save`.

    Args:
        folder: the run's `checkpoints` folder.
        keep: how many of the newest stay, at least 1.
        protect: steps that stay whatever their age, such as the best by validation.

    Returns:
        The steps removed. Damaged folders are neither counted nor removed.
    """
    assert keep >= 1, f"keep is {keep}"
    whole = [step for step in sorted(steps(folder)) if _complete(folder / step_name(step))]
    surplus = [step for step in whole[:-keep] if step not in protect]
    for step in surplus:
        _remove(folder / step_name(step))
    return surplus


def steps(folder: Path) -> list[int]:
    """Steps that have a finished folder in `folder`, damaged ones included, in any order."""
    if not folder.is_dir():
        return []
    return [step for path in folder.iterdir() if (step := _step(path)) is not None]


def needed_bytes(tensors: Mapping[str, torch.Tensor], world: World) -> int:
    """Bytes that a checkpoint of `tensors` takes on the disk; every rank calls it."""
    from posttrain_cli.engine import dcp

    own = dcp.own_bytes(tensors, replicas=world.is_main)
    return sum(gather(world, own)) + len(tensors) * _SPARE_PER_TENSOR + _SPARE


def require_space(folder: Path, needed: int) -> None:
    """Raise RunError unless the file system of `folder` has `needed` bytes to spare."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise RunError(
            f"`{folder}` has {free / 2**30:.2f} GiB free, a checkpoint takes "
            f"{needed / 2**30:.2f} GiB",
            hint=f"make room or lower `trainer.keep_checkpoints`; {_UNTOUCHED}",
        )


def damage(path: Path) -> str:
    """What is wrong with the checkpoint in `path`, or an empty string; reads every byte."""
    problem, files = _manifest(path)
    if problem:
        return problem
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        problems = pool.map(lambda item: _file_damage(path / item[0], item[1]), files.items())
        return next((each for each in problems if each), "")


def _open(folder: Path, unfinished: Path, needed: int) -> None:
    """Make the unfinished folder, after removing what was never finished before."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(left)
    require_space(folder, needed)
    unfinished.mkdir()


def _write_state(
    unfinished: Path,
    step: int,
    state: dict[str, Any],
    world: World,
    extras: Callable[[Path], None] | None,
) -> None:
    """Write this rank's generator states, and on rank 0 the loop's state and the extras."""
    from posttrain_cli.engine import seeds

    rng = json.dumps(seeds.rng_state(world.device))
    atomic_write(unfinished / _rng_name(world.rank), rng)
    if world.is_main:
        record = {"step": step, "world": world.size, "state": state}
        atomic_write(unfinished / STATE, json.dumps(record, indent=1))
        if extras:
            extras(unfinished)


def _describe_own(unfinished: Path, world: World) -> dict[str, dict[str, Any]]:
    """Size and hash of the files that this rank answers for, fsynced: rank 0 for the rest."""
    ranks = range(world.size)
    owner = {_rng_name(rank): rank for rank in ranks}
    described = {}
    for path in sorted(unfinished.rglob("*")):
        if path.is_dir():
            fsync_dir(path)
            continue
        shard = re.fullmatch(r"__(\d+)_\d+\.distcp", path.name)
        if owner.get(path.name, int(shard[1]) if shard else 0) == world.rank:
            fsync_file(path)
            size, name = path.stat().st_size, path.relative_to(unfinished).as_posix()
            described[name] = {"size": size, "sha256": sha256_file(path)}
    return described


def _finish(unfinished: Path, final: Path, files: dict[str, dict[str, Any]]) -> None:
    """Write the manifest, rename the folder into place and make the name durable."""
    absent = [name for name in files if not (unfinished / name).exists()]
    if absent:
        raise RunError(
            f"`{unfinished / absent[0]}` was written by another machine and is not seen here",
            hint="`--output-dir` must be on a file system that all machines share",
        )
    manifest = {"format": 1, "step": _step(final), "files": dict(sorted(files.items()))}
    atomic_write(unfinished / MANIFEST, json.dumps(manifest, indent=1))
    if final.exists():  # damaged, or trained again after falling back behind it
        _remove(final)
    unfinished.rename(final)
    fsync_dir(final.parent)


@contextmanager
def _removed_on_failure(unfinished: Path, world: World) -> Iterator[None]:
    """Give the space back when all ranks have failed together, and say that nothing is lost."""
    try:
        yield
    except BaseException as error:
        if world.is_main:
            shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, OSError):
            raise RunError(f"cannot write a checkpoint: {error}", _UNTOUCHED) from error
        if isinstance(error, RunError) and not error.hint:
            raise RunError(error.message, _UNTOUCHED) from error
        raise


def _remove(path: Path) -> None:
    """Remove a checkpoint so that half of it never looks like one."""
    doomed = path.with_name(f"{_TEMPORARY}removed-{path.name}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def _step(path: Path) -> int | None:
    """The step of a finished checkpoint folder by its name, or None for anything else."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def _open_checkpoint(path: Path) -> Checkpoint:
    record = json.loads((path / STATE).read_bytes())
    return Checkpoint(path, record["step"], record["world"], record["state"])


def _manifest(path: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    """What is wrong with the manifest (or an empty string), and the files it lists."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        files: dict[str, dict[str, Any]] = manifest["files"]
        sizes = {name: int(entry["size"]) for name, entry in files.items()}
    except FileNotFoundError:
        return f"`{MANIFEST}` is missing", {}
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"`{MANIFEST}` cannot be read", {}
    if manifest.get("step") != _step(path):
        return f"`{MANIFEST}` is of step {manifest.get('step')}", {}
    for name in (STATE, *sizes):
        if name not in sizes or not (path / name).resolve().is_relative_to(path.resolve()):
            return f"`{MANIFEST}` does not list its files properly: `{name}`", {}
    return "", files


def _complete(path: Path) -> bool:
    """Whether all files are there in their size; cheaper than `damage`."""
    problem, files = _manifest(path)
    return not problem and all(
        (path / name).is_file() and (path / name).stat().st_size == entry["size"]
        for name, entry in files.items()
    )


def _file_damage(path: Path, entry: dict[str, Any]) -> str:
    """What is wrong with one listed file, or an empty string."""
    if not path.is_file():
        return f"`{path.name}` is missing"
    if (size := path.stat().st_size) != entry["size"]:
        return f"`{path.name}` has {size} bytes instead of {entry['size']}"
    if sha256_file(path) != entry["sha256"]:
        return f"`{path.name}` has other content than when it was written"
    return ""


def _rng_name(rank: int) -> str:
    return f"rng-rank-{rank}.json"
