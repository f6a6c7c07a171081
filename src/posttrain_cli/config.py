"""The one schema of a run: the only place of a default.

Command-line flags, the YAML check, `docs/config.md` and the JSON schema are all derived from
these sections. A default of `None` that is not simply "absent" depends on the method or on
LoRA; `settings.resolve` fills it in and records why.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Method = Literal["sft", "dpo", "ppo"]
METHODS: tuple[Method, ...] = get_args(Method)


class Section(BaseModel):
    """A frozen group of settings: unknown keys are errors, types are not coerced."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def setting(
    default: Any, text: str, *, flag: str = "", only: tuple[Method, ...] = METHODS, **bounds: Any
) -> Any:
    """One setting: its default, one clause of help with the unit, its flag, who uses it.

    Args:
        default: the default, or None when it depends on the method (see `settings.resolve`).
        text: help for the flag and for docs/config.md.
        flag: the command-line flag, e.g. `--lr`; empty when only YAML and --set reach it.
        only: the methods that read it; setting it for another method is an error.
        bounds: pydantic bounds (`ge`, `gt`, `le`, `lt`).
    """
    extra: dict[str, Any] = {"flag": flag, "methods": list(only)}
    return Field(default, description=text, json_schema_extra=extra, **bounds)


Name = Annotated[str, StringConstraints(min_length=1)]
Paths = Name | list[Name]
DeviceRange = Annotated[str, StringConstraints(pattern=r"^\d+(-\d+)?(,\d+(-\d+)?)*$")]
Template = Name  # tokenizer | chatml | plain | a Jinja file
Overlong = Literal["keep", "drop", "truncate", "error"]
TrainOn = Literal["assistant", "last", "all"]

RL: tuple[Method, ...] = ("ppo",)
PREF: tuple[Method, ...] = ("dpo",)
SFT: tuple[Method, ...] = ("sft",)


class DataConfig(Section):
    """What is trained on, and how it becomes token ids."""

    train_files: Paths | None = setting(None, "training files, globs or folders", flag="--train")
    val_files: Paths | None = setting(None, "validation files", flag="--val")
    split: Name | None = setting(None, "split of a folder in hub format, such as `train`")
    kind: Literal["auto", "sft", "preference", "prompt"] = setting(
        "auto", "record kind; auto follows the method"
    )
    prompt_key: Name = setting("prompt", "field with the prompt", flag="--prompt-key")
    response_key: Name = setting("response", "field with the answer", flag="--response-key")
    chosen_key: Name = setting(
        "chosen", "field with the better answer", flag="--chosen-key", only=PREF
    )
    rejected_key: Name = setting(
        "rejected", "field with the worse answer", flag="--rejected-key", only=PREF
    )
    messages_key: Name = setting("messages", "field with the conversation", flag="--messages-key")
    chat: bool = setting(False, "accept chat lists in prompt, chosen and rejected", flag="--chat")
    max_length: int = setting(2048, "tokens a sample or pack may have", flag="--max-length", ge=8)
    overlong: Overlong = setting("truncate", "what happens to longer samples", flag="--overlong")
    packing: bool | None = setting(
        None, "fill packs of max_length with whole samples (default: on for sft)", flag="--packing"
    )
    train_batch_size: int | None = setting(
        None,
        "samples, packs when packing, or prompts of a step over all devices (default 32; packs 8)",
        flag="--batch-size",
        ge=1,
    )
    micro_batch_size_per_gpu: int = setting(
        1, "samples or packs in one forward pass of a device", flag="--micro-batch-size", ge=1
    )
    add_eos_token: bool | None = setting(
        None,
        "end each trained answer with the end token; default: added for plain text, demanded of "
        "templates",
        flag="--add-eos",
    )
    template: Template = setting(
        "tokenizer", "tokenizer, chatml, plain or a Jinja file", flag="--template"
    )
    train_on: TrainOn = setting("assistant", "turns that are trained", flag="--train-on", only=SFT)
    shuffle: bool = setting(True, "shuffle each epoch by (seed, epoch)", flag="--shuffle")
    weight_key: Name | None = setting(
        None, "metadata field that weights sampling", flag="--weight-key", only=SFT
    )


class DatasetConfig(Section):
    """The first article's spelling of data.train_files and data.split."""

    path: Paths | None = setting(None, "same as data.train_files")
    split: Name | None = setting(None, "same as data.split")


