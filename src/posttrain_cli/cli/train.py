"""`ptc sft`, `ptc train` and `ptc resume`: resolve, check, start, say how it ended."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from posttrain_cli.cli import preflight
from posttrain_cli.cli.options import with_settings
from posttrain_cli.settings import Resolved

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


def _start(resolved: Resolved, *, allow_download: bool, **options: Any) -> None:
    preflight.check(resolved, allow_download=allow_download)
