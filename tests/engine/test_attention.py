"""Packed equals alone: documents in one row never see each other, whatever the architecture.

The reference is transformers itself, one document a call, with its eager attention.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from posttrain_cli.config import ModelConfig
from posttrain_cli.engine import attention
from posttrain_cli.engine.batch import Batch, make_batch
from posttrain_cli.engine.distributed import World
from posttrain_cli.engine.model import Policy, _on_meta, build
from posttrain_cli.errors import UsageError
from posttrain_cli.runs.resolve import resolve_model

CPU = torch.device("cpu")
WORLD = World(rank=0, size=1, local_rank=0, device=CPU, backend=None)
LENGTHS = [7, 30, 1, 19, 2]
ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "mistral-window", "qwen2-window"]


class Documents:
    """Random documents, every token of which is trained."""

    def __init__(self, lengths: list[int], seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.rows = [random.integers(4, 320, n).astype(np.int32) for n in lengths]

    def ids(self, sample: int) -> NDArray[np.int32]:
        return self.rows[sample]

    def mask(self, sample: int) -> NDArray[np.bool_]:
        return np.ones(len(self.rows[sample]), np.bool_)

    def batch(self, *samples: int) -> Batch:
        return make_batch([np.array(samples)], self, seed=0, step=1, device=CPU)


@pytest.fixture(scope="module")
def folder(
    tiny_factory: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A tiny model whose attention is far from uniform, so that a leak is seen."""
    from safetensors.torch import load_file, save_file

    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            architecture, _, window = name.partition("-")
            path = tmp_path_factory.mktemp("model") / name
            shutil.copytree(tiny_factory(architecture=architecture, vocab=320), path)
            tensors = load_file(path / "model.safetensors")
            wide = {n: t * 6 if t.dim() == 2 else t for n, t in tensors.items()}
            save_file(wide, path / "model.safetensors", metadata={"format": "pt"})
            if window:
                config = json.loads((path / "config.json").read_text())
                config |= {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0}
                (path / "config.json").write_text(json.dumps(config))
            made[name] = path
        return made[name]

    return make


@pytest.fixture(scope="module")
def policies(folder: Callable[[str], Path]) -> Callable[[str], Policy]:
    made: dict[str, Policy] = {}

    def make(name: str) -> Policy:
        if name not in made:
            made[name] = build(resolve_model(folder(name)), ModelConfig(), WORLD, seed=0)
        return made[name]

    return make


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest distance of two gradients, relative to the norm of the expected one."""
    assert found.keys() == expected.keys()
    scale = max(float(tensor.norm()) for tensor in expected.values())
    return max(float((found[n] - expected[n]).norm()) for n in found) / scale


def alone(model: nn.Module, ids: NDArray[np.int32]) -> Tensor:
    """Log-probabilities of a document's tokens by transformers' own forward pass."""
    row = torch.from_numpy(ids.astype(np.int64)).unsqueeze(0)
    logits: Tensor = model(input_ids=row, use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, row[0, 1:].unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_documents_are_what_transformers_computes_alone(
    folder: Callable[[str], Path], policies: Callable[[str], Policy], name: str
) -> None:
    from transformers import AutoModelForCausalLM

    reference: Any = AutoModelForCausalLM.from_pretrained(
        folder(name), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    documents, policy = Documents(LENGTHS), policies(name)
    expected = torch.cat([alone(reference, ids) for ids in documents.rows])
    upstream = torch.randn(len(expected), generator=torch.Generator().manual_seed(0))
    wanted = gradients(reference, (expected * upstream).sum())
    batch = documents.batch(0, 1, 2, 3, 4)
    found = policy.token_logprobs(batch)
    assert (found - expected).abs().max() < 1e-5
    assert furthest(gradients(policy.module, (found * upstream).sum()), wanted) < 1e-5
    total = policy.cross_entropy(batch)
    assert float(total.detach()) == pytest.approx(-float(expected.detach().sum()), rel=1e-6)
    wanted = gradients(reference, -torch.cat([alone(reference, i) for i in documents.rows]).sum())
    assert furthest(gradients(policy.module, total), wanted) < 1e-5


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-window"])
def test_a_sliding_window_shorter_than_the_documents_is_kept(
    policies: Callable[[str], Policy], name: str
) -> None:
    windowed, whole = policies(name), policies(name.split("-")[0])
    documents = Documents([5, 30])
    with torch.no_grad():
        short, long = (
            (windowed.token_logprobs(documents.batch(n)) - whole.token_logprobs(documents.batch(n)))
            for n in (0, 1)
        )
    assert short.abs().max() < 1e-6  # within the window they are the same model
    assert long.abs().max() > 1e-3


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_garbage_in_neighbour_documents_changes_nothing(
    policies: Callable[[str], Policy], name: str
) -> None:
    policy = policies(name)
    documents, garbage = Documents(LENGTHS), Documents(LENGTHS, seed=1)
    garbage.rows[1] = documents.rows[1]
    with torch.no_grad():
        mine, theirs = (policy.token_logprobs(d.batch(0, 1, 2, 3)) for d in (documents, garbage))
    own = slice(LENGTHS[0] - 1, LENGTHS[0] - 1 + LENGTHS[1] - 1)
    assert torch.equal(mine[own], theirs[own])
    assert (mine - theirs).abs().max() > 1e-2  # the others did change


def test_the_order_of_documents_in_a_row_does_not_matter(
    policies: Callable[[str], Policy],
) -> None:
    documents, policy = Documents(LENGTHS), policies("llama")
    with torch.no_grad():
        there = policy.token_logprobs(documents.batch(0, 1, 3)).split([6, 29, 18])
        back = policy.token_logprobs(documents.batch(3, 1, 0)).split([18, 29, 6])
    for one, other in zip(there, reversed(back), strict=True):
        assert (one - other).abs().max() < 1e-6


# The functions themselves


def tensors(lengths: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query of 4 heads, key and value of 2, and the boundaries of the documents."""
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    query = torch.randn(1, 4, total, 8, generator=generator)
    key, value = (torch.randn(1, 2, total, 8, generator=generator) for _ in range(2))
    return query, key, value, torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def block_diagonal(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float, window: int
) -> Tensor:
    """(1, T, H, D) by one dense softmax over the whole row with a block-diagonal mask."""
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    back = torch.arange(len(owner))[:, None] - torch.arange(len(owner))
    seen = (owner[:, None] == owner) & (back >= 0) & (back < window)
    scores = query @ key.repeat_interleave(2, dim=1).transpose(2, 3) * scale
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return (weights @ value.repeat_interleave(2, dim=1)).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 1, 3, 6, 50])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_segments_are_a_block_diagonal_mask(window: int | None, scale: float | None) -> None:
    lengths = [3, 1, 12, 6]
    query, key, value, edges = tensors(lengths)
    found, weights = attention.sdpa_attention(
        nn.Module(), query, key, value, None, scaling=scale, sliding_window=window,
        cu_seq_lens_q=edges,
    )  # fmt: skip
    expected = block_diagonal(query, key, value, lengths, scale or 8**-0.5, window or 99)
    assert weights is None
    assert found.shape == (1, 22, 4, 8)
    assert (found - expected).abs().max() < 1e-6


