"""How the plan of `--dry-run` is printed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from posttrain_cli.cli import console


def show(plan: Mapping[str, Any]) -> None:
    """Print a plan of `engine.dryrun.plan` on stdout: as it is with `--json`, else for people."""
    if console.modes.json:
        console.emit({"ok": True, "plan": plan})
        return
    for line in _lines(plan):
        console.out(line)


def _lines(plan: Mapping[str, Any]) -> Iterator[str]:
    yield "settings"
    rows = [(key, str(row["value"]), row["origin"]) for key, row in plan["settings"].items()]
    yield from console.table(
        [row for row in rows if not (row[1] == "None" and row[2] == "default")], indent="  "
    )
    yield ""
    yield "data"
    for role, counts in plan["data"].items():
        dropped = sum(counts["dropped"].values())
        reasons = "".join(f"; {count:,} {why}" for why, count in sorted(counts["dropped"].items()))
        yield (
            f"  {role}: {counts['read']:,} rows read = {counts['kept']:,} kept + {dropped:,} "
            f"dropped{reasons}; {counts['cut']:,} cut"
        )
        yield f"  {role}: {counts['tokens']:,} tokens, {counts['trained']:,} of them trained"
    yield f"  first sample, trained text in ⟦ ⟧: {plan['sample']!r}"
    yield ""
    yield "run"
    memory, devices = plan["memory"], plan["devices"]
    kind = "GPU" if devices["gpu"] else "CPU process"
    gigabytes = {name: f"{value / 1e9:.2f} GB" for name, value in memory.items()}
    parts = ", ".join(
        f"{name.replace('_', ' ')} {size}"
        for name, size in gigabytes.items()
        if name not in ("total", "available")
    )
    yield from console.table(
        [
            ("directory", plan["run"]),
            ("steps", f"{plan['steps']:,}{_done(plan)}"),
            ("tokens a step", f"{plan['tokens_per_step']:,}"),
            ("devices", f"{devices['processes']} × {kind}"),
            ("parameters", "{all:,} in all, {trained:,} trained".format(**plan["parameters"])),
            ("memory a device", f"{gigabytes['total']} ({parts})"),
            ("free a device", gigabytes["available"]),
            (
                "fits",
                "yes"
                if plan["fits"]
                else "no: lower --micro-batch-size or --max-length, "
                "use --lora-rank, --gradient-checkpointing or more devices",
            ),
        ],
        indent="  ",
    )


def _done(plan: Mapping[str, Any]) -> str:
    """What a resumed run has behind it."""
    return f", {plan['from_step']:,} of them done" if "from_step" in plan else ""
