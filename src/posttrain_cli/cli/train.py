"""`ptc sft`, `ptc train` and `ptc resume`: resolve, check, start, say how it ended."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain_cli.cli import console, preflight
from posttrain_cli.cli.dryrun import show
from posttrain_cli.cli.options import Sets, with_flags, with_settings
from posttrain_cli.errors import ExitCode, UsageError
from posttrain_cli.schema import settings
from posttrain_cli.settings import Resolved

if TYPE_CHECKING:
    from posttrain_cli.engine.api import Outcome

_TRAINERS = ("sft",)
# What `ptc resume` offers as flags; the rest of what may change goes by --set.
_RESUMABLE = (
    "trainer.n_gpus_per_node",
    "trainer.processes",
    "trainer.total_epochs",
    "trainer.max_steps",
)

NodeRank = Annotated[
    int, typer.Option("--node-rank", metavar="N", help="number of this machine, from 0")
]
Endpoint = Annotated[
    str, typer.Option("--rdzv-endpoint", metavar="HOST:PORT", help="machine 0, with --nnodes")
]
ResumeFrom = Annotated[
    bool,
    typer.Option(
        "--resume-from-checkpoint", help="continue the run in --output-dir if there is one"
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="check everything, print the plan, write nothing")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="replace the run that --output-dir holds")
]
Download = Annotated[
    bool, typer.Option("--allow-download", help="let a hub id be fetched from the network")
]


@with_settings("sft")
def sft(
    resolved: Resolved,
    dry_run: DryRun = False,
    resume_from_checkpoint: ResumeFrom = False,
    overwrite: Overwrite = False,
    allow_download: Download = False,
    node_rank: NodeRank = 0,
    rdzv_endpoint: Endpoint = "",
) -> None:
    """Fine-tune a model on prompts and answers or conversations.

    The data is checked first, as `ptc validate` does. The run directory gets the resolved config,
    metrics.jsonl, TensorBoard files, checkpoints and, at the end, the model. A stopped or killed
    run goes on with `ptc resume`.

    Examples:
      ptc sft --model models/smollm2 --train train.jsonl --val val.jsonl --output-dir runs/first
      ptc sft --config sft.yaml --gpus 4 --set optim.weight_decay=0
      ptc sft --config sft.yaml --lora-rank 64 --target-modules q_proj,v_proj --dry-run
      ptc sft --model models/smollm2 --train train.jsonl --gpus 0 --processes 2 --max-steps 20
    """
    _start(
        resolved,
        dry_run=dry_run,
        resume_from_checkpoint=resume_from_checkpoint,
        overwrite=overwrite,
        allow_download=allow_download,
        node_rank=node_rank,
        rdzv_endpoint=rdzv_endpoint,
    )


@with_settings(None)
def train(
    resolved: Resolved,
    dry_run: DryRun = False,
    resume_from_checkpoint: ResumeFrom = False,
    overwrite: Overwrite = False,
    allow_download: Download = False,
    node_rank: NodeRank = 0,
    rdzv_endpoint: Endpoint = "",
) -> None:
    """Start the trainer that `trainer.type` of the config names.

    Examples:
      ptc train --config sft.yaml
      ptc train --config runs/first/config.yaml --output-dir runs/again
      ptc train --config sft.yaml --gpus 8 --nnodes 2 --node-rank 0 --rdzv-endpoint node0:29400
    """
    _start(
        resolved,
        dry_run=dry_run,
        resume_from_checkpoint=resume_from_checkpoint,
        overwrite=overwrite,
        allow_download=allow_download,
        node_rank=node_rank,
        rdzv_endpoint=rdzv_endpoint,
    )


@with_flags([settings()[key] for key in _RESUMABLE])
def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="the run directory")],
    flags: dict[str, Any],
    sets: Sets = None,
    force: Annotated[
        bool, typer.Option("--force", help="accept changes of the data order or the model")
    ] = False,
    dry_run: DryRun = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="train the last stretch again elsewhere and compare bits"),
    ] = False,
) -> int:
    """Continue a stopped or killed run from its newest whole checkpoint.

    The run goes on with its own recorded config and ends bit for bit as if it had never stopped.
    The number of devices may differ, the length may be raised, and `--set` takes whatever the
    data order and the model do not depend on. A finished run is left alone.

    Examples:
      ptc resume runs/first
      ptc resume runs/first --gpus 2
      ptc resume runs/first --max-steps 2000 --set trainer.save_interval=500
      ptc resume runs/first --verify
    """
    from posttrain_cli.engine.resume import Changes
    from posttrain_cli.engine.resume import resume as continue_run

    preflight.check_packages()
    if verify:
        return _verify(run)
    changes = Changes(flags=flags, sets=tuple(sets or ()), force=force)
    if dry_run:
        from posttrain_cli.engine.dryrun import plan_resume

        show(plan_resume(run, changes, console.say))
    else:
        _report(continue_run(run, changes, console.say))
    return ExitCode.OK


def _verify(run: Path) -> int:
    """Train the last stretch again; exit 1 when a bit differs."""
    from posttrain_cli.engine.verify import verify

    verdict = verify(run, console.say)
    steps = f"steps {verdict.first:,} to {verdict.last:,}"
    if console.modes.json:
        console.emit({"ok": verdict.same, **dataclasses.asdict(verdict)})
    elif verdict.same:
        console.out(f"{steps}: the same losses and weights, bit for bit")
    else:
        console.out(
            f"{steps}: {len(verdict.different_steps)} steps and "
            f"{len(verdict.different_tensors)} tensors differ"
        )
        for name in (*map(str, verdict.different_steps), *verdict.different_tensors):
            console.detail(f"  {name}")
    return ExitCode.OK if verdict.same else ExitCode.DATA


def _start(
    resolved: Resolved,
    *,
    dry_run: bool,
    allow_download: bool,
    node_rank: int,
    rdzv_endpoint: str,
    resume_from_checkpoint: bool,
    overwrite: bool,
) -> None:
    """Check what is needed, then train."""
    if resolved.method not in _TRAINERS:
        raise UsageError(
            f"{resolved.origins['trainer.type']}: this version has no `{resolved.method}` trainer",
            hint=f"it trains {', '.join(_TRAINERS)}",
        )
    preflight.check(resolved, allow_download=allow_download)
    node = preflight.node(resolved.config, node_rank, rdzv_endpoint)

    from posttrain_cli.engine import api, dryrun

    options = api.Options(
        command=("ptc", *console.modes.command),
        overwrite=overwrite,
        resume=resume_from_checkpoint,
        allow_download=allow_download,
        node=node,
    )
    if dry_run:
        show(dryrun.plan(resolved, options, console.say))
    else:
        _report(api.start(resolved, options, console.say))


def _report(outcome: Outcome) -> None:
    """How it ended: the model's folder on stdout, the rest for people. Only rank 0 speaks."""
    if os.environ.get("RANK", "0") != "0":
        return
    run = outcome.run.absolute()
    model = run / "model"
    if console.modes.json:
        console.emit(
            {
                "ok": True,
                "run": str(run),
                "model": str(model),
                "steps": outcome.steps,
                "already_finished": outcome.already_finished,
                "metrics": outcome.metrics,
            }
        )
        return
    if not outcome.already_finished:
        console.say(f"done: {outcome.steps:,} steps; try `ptc infer --model {run}`")
    console.out(str(model))
