"""The model that is trained: built on the meta device, sharded, then filled slice by slice.

LoRA goes in before sharding (the other order reads shapes from shards). Every rank reads only
its own slices of the safetensors files, so no rank ever holds the whole model. Adapter weights
are drawn by one generator per parameter name: the same on any number of processes.
"""

from __future__ import annotations

import copy
import math
import types
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posttrain_cli.config import ModelConfig
from posttrain_cli.engine import attention, distributed, dropout, kernels, weights
from posttrain_cli.engine.batch import Batch
from posttrain_cli.engine.distributed import World
from posttrain_cli.engine.head import linear_cross_entropy
from posttrain_cli.engine.losses import linear_logprobs
from posttrain_cli.errors import UsageError
from posttrain_cli.runs.resolve import ModelSource


@dataclass(frozen=True, slots=True)
class Policy:
    """A model ready for training.

    Attributes:
        module: the causal language model, or the PEFT model around it; call `token_logprobs`.
        trainable: parameters that are trained, by name (DTensors when sharded).
        clock: tells dropout where the present micro-batch stands.
        config: the transformers config.
        lora: whether only an adapter is trained.
        dtype: compute type, and the type of exported weights.
        attention: name of the attention function in use.
        parameters: number of all parameters.
        note: a line for the log about optional kernels, or empty.
    """

    module: nn.Module
    trainable: dict[str, nn.Parameter]
    clock: dropout.Clock
    config: Any
    lora: bool
    dtype: torch.dtype
    attention: str
    parameters: int
    note: str

    def token_logprobs(self, batch: Batch) -> Tensor:
        """(P,) log-probabilities of the trained tokens of a batch."""
        self.clock.keys = batch.keys
        result: Tensor = self.module.token_logprobs(batch)  # type: ignore[operator]
        return result

    def cross_entropy(self, batch: Batch) -> Tensor:
        """() cross-entropy summed over the trained tokens of a batch."""
        self.clock.keys = batch.keys
        result: Tensor = self.module.cross_entropy(batch)  # type: ignore[operator]
        return result


def compute_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """`model.dtype` on this device: auto is bfloat16 on a GPU, float32 on a CPU."""
    if wanted == "auto":
        wanted = "bfloat16" if device.type == "cuda" else "float32"
    return torch.bfloat16 if wanted == "bfloat16" else torch.float32


def build(source: ModelSource, settings: ModelConfig, world: World, seed: int) -> Policy:
    """Load `source` for training, sharded over `world`.

    Args:
        source: a whole model, an adapter (trained further) or a checkpoint of a run.
        settings: the `model` section.
        world: this process's place.
        seed: draws new adapter weights.

    Raises:
        UsageError: LoRA matches nothing, or the weights do not fit the architecture.
    """
    dtype = compute_dtype(settings.dtype, world.device)
    adapter = adapter_config(source, settings)
    base = source.base or source.weights
    name = attention.choose(settings.attention, world.device, dtype)
    held = torch.bfloat16 if adapter is not None and dtype == torch.bfloat16 else torch.float32
    model = _on_meta(base, held, name)
    config = model.config
    note = kernels.use_liger(model, settings, world.device)
    if adapter is not None:
        model = inject_lora(model, adapter)
    if settings.enable_gradient_checkpointing:
        _recompute_activations(model)
    clock = dropout.Clock()
    dropout.place(model, clock)
    model.token_logprobs = types.MethodType(_token_logprobs, model)
    model.cross_entropy = types.MethodType(_cross_entropy, model)
    blocks = _blocks(model)
    kernels.compile_blocks(blocks, settings, world.device)
    _shard(model, blocks, world, dtype)
    _fill(model, source, base, world, seed)
    model.train()
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return Policy(
        module=model,
        trainable=trainable,
        clock=clock,
        config=config,
        lora=adapter is not None,
        dtype=dtype,
        attention=name,
        parameters=sum(p.numel() for p in model.parameters()),
        note=note,
    )


def _token_logprobs(self: Any, batch: Batch) -> Tensor:
    return linear_logprobs(*_head_inputs(self, batch), batch.labels)


def _cross_entropy(self: Any, batch: Batch) -> Tensor:
    return linear_cross_entropy(*_head_inputs(self, batch), batch.labels)


