"""`ptc doctor`: facts with meaning and cure, needs with their exit code."""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain_cli import __version__, devices, environment
from posttrain_cli.devices import Gpu
from posttrain_cli.environment import Torch

Shell = Callable[..., Any]
H200 = Gpu(0, "GPU-abc", "NVIDIA H200", 143771, 143000, "580.65.06")
A100 = Gpu(1, "GPU-def", "NVIDIA A100", 81920, 1000, "515.10")


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "all_gpus", list)
    monkeypatch.setattr(environment, "visible_gpus", list)


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name)
    )


def statuses(checks: list[environment.Check]) -> dict[str, environment.Check]:
    return {check.name: check for check in checks}


def test_the_report_goes_to_stdout_and_ends_with_0(shell: Shell, no_gpus: None) -> None:
    answer = shell("doctor")
    assert (answer.code, answer.err) == (0, "")
    assert f"{sys.version_info.major}.{sys.version_info.minor}." in answer.out
    assert __version__ in answer.out
    assert "what the commands can use here" in answer.out
    assert "the CPU, float32" in answer.out
    assert "\x1b" not in answer.out


def test_json_has_checks_torch_commands_and_needs(
    shell: Shell, no_gpus: None, without_vllm: None
) -> None:
    answer = shell("doctor", "--need", "train,vllm", "--json")
    assert answer.code == 1
    report = answer.json()
    assert report["ok"] is False
    assert report["gpus"] == []
    assert report["needs"]["train"] == ""
    assert report["needs"]["vllm"] == "`vllm` not installed: pip install 'posttrain-cli[vllm]'"
    assert {"name", "status", "found", "meaning", "fix"} == set(report["checks"][0])
    import torch

    assert report["torch"]["version"] == torch.__version__


def test_a_missing_need_ends_with_1_and_says_how_to_get_it(
    shell: Shell, no_gpus: None, without_vllm: None
) -> None:
    answer = shell("doctor", "--need", "gpu,vllm", "-q")
    assert answer.code == 1
    assert answer.err.splitlines() == [
        "warning: `gpu` is missing: no NVIDIA GPU is visible here (`nvidia-smi` lists none)",
        "warning: `vllm` is missing: `vllm` not installed: pip install 'posttrain-cli[vllm]'",
    ]


def test_an_unknown_need_is_a_usage_mistake(shell: Shell) -> None:
    answer = shell("doctor", "--need", "gpu,vlm")
    assert answer.code == 2
    assert answer.err == (
        "error: `--need vlm`: expected some of gpu, train, vllm, s3, ray\n\n"
        "hint: did you mean `vllm`?\n"
    )


def test_needs_that_are_met(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [H200]
    assert environment.lacking("gpu", Torch("2.13.0", "13.0", gpus=1), gpus) == ""
    assert "torch cannot use" in environment.lacking("gpu", Torch("2.13.0+cpu"), gpus)
    assert "no NVIDIA GPU" in environment.lacking("gpu", Torch("2.13.0"), [])
    assert environment.lacking("train", Torch("2.13.0"), []) == ""
    assert "does not work: x" in environment.lacking("train", Torch(broken="x"), [])


def test_a_cpu_build_beside_gpus_is_a_problem() -> None:
    (check,) = environment._torch(Torch("2.13.0+cpu"), [H200])
    assert check.status == "problem"
    assert "the 1 GPUs here cannot be used" in check.meaning
    assert "pytorch.org" in check.fix
    (fine,) = environment._torch(Torch("2.13.0", "13.0", "91000", "2.28.3", 1), [H200])
    assert fine.found == "2.13.0 (CUDA 13.0, cuDNN 91000, NCCL 2.28.3 build)"
    (absent,) = environment._torch(Torch(), [])
    assert (absent.status, absent.fix) == ("note", "pip install 'posttrain-cli[train]'")


def test_a_missing_cuda_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = "libcudnn.so.8: cannot open shared object file: No such file or directory"
    (check,) = environment._torch(Torch(broken=broken), [])
    assert check.status == "problem"
    assert "`libcudnn.so.8`" in check.meaning
    assert "LD_LIBRARY_PATH" in check.fix


def test_a_torch_that_fails_to_import_is_reported_not_raised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudnn.so.8: cannot open')\n")
    for name in [name for name in sys.modules if name.split(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert environment.torch_facts() == Torch(broken="libcudnn.so.8: cannot open")


def test_a_torch_that_finds_other_libraries_is_reported_not_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version() -> int:
        raise RuntimeError("cuDNN version incompatibility: 9.19 against 8.9\nmore")

    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    monkeypatch.setattr("torch.backends.cudnn.version", version)
    broken = "cuDNN version incompatibility: 9.19 against 8.9"
    assert environment.torch_facts() == Torch(broken=broken)


def test_an_old_driver_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "all_gpus", lambda: [A100])
    found = statuses(list(environment._driver(Torch("2.13.0", "13.0", gpus=1), [A100])))
    assert found["driver"].status == "problem"
    assert "CUDA 13.0, which needs driver 580 or newer" in found["driver"].meaning
    found = statuses(list(environment._driver(Torch("2.4.0", "11.8", gpus=1), [A100])))
    assert found["driver"].status == "ok"
    assert found["gpus"].found == "1: NVIDIA A100 1/80 GB free"


def test_hidden_and_unseen_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "all_gpus", lambda: [H200])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    found = statuses(list(environment._driver(Torch("2.13.0", "13.0"), [])))
    assert found["gpus"].meaning == "CUDA_VISIBLE_DEVICES is `7`"
    found = statuses(list(environment._driver(Torch("2.13.0", "13.0", gpus=0), [H200])))
    assert found["gpus"].found == "1 visible, torch sees 0"


def test_another_ptc_on_the_path_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "ptc"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (check,) = environment._install()
    assert check.status == "problem"
    assert str(script) in check.found


def test_an_old_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        return {"torch": "2.1.0", "posttrain-cli": __version__}.get(name, "9999.0")

    monkeypatch.setattr(environment, "_version", version)
    found = [check for check in environment._packages() if check.status == "problem"]
    assert len(found) == 1
    assert found[0].found.startswith("torch 2.1.0, expected 2.")
    assert found[0].fix == "pip install -U 'posttrain-cli[train]'"


def test_a_full_disk_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 2**30})
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda path: usage)
    found = statuses(list(environment._space()))
    assert found["disk"].status == "problem"
    assert found["disk"].found.startswith("1.0 GB free in ")


# --- the GPUs without torch ----------------------------------------------------------------------

LISTED = """\
0, GPU-abc, NVIDIA H200, 143771, 143000, 580.65.06
1, GPU-def, NVIDIA GB10, [N/A], [N/A], 580.65.06
No devices were found
"""


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An `nvidia-smi` that lists two GPUs."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{LISTED}END\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return program


def test_gpus_are_read_from_nvidia_smi(smi: Path) -> None:
    first, second = devices.all_gpus()
    assert first == H200
    assert (second.name, second.total_mb) == ("NVIDIA GB10", 0)


@pytest.mark.parametrize(
    ("value", "indices"),
    [("1", [1]), ("1,0", [1, 0]), ("GPU-d", [1]), ("", []), ("-1", []), ("0,9,1", [0])],
)
def test_visible_devices_are_respected(
    smi: Path, monkeypatch: pytest.MonkeyPatch, value: str, indices: list[int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert [gpu.index for gpu in devices.visible_gpus()] == indices


def test_a_failing_nvidia_smi_means_no_gpus(smi: Path) -> None:
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert devices.all_gpus() == []


def test_no_nvidia_smi_means_no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert devices.all_gpus() == []
