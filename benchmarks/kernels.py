"""The engine's own GPU pieces against plain float32 code: right first, then how fast.

    python benchmarks/kernels.py --out kernels.json

Output layer with cross-entropy (also Liger's, where it is installed), attention by segments,
its backward with deterministic kernels, and dropout by coordinates on the GPU and the CPU.
Needs one GPU. Exit 0 if everything is right, 1 if not.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posttrain_cli.engine import attention, flops
from posttrain_cli.engine.dropout import Clock, CoordinateDropout
from posttrain_cli.engine.head import linear_cross_entropy

GPU = torch.device("cuda")
HEADS = {"SmolLM2-135M": (576, 49152), "Qwen2.5-0.5B": (896, 151936)}  # hidden, vocabulary
POSITIONS = 16384
DOCUMENTS = {"54 of 300": [300] * 54, "8 of 2,048": [2048] * 8}  # tokens each
SHAPES = {"9/3 heads of 64": (9, 3, 64), "28/4 heads of 128": (28, 4, 128)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    out = parser.parse_args().out
    torch.manual_seed(0)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    peak = flops.measure_peak(GPU, torch.bfloat16)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "peak_tflops": round(peak / 1e12, 1),
        "rows": [],
    }
    checks = [head_is_right, head_speed, attention_is_right, attention_speed, dropout_is_right]
    for check in checks:
        try:
            rows = check()
        except Exception as error:  # the other checks still count
            rows = [{"what": check.__name__, "ok": False, "error": f"{error}"[:2000]}]
        result["rows"] += rows
        for row in rows:
            print(json.dumps(row), flush=True)
        out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row.get("ok", True) for row in result["rows"]) else 1


def head_is_right() -> list[dict[str, Any]]:
    """Loss and gradients of the fused output layer against float64."""
    rows = []
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        hidden = torch.randn(5000, 576, device=GPU).to(dtype).requires_grad_()
        weight = (torch.randn(49152, 576, device=GPU) * 0.05).to(dtype).requires_grad_()
        labels = torch.randint(0, 49152, (5000,), device=GPU)
        loss = linear_cross_entropy(hidden, weight, labels)
        got = [loss.detach(), *torch.autograd.grad(loss / 5000, [hidden, weight])]
        exact = [hidden.detach().double().requires_grad_(), weight.detach().double()]
        exact[1].requires_grad_()
        true = F.cross_entropy(exact[0] @ exact[1].t(), labels, reduction="sum")
        want = [true.detach(), *torch.autograd.grad(true / 5000, exact)]
        apart = [distance(a, b) for a, b in zip(got, want, strict=True)]
        names = ("loss", "hidden", "weight")
        found = dict(zip(names, apart, strict=True))
        rows.append({"what": f"head {dtype}", **found, "ok": max(apart) < limit})
    return rows


def head_speed() -> list[dict[str, Any]]:
    """Forward and backward of the output layer, ours and Liger's."""
    rows = []
    ways = {"ours": linear_cross_entropy} | liger()
    for name, (width, vocabulary) in HEADS.items():
        hidden = torch.randn(POSITIONS, width, device=GPU, dtype=torch.bfloat16).requires_grad_()
        weight = torch.randn(vocabulary, width, device=GPU, dtype=torch.bfloat16) * 0.05
        labels = torch.randint(0, vocabulary, (POSITIONS,), device=GPU)
        for frozen in (False, True):
            weight.requires_grad_(not frozen)
            needed = 2.0 * POSITIONS * width * vocabulary * (2 if frozen else 3)
            for way, function in ways.items():
                row = {"what": f"head {name}, weight {'frozen' if frozen else 'trained'}, {way}"}
                step = partial(head_step, function, hidden, weight, labels)
                rows.append(row | timed(step, needed))
    return rows


def head_step(function: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    hidden.grad = weight.grad = None
    function(hidden, weight, labels).backward()


def liger() -> dict[str, Callable[..., Tensor]]:
    if importlib.util.find_spec("liger_kernel") is None:
        return {}
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        found = LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, labels)
        total: Tensor = found[0] if isinstance(found, tuple) else found
        return total

    return {"Liger": loss}


