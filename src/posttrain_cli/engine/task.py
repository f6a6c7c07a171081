"""What a worker is to do: read from the run directory alone, so a moved run still works."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from posttrain_cli.config import Config
from posttrain_cli.data.plan import Plan
from posttrain_cli.data.prepare import Prepared
from posttrain_cli.data.tokenizer import Tokenizer, load_tokenizer
from posttrain_cli.files import atomic_write
from posttrain_cli.runs.directory import RunDirectory
from posttrain_cli.runs.resolve import ModelSource, resolve_model
from posttrain_cli.settings import load


@dataclass(frozen=True, slots=True)
class Order:
    """The parent's orders to its workers, written to RUN/.task.json.

    Attributes:
        gpu: compute on GPUs.
        resume: continue from the newest whole checkpoint.
        train_files: the training files, in order.
        stop_after: last step of this session; None trains to the end and exports.
        left_out: steps that are not tried again after a rollback.
        allow_download: a hub id may be fetched.
    """

    gpu: bool
    resume: bool
    train_files: tuple[str, ...]
    stop_after: int | None = None
    left_out: tuple[int, ...] = ()
    allow_download: bool = False


def write_order(run: RunDirectory, order: Order) -> None:
    """Leave `order` for the workers."""
    atomic_write(run.path / ".task.json", json.dumps(asdict(order), indent=1) + "\n")


def read_order(run: RunDirectory) -> Order:
    """The order that `write_order` left."""
    values: dict[str, Any] = json.loads((run.path / ".task.json").read_bytes())
    for name in ("train_files", "left_out"):
        values[name] = tuple(values[name])
    return Order(**values)


class Task:
    """A run directory, its config and its orders, as workers use them.

    Args:
        run: the run directory, prepared by the parent.
    """

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.order = read_order(run)
        resolved = load(None, flags={}, config_file=run.config, cwd=run.path)
        self.config: Config = resolved.config

    @cached_property
    def model(self) -> ModelSource:
        """Where the starting model lies."""
        name = self.config.model.partial_pretrain
        assert name is not None
        return resolve_model(name, allow_download=self.order.allow_download)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer and template of the run."""
        return load_tokenizer(self.model.tokenizer, template_of(self.config, self.model))

    def evaluates(self, plan: Plan, step: int, total: int) -> bool:
        """Whether a validation follows `step`: at the interval or the epochs' ends, and last."""
        interval = self.config.trainer.eval_interval
        if step == total:
            return True
        if interval is not None:
            return step % interval == 0
        return plan.step(step).fraction.is_integer()


def total_steps(config: Config, plan: Plan) -> int:
    """Global steps of a run: `max_steps`, the epochs, or whichever ends earlier."""
    trainer = config.trainer
    limits = [] if trainer.max_steps is None else [trainer.max_steps]
    if trainer.total_epochs is not None:
        limits.append(plan.total(trainer.total_epochs))
    return min(limits)


def make_plan(train: Prepared, config: Config) -> Plan:
    """The order of all batches of a run."""
    data = config.data
    assert data.train_batch_size is not None
    return Plan(
        train.lengths,
        train.trained,
        capacity=data.max_length if data.packing else None,
        batch_size=data.train_batch_size,
        seed=config.trainer.seed,
        shuffle=data.shuffle,
        weights=train.weights,
    )


def template_of(config: Config, source: ModelSource) -> str:
    """The template that the user chose, or else the one that the model was trained with."""
    chosen = config.data.template
    return source.template if chosen == "tokenizer" else chosen
