"""What a training command needs before anything heavy is imported, told all at once."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from posttrain_cli.config import Config
from posttrain_cli.devices import visible_gpus
from posttrain_cli.errors import UsageError
from posttrain_cli.extras import missing
from posttrain_cli.settings import Resolved, mistakes

if TYPE_CHECKING:
    from posttrain_cli.engine.launch import NodePlan

_NO_MODEL = (
    "no model to start from: pass `--model DIR` (a Hugging Face folder, a run or an adapter), "
    "or a hub id such as `Qwen/Qwen2.5-0.5B-Instruct` with `--allow-download`"
)
_NO_DATA = (
    "no training data: pass `--train FILE` (.jsonl or .parquet); `ptc preprocess` makes it from "
    "raw files, and `ptc gen-synthetic --kind sft --out train.jsonl` makes some to try"
)


def check(resolved: Resolved, *, allow_download: bool) -> None:
    """Raise one UsageError that names everything that is missing here, and how to get it."""
    config = resolved.config
    problems = [
        *_model(config, allow_download=allow_download),
        *_files(resolved),
        *_machine(config),
    ]
    if problems:
        raise mistakes(problems)


def check_packages() -> None:
    """Raise UsageError when the packages of training are not installed."""
    line = _packages()
    if line:
        raise UsageError(line)


def node(config: Config, rank: int, endpoint: str) -> NodePlan | None:
    """This machine's place among `trainer.nnodes`; None for one machine."""
    from posttrain_cli.engine.launch import NodePlan

    nodes = config.trainer.nnodes
    if nodes == 1 and (rank or endpoint):
        raise UsageError(
            "`--node-rank` and `--rdzv-endpoint` are for several machines",
            hint="say how many with `--nnodes N`",
        )
    if nodes == 1 or "RANK" in os.environ:
        return None
    if not endpoint:
        raise UsageError(
            f"`--nnodes {nodes}` needs `--rdzv-endpoint HOST:PORT`",
            hint="name machine 0 and a free port there, the same on every machine",
        )
    plan = NodePlan(nodes, rank, endpoint)
    plan.address()  # complains about a wrong form before anything is started
    return plan


def _model(config: Config, *, allow_download: bool) -> list[str]:
    from posttrain_cli.runs.resolve import resolve_model

    name = config.model.partial_pretrain
    if name is None:
        return [_NO_MODEL]
    if allow_download:
        return []  # looked up, and fetched, when the run starts
    return _problems_of(functools.partial(resolve_model, name))


def _files(resolved: Resolved) -> list[str]:
    from posttrain_cli.data.storage import expand

    data = resolved.config.data
    problems: list[str] = []
    if data.train_files is None:
        problems.append(_NO_DATA)
    for named in (data.train_files, data.val_files):
        if named is not None:
            patterns = [named] if isinstance(named, str) else named
            problems += _problems_of(functools.partial(expand, patterns))
    return problems


def _machine(config: Config) -> list[str]:
    """Packages and GPUs, in one line: both are got in the same go."""
    parts = [line for line in (_packages(),) if line]
    wanted = config.trainer.n_gpus_per_node
    if isinstance(wanted, int) and wanted > 0 and "RANK" not in os.environ:
        found = len(visible_gpus())
        if found < wanted:
            hidden = "CUDA_VISIBLE_DEVICES" in os.environ
            parts.append(
                f"{wanted} GPUs asked for, {found} found here"
                + (
                    f" (CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']})"
                    if hidden
                    else ""
                )
                + ": use `--gpus auto` for what there is or `--gpus 0` for the CPU; "
                "`ptc doctor` shows the machine"
            )
    return ["; ".join(parts)] if parts else []


def _packages() -> str:
    """What to install before training, or an empty text."""
    names = ", ".join(f"`{name}`" for name in missing("train"))
    return f"not installed: {names}; pip install 'posttrain-cli[train]'" if names else ""


def _problems_of(look: Callable[[], object]) -> list[str]:
    """What `look` complains about, a line each."""
    try:
        look()
    except UsageError as exc:
        return list(exc.problems) or ["; ".join(part for part in (exc.message, exc.hint) if part)]
    return []
