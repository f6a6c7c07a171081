"""What a run was made of: enough to trace a model back to its rows, code and machine."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import posttrain_cli
from posttrain_cli.config import Config
from posttrain_cli.files import sha256_file
from posttrain_cli.runs.directory import now

PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "tokenizers",
    "safetensors",
    "numpy",
    "orjson",
    "pyarrow",
    "pydantic",
    "jinja2",
    "vllm",
    "liger-kernel",
    "flash-attn",
    "flash-attn-4",
    "triton",
)


def run_record(
    *,
    command: Sequence[str],
    config: Config,
    datasets: Iterable[Mapping[str, Any]],
    tokenizer: Mapping[str, Any],
    model: Mapping[str, Any],
    devices: Sequence[str],
    threads: int,
) -> dict[str, Any]:
    """The first content of `run.json`.

    Args:
        command: the command line, from the program's name on.
        config: the resolved config; its seed and hash are recorded.
        datasets: for each file its role (`train`, `val`), path, sha256 and rows.
        tokenizer: hashes of the tokenizer and the template.
        model: identity of the model that training starts from, see `folder_identity`.
        devices: a name for the device of each process.
        threads: CPU threads of each process.
    """
    return {
        "state": "running",
        "command": shlex.join(command),
        "type": config.trainer.type,
        "config_sha256": config_hash(config),
        "datasets": [dict(each) for each in datasets],
        "tokenizer": dict(tokenizer),
        "model": dict(model),
        "code": code_identity(),
        "packages": package_versions(),
        "host": host(),
        "devices": list(devices),
        "processes": len(devices),
        "threads": threads,
        "seed": config.trainer.seed,
        "started_at": now(),
        "stopped_at": None,
    }


def config_hash(config: Config) -> str:
    """SHA-256 of the resolved config, independent of the order of its keys."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def code_identity() -> dict[str, Any]:
    """Version of this package, and the git commit if it runs from a checkout of its own."""
    package = Path(posttrain_cli.__file__).resolve().parent
    identity: dict[str, Any] = {"version": posttrain_cli.__version__}
    if (package.parents[1] / ".git").exists():
        identity["git_commit"] = _git(package, "rev-parse", "HEAD")
        identity["git_changed"] = bool(_git(package, "status", "--porcelain", "--", "."))
    return identity


def package_versions() -> dict[str, str]:
    """Versions of the installed packages that can change a result."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def host() -> dict[str, Any]:
    """This machine: name, system, Python, cores."""
    return {
        "name": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }


def folder_identity(folder: Path) -> dict[str, Any]:
    """Path, and size and SHA-256 of each file of a model folder that decides what it computes."""
    wanted = {".json", ".safetensors", ".jinja", ".model", ".txt"}
    files = sorted(path for path in folder.iterdir() if path.suffix in wanted and path.is_file())
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        hashes = list(pool.map(sha256_file, files))
    return {
        "path": str(folder),
        "files": {
            path.name: {"size": path.stat().st_size, "sha256": sha256}
            for path, sha256 in zip(files, hashes, strict=True)
        },
    }


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of one git command, or None where git cannot tell."""
    try:
        result = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
