from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from posttrain_cli.engine.tiny import PAD_ID, make_tiny_model
from posttrain_cli.errors import UsageError


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_same_arguments_give_the_same_bytes_and_quickly(tmp_path: Path) -> None:
    start = time.process_time()
    first = folder_bytes(make_tiny_model(tmp_path / "a"))
    assert time.process_time() - start < 2
    assert folder_bytes(make_tiny_model(tmp_path / "b")) == first
    other = folder_bytes(make_tiny_model(tmp_path / "c", seed=1))
    assert [name for name in first if first[name] != other[name]] == ["model.safetensors"]
    assert sorted(first) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_every_shape_whole(
    tiny_factory: Callable[..., Path], architecture: str, tied: bool
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = tiny_factory(architecture=architecture, tied=tied)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values())
    shared = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert shared == tied
    logits = model(input_ids=torch.tensor([[5, 6, 7]])).logits
    assert logits.shape == (1, 3, 1024)
    assert torch.isfinite(logits).all()


def test_tokenizer_keeps_every_text_and_has_its_own_pad_token(tiny_model: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    backend = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    text = "Grüße, 1234   \u2028 \x00 数学\n\n😀"
    ids = backend.encode(text, add_special_tokens=False).ids
    assert backend.decode(ids, skip_special_tokens=False) == text
    assert backend.get_vocab_size() == 1024
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert tokenizer(text).input_ids == ids
    assert tokenizer.pad_token_id == PAD_ID != tokenizer.eos_token_id
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n"
    )


def test_shape_arguments_reach_the_config(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, layers=1, hidden=128, head_dim=32, vocab=400)
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"]) == (1, 128)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)
    assert (config["head_dim"], config["vocab_size"]) == (32, 400)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"architecture": "gpt"}, "unknown architecture `gpt`, expected one of llama, qwen2"),
        ({"hidden": 60}, "hidden 60 must be a multiple of head_dim 16"),
        ({"vocab": 100}, "vocab 100 at least 320"),
    ],
)
def test_impossible_shapes_are_named(
    tmp_path: Path, shape: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        make_tiny_model(tmp_path / "x", **shape)  # type: ignore[arg-type]
    assert not (tmp_path / "x").exists()
