"""`ptc resume --verify`: train the last recorded stretch again and compare bit by bit.

The stretch is from the newest checkpoint but one (or the start) to the newest. Everything
happens in a scratch directory; the run is not touched.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain_cli.engine import api, checkpoint
from posttrain_cli.engine.api import Say
from posttrain_cli.engine.resume import Changes, lay_out, recorded_config
from posttrain_cli.engine.task import write_order
from posttrain_cli.errors import UsageError
from posttrain_cli.runs.directory import RunDirectory, open_run
from posttrain_cli.runs.lock import run_lock
from posttrain_cli.runs.metrics import cut_metrics, read_metrics

# Measured, not computed: these differ between two runs of the same step.
MEASURED = frozenset({"train/tokens_per_second", "train/memory_gb", "train/mfu"})


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the comparison found.

    Attributes:
        first: first step that was trained again.
        last: last step that was trained again.
        different_steps: steps whose metrics differ in any bit.
        different_tensors: weights and moments of the last step that differ in any bit.
    """

    first: int
    last: int
    different_steps: tuple[int, ...]
    different_tensors: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not (self.different_steps or self.different_tensors)


def verify(path: Path, say: Say) -> Verdict:
    """Train the last recorded stretch of the run in `path` again and compare.

    Raises:
        UsageError: there is no run, or no checkpoint to compare with.
        RunError: a worker failed.
    """
    run = open_run(path)
    with run_lock(path, say), tempfile.TemporaryDirectory(prefix="ptc-verify-") as scratch:
        newest = checkpoint.newest(run.checkpoints, say)
        if newest is None:
            raise UsageError(f"`{path}` has no whole checkpoint to verify")
        again = RunDirectory(Path(scratch) / "run")
        start = _stage(run, again, newest.step, say)
        config = recorded_config(run)
        order = replace(lay_out(again, config, Changes(), say), stop_after=newest.step)
        write_order(again, order)
        api.work(again, config, order, None, say)
        return Verdict(
            start + 1,
            newest.step,
            _different_lines(run, again, start, newest.step),
            _different_tensors(newest.path, again.checkpoints / newest.path.name),
        )


def _stage(run: RunDirectory, again: RunDirectory, last: int, say: Say) -> int:
    """Copy what the stretch starts from into the scratch run; returns the step it starts after."""
    for folder in (again.logs, again.checkpoints):
        folder.mkdir(parents=True)
    for source, target in ((run.record, again.record), (run.config, again.config)):
        shutil.copyfile(source, target)
    start = 0
    for step in sorted(checkpoint.steps(run.checkpoints), reverse=True):
        place = run.checkpoints / checkpoint.step_name(step)
        if step < last and not checkpoint.damage(place):
            shutil.copytree(place, again.checkpoints / place.name)
            start = step
            break
    if run.metrics.is_file():
        shutil.copyfile(run.metrics, again.metrics)
        cut_metrics(again.metrics, start)
    say(f"training steps {start + 1:,} to {last:,} again in {again.path}")
    return start


def _different_lines(
    run: RunDirectory, again: RunDirectory, start: int, last: int
) -> tuple[int, ...]:
    """Steps whose computed metrics are not equal in every bit."""

    def computed(directory: RunDirectory) -> dict[int, dict[str, Any]]:
        return {
            int(line["step"]): {k: repr(v) for k, v in line.items() if k not in MEASURED}
            for line in read_metrics(directory.metrics)
        }

    first, second = computed(run), computed(again)
    return tuple(n for n in range(start + 1, last + 1) if first.get(n) != second.get(n))


def _tensors(folder: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint."""
    import torch

    from posttrain_cli.engine import dcp

    shapes = dcp.shapes(dcp.read_index(folder))
    tensors = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in shapes.items()}
    dcp.read(folder, tensors)
    return tensors


def _different_tensors(first: Path, second: Path) -> tuple[str, ...]:
    """Names of the tensors in two checkpoints that are not equal in every bit."""
    import torch

    one, two = _tensors(first), _tensors(second)
    names = sorted(set(one) | set(two))
    return tuple(
        name
        for name in names
        if name not in one or name not in two or not torch.equal(one[name], two[name])
    )
