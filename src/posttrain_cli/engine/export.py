"""The result of a run: a plain Hugging Face folder or PEFT adapter that anything else can load.

Tokenizer, template and end ids of training go with it, so inference cannot use others. After
writing, the file is read again: missing, unexpected or different tensors are an error.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain_cli.data.tokenizer import Tokenizer
from posttrain_cli.engine import distributed, weights
from posttrain_cli.engine.distributed import World
from posttrain_cli.engine.model import Policy
from posttrain_cli.errors import RunError
from posttrain_cli.files import fsync_dir, fsync_file

_SHARD_BYTES = 5 * 10**9
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def export(policy: Policy, tokenizer: Tokenizer, base: Path, target: Path, world: World) -> None:
    """Write the result to `target`, whole or not at all; every rank calls it.

    Args:
        policy: the trained model; tensors are saved in its compute type.
        tokenizer: the one of training.
        base: Hugging Face folder that an adapter belongs to.
        target: RUN/model; replaced if it is there.
        world: this process's place.
    """
    names = adapter_names(policy) if policy.lora else {n: n for n in policy.trainable}
    tensors: dict[str, Tensor] = {}
    for name, parameter in policy.trainable.items():
        full = weights.whole(parameter)
        if world.is_main:
            tensors[names[name]] = full.to("cpu", policy.dtype).contiguous()
    distributed.together(
        world,
        lambda: _write(policy, tokenizer, base, target, tensors) if world.is_main else None,
    )


def adapter_names(policy: Policy) -> dict[str, str]:
    """Trained parameter names to their names in an adapter file."""
    return {name: weights.adapter_name(name) for name in policy.trainable}


def _write(
    policy: Policy, tokenizer: Tokenizer, base: Path, target: Path, tensors: dict[str, Tensor]
) -> None:
    temporary = target.with_name(f".tmp-{target.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    if policy.lora:
        _write_adapter(policy, base, temporary, tensors)
    else:
        _write_model(policy, temporary, tensors)
    _write_tokenizer(tokenizer, temporary)
    _check(temporary, tensors)
    for path in temporary.iterdir():
        path.chmod(0o644)
        fsync_file(path)
    fsync_dir(temporary)
    old = target.with_name(f".tmp-old-{target.name}")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    temporary.rename(target)
    fsync_dir(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write_adapter(policy: Policy, base: Path, folder: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    module: Any = policy.module
    config = module.peft_config["default"].to_dict()
    config |= {
        "inference_mode": True,
        "base_model_name_or_path": str(base),
        "target_modules": sorted({name.rsplit(".", 1)[-1] for name in config["target_modules"]}),
    }
    text = json.dumps(config, indent=2, sort_keys=True, default=str) + "\n"
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")


def _write_model(policy: Policy, folder: Path, tensors: dict[str, Tensor]) -> None:
    """config.json of the compute type, and safetensors in shards of at most 5 GB."""
    from safetensors.torch import save_file

    config = policy.config.to_dict()
    config["dtype"] = str(policy.dtype).removeprefix("torch.")
    config["use_cache"] = True
    for key in ("_attn_implementation", "_name_or_path", "transformers_version"):
        config.pop(key, None)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    shards = _shards(tensors)
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, name)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    text = json.dumps(index, indent=2) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _shards(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and filled + size > _SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size
    return shards


def _write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """The tokenizer's files, the template that was used, and the ids that end an answer."""
    for name in _TOKENIZER_FILES:
        source = tokenizer.folder / name
        if source.is_file():
            shutil.copyfile(source, folder / name)
    settings_path = folder / "tokenizer_config.json"
    if settings_path.is_file():
        settings = json.loads(settings_path.read_text(encoding="utf-8"))
        if settings.pop("chat_template", None) is not None:
            settings_path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(tokenizer.portable_template, encoding="utf-8")
    generation = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": sorted(tokenizer.end_ids),
        "pad_token_id": tokenizer.pad_id,
    }
    known = {key: value for key, value in generation.items() if value not in (None, [])}
    text = json.dumps(known, indent=2) + "\n"
    (folder / "generation_config.json").write_text(text, encoding="utf-8")


def _check(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Read the written weights again and compare every tensor."""
    from safetensors import safe_open

    found = weights.index(folder)
    for name, expected in tensors.items():
        file = found.files.get(name)
        if file is None:
            raise RunError(f"`{name}` is missing in the exported `{folder}`")
        with safe_open(folder / file, framework="pt") as stream:
            if not torch.equal(stream.get_tensor(name), expected):
                raise RunError(f"`{name}` in the exported `{folder}` differs from the trained one")
    extra = sorted(set(found.files) - set(tensors))
    if extra:
        raise RunError(f"`{extra[0]}` in the exported `{folder}` was never trained")
