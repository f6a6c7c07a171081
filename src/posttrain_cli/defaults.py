"""Defaults that depend on the method, on LoRA or on another setting (SPEC §3)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain_cli.config import Config, Method
from posttrain_cli.errors import did_you_mean
from posttrain_cli.schema import settings
from posttrain_cli.sources import Given

# Peak learning rate by method: all parameters, LoRA.
_LR: dict[Method, tuple[float, float]] = {
    "sft": (2e-5, 2e-4),
    "dpo": (5e-7, 5e-6),
    "ppo": (1e-6, 1e-5),
}
_LOGGERS = ("console", "jsonl", "tensorboard")
_LORA_ONLY = ("model.lora_alpha", "model.lora_dropout", "model.target_modules")


def fill(
    config: Config,
    method: Method,
    *,
    given: Mapping[str, Given],
    folder: Path,
    problems: list[str],
) -> tuple[Config, dict[str, str]]:
    """Fill in what the schema leaves open, and check what only the whole config can tell.

    Args:
        config: the validated config.
        method: the method that runs.
        given: what the user wrote, by key.
        folder: the working directory; the default run directory is below it.
        problems: gets a line for each contradiction.

    Returns:
        The full config and the origins of the values filled in.
    """
    _check(config, given, problems)
    found = {
        **_model(config, method),
        **_data(config, method),
        **_length(config),
        **_place(config, method, folder),
    }
    updates: dict[str, dict[str, Any]] = {}
    for key, (value, _) in found.items():
        section, name = key.split(".")
        updates.setdefault(section, {})[name] = value
    updates.setdefault("trainer", {})["logger"] = _loggers(config, given, problems)
    filled = {
        section: getattr(config, section).model_copy(update=update)
        for section, update in updates.items()
    }
    origins = {key: origin for key, (_, origin) in found.items()}
    if "trainer.type" not in given:
        origins["trainer.type"] = f"command ptc {method}"
    return config.model_copy(update=filled), origins


def _model(config: Config, method: Method) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {}
    lora = config.model.lora_rank > 0 or _is_adapter(config.model.partial_pretrain)
    if config.optim.lr is None:
        found["optim.lr"] = (_LR[method][lora], f"default ({'LoRA' if lora else method})")
    if config.model.lora_rank > 0 and config.model.lora_alpha is None:
        alpha = 2.0 * config.model.lora_rank
        found["model.lora_alpha"] = (alpha, "default (twice the rank)")
    return found


def _data(config: Config, method: Method) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {}
    packing = config.data.packing
    if packing is None:
        packing = method == "sft"
        found["data.packing"] = (packing, f"default ({method})")
    if config.data.train_batch_size is None:
        size, unit = (8, "packs") if packing else (32, "samples")
        found["data.train_batch_size"] = (size, f"default ({unit})")
    return found


def _length(config: Config) -> dict[str, tuple[Any, str]]:
    """One epoch, unless the user gave steps: a default never cuts `max_steps`."""
    if config.trainer.total_epochs is not None:
        return {}
    if config.trainer.max_steps is None:
        return {"trainer.total_epochs": (1, "default")}
    return {"trainer.total_epochs": (None, "default (max_steps sets the length)")}


def _place(config: Config, method: Method, folder: Path) -> dict[str, tuple[Any, str]]:
    if config.trainer.default_local_dir is not None:
        return {}
    project = re.sub(r"[^\w.-]+", "-", config.trainer.project_name).strip(".-") or "ptc"
    run = folder / "runs" / f"{project}-{method}"
    return {"trainer.default_local_dir": (str(run), "default (runs/PROJECT-METHOD)")}


def _check(config: Config, given: Mapping[str, Given], problems: list[str]) -> None:
    """Settings that contradict each other or would do nothing."""
    model = config.model
    if model.lora_rank == 0 and not _is_adapter(model.partial_pretrain):
        for key in _LORA_ONLY:
            item = given.get(key)
            if item is not None and item.value not in (None, settings()[key].default):
                problems.append(
                    f"{item.origin}: `{key}` has no effect while `model.lora_rank` is 0; "
                    "set a rank (such as `--lora-rank 16`) or take it out"
                )
    trainer = config.trainer
    if trainer.processes > 1 and trainer.n_gpus_per_node not in (0, "auto"):
        problems.append(
            f"{given['trainer.processes'].origin}: `trainer.processes` counts CPU processes, but "
            f"`trainer.n_gpus_per_node` is {trainer.n_gpus_per_node}; use `--gpus 0` or drop it"
        )


def _loggers(config: Config, given: Mapping[str, Given], problems: list[str]) -> list[str]:
    written = config.trainer.logger
    names = written.split(",") if isinstance(written, str) else written
    names = [name.strip() for name in names]
    for name in names:
        if name not in _LOGGERS:
            near = did_you_mean(name, _LOGGERS)
            problems.append(
                f"{given['trainer.logger'].origin}: unknown logger `{name}`; "
                + (near or f"known are {', '.join(_LOGGERS)}")
            )
    return names


def _is_adapter(model: str | None) -> bool:
    """Whether the model to start from is a PEFT adapter, or a run whose result is one."""
    if model is None:
        return False
    folder = Path(model)
    return any(
        (folder / name).is_file() for name in ("adapter_config.json", "model/adapter_config.json")
    )
