"""`--dry-run`: resolve and check everything, say what would happen, write nothing."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from posttrain_cli.data.prepare import Prepared
from posttrain_cli.data.tokenizer import Tokenizer, load_tokenizer
from posttrain_cli.engine import api, checkpoint, inputs, memory
from posttrain_cli.engine.api import Options, Say
from posttrain_cli.engine.resume import (
    Changes,
    changed,
    recorded_config,
    refuse_other_data,
    refuse_shorter,
)
from posttrain_cli.engine.task import make_plan, template_of, total_steps
from posttrain_cli.runs.directory import open_run, read_record, refuse_run
from posttrain_cli.runs.resolve import resolve_model
from posttrain_cli.settings import Resolved, load, value_of


def plan(resolved: Resolved, options: Options, say: Say) -> dict[str, Any]:
    """What `api.start` would do.

    Returns:
        `settings` (each value and its origin), `data` (rows by what became of them), `steps`,
        `tokens_per_step`, `devices`, `memory` (bytes a device), `fits`, and `sample`: the first
        sample with its trained text between ⟦ and ⟧.
    """
    if not options.resume:
        refuse_run(api.run_path(resolved.config), options.overwrite)
    return _plan(resolved, options, inputs.check(resolved.config, say), say)


def plan_resume(path: Path, changes: Changes, say: Say) -> dict[str, Any]:
    """What `resume.resume` would do: as `plan`, with `from_step`, the step it would go on from.

    Raises:
        UsageError: no run there, other data, or a change that is not safe.
    """
    run = open_run(path)
    resolved = load(
        None, flags=changes.flags, sets=changes.sets, config_file=run.config, cwd=run.path
    )
    config = changed(run, recorded_config(run), changes)
    found = checkpoint.newest(run.checkpoints, say)
    step = found.step if found is not None else 0
    refuse_shorter(config, step)
    splits = inputs.check(config, say)
    refuse_other_data(run, splits, changes.force)
    first = read_record(run).get("origins", {})  # of what the run was started with
    origins = {
        key: first.get(key, origin) if origin.startswith(str(run.config)) else origin
        for key, origin in resolved.origins.items()
    }
    planned = _plan(replace(resolved, origins=origins), Options(resume=True), splits, say)
    return planned | {"run": str(run.path), "from_step": step}


def _plan(
    resolved: Resolved, options: Options, splits: list[inputs.Split], say: Say
) -> dict[str, Any]:
    config = resolved.config
    name = config.model.partial_pretrain
    assert name is not None
    source = resolve_model(name, allow_download=options.allow_download)
    tokenizer = load_tokenizer(source.tokenizer, template_of(config, source))
    count, gpu = api.processes(config)
    world = count * (options.node.nodes if options.node else 1)
    shape = memory.shape_of(source, config)
    needed = memory.need(shape, config, world, gpu)
    free = memory.available(gpu, count)
    with tempfile.TemporaryDirectory(prefix="ptc-dry-run-") as folder:
        prepared = inputs.tokenize(splits, config, tokenizer, Path(folder), say)
        train = prepared["train"]
        batches = make_plan(train, config)
        total = total_steps(config, batches)
        return {
            "settings": {
                key: {"value": value_of(config, key), "origin": origin}
                for key, origin in resolved.origins.items()
            },
            "run": str(api.run_path(config)),
            "data": {role: asdict(found.counts) for role, found in prepared.items()},
            "steps": total,
            "bins_per_epoch": len(batches.bins(0)),
            "tokens_per_step": round(train.counts.tokens / batches.steps_in(0)),
            "devices": {"processes": world, "gpu": gpu},
            "parameters": {"all": shape.parameters, "trained": shape.trained},
            "memory": asdict(needed) | {"total": needed.total, "available": free},
            "fits": needed.total <= free,
            "sample": marked_sample(train, tokenizer),
        }


def marked_sample(train: Prepared, tokenizer: Tokenizer) -> str:
    """The first sample as text, its trained tokens between ⟦ and ⟧."""
    ids, mask = train.ids(0).tolist(), train.mask(0).tolist()
    text, start = "", 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or mask[end] != mask[start]:
            piece = tokenizer.decode(ids[start:end], skip_special=False)
            text += f"⟦{piece}⟧" if mask[start] else piece
            start = end
    return text
