"""What the end-to-end tests share: a small run, and reading what it left."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MEASURED = {"train/tokens_per_second", "train/memory_gb", "train/mfu"}


def sft_args(model: Path, train: Path, val: Path, run: Path, *extra: str) -> list[str]:
    """A run of 18 steps over 6 epochs of packs, LoRA with dropout, a checkpoint every 2 steps."""
    return [
        "sft", "--gpus", "0", "--model", str(model), "--train", str(train), "--val", str(val),
        "--output-dir", str(run), "--max-length", "256", "--batch-size", "4", "--lr", "1e-3",
        "--lora-rank", "8", "--lora-dropout", "0.1", "--epochs", "6", "--save-interval", "2",
        *extra,
    ]  # fmt: skip


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def computed(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what a clock measured."""
    return [{k: v for k, v in line.items() if k not in MEASURED} for line in metrics(run)]


def adapter_hash(run: Path) -> str:
    """SHA-256 of the exported adapter."""
    return hashlib.sha256((run / "model" / "adapter_model.safetensors").read_bytes()).hexdigest()


def start(args: list[str]) -> subprocess.Popen[bytes]:
    """`ptc ARGS` in the background, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "posttrain_cli", *args],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Wait until `condition` holds or the process has ended."""
    deadline = time.monotonic() + 120
    while not condition() and process.poll() is None:
        assert time.monotonic() < deadline, "nothing happened in two minutes"
        time.sleep(0.001)


def lines_written(run: Path) -> int:
    """Whole lines in metrics.jsonl so far."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def children(pid: int) -> list[int]:
    """Process ids of the direct children of `pid`."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()]


def kill(process: subprocess.Popen[bytes], whom: str) -> None:
    """SIGKILL the launcher alone, one worker, or the whole tree, and reap the launcher."""
    workers = children(process.pid)
    targets = {"launcher": [process.pid], "worker": workers[-1:], "tree": [process.pid, *workers]}
    for pid in targets[whom]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait(timeout=60)