class ModelConfig(Section):
    """The model and how it is held in memory."""

    partial_pretrain: Name | None = setting(
        None, "Hugging Face folder, run, checkpoint or adapter (also `path`)", flag="--model"
    )
    strategy: Literal["fsdp2"] = setting("fsdp2", "how parameters are sharded")
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "compute type: auto is bfloat16 on a GPU, float32 on a CPU", flag="--dtype"
    )
    attention: Literal["auto", "varlen", "sdpa"] = setting(
        "auto",
        "attention by segments: varlen kernel or one sdpa call a document",
        flag="--attention",
    )
    enable_gradient_checkpointing: bool = setting(
        False, "recompute activations in backward", flag="--gradient-checkpointing"
    )
    use_liger: bool = setting(False, "Liger kernels where a GPU and the package are there")
    compile: bool = setting(False, "compile decoder layers", flag="--compile")
    lora_rank: int = setting(0, "LoRA rank; 0 trains all parameters", flag="--lora-rank", ge=0)
    lora_alpha: float | None = setting(
        None, "LoRA scale numerator (default: twice the rank)", flag="--lora-alpha", gt=0
    )
    lora_dropout: float = setting(0.0, "dropout on LoRA inputs", flag="--lora-dropout", ge=0, lt=1)
    target_modules: Name | list[Name] = setting(
        "all-linear", "modules that get LoRA: names, or all-linear", flag="--target-modules"
    )
    trust_remote_code: Literal[False] = setting(
        False, "accepted for the articles' configs; true is refused: no code of a model is run"
    )


class OptimConfig(Section):
    """AdamW and its schedule, a pure function of the step."""

    lr: float | None = setting(None, "peak learning rate (default by method)", flag="--lr", gt=0)
    schedule: Literal["cosine", "linear", "constant"] = setting(
        "cosine", "after warm-up", flag="--schedule"
    )
    warmup_steps_ratio: float = setting(
        0.1, "share of the steps that warm up", flag="--warmup-ratio", ge=0, le=1
    )
    warmup_steps: int | None = setting(
        None, "steps that warm up, instead of the share", flag="--warmup-steps", ge=0
    )
    weight_decay: float = setting(
        0.01, "decoupled weight decay on matrices", flag="--weight-decay", ge=0
    )
    betas: list[float] = setting([0.9, 0.999], "AdamW moments", min_length=2, max_length=2)
    eps: float = setting(1e-8, "AdamW epsilon", gt=0)
    clip_grad_norm: float = setting(
        1.0, "largest global gradient norm; 0 switches clipping off", flag="--clip-grad-norm", ge=0
    )


Logger = Literal["console", "jsonl", "tensorboard"]


class TrainerConfig(Section):
    """The run: how long, where, how often."""

    type: Method | None = setting(None, "which trainer `ptc train` starts")
    total_epochs: int | None = setting(
        None, "passes over the data (default 1)", flag="--epochs", ge=1
    )
    max_steps: int | None = setting(None, "optimizer steps", flag="--max-steps", ge=1)
    project_name: Name = setting("ptc", "name kept in run.json")
    default_local_dir: Name | None = setting(None, "the run directory", flag="--output-dir")
    logger: str | list[str] = setting(
        "console,jsonl,tensorboard", "console, jsonl, tensorboard", flag="--logger"
    )
    log_interval: int = setting(10, "steps between console lines", flag="--log-interval", ge=1)
    save_interval: int = setting(1000, "steps between checkpoints", flag="--save-interval", ge=1)
    save_full_state_dict: bool = setting(
        False, "also write whole weights beside each sharded checkpoint"
    )
    keep_checkpoints: int = setting(
        3, "newest checkpoints kept, the best beside them", flag="--keep-checkpoints", ge=1
    )
    eval_interval: int | None = setting(
        None,
        "steps between validations (default: at the end of each epoch)",
        flag="--eval-interval",
        ge=1,
    )
    seed: int = setting(42, "seeds everything", flag="--seed", ge=0, le=2**32 - 1)
    deterministic: bool = setting(False, "deterministic kernels on GPUs", flag="--deterministic")
    n_gpus_per_node: int | Literal["auto"] = setting(
        "auto",
        "GPUs of this node; 0 trains on the CPU",
        flag="--gpus",
    )
    processes: int = setting(1, "CPU processes when --gpus is 0", flag="--processes", ge=1)
    nnodes: int = setting(1, "machines", flag="--nnodes", ge=1)
    max_bad_steps: int = setting(
        10, "skipped steps (non-finite gradients) in a row before the run stops", ge=1
    )
    rollback: bool = setting(
        False, "after max_bad_steps go back once to the last good checkpoint", flag="--rollback"
    )
    reward_model: Name | None = setting(None, "reward model folder", flag="--reward-model", only=RL)


