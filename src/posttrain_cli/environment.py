"""What this machine and this Python can do: facts with their meaning and cure, for `ptc doctor`.

Nothing is changed and nothing is fetched. Torch is imported (1 to 4 seconds); vLLM is not.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from posttrain_cli import __version__
from posttrain_cli.devices import Gpu, all_gpus, visible_gpus
from posttrain_cli.extras import EXTRAS, extra_of, missing

Status = Literal["ok", "note", "problem"]

# The oldest driver that runs programs built for a CUDA major version.
_OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[\w,-]+\])?>=([\d.]+)")


@dataclass(frozen=True, slots=True)
class Check:
    """One fact about the machine.

    Attributes:
        name: what was looked at.
        status: ok, note (a limit worth knowing) or problem (something will fail).
        found: what was found.
        meaning: what that means for ptc; empty when ok.
        fix: what to do about it; empty when ok.
    """

    name: str
    status: Status
    found: str
    meaning: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Torch:
    """The installed torch: version, CUDA it was built for, and what it sees; or why it fails."""

    version: str = ""
    cuda: str = ""
    cudnn: str = ""
    nccl: str = ""
    gpus: int = 0
    broken: str = ""


def look() -> tuple[list[Check], Torch, list[Gpu]]:
    """Every check, the torch that was found, and the GPUs that are visible here."""
    torch, gpus = torch_facts(), visible_gpus()
    checks = [
        *_python(),
        *_install(),
        *_packages(),
        *_torch(torch, gpus),
        *_driver(torch, gpus),
        *_nvcc(),
        *_space(),
    ]
    return checks, torch, gpus


def torch_facts() -> Torch:
    """Import torch and ask it; that it fails is a fact too."""
    if "torch" in missing("train"):
        return Torch()
    try:
        import torch

        return _ask(torch)
    except (ImportError, OSError, RuntimeError) as exc:
        return Torch(broken=str(exc).splitlines()[0])


def _ask(torch: Any) -> Torch:
    """What the torch module says; it raises when it finds libraries that do not fit it."""
    cuda = torch.version.cuda or ""
    has_nccl = bool(cuda) and torch.distributed.is_nccl_available()
    nccl = torch.cuda.nccl.version() if has_nccl else ()
    return Torch(
        version=torch.__version__,
        cuda=cuda,
        cudnn=str(torch.backends.cudnn.version() or "") if cuda else "",
        nccl=".".join(str(part) for part in nccl),
        gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0,
    )


def lacking(need: str, torch: Torch, gpus: list[Gpu]) -> str:
    """Why `need` (gpu, or an extra) is not there, with the cure; empty when it is."""
    if need == "gpu":
        if not gpus:
            return "no NVIDIA GPU is visible here (`nvidia-smi` lists none)"
        if torch.gpus == 0:
            return "torch cannot use the GPUs here (see `torch` above)"
        return ""
    names = missing(need)
    if names:
        install = f"pip install 'posttrain-cli[{need}]'"
        return f"{', '.join(f'`{name}`' for name in names)} not installed: {install}"
    if need in ("train", "vllm") and torch.broken:
        return f"torch does not work: {torch.broken}"
    return ""


def _python() -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} ({sys.executable})")


def _install() -> Iterator[Check]:
    """The right package, once: the console script and the module belong together."""
    script = shutil.which("ptc")
    own = Path(sys.prefix).resolve()
    try:
        installed = importlib.metadata.version("posttrain-cli")
    except importlib.metadata.PackageNotFoundError:
        yield Check(
            "ptc",
            "note",
            f"{__version__}, not installed as a package",
            "it runs from a source folder; there is no `ptc` command",
            "pip install -e . in the source folder, or run `python -m posttrain_cli`",
        )
        return
    if script and own not in Path(script).absolute().parents and own not in Path(script).parents:
        yield Check(
            "ptc",
            "problem",
            f"{__version__}, but `ptc` on PATH is {script}",
            "the command belongs to another Python environment, or to another package named ptc",
            "activate the right environment, or call `python -m posttrain_cli`",
        )
    elif installed != __version__:
        yield Check(
            "ptc",
            "problem",
            f"module {__version__}, package {installed}",
            "two installations are mixed (an old folder on PYTHONPATH, or a stale install)",
            "pip uninstall -y posttrain-cli && pip install posttrain-cli, and check PYTHONPATH",
        )
    else:
        yield Check("ptc", "ok", f"{__version__} ({Path(__file__).parent})")


def _packages() -> Iterator[Check]:
    """Required packages in the range, and which extras are whole."""
    for name, minimum, extra in _required():
        found = _version(name)
        if not found and extra:
            continue  # the extras are summed up below
        if not found or _numbers(found) < _numbers(minimum):
            whole = f"posttrain-cli[{extra}]" if extra else "posttrain-cli"
            yield Check(
                "package",
                "problem",
                f"{name} {found or 'missing'}, expected {minimum} or newer",
                "ptc may fail or differ with this version",
                f"pip install -U '{whole}'",
            )
    for extra, modules in EXTRAS.items():
        gone = missing(extra)
        versions = [f"{name} {_version(name)}" for name in modules if name not in gone]
        if gone:
            use = _USES[extra]
            yield Check(
                f"extra {extra}",
                "note",
                f"missing {', '.join(gone)}",
                f"{use} is not possible",
                f"pip install 'posttrain-cli[{extra}]'",
            )
        else:
            yield Check(f"extra {extra}", "ok", ", ".join(versions))


def _required() -> Iterator[tuple[str, str, str]]:
    """Name, oldest version and extra ("" for the base install) of each required package."""
    if not _version("posttrain-cli"):
        return
    for line in importlib.metadata.requires("posttrain-cli") or ():
        requirement, _, marker = line.partition(";")
        match = _REQUIREMENT.match(requirement.replace(" ", ""))
        extra = marker.split("==")[-1].strip(" \"'")
        if match and extra in ("", extra_of(match[1].replace("-", "_"))):
            yield match[1], match[2], extra


_USES = {
    "train": "training and inference",
    "vllm": "generation by vLLM (`--engine vllm`)",
    "gpu": "the fastest attention and Liger kernels on GPUs",
    "s3": "reading and writing s3:// paths",
    "ray": "preprocessing on a Ray cluster",
}


def _torch(torch: Torch, gpus: list[Gpu]) -> Iterator[Check]:
    if torch.broken:
        library = re.search(r"lib\w+\.so[.\d]*", torch.broken)
        meaning = "torch does not work, so nothing can be trained"
        if library:
            meaning += f": `{library[0]}` of the CUDA version it was built for is not found"
        yield Check(
            "torch",
            "problem",
            torch.broken,
            meaning,
            "pip install --force-reinstall torch, and take other CUDA folders out of "
            "LD_LIBRARY_PATH",
        )
        return
    if not torch.version:
        yield Check(
            "torch",
            "note",
            "not installed",
            "the data commands work; training does not",
            "pip install 'posttrain-cli[train]'",
        )
        return
    if gpus and not torch.cuda:
        yield Check(
            "torch",
            "problem",
            f"{torch.version}, built for the CPU only",
            f"the {len(gpus)} GPUs here cannot be used",
            "reinstall torch with the CUDA build that pytorch.org names for your driver",
        )
        return
    build = f"CUDA {torch.cuda}, cuDNN {torch.cudnn}, NCCL {torch.nccl}" if torch.cuda else "CPU"
    yield Check("torch", "ok", f"{torch.version} ({build} build)")


def _driver(torch: Torch, gpus: list[Gpu]) -> Iterator[Check]:
    present = all_gpus()
    if not present:
        program = shutil.which("nvidia-smi")
        found = "`nvidia-smi` lists none" if program else "no `nvidia-smi`"
        yield Check(
            "gpus",
            "note",
            found,
            "training and inference run on the CPU: fine for small models",
            "on a GPU machine install the NVIDIA driver (in a container, start it with GPUs)",
        )
        return
    driver = present[0].driver
    oldest = _OLDEST_DRIVER.get(torch.cuda.split(".")[0], 0)
    if oldest and _numbers(driver)[:1] < (oldest,):
        yield Check(
            "driver",
            "problem",
            driver,
            f"torch was built for CUDA {torch.cuda}, which needs driver {oldest} or newer",
            "update the driver, or install a torch built for an older CUDA",
        )
    else:
        yield Check("driver", "ok", driver)
    if not gpus:
        value = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        yield Check(
            "gpus",
            "problem",
            f"{len(present)} there, none visible",
            f"CUDA_VISIBLE_DEVICES is `{value}`",
            "unset CUDA_VISIBLE_DEVICES",
        )
    elif torch.cuda and torch.gpus < len(gpus):
        yield Check(
            "gpus",
            "problem",
            f"{len(gpus)} visible, torch sees {torch.gpus}",
            "torch and the driver do not fit, or a device is in another mode",
            "run `nvidia-smi`, then `python -c 'import torch; torch.cuda.init()'` for the reason",
        )
    else:
        shown = [
            f"{gpu.name} {gpu.free_mb / 1024:.0f}/{gpu.total_mb / 1024:.0f} GB free" for gpu in gpus
        ]
        yield Check("gpus", "ok", f"{len(gpus)}: {'; '.join(shown)}")


def _nvcc() -> Iterator[Check]:
    program = shutil.which("nvcc")
    if program is None:
        yield Check(
            "nvcc",
            "ok",
            "not there, not needed (only building CUDA extensions from source uses it)",
        )
        return
    answer = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    release = re.search(r"release ([\d.]+)", answer.stdout)
    yield Check("nvcc", "ok", release[1] if release else program)


def _space() -> Iterator[Check]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    yield Check("cpu", "ok", f"{cores} cores, {memory:.0f} GB memory")
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    if free < 5:
        yield Check(
            "disk",
            "problem",
            f"{free:.1f} GB free in {Path.cwd()}",
            "a checkpoint holds the trained weights twice more for the optimizer",
            "free some space, or put --output-dir on another disk",
        )
    else:
        yield Check("disk", "ok", f"{free:.0f} GB free in {Path.cwd()}")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, for comparing: 2.13.0+cpu is (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
