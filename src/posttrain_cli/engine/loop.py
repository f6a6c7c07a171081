"""The one loop of all trainers.

    plan of batches → loss sums → one global division → optimizer step → metrics → checkpoint

It knows no algorithm. What is trained is a function from a batch to (loss sum, metric sums);
where the batches of a step come from is another. The state beside the tensors is a handful of
numbers, because order, dropout and learning rate are functions of the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from posttrain_cli.config import Config
from posttrain_cli.engine import checkpoint, distributed, flops, health, weights
from posttrain_cli.engine.background import BackgroundSaver
from posttrain_cli.engine.batch import Batch
from posttrain_cli.engine.distributed import Stopper, World
from posttrain_cli.engine.metrics import MetricsWriter
from posttrain_cli.engine.model import Policy
from posttrain_cli.engine.optimizer import checkpoint_tensors, learning_rate, set_updates
from posttrain_cli.errors import Interrupted, RunError
from posttrain_cli.runs.directory import RunDirectory

LossFn = Callable[[Batch], Tensor]


@dataclass(slots=True)
class Progress:
    """What of a run is neither tensor nor function of the step; stored in state.json.

    Attributes:
        step: global steps done.
        updates: optimizer updates among them (skipped steps make none).
        trained_tokens: trained tokens so far.
        bad_in_a_row: skipped steps since the last good one.
        best_loss: lowest validation loss at a checkpoint, or None.
        best_step: its step.
    """

    step: int = 0
    updates: int = 0
    trained_tokens: int = 0
    bad_in_a_row: int = 0
    best_loss: float | None = None
    best_step: int | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """One global step as this rank sees it.

    Attributes:
        batches: this rank's micro-batches; every rank has the same number.
        count: what the loss sum of all ranks is divided by.
        epoch: epochs done after the step.
        rows: the rows of the whole step, asked for only when it goes wrong.
    """

    batches: Sequence[Batch]
    count: int
    epoch: float
    rows: Callable[[], list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Job:
    """What `fit` needs from an algorithm and a run.

    Attributes:
        run: the run directory.
        config: the resolved config.
        world: this process's place.
        policy: the model.
        optimizer: over its trainable parameters.
        total: global steps of the run, on which the learning rate depends.
        end: last step of this session.
        work: step number to its batches.
        loss: loss sum of one batch.
        flops: arithmetic of one batch.
        peak: FLOP/s that one device reaches, measured.
        evaluate: validation metrics, or None.
        eval_steps: whether a step is followed by a validation.
        left_out: steps whose batches proved unusable before a rollback: not tried again.
        saver: checkpoints, written while training goes on.
        writer: metrics.
        say: one line for people, used on the main rank.
    """

    run: RunDirectory
    config: Config
    world: World
    policy: Policy
    optimizer: torch.optim.AdamW
    total: int
    end: int
    work: Callable[[int], Work]
    loss: LossFn
    flops: flops.Work
    peak: float
    evaluate: Callable[[], dict[str, float]] | None
    eval_steps: Callable[[int], bool]
    left_out: frozenset[int]
    saver: BackgroundSaver
    writer: MetricsWriter
    say: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Sums:
    """What a step gave, over all ranks.

    Attributes:
        loss: loss sum over trained tokens, divided by their number.
        norm: gradient norm before clipping.
        tokens: real tokens.
        flops: arithmetic that the step needed.
    """

    loss: float
    norm: float
    tokens: int
    flops: float


def train_step(job: Job, work: Work, first: bool) -> Sums:
    """Forward and backward over a global step; the clipped gradients stay in the parameters.

    The loss sums of all micro-batches and ranks are divided once, by `work.count`.

    Args:
        job: the run.
        work: this rank's part of the step.
        first: whether to check that every trained tensor gets a gradient.
    """
    assert work.count > 0, "a step without trained tokens"
    total = torch.zeros((), dtype=torch.float64)
    for batch in work.batches:
        loss_sum = job.loss(batch)
        (loss_sum / work.count).backward()
        total += loss_sum.detach().to("cpu", torch.float64)
    if first:
        health.check_gradients(job.policy.trainable)
    tokens = sum(batch.tokens for batch in work.batches)
    needed = sum(job.flops.of(batch) for batch in work.batches)
    loss, all_tokens, all_flops = distributed.sums(job.world, [float(total), float(tokens), needed])
    limit = job.config.optim.clip_grad_norm or float("inf")
    norm = torch.nn.utils.clip_grad_norm_(job.policy.trainable.values(), limit)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    return Sums(loss / work.count, float(norm), int(all_tokens), all_flops)


def fit(job: Job, progress: Progress, watch: health.NormWatch) -> Progress:
    """Train from `progress` to the last step.

    Raises:
        Interrupted: a signal came; the step was finished and a checkpoint written.
        RunError: too many skipped steps in a row, or a checkpoint could not be written.
    """
    started = progress.step
    with Stopper() as stopper:
        while progress.step < job.end:
            step = progress.step + 1
            values = _one_step(job, progress, watch, step == started + 1)
            validated = job.evaluate is not None and job.eval_steps(step)
            if validated and job.evaluate is not None:
                values |= job.evaluate()
            job.writer.write(step, values)
            _stop_when_hopeless(job, progress)
            signum = stopper.agreed(job.world)
            due = step % job.config.trainer.save_interval == 0 and not progress.bad_in_a_row
            if due or signum or step == job.end:
                _save(job, progress, values.get("val/loss"))
            if signum or step == job.end:
                job.saver.close()
            if signum and step < job.end:
                raise Interrupted(
                    signum,
                    f"stopped after step {step:,} of {job.total:,}; a checkpoint is saved",
                    hint=f"continue with `ptc resume {job.run.path}`",
                )
    return progress


def _one_step(
    job: Job, progress: Progress, watch: health.NormWatch, first: bool
) -> dict[str, float]:
    """Train one step, or skip it if its gradients cannot be used; its metrics."""
    clock = time.perf_counter()
    step = progress.step + 1
    work = job.work(step)
    rate = learning_rate(step, job.total, job.config.optim)
    if step in job.left_out:
        progress.step = step
        return {"epoch": round(work.epoch, 6), "train/lr": rate, "train/skipped": 1}
    sums = train_step(job, work, first)
    reason = watch.judge(sums.loss, sums.norm)
    if not reason:
        for group in job.optimizer.param_groups:
            group["lr"] = rate
        job.optimizer.step()
        progress.updates += 1
    job.optimizer.zero_grad(set_to_none=True)
    progress.step = step
    progress.trained_tokens += work.count
    progress.bad_in_a_row = progress.bad_in_a_row + 1 if reason else 0
    seconds = _elapsed(job.world.device, clock)
    values: dict[str, float] = {
        "epoch": round(work.epoch, 6),
        "train/loss": sums.loss,
        "train/lr": rate,
        "train/grad_norm": sums.norm,
        "train/tokens": progress.trained_tokens,
        "train/tokens_per_second": round(sums.tokens / seconds, 1),
        "train/mfu": round(sums.flops / seconds / (job.peak * job.world.size), 4),
        "train/memory_gb": round(peak_memory_gb(job.world.device), 3),
    }
    if reason:
        values["train/skipped"] = 1
        _skipped(job, progress, reason, work)
    return values


def _skipped(job: Job, progress: Progress, reason: str, work: Work) -> None:
    """Say that a step was skipped and keep its rows."""
    if job.world.is_main:
        path = health.save_bad_rows(job.run, progress.step, reason, work.rows())
        job.say(f"step {progress.step} skipped, no update: {reason}; its rows are in {path}")


def _stop_when_hopeless(job: Job, progress: Progress) -> None:
    limit = job.config.trainer.max_bad_steps
    if progress.bad_in_a_row >= limit:
        raise RunError(
            f"{limit} steps in a row had unusable gradients, the last at step {progress.step:,}",
            hint=f"look at the rows in `{health.bad_steps_folder(job.run)}`; lower --lr, "
            "or check the data",
        )


def _save(job: Job, progress: Progress, val_loss: float | None) -> None:
    """Begin the checkpoint of the present step; when it is whole, older ones are pruned."""
    best = progress.best_loss
    if val_loss is not None and (best is None or val_loss < best):
        progress.best_loss, progress.best_step = val_loss, progress.step
    job.writer.sync()
    folder, keep = job.run.checkpoints, job.config.trainer.keep_checkpoints
    protect = () if progress.best_step is None else (progress.best_step,)

    def retain(_saved: Path) -> None:
        if job.world.is_main:
            checkpoint.prune(folder, keep, protect)

    tensors = checkpoint_tensors(job.policy, job.optimizer)
    state = asdict(progress)
    job.saver.save(folder, progress.step, tensors, state, retain, _whole_weights(job))


def _whole_weights(job: Job) -> Callable[[Path], None] | None:
    """With `save_full_state_dict`, what writes the trained weights as one file; collective."""
    if not job.config.trainer.save_full_state_dict:
        return None
    from safetensors.torch import save_file

    full: dict[str, Tensor] = {}
    for name, parameter in job.policy.trainable.items():
        tensor = weights.whole(parameter)
        if job.world.is_main:
            full[name] = tensor.cpu().contiguous()
    return lambda folder: save_file(full, folder / "full.safetensors", metadata={"format": "pt"})


def restore(job: Job, found: checkpoint.Checkpoint) -> Progress:
    """Put weights, moments, counters and generators back to where `found` left them."""
    checkpoint.load(found, checkpoint_tensors(job.policy, job.optimizer))
    progress = Progress(**found.state)
    set_updates(job.optimizer, progress.updates)
    checkpoint.restore_rng(found, job.world)
    return progress


def peak_memory_gb(device: torch.device) -> float:
    """Most memory used so far, in 10⁹ bytes: of the GPU, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def _elapsed(device: torch.device, since: float) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return max(1e-9, time.perf_counter() - since)