class DpoConfig(Section):
    """Direct preference optimisation."""

    beta: float = setting(
        0.1, "strength of the pull to the reference", flag="--beta", gt=0, only=PREF
    )
    loss: Literal["sigmoid", "ipo", "hinge", "robust", "simpo", "orpo"] = setting(
        "sigmoid", "preference loss", flag="--loss", only=PREF
    )
    label_smoothing: float = setting(
        0.0, "share of labels taken as flipped", flag="--label-smoothing", ge=0, lt=0.5, only=PREF
    )
    reference_model: Name | None = setting(
        None, "reference (default: the policy at step 0)", flag="--reference-model", only=PREF
    )
    online_sampling: bool = setting(
        False, "sample pairs from the policy", flag="--online-sampling", only=PREF
    )


class RlConfig(Section):
    """Reinforcement learning from rewards."""

    advantage: Literal["gae", "grpo", "rloo", "reinforce++"] = setting(
        "gae", "advantage estimator", flag="--advantage", only=RL
    )
    kl_coef: float = setting(0.1, "weight of the KL penalty", flag="--kl-coef", ge=0, only=RL)
    ppo_epochs: int = setting(
        4, "passes over each rollout batch", flag="--ppo-epochs", ge=1, only=RL
    )
    cliprange_value: float = setting(0.2, "clip range of the value loss", gt=0, only=RL)
    cliprange: float = setting(0.2, "clip range of the ratio", flag="--cliprange", gt=0, only=RL)
    gamma: float = setting(1.0, "discount", ge=0, le=1, only=RL)
    lam: float = setting(0.95, "GAE lambda", ge=0, le=1, only=RL)
    group_size: int = setting(8, "answers a prompt", flag="--group-size", ge=1, only=RL)
    rollout_batch_size: int = setting(32, "prompts a step", ge=1, only=RL)
    max_prompt_length: int = setting(
        1024, "tokens of a prompt", flag="--max-prompt-length", ge=1, only=RL
    )
    max_response_length: int = setting(
        1024, "tokens of an answer", flag="--max-response-length", ge=1, only=RL
    )
    temperature: float = setting(1.0, "sampling temperature", flag="--temperature", gt=0, only=RL)
    missing_eos_penalty: float = setting(
        0.0, "taken from the reward of an unfinished answer", ge=0, only=RL
    )
    critic_model: Name | None = setting(None, "critic folder", flag="--critic-model", only=RL)


class RolloutConfig(Section):
    """The generation engine inside training."""

    engine: Literal["auto", "vllm", "hf"] = setting(
        "auto", "generation engine", flag="--rollout", only=RL
    )
    gpu_memory_utilization: float = setting(
        0.5, "share of GPU memory for vLLM", gt=0, le=1, only=RL
    )
    tensor_parallel_size: int = setting(1, "GPUs of one vLLM engine", ge=1, only=RL)


class PlacementConfig(Section):
    """Device ranges of the roles, such as `0-3`; colocated when absent."""

    actor: DeviceRange | None = setting(None, "devices of the actor", only=RL)
    critic: DeviceRange | None = setting(None, "devices of the critic", only=RL)
    reward: DeviceRange | None = setting(None, "devices of the reward model", only=RL)
    rollout: DeviceRange | None = setting(None, "devices of the rollout engine", only=RL)


class Config(Section):
    """A whole run. `docs/config.md` lists every key."""

    data: DataConfig = DataConfig()
    dataset: DatasetConfig = DatasetConfig()
    model: ModelConfig = ModelConfig()
    optim: OptimConfig = OptimConfig()
    trainer: TrainerConfig = TrainerConfig()
    dpo: DpoConfig = DpoConfig()
    rl: RlConfig = RlConfig()
    rollout: RolloutConfig = RolloutConfig()
    placement: PlacementConfig = PlacementConfig()