@pytest.mark.parametrize("window", [None, 4])
def test_the_kernel_is_asked_for_the_same(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    """CUDA's kernel cannot run here: what it is given must be what it documents."""
    from torch.nn.attention import varlen

    lengths = [3, 9, 2]
    query, key, value, edges = tensors(lengths)
    given: dict[str, Any] = {}

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int,
        max_k: int, *, scale: float | None, window_size: tuple[int, int], enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        given.update(cu_q=cu_q, cu_k=cu_k, longest=(max_q, max_k), window=window_size)
        given.update(gqa=enable_gqa, scale=scale)
        assert query.shape == (14, 4, 8)
        assert key.shape == value.shape == (14, 2, 8)
        outputs = []
        for start, end in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True):
            q, k, v = (x[start:end].transpose(0, 1) for x in (query, key, value))
            back = torch.arange(end - start)[:, None] - torch.arange(end - start)
            left = window_size[0] if window_size[0] >= 0 else end
            mask = (back <= left) & (back >= -window_size[1])
            outputs.append(
                F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
            )
        return torch.cat([out.transpose(0, 1) for out in outputs])

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    found, _ = attention.varlen_attention(
        nn.Module(), query, key, value, None, scaling=0.5, sliding_window=window,
        cu_seq_lens_q=edges, max_length_q=9,
    )  # fmt: skip
    expected = block_diagonal(query, key, value, lengths, 0.5, window or 99)
    assert (found - expected).abs().max() < 1e-6
    assert given["cu_q"] is given["cu_k"] is edges
    assert given["longest"] == (9, 9)
    assert given["window"] == ((-1, 0) if window is None else (3, 0))
    assert given["gqa"]


@pytest.mark.parametrize("function", [attention.sdpa_attention, attention.varlen_attention])
def test_rows_whose_documents_cannot_be_told_apart_are_refused(
    function: Callable[..., Any],
) -> None:
    query, key, value, edges = tensors([4, 2])
    known = {"cu_seq_lens_q": edges, "max_length_q": 4}
    message = "needs one flat row with cu_seq_lens_q and no mask"
    with pytest.raises(ValueError, match=message):
        function(nn.Module(), query, key, value, None, max_length_q=4)
    with pytest.raises(ValueError, match=message):
        function(nn.Module(), query, key, value, torch.ones(1, 6), **known)
    two = [torch.cat([x, x]) for x in (query, key, value)]
    with pytest.raises(ValueError, match=message):
        function(nn.Module(), *two, None, **known)
    for name in ("softcap", "s_aux", "position_bias"):
        with pytest.raises(ValueError, match=f"does not support {name}"):
            function(nn.Module(), query, key, value, None, **known, **{name: 50.0})


def test_a_model_called_without_boundaries_stops(policies: Callable[[str], Policy]) -> None:
    decoder = policies("llama").module.get_decoder()  # type: ignore[operator]
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        decoder(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False)


# Models that this attention, or a plain output layer, would get wrong


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "gemma2"}, "final_logit_softcapping"),
        ({"model_type": "gemma2", "final_logit_softcapping": None}, "attn_logit_softcapping"),
        ({"model_type": "granite", "logits_scaling": 8.0}, "logits_scaling"),
        ({"model_type": "cohere", "logit_scale": 0.06}, "logit_scale"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}},
         "quantization_config"),
    ],
)  # fmt: skip
def test_models_that_change_scores_or_logits_are_refused(
    tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    shape = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape | config))
    with pytest.raises(UsageError, match=f"uses `{named}`, which this engine cannot") as caught:
        _on_meta(tmp_path, torch.float32, "ptc_sdpa")
    assert str(tmp_path) in caught.value.message
    assert "Qwen3" in caught.value.hint


def test_models_whose_output_layer_has_a_bias_are_refused(tmp_path: Path) -> None:
    shape = {
        "model_type": "phi", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    with pytest.raises(UsageError, match="has no plain output layer `lm_head`"):
        _on_meta(tmp_path, torch.float32, attention.choose("auto", CPU, torch.float32))