def _head_inputs(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Hidden states before the trained tokens, and the output embedding.

    Runs inside the root's forward, so that FSDP has gathered the embedding.
    """
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    hidden = base.get_decoder()(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        cu_seq_lens_q=batch.cu_seqlens,
        cu_seq_lens_k=batch.cu_seqlens,
        max_length_q=batch.max_seqlen,
        max_length_k=batch.max_seqlen,
    ).last_hidden_state[0]
    return hidden[batch.positions], base.lm_head.weight


def _on_meta(base: Path, dtype: torch.dtype, attention_name: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = copy.deepcopy(AutoConfig.from_pretrained(base, trust_remote_code=False))
    config.use_cache = False
    if getattr(config, "attention_dropout", 0.0):
        config.attention_dropout = 0.0  # inside the kernel a mask cannot follow coordinates
    unsupported = {
        key: getattr(config, key)
        for key in ("final_logit_softcapping", "attn_logit_softcapping", "logits_scaling",
                    "logit_scale", "quantization_config")
        if getattr(config, key, None) not in (None, 1, 1.0)
    }  # fmt: skip
    if unsupported:
        raise UsageError(
            f"the model at `{base}` uses `{next(iter(unsupported))}`, which this engine cannot "
            "reproduce exactly",
            hint="Llama, Qwen2, Qwen3, Mistral, SmolLM and OLMo2 style models are supported",
        )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention_name, trust_remote_code=False
        )
    head = model.get_output_embeddings()
    if not hasattr(model, "lm_head") or head is None or getattr(head, "bias", None) is not None:
        raise UsageError(f"the model at `{base}` has no plain output layer `lm_head`")
    return model


def adapter_config(source: ModelSource, settings: ModelConfig) -> Any | None:
    """The LoRA shape: the one that is continued, or a new one; None for full training."""
    from peft import LoraConfig

    if source.adapter is not None:
        found = LoraConfig.from_pretrained(str(source.adapter))
        if settings.lora_rank not in (0, found.r):
            raise UsageError(
                f"`{source.path}` is an adapter of rank {found.r}, which is trained further; "
                f"a rank of {settings.lora_rank} would need another one",
                hint="leave --lora-rank out, or merge the adapter first and start from the result",
            )
        found.inference_mode = False
        found.base_model_name_or_path = None  # where it was trained; PEFT warns when it differs
        found.lora_dropout = settings.lora_dropout
        return found
    if settings.lora_rank == 0:
        return None
    assert settings.lora_alpha is not None
    targets = settings.target_modules
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=settings.lora_dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
    )


def inject_lora(model: Any, adapter: Any) -> Any:
    """Put LoRA into the model; every named target must match something."""
    from peft import get_peft_model

    linear = {
        name.rsplit(".", 1)[-1] for name, m in model.named_modules() if isinstance(m, nn.Linear)
    }
    targets = adapter.target_modules
    names = set() if targets == "all-linear" else {targets} if isinstance(targets, str) else targets
    missing = sorted(name for name in names if name.rsplit(".", 1)[-1] not in linear)
    if missing:
        raise UsageError(
            f"`target_modules` {', '.join(f'`{name}`' for name in missing)} match no layer",
            hint=f"this model has {', '.join(sorted(linear - {'lm_head'}))}, or use all-linear",
        )
    if isinstance(targets, str) and targets != "all-linear":
        adapter.target_modules = [targets]
    with warnings.catch_warnings():  # PEFT still asks transformers by the old name
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        return get_peft_model(model, adapter)


def _recompute_activations(model: Any) -> None:
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _blocks(model: Any) -> list[nn.Module]:
    """The decoder layers, by transformers' own list of what must not be split."""
    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or [])
    return [module for module in model.modules() if type(module).__name__ in names]


def _shard(model: Any, blocks: list[nn.Module], world: World, dtype: torch.dtype) -> None:
    """FSDP2 around each decoder layer and the root; gradients are summed, not averaged.

    One process in float32 stays unwrapped: same bits, same checkpoints, no copies.
    """
    if world.size == 1 and dtype == torch.float32:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        FSDPModule,
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    distributed.ensure_group(world)
    mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("dp",))
    options: dict[str, Any] = {"mesh": mesh}
    if dtype == torch.bfloat16:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    for block in blocks:
        fully_shard(block, reshard_after_forward=True, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for method in ("token_logprobs", "cross_entropy"):
        register_fsdp_forward_method(model, method)


def _fill(model: Any, source: ModelSource, base: Path, world: World, seed: int) -> None:
    """Give every parameter its values: from files, or drawn by its name."""
    from posttrain_cli.engine import checkpoint

    weights.materialize(model, world.device)
    left = weights.load(model, weights.index(base), weights.base_name)
    wrong = [name for name in left if ".lora_" not in name]
    if wrong:
        raise UsageError(
            f"the weights in `{base}` do not fit the architecture: `{wrong[0]}` is missing"
            + (f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""),
            hint="the folder may be damaged, or store its weights under other names",
        )
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            weights.copy_slice(parameter, _new_adapter(name, parameter, seed))
    if source.form == "adapter":
        weights.load_adapter(model, source.weights)
    if source.form == "sharded":
        found = checkpoint.open_checkpoint(source.weights)
        tensors = {f"model.{n}": p.detach() for n, p in model.named_parameters() if p.requires_grad}
        checkpoint.load(found, tensors, partial=True)


def _new_adapter(name: str, parameter: Tensor, seed: int) -> Tensor:
    """A: uniform within 1/sqrt(fan-in); B: zero, so that step 0 is the base model."""
    full = torch.zeros(parameter.shape)
    if ".lora_A." in name:
        bound = 1 / math.sqrt(parameter.shape[1])
        generator = torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode()))
        full.uniform_(-bound, bound, generator=generator)
    return full
