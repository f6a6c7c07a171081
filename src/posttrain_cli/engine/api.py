"""What the command line calls to train: start a run, or continue one. No torch in this process.

    start   check data → token ids → run directory → workers → result
    resume  newest whole checkpoint → same config (or allowed changes) → workers → result

Under torchrun, SLURM or Kubernetes (`RANK` is set) the present process joins that world instead
of starting workers of its own.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from posttrain_cli.config import Config
from posttrain_cli.data.prepare import Prepared
from posttrain_cli.data.tokenizer import Tokenizer, load_tokenizer
from posttrain_cli.devices import visible_gpus
from posttrain_cli.engine import inputs, joined
from posttrain_cli.engine.inputs import Split
from posttrain_cli.engine.launch import NodePlan, launch, worker_environment
from posttrain_cli.engine.task import Order, template_of, write_order
from posttrain_cli.errors import DataError, Interrupted, PtcError, RunError, UsageError
from posttrain_cli.runs import lineage
from posttrain_cli.runs.directory import (
    RunDirectory,
    create_run,
    holds_run,
    read_record,
    refuse_run,
    remove_run,
    set_state,
    update_record,
)
from posttrain_cli.runs.lock import run_lock
from posttrain_cli.runs.metrics import read_metrics
from posttrain_cli.runs.resolve import ModelSource, resolve_model
from posttrain_cli.settings import Resolved

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """What a command was asked beside the config.

    Attributes:
        command: the command line, for run.json.
        overwrite: replace a run that is there.
        resume: continue a run that is there.
        allow_download: a hub id may be fetched.
        node: this machine's place among several, or None.
    """

    command: tuple[str, ...] = ()
    overwrite: bool = False
    resume: bool = False
    allow_download: bool = False
    node: NodePlan | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    Attributes:
        run: its directory.
        steps: steps done.
        metrics: the last line of metrics.jsonl.
        already_finished: nothing was left to do, nothing was touched.
    """

    run: Path
    steps: int
    metrics: dict[str, Any]
    already_finished: bool = False


def start(resolved: Resolved, options: Options, say: Say) -> Outcome:
    """Train from the beginning, or continue what is there if `options.resume` says so.

    Raises:
        DataError: the data breaks the contract, or nothing is left to train on.
        UsageError: the output directory is taken, or an input cannot be used.
        RunError: a worker failed.
        Interrupted: a signal came; a checkpoint was saved.
    """
    config = resolved.config
    path = run_path(config)
    if options.resume and holds_run(path):
        from posttrain_cli.engine.resume import Changes, resume

        return resume(path, Changes(overrides=resolved, node=options.node), say)
    if joined.is_joined():
        run = RunDirectory(path)
        return joined.take_part(
            run, processes(config)[1], lambda: bool(set_up(resolved, options, say))
        )
    refuse_run(path, options.overwrite)
    if options.node is not None and options.node.rank > 0:
        return _second_node(config, options, say)
    with _discarding(path), run_lock(path, say):
        order = set_up(resolved, options, say)
        run = RunDirectory(path)
        try:
            return work(run, config, order, options.node, say)
        except (DataError, UsageError):  # refused by the workers: a corrected command starts anew
            if not _has_trained(run):
                remove_run(path)
            raise


def run_path(config: Config) -> Path:
    """The run directory of a config."""
    assert config.trainer.default_local_dir is not None
    return Path(config.trainer.default_local_dir)


def set_up(resolved: Resolved, options: Options, say: Say) -> Order:
    """Check and prepare the data, then make the run directory; nothing is left on failure."""
    config, path = resolved.config, run_path(resolved.config)
    refuse_run(path, options.overwrite)
    splits = inputs.check(config, say)
    name = config.model.partial_pretrain
    assert name is not None
    source = resolve_model(name, allow_download=options.allow_download)
    tokenizer = load_tokenizer(source.tokenizer, template_of(config, source))
    prepared = inputs.tokenize(splits, config, tokenizer, path / ".prepared", say)
    record = _record(resolved, options, splits, prepared, (source, tokenizer))
    run = create_run(path, config, record, overwrite=options.overwrite)
    order = Order(
        gpu=processes(config)[1],
        resume=False,
        train_files=splits[0].files,
        allow_download=options.allow_download,
    )
    write_order(run, order)
    return order


