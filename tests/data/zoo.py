"""Small tokenizers and chat templates of every style that the render function must get right."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from posttrain_cli.data.tokenizer import Message, Tokenizer, load_tokenizer

CORPUS = (
    "user\nWhat is the capital of France?\nassistant\nThe capital of France is Paris.\n\n",
    "user\n\nHello there, how are you today?\n\nassistant\n\nI am fine, thank you.\n",
    "[INST] What is two plus two? [/INST] It is four.\nsystem\nYou are helpful.\n",
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITHOUT_SWITCH = CHATML.split("{% if add_generation_prompt")[0]
GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}"
    "{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "<|start|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
QWEN3 = (
    "{% set last = namespace(user=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > last.user %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INSTRUCT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
WITHOUT_END = (
    "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)
TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}CALL {{ call | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>")
PAD, BOS, EOS, IM_START, IM_END, _, _, EOT = range(8)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


@cache
def backend_json(kind: str) -> str:
    """A trained tokenizer.

    `bytes`: byte-level, words apart (GPT-2 style). `greedy`: byte-level, tokens may span words
    and line feeds. `first`, `always`, `legacy`: the three ways of SentencePiece conversions to
    prepend a space: to the text, to what follows a control token, by a normalizer.
    """
    special = list(SPECIAL)
    if kind in ("bytes", "greedy"):
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=kind == "bytes")
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        special += [f"<0x{i:02X}>" for i in range(256)]
        backend = Backend(models.BPE(byte_fallback=True))
        if kind == "legacy":
            backend.normalizer = normalizers.Sequence(
                [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            )
        else:
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        alphabet = []
    trainer = trainers.BpeTrainer(
        vocab_size=256 + 300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    corpus = [line for text in CORPUS for line in text.split("\n")]
    backend.train_from_iterator(CORPUS if kind == "greedy" else corpus, trainer)
    return _byte_tokens_are_text(backend.to_str())


def _byte_tokens_are_text(text: str) -> str:
    """The 256 byte-fallback tokens belong to the vocabulary, not to the control tokens."""
    content = json.loads(text)
    added = content["added_tokens"]
    content["added_tokens"] = [token for token in added if not token["content"].startswith("<0x")]
    return json.dumps(content)


def folder(
    path: Path,
    template: str | None = CHATML,
    kind: str = "bytes",
    settings: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
) -> Path:
    """A tokenizer folder. By default pad, begin and end tokens of their own, end `<|im_end|>`."""
    path.mkdir(parents=True, exist_ok=True)
    tokens = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "<|im_end|>"}
    (path / "tokenizer.json").write_text(backend_json(kind), encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(tokens | (settings or {})))
    if template is not None:
        (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def load(path: Path, template: str | None = CHATML, kind: str = "bytes", **more: Any) -> Tokenizer:
    """`folder`, loaded."""
    return load_tokenizer(folder(path, template, kind, **more))
