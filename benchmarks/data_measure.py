"""What a program costs: CPU seconds of all its processes, wall time, memory of the largest one.

This module and the one that uses it import nothing large: a started program's peak memory is
never told as less than its parent's was.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
JOBS = ROOT / "benchmarks" / "data_jobs.py"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
MB = 1e6


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one run: seconds, and bytes of the largest process."""

    cpu: float
    wall: float
    rss: int


def ptc(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "posttrain_cli", *arguments]


def job(name: str, *arguments: str | int | Path, python: str = sys.executable) -> list[str]:
    return [python, str(JOBS), name, *map(str, arguments)]


def run(argv: Sequence[str], good: tuple[int, ...] = (0,)) -> tuple[Cost, dict[str, Any]]:
    """Run a program to its end; its cost, and the JSON object it printed."""
    start = time.perf_counter()
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, **ONE_THREAD}
    ) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in good:
        raise SystemExit(f"exit {process.returncode}: {' '.join(argv)}")
    kilobytes = used.ru_maxrss if sys.platform != "darwin" else used.ru_maxrss // 1024
    return Cost(used.ru_utime + used.ru_stime, wall, kilobytes * 1024), json.loads(printed)


def alternate(
    commands: Mapping[str, Sequence[str]], repeat: int
) -> tuple[dict[str, Cost], dict[str, dict[str, Any]]]:
    """Run the programs in turn, `repeat` rounds; medians and what each printed last."""
    costs: dict[str, list[Cost]] = {name: [] for name in commands}
    printed: dict[str, dict[str, Any]] = {}
    for _ in range(repeat):
        for name, argv in commands.items():
            good = (0, 1) if "validate" in argv else (0,)
            cost, printed[name] = run(argv, good)
            costs[name].append(cost)
            note = f"{name}: CPU {cost.cpu:.2f} s, wall {cost.wall:.2f} s, {cost.rss / MB:.0f} MB"
            print(note, file=sys.stderr, flush=True)
    return {name: _median(found) for name, found in costs.items()}, printed


def _median(costs: Sequence[Cost]) -> Cost:
    middle = statistics.median
    return Cost(
        middle(cost.cpu for cost in costs),
        middle(cost.wall for cost in costs),
        max(cost.rss for cost in costs),
    )


def machine() -> dict[str, Any]:
    """What the figures were taken on, and how busy it was."""
    model = ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = found[0].partition(":")[2].strip() if found else ""
    return {
        "cpu": model or platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load": [round(load, 1) for load in os.getloadavg()],
    }