def segments(name: str, shape: str, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
    """Query, key and value as the model hands them over, and where documents end."""
    lengths, (heads, groups, width) = DOCUMENTS[name], SHAPES[shape]
    total = sum(lengths)
    parts = [
        torch.randn(1, total, n, width, device=GPU).to(dtype).transpose(1, 2).requires_grad_()
        for n in (heads, groups, groups)
    ]
    edges = torch.tensor([0, *lengths], device=GPU).cumsum(0).to(torch.int32)
    return parts, {"cu_seq_lens_q": edges, "max_length_q": max(lengths)}


def attend(function: Any, parts: list[Tensor], where: dict[str, Any]) -> list[Tensor]:
    """Output and gradients."""
    out, _ = function(nn.Identity(), *parts, None, **where)
    factor = torch.linspace(-1, 1, out.numel(), device=GPU, dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * factor).float().sum(), parts)]


def attention_is_right() -> list[dict[str, Any]]:
    """The varlen kernel against one float32 call a document; twice the same bits if asked."""
    rows = []
    for shape in SHAPES:
        parts, where = segments("54 of 300", shape, torch.bfloat16)
        got = attend(attention.varlen_attention, parts, where)
        exact = [part.detach().float().requires_grad_() for part in parts]
        want = attend(attention.sdpa_attention, exact, where)
        found = {
            name: distance(a, b)
            for name, a, b in zip(("out", "q", "k", "v"), got, want, strict=True)
        }
        row = {"what": f"attention {shape}", **found, "ok": max(found.values()) < 2e-2}
        torch.use_deterministic_algorithms(True)
        runs = [attend(attention.varlen_attention, parts, where) for _ in range(5)]
        torch.use_deterministic_algorithms(False)
        same = all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))
        rows.append(row | {"deterministic": same, "ok": row["ok"] and same})
    return rows


def attention_speed() -> list[dict[str, Any]]:
    """Forward and backward of the varlen kernel, free and deterministic."""
    rows = []
    for shape, (heads, _, width) in SHAPES.items():
        for name, lengths in DOCUMENTS.items():
            parts, where = segments(name, shape, torch.bfloat16)
            needed = 3.5 * 4 * heads * width * sum(n * n for n in lengths) / 2
            for strict in (False, True):
                torch.use_deterministic_algorithms(strict)
                row = {"what": f"attention {shape}, {name}{', deterministic' if strict else ''}"}
                rows.append(row | timed(partial(attention_step, parts, where), needed))
            torch.use_deterministic_algorithms(False)
    return rows


def attention_step(parts: list[Tensor], where: dict[str, Any]) -> None:
    query, key, value = parts
    out, _ = attention.varlen_attention(nn.Identity(), query, key, value, None, **where)
    torch.autograd.grad(out, parts, torch.ones_like(out))


def dropout_is_right() -> list[dict[str, Any]]:
    """The GPU drops what the CPU drops."""
    keys = torch.randint(-(2**31), 2**31 - 1, (3000,), dtype=torch.int64).to(torch.int32)
    kept = []
    for device in (torch.device("cpu"), GPU):
        layer = CoordinateDropout(0.1, "layers.0.q_proj", Clock(keys.to(device)))
        kept.append(layer(torch.ones(3000, 576, device=device)).cpu() > 0)
    share = round(float(kept[1].float().mean()), 4)
    ok = torch.equal(kept[0], kept[1]) and abs(share - 0.9) < 0.002
    return [{"what": "dropout on GPU and CPU", "kept": share, "ok": ok}]


def distance(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of what is right."""
    want = want.double()
    return float((got.double() - want).norm() / want.norm())


def timed(step: Callable[[], None], needed: float) -> dict[str, Any]:
    """Median milliseconds of 10 calls after 3, TFLOP/s, and the most memory used, in GiB."""
    for _ in range(3):
        step()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    median = statistics.median(times)
    return {
        "ms": round(median, 3),
        "tflops": round(needed / median / 1e9, 1),
        "gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }


if __name__ == "__main__":
    sys.exit(main())
