from __future__ import annotations

import zlib
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from posttrain_cli.engine.dropout import Clock, CoordinateDropout, place, token_keys

WIDTH = 256


def keys(samples: list[int], lengths: list[int], seed: int = 42, step: int = 1) -> Tensor:
    return torch.from_numpy(token_keys(seed, step, np.array(samples), np.array(lengths)).copy())


def kept(rows: Tensor, p: float = 0.1, name: str = "layer", width: int = WIDTH) -> Tensor:
    """(T, width) which elements a module lets through."""
    dropout = CoordinateDropout(p, name, Clock(rows))
    return dropout(torch.ones(len(rows), width)) != 0


def correlation(one: Tensor, other: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]).double())[0, 1])


def test_a_sample_has_the_same_mask_wherever_it_stands() -> None:
    alone = {n: kept(keys([n], [length])) for n, length in ((3, 7), (8, 5), (1000, 9))}
    for samples, lengths in (([3, 8, 1000], [7, 5, 9]), ([1000, 3], [9, 7]), ([8, 8], [5, 5])):
        rows = kept(keys(samples, lengths)).split(lengths)
        for sample, row in zip(samples, rows, strict=True):
            assert torch.equal(row, alone[sample])
    longer = kept(keys([3], [20]))
    assert torch.equal(longer[:7], alone[3])  # what follows does not matter either


def scrambled(bits: int) -> int:
    """lowbias32 by whole numbers."""
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return bits ^ (bits >> 16)


def test_masks_are_those_of_the_same_hash_by_whole_numbers() -> None:
    rows = keys([0, 5, 10**9], [3, 2, 2])
    mask = kept(rows, p=0.3, width=40)
    salt = zlib.crc32(b"layer")
    for key, row in zip(rows.tolist(), mask.tolist(), strict=True):
        columns = [scrambled((c * 0x85EBCA6B + salt) & 0xFFFFFFFF) for c in range(40)]
        hashes = [scrambled((key & 0xFFFFFFFF) ^ column) for column in columns]
        signed = [bits - 2**32 if bits >= 2**31 else bits for bits in hashes]
        assert row == [bits >= round(0.3 * 2**32) - 2**31 for bits in signed]


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_share_that_stays_is_one_minus_p_everywhere(p: float) -> None:
    mask = kept(keys(list(range(50)), [40] * 50), p).double()
    sigma = (p * (1 - p)) ** 0.5
    assert abs(mask.mean() - (1 - p)) < 4 * sigma / mask.numel() ** 0.5
    for dimension, size in ((0, 2000), (1, WIDTH)):  # by column, by token
        means = mask.mean(dim=dimension)
        spread = (means - (1 - p)).abs().max() / (sigma / size**0.5)
        assert spread < 5.5
        assert means.var() == pytest.approx(sigma**2 / size, rel=0.35)


def test_modules_steps_seeds_samples_and_places_are_independent() -> None:
    rows = keys([0], [200])
    masks = {
        "base": kept(rows, 0.5),
        "module": kept(rows, 0.5, name="layer2"),
        "similar module": kept(rows, 0.5, name="layes"),
        "step": kept(keys([0], [200], step=2), 0.5),
        "seed": kept(keys([0], [200], seed=43), 0.5),
        "sample": kept(keys([1], [200]), 0.5),
        "next token": kept(rows, 0.5).roll(1, 0),
        "next column": kept(rows, 0.5).roll(1, 1),
        "column 128": kept(rows, 0.5).roll(128, 1),
    }
    for one, other in combinations(masks, 2):
        assert abs(correlation(masks[one], masks[other])) < 5 / (200 * WIDTH) ** 0.5, (one, other)


def test_keys_do_not_repeat() -> None:
    found = [keys([n], [64], step=step) for n in range(100) for step in (1, 2, 3)]
    together = torch.cat(found)
    assert len(together.unique()) > 0.999 * len(together)
    assert len({tuple(k.tolist()) for k in found}) == 300


def test_what_stays_is_scaled_and_what_goes_gets_no_gradient() -> None:
    rows = keys([4], [30])
    dropout = CoordinateDropout(0.25, "layer", Clock(rows))
    x = torch.randn(30, WIDTH, requires_grad=True)
    out = dropout(x)
    mask = kept(rows, 0.25)
    assert torch.allclose(out, torch.where(mask, x / 0.75, 0))
    out.sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, mask / 0.75)
    batched = dropout(x.detach().unsqueeze(0))
    assert torch.equal(batched[0], out.detach())
    assert dropout(x.detach().bfloat16()).dtype == torch.bfloat16


def test_evaluation_and_p_zero_change_nothing() -> None:
    x = torch.randn(5, 8)
    dropout = CoordinateDropout(0.5, "layer", Clock())
    assert dropout.eval()(x) is x
    assert CoordinateDropout(0.0, "layer", Clock())(x) is x


def test_training_without_keys_or_with_those_of_another_batch_stops() -> None:
    x = torch.randn(5, 8)
    for rows in (None, keys([0], [4])):
        with pytest.raises(AssertionError, match="no keys set"):
            CoordinateDropout(0.5, "layer", Clock(rows))(x)


def test_recomputed_activations_drop_the_same_elements() -> None:
    clock = Clock(keys([7], [12]))
    layers = nn.Sequential(
        nn.Linear(16, 16), CoordinateDropout(0.5, "a", clock), nn.Linear(16, 16),
        CoordinateDropout(0.5, "b", clock), nn.Linear(16, 4),
    )  # fmt: skip
    x = torch.randn(12, 16)
    gradients = []
    for recompute in (False, True):
        layers.zero_grad()
        torch.manual_seed(int(recompute))  # the global stream plays no part
        out = checkpoint(layers, x, use_reentrant=False) if recompute else layers(x)
        assert isinstance(out, Tensor)
        out.square().sum().backward()
        gradients.append([parameter.grad for parameter in layers.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def test_place_replaces_every_active_dropout_and_no_other() -> None:
    model = nn.ModuleDict(
        {
            "plain": nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)),
            "lora": nn.ModuleDict({"default": nn.Dropout(0.2)}),
            "off": nn.Dropout(0.0),
            "none": nn.Identity(),
        }
    )
    clock = Clock()
    assert place(model, clock) == 2
    found = {n: m for n, m in model.named_modules() if isinstance(m, CoordinateDropout)}
    assert {name: module.p for name, module in found.items()} == {
        "plain.1": 0.1,
        "lora.default": 0.2,
    }
    assert all(module.clock is clock for module in found.values())
    assert len({module.salt for module in found.values()}) == 2
    assert place(model, clock) == 0
    clock.keys = keys([0], [3])
    assert not torch.equal(found["plain.1"](torch.ones(3, 64)), torch.ones(3, 64))