def work(
    run: RunDirectory, config: Config, order: Order, node: NodePlan | None, say: Say
) -> Outcome:
    """Start the workers, wait for them, and note in run.json how it ended."""
    count, _ = processes(config)
    threads = read_record(run).get("threads")
    env = worker_environment(config.trainer.seed, count)
    if isinstance(threads, int) and "OMP_NUM_THREADS" not in os.environ:
        env["OMP_NUM_THREADS"] = str(threads)  # another number would give other bits
    argv = [sys.executable, "-m", "posttrain_cli.engine.train", str(run.path)]
    try:
        launch(argv, count, log_dir=run.logs, env=env, follow=say, node=node)
    except RunError as error:
        rolled_back = _roll_back(run, config, order)
        if rolled_back is None:
            set_ended(run, error)
            raise
        say(f"{error.message}; going back once to the last checkpoint and leaving them out")
        write_order(run, rolled_back)
        return work(run, config, rolled_back, node, say)
    except PtcError as error:
        set_ended(run, error)
        raise
    return finish(run)


def set_ended(run: RunDirectory, error: PtcError) -> None:
    """Note in run.json that the run was stopped or failed."""
    if isinstance(error, Interrupted):
        set_state(run, "interrupted")
    else:
        set_state(run, "failed", error=error.message)


def finish(run: RunDirectory) -> Outcome:
    """Note that the run is finished and drop what only training needs."""
    set_state(run, "finished", error=None)
    shutil.rmtree(run.prepared, ignore_errors=True)
    return outcome(run)


def outcome(run: RunDirectory, already_finished: bool = False) -> Outcome:
    """What the last metrics line says."""
    lines = list(read_metrics(run.metrics))
    last = lines[-1] if lines else {}
    return Outcome(run.path, int(last.get("step", 0)), last, already_finished)


def processes(config: Config) -> tuple[int, bool]:
    """(processes of this machine, whether they compute on GPUs)."""
    wanted = config.trainer.n_gpus_per_node
    gpus = len(visible_gpus()) if wanted == "auto" else wanted
    return (gpus, True) if gpus else (config.trainer.processes, False)


def _record(
    resolved: Resolved,
    options: Options,
    splits: list[Split],
    prepared: dict[str, Prepared],
    model: tuple[ModelSource, Tokenizer],
) -> dict[str, Any]:
    """The first content of run.json."""
    source, tokenizer = model
    config = resolved.config
    count, gpu = processes(config)
    datasets = [
        {"role": split.role, "path": path, "sha256": sha256, "rows": rows}
        for split in splits
        for path, sha256, rows in zip(split.files, split.hashes, split.rows, strict=True)
    ]
    threads = worker_environment(config.trainer.seed, count)["OMP_NUM_THREADS"]
    record = lineage.run_record(
        command=options.command,
        config=config,
        datasets=datasets,
        tokenizer={"sha256": tokenizer.sha256, "template": tokenizer.template_name},
        model=lineage.folder_identity(source.weights),
        devices=[gpu_name(i) if gpu else "cpu" for i in range(count)],
        threads=int(threads),
    )
    record["origins"] = resolved.origins
    record["samples"] = {role: _counts(found) for role, found in prepared.items()}
    return record


def _counts(prepared: Prepared) -> dict[str, Any]:
    return asdict(prepared.counts)


def gpu_name(index: int) -> str:
    """Name of the GPU that process `index` of this machine gets."""
    gpus = visible_gpus()
    return gpus[index].name if index < len(gpus) else "gpu"


def _roll_back(run: RunDirectory, config: Config, order: Order) -> Order | None:
    """Orders to go back once and leave the bad steps out, if the user asked for it."""
    from posttrain_cli.engine.health import bad_steps

    bad = tuple(sorted(bad_steps(run)))
    lines = list(read_metrics(run.metrics))[-config.trainer.max_bad_steps :]
    hopeless = len(lines) == config.trainer.max_bad_steps and all(
        line.get("train/skipped") for line in lines
    )
    if not (config.trainer.rollback and hopeless) or order.left_out:
        return None
    update_record(run, rolled_back={"from_step": int(lines[-1]["step"]), "left_out": list(bad)})
    return replace(order, resume=True, left_out=bad)


def _second_node(config: Config, options: Options, say: Say) -> Outcome:
    """Wait for machine 0 to lay out the run, then start this machine's workers."""
    run = RunDirectory(run_path(config))
    order = joined.wait_for_order(run, say)
    return work(run, config, order, options.node, say)


def _has_trained(run: RunDirectory) -> bool:
    """Whether there is a step or a checkpoint that could be lost."""
    steps = run.metrics.is_file() and any(read_metrics(run.metrics))
    return steps or any(run.checkpoints.iterdir())


class _discarding:  # noqa: N801 - reads as a statement
    """Leave no directory behind when a run could not even be laid out."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None and not holds_run(self.path):
            shutil.rmtree(self.path / ".prepared", ignore_errors=True)
            for name in (".task.json", ".lock"):
                (self.path / name).unlink(missing_ok=True)
            with suppress(OSError):
                self.path.rmdir()
