"""Supervised fine-tuning, read top to bottom: load, build, step, fit, export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from posttrain_cli.data.plan import Plan, Step, deal
from posttrain_cli.data.prepare import Prepared
from posttrain_cli.data.tokenizer import load_tokenizer
from posttrain_cli.engine import checkpoint, distributed, export, flops, health
from posttrain_cli.engine.background import BackgroundSaver
from posttrain_cli.engine.batch import Batch, make_batch
from posttrain_cli.engine.distributed import World
from posttrain_cli.engine.loop import Job, Progress, Work, fit, restore
from posttrain_cli.engine.metrics import MetricsWriter, parse_loggers
from posttrain_cli.engine.model import Policy, build
from posttrain_cli.engine.optimizer import build_optimizer
from posttrain_cli.engine.task import Task, make_plan, total_steps
from posttrain_cli.runs.directory import update_record
from posttrain_cli.runs.metrics import cut_metrics, read_metrics


def run(task: Task, world: World, say: Callable[[str], None]) -> None:
    """Train the run of `task` from where it stands to its end; every rank calls it."""
    config = task.config
    train = Prepared(task.run.prepared / "train")
    plan = make_plan(train, config)
    total = total_steps(config, plan)
    policy = build(task.model, config.model, world, config.trainer.seed)
    optimizer = build_optimizer(policy, config.optim)
    found = checkpoint.newest(task.run.checkpoints, say, world) if task.order.resume else None
    job = Job(
        run=task.run,
        config=config,
        world=world,
        policy=policy,
        optimizer=optimizer,
        total=total,
        end=min(total, task.order.stop_after or total),
        work=lambda step: make_work(plan.step(step), train, task, world),
        loss=policy.cross_entropy,
        flops=flops.work_of(policy.module, policy.config, policy.lora),
        peak=flops.measure_peak(world.device, policy.dtype),
        evaluate=make_evaluation(policy, task, world),
        eval_steps=lambda step: task.evaluates(plan, step, total),
        left_out=frozenset(task.order.left_out),
        saver=BackgroundSaver(world),
        writer=_writer(task, world, found, total, say),
        say=say,
    )
    progress, watch = Progress(), health.NormWatch()
    if world.is_main:
        update_record(task.run, total_steps=total)
    if found is not None:
        progress = restore(job, found)
        watch.replay(list(read_metrics(task.run.metrics)))
        say(f"continuing after step {progress.step:,} of {total:,} ({found.path.name})")
    else:
        _describe(task, policy, plan, total, say)
        _evaluate_untrained(job)
    fit(job, progress, watch)
    job.writer.close()
    if task.order.stop_after is not None:
        return
    base = task.model.base or task.model.weights
    export.export(policy, task.tokenizer, base, task.run.model, world)
    if world.is_main:  # `infer` compares it, to notice when the artefact's template was changed
        update_record(task.run, result_tokenizer={"sha256": load_tokenizer(task.run.model).sha256})


def make_work(step: Step, train: Prepared, task: Task, world: World) -> Work:
    """This rank's micro-batches of a global step."""
    data, seed = task.config.data, task.config.trainer.seed
    micro = data.micro_batch_size_per_gpu
    shares = deal(step.bins, train.lengths, world.size, micro)
    batches = [
        make_batch(bins, train, seed=seed, step=step.number, device=world.device)
        for bins in shares[world.rank]
    ]

    def rows() -> list[dict[str, Any]]:
        places = [train.place(int(sample)) for sample in np.concatenate(step.bins)]
        return [{"file": task.order.train_files[file], "row": row} for file, row in places]

    return Work(batches, step.trained, step.fraction, rows)


def make_evaluation(
    policy: Policy, task: Task, world: World
) -> Callable[[], dict[str, float]] | None:
    """Validation loss over all trained tokens of the validation files, or None without any."""
    folder = task.run.prepared / "val"
    if not folder.is_dir():
        return None
    data = task.config.data
    val = Prepared(folder)
    capacity = data.max_length if data.packing else None
    bins = Plan(
        val.lengths, val.trained, capacity=capacity, batch_size=1, seed=0, shuffle=False
    ).bins(0)
    micro = data.micro_batch_size_per_gpu
    share = deal(bins, val.lengths, world.size, micro)[world.rank]
    count = int(val.trained.sum())

    def evaluate() -> dict[str, float]:
        policy.module.eval()
        total = 0.0
        with torch.no_grad():
            for group in share:
                batch: Batch = make_batch(group, val, seed=0, step=0, device=world.device)
                total += float(policy.cross_entropy(batch))
        policy.module.train()
        return {"val/loss": distributed.sums(world, [total])[0] / count}

    return evaluate


def _evaluate_untrained(job: Job) -> None:
    """The validation loss before the first step goes to run.json."""
    if job.evaluate is None:
        return
    values = job.evaluate()
    job.say(f"before training | val/loss {values['val/loss']:.3f}")
    if job.world.is_main:
        update_record(job.run, before_training=values)


def _writer(
    task: Task,
    world: World,
    found: checkpoint.Checkpoint | None,
    total: int,
    say: Callable[[str], None],
) -> MetricsWriter:
    """Metrics that go on after the checkpoint, without gaps or repeats."""
    done = found.step if found is not None else 0
    if world.is_main:
        cut_metrics(task.run.metrics, done)
    distributed.barrier(world)
    return MetricsWriter(
        task.run,
        parse_loggers(task.config.trainer.logger),
        done=done,
        total=total,
        interval=task.config.trainer.log_interval,
        say=say,
        active=world.is_main,
    )


def _describe(
    task: Task, policy: Policy, plan: Plan, total: int, say: Callable[[str], None]
) -> None:
    """Say what will be trained, in what, and for how long."""
    trainable = sum(p.numel() for p in policy.trainable.values())
    share = 100 * trainable / policy.parameters
    kind = f"LoRA, {len(policy.trainable):,} tensors" if policy.lora else "all parameters"
    say(f"training {trainable:,} of {policy.parameters:,} parameters ({share:.2f} %; {kind})")
    if policy.note:
        say(policy.note)
    unit = "packs" if task.config.data.packing else "samples"
    say(
        f"{len(plan.bins(0)):,} {unit} an epoch, {plan.batch_size} a step, {total:,} steps; "
        f"attention {policy.attention}, {str(policy.dtype).removeprefix('torch.')}"
    )
