"""What a run says about each step: metrics.jsonl, TensorBoard and the console line.

The three show the same values. Only rank 0 writes; on other ranks every method does nothing.
"""

from __future__ import annotations

import importlib.util
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from posttrain_cli.runs.directory import RunDirectory
from posttrain_cli.runs.metrics import MetricsFile

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# What the console shows of a step, in this order: metric, label, format.
_SHOWN = (
    ("train/loss", "train/loss", ".3f"),
    ("val/loss", "val/loss", ".3f"),
    ("dpo/accuracy", "dpo/accuracy", ".3f"),
    ("dpo/margin", "dpo/margin", ".3f"),
    ("reward/mean", "reward/mean", ".3f"),
    ("kl/reference", "kl/reference", ".4f"),
    ("train/lr", "lr", ".2e"),
    ("train/grad_norm", "grad_norm", ".2f"),
    ("train/tokens_per_second", "tokens/s", ",.0f"),
)
_RECENT = 50  # steps whose mean duration predicts the rest


def parse_loggers(value: str | Collection[str]) -> frozenset[str]:
    """The loggers that `trainer.logger` names: a list, or a text with commas.

    `settings` has refused unknown names before a run starts.
    """
    named = value.split(",") if isinstance(value, str) else value
    return frozenset(name.strip() for name in named) - {""}


def console_line(step: int, values: Mapping[str, float], eta_seconds: float) -> str:
    """The line the console shows for a step, such as `step 10 | train/loss 2.143 | …`."""
    parts = [f"step {step}"]
    parts += [f"{label} {values[name]:{form}}" for name, label, form in _SHOWN if name in values]
    minutes, seconds = divmod(round(max(0.0, eta_seconds)), 60)
    parts.append(f"eta {minutes // 60}:{minutes % 60:02d}:{seconds:02d}")
    return " | ".join(parts)


class MetricsWriter:
    """Writes the metrics of a session that begins after `done` steps.

    Args:
        run: the run directory; its metrics.jsonl ends with step `done`.
        loggers: from `parse_loggers`; metrics.jsonl is always written.
        done: steps done before this session; later TensorBoard events are taken back.
        total: steps of the whole run.
        interval: steps between console lines.
        say: called with each console line.
        active: whether this is rank 0.
        clock: seconds, for the estimated time left.
    """

    def __init__(
        self,
        run: RunDirectory,
        loggers: Collection[str],
        *,
        done: int,
        total: int,
        interval: int,
        say: Callable[[str], None],
        active: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = MetricsFile(run.metrics) if active else None
        self._board: SummaryWriter | None = None
        self._console = active and "console" in loggers
        self._total, self._interval = total, interval
        self._say, self._clock = say, clock
        self._times = deque([clock()], maxlen=_RECENT + 1)
        if active and "tensorboard" in loggers:
            self._board = _open_board(run, done, say)

    def write(self, step: int, values: Mapping[str, float | int]) -> None:
        """Record the metrics of `step`, all names and values as SPEC lists them."""
        if self._file is None:
            return
        self._file.append(step, values)
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
        self._times.append(self._clock())
        if self._console and (step % self._interval == 0 or step == self._total):
            self._say(console_line(step, values, self._seconds_left(step)))

    def sync(self) -> None:
        """Make all that was written durable; call it before a checkpoint is saved."""
        if self._file is not None:
            self._file.sync()
        if self._board is not None:
            self._board.flush()

    def close(self) -> None:
        """Make all that was written durable and close the files."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

    def _seconds_left(self, step: int) -> float:
        """Remaining steps times the mean duration of the recent ones of this session."""
        mean = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        return (self._total - step) * mean


def _open_board(run: RunDirectory, done: int, say: Callable[[str], None]) -> SummaryWriter | None:
    """TensorBoard's writer, or None where the package is missing (metrics.jsonl has it all)."""
    if importlib.util.find_spec("tensorboard") is None:
        say("tensorboard is not installed: its values are in metrics.jsonl all the same")
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(run.tensorboard), purge_step=done + 1)
