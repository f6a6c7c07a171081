"""Which attention function a device and a compute type get."""

from __future__ import annotations

import pytest
import torch

from posttrain_cli.engine.attention import choose
from posttrain_cli.errors import UsageError

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("wanted", "device", "dtype", "name"),
    [
        ("auto", GPU, torch.bfloat16, "ptc_varlen"),
        ("varlen", GPU, torch.bfloat16, "ptc_varlen"),
        ("sdpa", GPU, torch.bfloat16, "ptc_sdpa"),
        ("auto", GPU, torch.float32, "ptc_sdpa"),
        ("auto", CPU, torch.bfloat16, "ptc_sdpa"),
        ("auto", CPU, torch.float32, "ptc_sdpa"),
    ],
)
def test_kernel_is_used_where_it_can_run(
    wanted: str, device: torch.device, dtype: torch.dtype, name: str
) -> None:
    assert choose(wanted, device, dtype) == name


@pytest.mark.parametrize(
    ("device", "dtype", "found"),
    [(CPU, torch.bfloat16, "cpu and bfloat16"), (GPU, torch.float32, "cuda and float32")],
)
def test_asking_for_the_kernel_where_it_cannot_run_is_refused(
    device: torch.device, dtype: torch.dtype, found: str
) -> None:
    with pytest.raises(UsageError, match=f"varlen` needs a GPU and bfloat16, this run has {found}"):
        choose("varlen", device, dtype)
