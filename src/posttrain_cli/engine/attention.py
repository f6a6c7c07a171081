"""Attention by segments: packed documents never see each other, or the run is refused.

Every row that is trained is one flat row of whole documents, and their boundaries
(`cu_seqlens`) reach this function through the model's keyword arguments. On CUDA one varlen
kernel serves all segments; elsewhere each document is one SDPA call. transformers builds no
mask for an attention function it does not know, so nothing else can mix the documents.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posttrain_cli.errors import UsageError

REFUSED = ("softcap", "s_aux", "position_bias")


def choose(wanted: str, device: torch.device, dtype: torch.dtype) -> str:
    """Register both functions with transformers and return the name of the one to use.

    Args:
        wanted: `auto`, `varlen` or `sdpa` (`model.attention`).
        device: where the model runs; the varlen kernel needs CUDA.
        dtype: compute type; the varlen kernel needs half precision.
    """
    from transformers import AttentionInterface

    AttentionInterface.register("ptc_varlen", varlen_attention)
    AttentionInterface.register("ptc_sdpa", sdpa_attention)
    able = device.type == "cuda" and dtype != torch.float32
    if wanted == "varlen" and not able:
        raise UsageError(
            f"`model.attention: varlen` needs a GPU and bfloat16, this run has {device.type} and "
            f"{str(dtype).removeprefix('torch.')}",
            hint="use auto or sdpa",
        )
    return "ptc_varlen" if able and wanted != "sdpa" else "ptc_sdpa"


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each segment by one kernel; half precision, CUDA only.

    Args:
        module: the attention layer (part of transformers' signature).
        query: (1, H, T, D).
        key: (1, K, T, D) with K dividing H.
        value: (1, K, T, D).
        attention_mask: must be None: segments replace it.
        scaling: factor of the scores; 1/sqrt(D) when None.
        sliding_window: tokens a query may look back, itself included.
        kwargs: `cu_seq_lens_q` (S+1,) int32 and `max_length_q`, as transformers names them.

    Returns:
        (1, T, H, D) and no attention weights.

    Raises:
        ValueError: the boundaries are missing, or the layer needs a feature the kernels lack.
    """
    from torch.nn.attention import varlen

    cu_seqlens = _boundaries(query, attention_mask, kwargs)
    longest = int(kwargs["max_length_q"])
    window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
    flat = [x[0].transpose(0, 1) for x in (query, key, value)]
    options: dict[str, Any] = {"scale": scaling, "window_size": window}
    if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters:  # 2.13; 2.11 just does it
        options["enable_gqa"] = True
    kernel: Any = varlen.varlen_attn
    out: Tensor = kernel(*flat, cu_seqlens, cu_seqlens, longest, longest, **options)
    return out.unsqueeze(0), None


def sdpa_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The same by one SDPA call a document, on any device; arguments as `varlen_attention`."""
    edges = _boundaries(query, attention_mask, kwargs).tolist()
    outputs = []
    for start, end in pairwise(edges):
        mask = _window_mask(end - start, sliding_window, query.device)
        document = F.scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, start:end],
            value[:, :, start:end],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(document.transpose(1, 2))
    return torch.cat(outputs, dim=1), None


def _boundaries(query: Tensor, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> Tensor:
    cu_seqlens: Tensor | None = kwargs.get("cu_seq_lens_q")
    if cu_seqlens is None or attention_mask is not None or query.shape[0] != 1:
        raise ValueError("segment attention needs one flat row with cu_seq_lens_q and no mask")
    wanted = [name for name in REFUSED if kwargs.get(name) is not None]
    if wanted:
        raise ValueError(f"segment attention does not support {', '.join(wanted)}")
    return cu_seqlens


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    if window is None or window >= length:
        return None
    place = torch.arange(length, device=device)
    back = place[:, None] - place
    return (back >= 0) & (back < window)
