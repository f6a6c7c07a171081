"""Continue a stopped or killed run: its checkpoints say where it stands, not its record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain_cli.config import Config
from posttrain_cli.data.tokenizer import load_tokenizer
from posttrain_cli.engine import api, checkpoint, inputs, joined
from posttrain_cli.engine.api import Outcome, Say
from posttrain_cli.engine.launch import NodePlan
from posttrain_cli.engine.task import Order, template_of, write_order
from posttrain_cli.errors import UsageError
from posttrain_cli.files import atomic_write
from posttrain_cli.runs.directory import (
    RunDirectory,
    dump_config,
    now,
    open_run,
    read_record,
    set_state,
)
from posttrain_cli.runs.lock import run_lock
from posttrain_cli.runs.resolve import resolve_model
from posttrain_cli.settings import Resolved, load, value_of

# What may differ after a resume: neither the order of the data nor the model depends on it.
SAFE = frozenset(
    {
        "data.micro_batch_size_per_gpu",
        "model.attention",
        "model.compile",
        "model.enable_gradient_checkpointing",
        "trainer.default_local_dir",
        "trainer.eval_interval",
        "trainer.keep_checkpoints",
        "trainer.log_interval",
        "trainer.logger",
        "trainer.max_bad_steps",
        "trainer.max_steps",
        "trainer.n_gpus_per_node",
        "trainer.nnodes",
        "trainer.processes",
        "trainer.project_name",
        "trainer.rollback",
        "trainer.save_full_state_dict",
        "trainer.save_interval",
        "trainer.total_epochs",
        "trainer.type",
    }
)


@dataclass(frozen=True, slots=True)
class Changes:
    """What a resume may change.

    Attributes:
        flags: `section.key` to the text of a flag (`trainer.n_gpus_per_node`, …).
        sets: the texts of `--set`.
        force: accept changes of the data order or the model.
        overrides: a whole resolved config (`sft --resume-from-checkpoint`), compared as it is.
        node: this machine's place among several, or None.
    """

    flags: Mapping[str, Any] = field(default_factory=dict)
    sets: tuple[str, ...] = ()
    force: bool = False
    overrides: Resolved | None = None
    node: NodePlan | None = None


def resume(path: Path, changes: Changes, say: Say) -> Outcome:
    """Continue the run in `path` from its newest whole checkpoint.

    Raises:
        UsageError: no run there, still in use, or a change that is not safe.
        RunError: a worker failed.
        Interrupted: a signal came; a checkpoint was saved.
    """
    run = open_run(path)
    if joined.is_joined():
        gpu = api.processes(recorded_config(run))[1]
        return joined.take_part(run, gpu, lambda: _prepare(run, changes, say) is not None)
    with run_lock(path, say):
        ready = _prepare(run, changes, say)
        if ready is None:
            return api.outcome(run, already_finished=True)
        config, order = ready
        return api.work(run, config, order, changes.node, say)


def _prepare(run: RunDirectory, changes: Changes, say: Say) -> tuple[Config, Order] | None:
    """Check the changes and the data and leave the orders; None when the run is finished."""
    old = recorded_config(run)
    new = changed(run, old, changes)
    found = checkpoint.newest(run.checkpoints, say)
    step = found.step if found is not None else 0
    if _is_finished(run, old, new, step):
        say(f"`{run.path}` is finished: {step:,} steps done, the result is in `{run.model}`")
        return None
    refuse_shorter(new, step)
    order = lay_out(run, new, changes, say)
    history = [*read_record(run).get("resumed", []), _note(step, old, new)]
    set_state(run, "running", resumed=history)
    return new, order


def recorded_config(run: RunDirectory) -> Config:
    """The config that the run was started or last resumed with."""
    return load(None, flags={}, config_file=run.config, cwd=run.path).config


def changed(run: RunDirectory, old: Config, changes: Changes) -> Config:
    """The config to go on with; refuses what would change the data order or the model."""
    if changes.overrides is not None:
        new = changes.overrides.config
    else:
        flags, sets = changes.flags, changes.sets
        new = load(None, flags=flags, sets=sets, config_file=run.config, cwd=run.path).config
    unsafe = [key for key in differences(old, new) if key not in SAFE]
    if unsafe and not changes.force:
        lines = [
            f"`{key}` was {value_of(old, key)!r} and would become {value_of(new, key)!r}"
            for key in unsafe
        ]
        raise UsageError(
            "a resumed run keeps what its data order and its model depend on",
            hint="leave these as they were, start a new run, or pass --force to accept that the "
            "run is no longer the one that was started",
            problems=lines,
        )
    return new


def differences(old: Config, new: Config) -> list[str]:
    """Keys whose values differ."""
    before, after = old.model_dump(mode="json"), new.model_dump(mode="json")
    return [
        f"{section}.{name}"
        for section in before
        for name in before[section]
        if before[section][name] != after[section][name]
    ]


def _is_finished(run: RunDirectory, old: Config, new: Config, step: int) -> bool:
    total = read_record(run).get("total_steps")
    same_length = (old.trainer.max_steps, old.trainer.total_epochs) == (
        new.trainer.max_steps,
        new.trainer.total_epochs,
    )
    return same_length and run.model.is_dir() and isinstance(total, int) and step >= total


def refuse_shorter(new: Config, step: int) -> None:
    """Refuse a length that is already behind."""
    limit = new.trainer.max_steps
    if limit is not None and limit < step:
        raise UsageError(
            f"`--max-steps {limit}` is less than the {step:,} steps that are done",
            hint="raise it, or start a new run",
        )


def lay_out(run: RunDirectory, config: Config, changes: Changes, say: Say) -> Order:
    """Prepare the data again if it is gone, check that it is the same, and write the orders."""
    splits = inputs.check(config, say)
    refuse_other_data(run, splits, changes.force)
    name = config.model.partial_pretrain
    assert name is not None
    source = resolve_model(name)
    tokenizer = load_tokenizer(source.tokenizer, template_of(config, source))
    _refuse_other_tokenizer(run, tokenizer.sha256, changes.force)
    inputs.tokenize(splits, config, tokenizer, run.prepared, say)
    atomic_write(run.config, dump_config(config))
    left_out = read_record(run).get("rolled_back", {}).get("left_out", [])
    order = Order(
        gpu=api.processes(config)[1],
        resume=True,
        train_files=splits[0].files,
        left_out=tuple(left_out),
    )
    write_order(run, order)
    return order


def refuse_other_data(run: RunDirectory, splits: list[inputs.Split], force: bool) -> None:
    """The files must hold what they held when the run was started, wherever they lie now."""
    known = [(entry["role"], entry["sha256"]) for entry in read_record(run)["datasets"]]
    present = [(split.role, sha256) for split in splits for sha256 in split.hashes]
    if known == present or force:
        return
    paths = [path for split in splits for path in split.files]
    changed = [
        f"`{path}` has other content than when the run was started"
        for path, pair in zip(paths, present, strict=True)
        if pair not in known
    ] or ["the files are others, or in another order, than when the run was started"]
    raise UsageError(
        "the data has changed",
        hint="restore the files, start a new run, or pass --force",
        problems=changed,
    )


def _refuse_other_tokenizer(run: RunDirectory, sha256: str, force: bool) -> None:
    if read_record(run)["tokenizer"]["sha256"] != sha256 and not force:
        raise UsageError(
            "the tokenizer or its chat template has changed since the run was started",
            hint="restore the model folder, start a new run, or pass --force",
        )


def _note(step: int, old: Config, new: Config) -> dict[str, Any]:
    changed = {key: value_of(new, key) for key in differences(old, new)}
    return {"at": now(), "after_step": step, "changes": changed}
