"""`ptc doctor`: what is here, what it means, how to fix it, and what each command can use."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from posttrain_cli.cli import console
from posttrain_cli.environment import Check, Torch, lacking, look
from posttrain_cli.errors import ExitCode, UsageError, did_you_mean
from posttrain_cli.extras import missing

_NEEDS = ("gpu", "train", "vllm", "s3", "ray")
_MARKS = {"ok": ("ok     ", "32"), "note": ("note   ", "33"), "problem": ("PROBLEM", "31;1")}

Need = Annotated[
    str | None,
    typer.Option(
        "--need", metavar="NAME,...", help=f"exit 1 unless these are here: {', '.join(_NEEDS)}"
    ),
]


def doctor(need: Need = None) -> int:
    """Look at this machine: Python, torch, CUDA, driver, GPUs, packages, disk.

    Each finding says what it means and how to fix it. Nothing is changed or sent anywhere.

    Examples:
      ptc doctor
      ptc doctor --need gpu,train
      ptc doctor --json
    """
    needs = _needs(need)
    checks, torch, gpus = look()
    absent = {name: reason for name in needs if (reason := lacking(name, torch, gpus))}
    uses = _uses(torch, len(gpus))
    if console.modes.json:
        console.emit(
            {
                "ok": not absent,
                "checks": [dataclasses.asdict(check) for check in checks],
                "gpus": [dataclasses.asdict(gpu) for gpu in gpus],
                "torch": dataclasses.asdict(torch),
                "commands": uses,
                "needs": {name: absent.get(name, "") for name in needs},
            }
        )
    else:
        _print(checks, uses)
    for name, reason in absent.items():
        console.warn(f"`{name}` is missing: {reason}")
    return ExitCode.DATA if absent else ExitCode.OK


def _needs(written: str | None) -> list[str]:
    names = [name.strip() for name in (written or "").split(",") if name.strip()]
    for name in names:
        if name not in _NEEDS:
            raise UsageError(
                f"`--need {name}`: expected some of {', '.join(_NEEDS)}",
                hint=did_you_mean(name, _NEEDS),
            )
    return names


def _uses(torch: Torch, gpus: int) -> dict[str, str]:
    """What each command can use on this machine."""
    trains = not missing("train") and bool(torch.version)
    device = f"{torch.gpus} of {gpus} GPUs, bf16" if torch.gpus else "the CPU, float32"
    training = device if trains else "not possible: pip install 'posttrain-cli[train]'"
    storage = "local files" if missing("s3") else "local files and s3://"
    return {
        "validate, preprocess, gen-synthetic": storage,
        "sft, train, resume": training,
        "infer": training,
    }


def _print(checks: Sequence[Check], uses: Mapping[str, str]) -> None:
    """Results go to stdout: they are what was asked for."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        mark, color = _MARKS[check.status]
        colored = console.paint(mark, color, stream=console.stdout())
        console.out(f"{colored}  {check.name.ljust(width)}  {check.found}")
        for label, text in (("means", check.meaning), ("fix", check.fix)):
            if text:
                console.out(f"{' ' * (width + 11)}{label}: {text}")
    console.out()
    console.out("what the commands can use here")
    for line in console.table(list(uses.items()), indent="  "):
        console.out(line)
