"""Checks that stop a run which cannot be right, and steps that must not touch the weights."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from torch import nn

from posttrain_cli.errors import RunError
from posttrain_cli.files import atomic_write
from posttrain_cli.runs.directory import RunDirectory

WINDOW = 50  # recent gradient norms that a new one is compared with
ENOUGH = 20  # norms needed before any is called exploding
EXPLODING = 1000.0  # times the median of the window


@dataclass(slots=True)
class NormWatch:
    """Judges gradient norms by the recent good ones; a function of metrics.jsonl alone."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def judge(self, loss: float, norm: float) -> str:
        """Why this step must be skipped, or an empty string; a good norm is remembered."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return f"loss {loss}, gradient norm {norm}"
        if len(self.recent) >= ENOUGH and norm > EXPLODING * median(self.recent) > 0:
            return f"gradient norm {norm:.3g} is over {EXPLODING:.0f} × the recent median"
        self.recent.append(norm)
        return ""

    def replay(self, lines: list[dict[str, Any]]) -> None:
        """Remember the good norms of earlier metrics lines."""
        for line in lines:
            norm = line.get("train/grad_norm")
            if isinstance(norm, int | float) and not line.get("train/skipped"):
                self.recent.append(float(norm))


def check_gradients(trainable: Mapping[str, nn.Parameter]) -> None:
    """After the first backward every trained tensor must have had a gradient, zero or not."""
    missing = [name for name, parameter in trainable.items() if parameter.grad is None]
    if missing:
        raise RunError(
            f"{len(missing):,} of {len(trainable):,} trainable tensors got no gradient in the "
            f"first step, such as `{missing[0]}`",
            hint="they are not part of the model's forward pass: leave them out of "
            "`target_modules`, or report this architecture",
        )


def bad_steps_folder(run: RunDirectory) -> Path:
    """Where the rows of skipped steps are kept."""
    return run.path / "bad_steps"


def save_bad_rows(run: RunDirectory, step: int, reason: str, rows: list[dict[str, Any]]) -> Path:
    """Keep the rows of a skipped step for inspection; returns the file."""
    path = bad_steps_folder(run) / f"step_{step:08d}.json"
    atomic_write(path, json.dumps({"step": step, "reason": reason, "rows": rows}, indent=1) + "\n")
    return path


def bad_steps(run: RunDirectory) -> frozenset[int]:
    """Steps whose rows were kept because they had to be skipped."""
    files = bad_steps_folder(run).glob("step_*.json")
    return frozenset(int(path.stem.removeprefix("step_")) for path in files)
