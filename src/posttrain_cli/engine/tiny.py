"""A tiny model that needs no network: for tests, continuous integration and a first run.

The folder is what `from_pretrained` reads, but it is written here with numpy alone, so that
making it costs no torch import and its bytes are the same everywhere: a byte-level BPE
tokenizer trained on the text beside this file, a ChatML template with a pad token of its own,
and random weights of a Llama, Qwen or Mistral shape.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from posttrain_cli.errors import UsageError
from posttrain_cli.files import atomic_write

Architecture = Literal["llama", "qwen2", "qwen3", "mistral"]

SPECIAL_TOKENS = ("<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD_ID, UNKNOWN_ID, TURN_ID, END_ID = range(4)
CONTEXT = 4096
INIT_STD = 0.02
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_CLASSES: dict[Architecture, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}


def make_tiny_model(
    folder: Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    head_dim: int = 16,
    vocab: int = 1024,
    architecture: Architecture = "llama",
    tied: bool = True,
    seed: int = 0,
) -> Path:
    """Write a Hugging Face folder of a tiny causal language model with random weights.

    The same arguments give the same bytes. Half as many key/value heads as query heads,
    so that grouped attention is exercised. `folder` is made if needed, files are replaced.

    Args:
        folder: where config, weights and tokenizer go.
        layers: decoder layers.
        hidden: model width, a multiple of `head_dim`.
        head_dim: width of one attention head.
        vocab: rows of the embedding, at least 320 (256 bytes, 4 special tokens, some merges).
        architecture: which decoder the config names.
        tied: whether the output layer is the embedding.
        seed: of the weights.

    Raises:
        UsageError: for a shape that cannot be built.
    """
    if architecture not in get_args(Architecture):
        known = ", ".join(get_args(Architecture))
        raise UsageError(f"unknown architecture `{architecture}`, expected one of {known}")
    if hidden % head_dim or vocab < 320:
        raise UsageError(
            f"hidden {hidden} must be a multiple of head_dim {head_dim}, "
            f"and vocab {vocab} at least 320"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = _model_config(layers, hidden, head_dim, vocab, architecture, tied)
    for name, content in {
        "config.json": config,
        "generation_config.json": {"eos_token_id": [END_ID], "pad_token_id": PAD_ID},
        "tokenizer_config.json": _tokenizer_config(),
    }.items():
        atomic_write(folder / name, json.dumps(content, indent=2) + "\n")
    atomic_write(folder / "chat_template.jinja", CHAT_TEMPLATE)
    atomic_write(folder / "tokenizer.json", _train_tokenizer(vocab))
    from safetensors.numpy import save

    weights = _random_weights(_weight_shapes(config), seed)
    atomic_write(folder / "model.safetensors", save(weights, metadata={"format": "pt"}))
    return folder


def _model_config(
    layers: int, hidden: int, head_dim: int, vocab: int, architecture: Architecture, tied: bool
) -> dict[str, Any]:
    heads = hidden // head_dim
    return {
        "architectures": [_CLASSES[architecture]],
        "model_type": architecture,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "initializer_range": INIT_STD,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "rope_theta": 10000.0,
        "attention_bias": False,
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "dtype": "float32",
        "use_cache": True,
    }


def _weight_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config["head_dim"]
    width = {
        "q_proj": config["num_attention_heads"] * head,
        "k_proj": config["num_key_value_heads"] * head,
        "v_proj": config["num_key_value_heads"] * head,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        for name, rows in width.items():
            shapes[f"{layer}self_attn.{name}.weight"] = (rows, hidden)
            if config["model_type"] == "qwen2":
                shapes[f"{layer}self_attn.{name}.bias"] = (rows,)
        if config["model_type"] == "qwen3":
            shapes[f"{layer}self_attn.q_norm.weight"] = (head,)
            shapes[f"{layer}self_attn.k_norm.weight"] = (head,)
        shapes[f"{layer}self_attn.o_proj.weight"] = (hidden, width["q_proj"])
        shapes[f"{layer}mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{layer}mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{layer}mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{layer}input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}post_attention_layernorm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def _random_weights(
    shapes: dict[str, tuple[int, ...]], seed: int
) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    random = np.random.Generator(np.random.Philox(seed))
    weights = {}
    for name in sorted(shapes):
        if name.endswith("norm.weight"):
            weights[name] = np.ones(shapes[name], np.float32)
        else:
            noise = random.standard_normal(shapes[name], np.float32)
            weights[name] = noise * np.float32(INIT_STD)
    return weights


def _tokenizer_config() -> dict[str, Any]:
    pad, unknown, _, end = SPECIAL_TOKENS
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": end,
        "pad_token": pad,
        "unk_token": unknown,
        "model_input_names": ["input_ids", "attention_mask"],
    }


def _train_tokenizer(vocab: int) -> str:
    """The JSON of a byte-level BPE of at most `vocab` tokens; digits stand alone."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = Path(__file__).with_name("tiny_corpus.txt").read_text(encoding="utf-8")
    tokenizer.train_from_iterator(corpus.split("\n\n"), trainer)
    return tokenizer.to_str(pretty=True)
