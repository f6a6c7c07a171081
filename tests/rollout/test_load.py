from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from posttrain_cli.config import Config
from posttrain_cli.engine import checkpoint
from posttrain_cli.engine.distributed import World
from posttrain_cli.engine.model import Policy, build
from posttrain_cli.errors import UsageError
from posttrain_cli.rollout.load import changes_nothing, load_model
from posttrain_cli.runs.directory import dump_config
from posttrain_cli.runs.resolve import resolve_model

CPU = torch.device("cpu")
ALONE = World(rank=0, size=1, local_rank=0, device=CPU, backend=None)
IDS = torch.tensor([[5, 80, 200, 17, 3, 9]])


def load(name: Path, base: Path | None = None) -> Any:
    return load_model(resolve_model(name, base), CPU, torch.float32)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


@pytest.fixture
def adapter(tmp_path: Path, tiny_model: Path) -> Path:
    """A LoRA adapter written by plain PEFT, with B matrices that are not zero."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=4, lora_dropout=0.5, target_modules="all-linear"))
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_a_whole_model_is_loaded_for_generation(tiny_model: Path) -> None:
    model = load(tiny_model)
    assert not model.training
    assert model.dtype == torch.float32
    assert load_model(resolve_model(tiny_model), CPU, torch.bfloat16).dtype == torch.bfloat16


def test_an_adapter_gives_the_logits_that_plain_peft_gives(adapter: Path, tiny_model: Path) -> None:
    from peft import PeftModel

    model = load(adapter)
    plain = PeftModel.from_pretrained(load(tiny_model), str(adapter)).eval()
    torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=0)
    assert (logits(model) - logits(load(tiny_model))).abs().max() > 0.01
    assert not changes_nothing(model)


def test_an_adapter_that_changes_nothing_is_noticed(adapter: Path, tiny_model: Path) -> None:
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({k: v * (".lora_B." not in k) for k, v in tensors.items()}, path)
    assert changes_nothing(load(adapter))
    assert not changes_nothing(load(tiny_model))


def test_missing_and_unexpected_tensors_of_an_adapter_are_errors(adapter: Path) -> None:
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[0]
    save_file({k: v for k, v in tensors.items() if k != name}, path)
    with pytest.raises(UsageError, match=f"it lacks `{name}`"):
        load(adapter)
    save_file({f"_orig_mod.{k}": v for k, v in tensors.items()}, path)
    with pytest.raises(UsageError, match="does not fit this base: it lacks"):
        load(adapter)
    save_file(tensors | {"surplus": torch.zeros(1)}, path)
    with pytest.raises(UsageError, match="has the unexpected `surplus`"):
        load(adapter)


def test_an_adapter_on_another_base_is_an_error(
    adapter: Path, tiny_factory: Callable[..., Path]
) -> None:
    with pytest.raises(UsageError, match=r"has shape \(4, 64\), expected \(4, 128\)"):
        load(adapter, tiny_factory(hidden=128))
    with pytest.raises(
        UsageError, match=r"has the unexpected `base_model\.model\.model\.layers\.1"
    ):
        load(adapter, tiny_factory(layers=1))


def test_a_model_with_a_missing_tensor_is_an_error(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"layers\.1\.mlp\.up_proj\.weight` is missing"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", '{"model_type": "nothing_like_it"}'),
        ("config.json", "{"),
        ("model.safetensors", "cut off"),
    ],
)
def test_a_folder_that_cannot_be_loaded_is_named(
    tiny_model: Path, tmp_path: Path, name: str, content: str
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / name).write_text(content)
    with pytest.raises(UsageError) as caught:
        load(folder)
    assert caught.value.message.startswith(f"the model in `{folder}` cannot be loaded: ")


def test_code_of_a_model_folder_is_never_run(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "evil.C",
                                                  "AutoModelForCausalLM": "evil.M"}}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UsageError, match="cannot be loaded"):
        load(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("rank", [0, 4], ids=["full", "lora"])
def test_a_checkpoint_gives_the_logits_of_the_trained_model(
    tiny_model: Path, tmp_path: Path, rank: int
) -> None:
    policy, folder = write_checkpoint(tmp_path / "run", tiny_model, rank)
    found = logits(load(folder))
    expected = logits_of(policy)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert (found - logits(load(tiny_model))).abs().max() > 1e-3


def test_a_checkpoint_is_verified_and_must_fit(
    tiny_model: Path, tiny_factory: Callable[..., Path], tmp_path: Path
) -> None:
    _, folder = write_checkpoint(tmp_path / "run", tiny_model, 4)
    with pytest.raises(UsageError, match="does not fit the model"):
        load(folder, tiny_factory(hidden=128))
    with pytest.raises(UsageError, match="which this model lacks"):
        load(folder, tiny_factory(layers=1))
    shard = next(folder.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(UsageError, match=r"is damaged: .* has other content"):
        load(folder)


def write_checkpoint(run: Path, base: Path, rank: int) -> tuple[Policy, Path]:
    """A run directory with one checkpoint, whose tensors differ from those it started from."""
    settings: dict[str, Any] = {"partial_pretrain": str(base)}
    if rank:
        settings |= {"lora_rank": rank, "lora_alpha": 8.0}
    config = Config.model_validate({"model": settings, "trainer": {"type": "sft"}})
    policy = build(resolve_model(base), config.model, ALONE, seed=1)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.trainable.values():
            parameter += 0.05 * torch.randn(parameter.shape, generator=random)
    run.mkdir()
    (run / "run.json").write_text("{}")
    (run / "config.yaml").write_text(dump_config(config))
    tensors: dict[str, torch.Tensor] = {f"model.{n}": p for n, p in policy.trainable.items()}
    tensors |= {f"optim.{n}": torch.zeros(3) for n in policy.trainable}
    return policy, checkpoint.save(run / "checkpoints", 5, tensors, {}, ALONE)


def logits_of(policy: Policy) -> torch.Tensor:
    """The training model's own logits: from its own attention, by the output embedding."""
    module: Any = policy.module.eval()
    base = module.get_base_model() if policy.lora else module
    length = IDS.shape[1]
    segments = torch.tensor([0, length], dtype=torch.int32)
    with torch.no_grad():
        hidden = base.get_decoder()(
            input_ids=IDS,
            position_ids=torch.arange(length)[None],
            use_cache=False,
            cu_seq_lens_q=segments,
            cu_seq_lens_k=segments,
            max_length_q=length,
            max_length_k=length,
        ).last_hidden_state
        found: torch.Tensor = base.lm_head(hidden)
    return found
