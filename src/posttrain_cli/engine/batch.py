"""Micro-batches: whole samples laid end to end in one flat row, no padding anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posttrain_cli.data.pack import Ints
from posttrain_cli.engine.dropout import token_keys


class Samples(Protocol):
    """Token ids and trained marks by sample index (`data.prepare.Prepared`)."""

    def ids(self, sample: int) -> NDArray[np.int32]:
        """(length,) token ids."""

    def mask(self, sample: int) -> NDArray[np.bool_]:
        """(length,) which tokens are trained."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass. T: tokens, S: samples, P: trained tokens.

    Attributes:
        input_ids: (1, T).
        position_ids: (1, T), from 0 in each sample.
        cu_seqlens: (S+1,) int32 edges of the samples.
        max_seqlen: longest sample.
        positions: (P,) places whose next token is trained.
        labels: (P,) those next tokens.
        keys: (T,) int32 dropout keys.
        tokens: T, or 0 for a stand-in that only keeps ranks in step.
        pairs: sum of the squared lengths, for counting attention's work.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    positions: Tensor
    labels: Tensor
    keys: Tensor
    tokens: int
    pairs: int


def make_batch(
    bins: list[Ints], samples: Samples, *, seed: int, step: int, device: torch.device
) -> Batch:
    """Lay the samples of `bins` into one row.

    Args:
        bins: sample indices of each bin; none makes a stand-in without trained tokens.
        samples: where ids and marks come from.
        seed: the run's seed, for dropout keys.
        step: 1-based global step, for dropout keys.
        device: where the tensors go.
    """
    chosen = np.concatenate(bins) if bins else np.zeros(0, np.int64)
    ids = [samples.ids(int(i)) for i in chosen] or [np.zeros(2, np.int32)]
    masks = [samples.mask(int(i)) for i in chosen] or [np.zeros(2, np.bool_)]
    lengths = np.array([len(x) for x in ids], np.int64)
    edges = np.concatenate([[0], np.cumsum(lengths)])
    flat_ids, trained = np.concatenate(ids), np.concatenate(masks)
    trained[edges[:-1]] = False  # a sample's first token has nothing before it to predict it
    labels = np.flatnonzero(trained)
    keys = token_keys(seed, step, chosen if bins else np.zeros(1, np.int64), lengths)
    places = np.concatenate([np.arange(n) for n in lengths])

    def send(array: NDArray[np.generic], dtype: torch.dtype) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
        if device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    return Batch(
        input_ids=send(flat_ids, torch.int64).unsqueeze(0),
        position_ids=send(places, torch.int64).unsqueeze(0),
        cu_seqlens=send(edges, torch.int32),
        max_seqlen=int(lengths.max()),
        positions=send(labels - 1, torch.int64),
        labels=send(flat_ids[labels], torch.int64),
        keys=send(keys, torch.int32),
        tokens=int(edges[-1]) if bins else 0,
        pairs=int((lengths**2).sum()),
    )
