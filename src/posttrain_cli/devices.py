"""The GPUs of this machine without importing torch, as `nvidia-smi` lists them."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

_FIELDS = "index,uuid,name,memory.total,memory.free,driver_version"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Attributes:
        index: its number on the machine.
        uuid: its lasting name.
        name: the product.
        total_mb: memory in MiB.
        free_mb: memory that nobody uses now, in MiB.
        driver: version of the NVIDIA driver.
    """

    index: int
    uuid: str
    name: str
    total_mb: int
    free_mb: int
    driver: str


def visible_gpus() -> list[Gpu]:
    """The GPUs that CUDA programs started here would see, in their order."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = all_gpus()
    if chosen is None:
        return gpus
    visible: list[Gpu] = []
    for name in chosen.split(","):
        found = [gpu for gpu in gpus if _is_named(gpu, name.strip())]
        if not found:
            break  # CUDA ignores everything after the first name that it does not know
        visible += found[:1]
    return visible


def all_gpus() -> list[Gpu]:
    """Every GPU that `nvidia-smi` lists; none when there is no driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(", ") for line in answer.stdout.splitlines()]
    return [_gpu(row) for row in rows if len(row) == 6 and row[0].isdigit()]


def _gpu(row: list[str]) -> Gpu:
    index, uuid, name, total, free, driver = row
    return Gpu(int(index), uuid, name, _mb(total), _mb(free), driver)


def _mb(text: str) -> int:
    """MiB; 0 where the driver does not know (unified memory)."""
    return int(text) if text.isdigit() else 0


def _is_named(gpu: Gpu, name: str) -> bool:
    return name == str(gpu.index) or (bool(name) and gpu.uuid.startswith(name))
