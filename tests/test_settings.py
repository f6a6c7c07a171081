"""Configs: both articles' files as written, precedence, every mistake at once, defaults."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from posttrain_cli import settings
from posttrain_cli.config import METHODS
from posttrain_cli.errors import UsageError
from posttrain_cli.schema import ALIASES
from posttrain_cli.schema import settings as schema

SECOND_ARTICLE = """\
data:
  train_files: ./test_data.parquet
  val_files: ./test_data.parquet # the same file while testing
  prompt_key: question
  response_key: answer
  micro_batch_size_per_gpu: 2
  max_length: 1024
  packing: true # small data needs it
model:
  partial_pretrain: Qwen/Qwen2.5-0.5B-Instruct
  strategy: fsdp2
  enable_gradient_checkpointing: true
  use_liger: false
optim:
  lr: 2e-5
  warmup_steps_ratio: 0.1
  weight_decay: 0.01
trainer:
  total_epochs: 1
  project_name: quickstart-sft
  default_local_dir: ./checkpoints
  logger: console
  log_interval: 10
"""
LORA = """\
model:
  partial_pretrain: Qwen/Qwen2.5-7B-Instruct
  lora_rank: 64
  lora_alpha: 128
  target_modules: ["q_proj", "k_proj", "v_proj", "o_proj"]
  use_liger: true
"""
FIRST_ARTICLE = """\
dataset:
  path: "s3://my-bucket/datasets/dataset_v1.2.0-20250415.jsonl"
  split: "train"
"""
PPO = """\
trainer:
  type: ppo
  reward_model: Qwen/Qwen2.5-0.5B-Reward
rl:
  kl_coef: 0.1
  ppo_epochs: 4
  cliprange_value: 0.2
"""


def load(folder: Path, text: str = "", method: Any = "sft", **given: Any) -> settings.Resolved:
    """Resolve `text` as `--config` in `folder`, with flags by `section.key`."""
    file = folder / "run.yaml"
    file.write_text(text, encoding="utf-8")
    flags = given.pop("flags", {})
    return settings.load(method, flags=flags, config_file=file, cwd=folder, **given)


def problems(folder: Path, text: str = "", method: Any = "sft", **given: Any) -> list[str]:
    """What is wrong with a config, without the folder's name."""
    with pytest.raises(UsageError) as caught:
        load(folder, text, method, **given)
    return [line.replace(f"{folder}{os.sep}", "") for line in caught.value.problems]


# --- the articles -------------------------------------------------------------------------------


def test_second_articles_config_loads_as_written(tmp_path: Path) -> None:
    resolved = load(tmp_path, SECOND_ARTICLE)
    config = resolved.config
    assert config.data.train_files == str(tmp_path / "test_data.parquet")
    assert config.data.val_files == str(tmp_path / "test_data.parquet")
    assert (config.data.prompt_key, config.data.response_key) == ("question", "answer")
    assert (config.data.micro_batch_size_per_gpu, config.data.max_length) == (2, 1024)
    assert config.data.packing is True
    assert config.model.partial_pretrain == "Qwen/Qwen2.5-0.5B-Instruct"
    assert config.model.enable_gradient_checkpointing is True
    assert config.optim.lr == 2e-5
    assert config.trainer.default_local_dir == str(tmp_path / "checkpoints")
    assert config.trainer.logger == ["console"]
    assert resolved.origins["optim.lr"] == f"{tmp_path / 'run.yaml'}:15"


def test_second_articles_lora_config_loads_as_written(tmp_path: Path) -> None:
    model = load(tmp_path, LORA).config.model
    assert (model.lora_rank, model.lora_alpha) == (64, 128.0)
    assert model.target_modules == ["q_proj", "k_proj", "v_proj", "o_proj"]


def test_first_articles_dataset_section_is_another_spelling(tmp_path: Path) -> None:
    data = load(tmp_path, FIRST_ARTICLE).config.data
    assert data.train_files == "s3://my-bucket/datasets/dataset_v1.2.0-20250415.jsonl"
    assert data.split == "train"


def test_second_articles_ppo_lines_load_as_written(tmp_path: Path) -> None:
    resolved = load(tmp_path, PPO, method=None)
    assert resolved.method == "ppo"
    assert resolved.config.trainer.reward_model == "Qwen/Qwen2.5-0.5B-Reward"
    assert (resolved.config.rl.kl_coef, resolved.config.rl.ppo_epochs) == (0.1, 4)


def test_model_path_is_another_spelling(tmp_path: Path) -> None:
    assert load(tmp_path, "model:\n  path: gpt2\n").config.model.partial_pretrain == "gpt2"


# --- precedence and origins ---------------------------------------------------------------------


def test_a_flag_wins_over_set_over_config_over_project_file_over_default(tmp_path: Path) -> None:
    (tmp_path / "ptc.yaml").write_text(
        "trainer: {seed: 1, log_interval: 1, save_interval: 1, keep_checkpoints: 1}"
    )
    resolved = load(
        tmp_path,
        "trainer: {log_interval: 2, save_interval: 2, keep_checkpoints: 2}",
        sets=["trainer.save_interval=3", "trainer.keep_checkpoints=3"],
        flags={"trainer.keep_checkpoints": "4"},
    )
    trainer = resolved.config.trainer
    assert (trainer.seed, trainer.log_interval) == (1, 2)
    assert (trainer.save_interval, trainer.keep_checkpoints) == (3, 4)
    assert trainer.max_bad_steps == 10
    origins = resolved.origins
    assert origins["trainer.seed"] == f"{tmp_path / 'ptc.yaml'}:1"
    assert origins["trainer.log_interval"] == f"{tmp_path / 'run.yaml'}:1"
    assert origins["trainer.save_interval"] == "--set trainer.save_interval"
    assert origins["trainer.keep_checkpoints"] == "flag --keep-checkpoints"
    assert origins["trainer.max_bad_steps"] == "default"


@pytest.mark.parametrize("method", METHODS)
def test_every_setting_that_is_read_has_an_origin(tmp_path: Path, method: Any) -> None:
    read = {key for key, row in schema().items() if method in row.methods}
    assert set(load(tmp_path, method=method).origins) == read


def test_the_command_is_the_origin_of_the_trainer(tmp_path: Path) -> None:
    resolved = load(tmp_path)
    assert resolved.origins["trainer.type"] == "command ptc sft"


def test_the_last_of_two_sets_wins(tmp_path: Path) -> None:
    resolved = load(tmp_path, sets=["trainer.seed=1", "trainer.seed=2"])
    assert resolved.config.trainer.seed == 2


def test_set_null_takes_a_value_back(tmp_path: Path) -> None:
    resolved = load(tmp_path, "trainer: {max_steps: 5}", sets=["trainer.max_steps=null"])
    assert resolved.config.trainer.max_steps is None
    assert resolved.config.trainer.total_epochs == 1


def test_naming_the_project_file_by_config_reads_it_once(tmp_path: Path) -> None:
    file = tmp_path / "ptc.yaml"
    file.write_text("nonsense: 1\n")
    with pytest.raises(UsageError) as caught:
        settings.load("sft", flags={}, config_file=file, cwd=tmp_path)
    assert len(caught.value.problems) == 1


# --- scalars ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "value"), [("2e-5", 2e-5), ("1e3", 1000.0), (".5", 0.5), ("3", 3.0), ("1E-6", 1e-6)]
)
def test_numbers_in_every_spelling(tmp_path: Path, written: str, value: float) -> None:
    assert load(tmp_path, f"optim: {{lr: {written}}}").config.optim.lr == value
    assert load(tmp_path, sets=[f"optim.lr={written}"]).config.optim.lr == value
    assert load(tmp_path, flags={"optim.lr": written}).config.optim.lr == value


def test_1e3_and_010_are_whole_numbers_too(tmp_path: Path) -> None:
    assert load(tmp_path, "trainer: {max_steps: 1e3}").config.trainer.max_steps == 1000
    assert load(tmp_path, "trainer: {max_steps: 010}").config.trainer.max_steps == 10


@pytest.mark.parametrize("written", ["no", "on", "010", "12:30", "0x1F", "1_000", "2025-04-15"])
def test_text_is_kept_as_written(tmp_path: Path, written: str) -> None:
    text = f"trainer: {{project_name: {written}}}"
    assert load(tmp_path, text).config.trainer.project_name == written


def test_quoted_text_and_flags_are_text_whatever_they_look_like(tmp_path: Path) -> None:
    assert load(tmp_path, 'trainer: {project_name: "2024"}').config.trainer.project_name == "2024"
    assert load(tmp_path, sets=["trainer.project_name=2024"]).config.trainer.project_name == "2024"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim: {lr: fast}", "`optim.lr`: expected a number > 0, got `fast`"),
        ('optim: {lr: "2e-5"}', "got `2e-5` in quotes; write it without"),
        ("optim: {lr: -1}", "`optim.lr`: expected a number > 0, got `-1`"),
        ("optim: {lr: .inf}", "expected a number > 0, got `.inf`"),
        ("data: {packing: no}", "got `no`; did you mean `false`?"),
        ("data: {packing: On}", "got `On`; did you mean `true`?"),
        ('data: {packing: "false"}', "got `false` in quotes; write it without"),
        ("data: {max_length: 4}", "expected a whole number ≥ 8, got `4`"),
        ("data: {max_length: 10.5}", "expected a whole number ≥ 8, got `10.5`"),
        ("data: {max_length: null}", "expected a whole number ≥ 8, got `null`"),
        ("data: {overlong: trunkate}", "got `trunkate`; did you mean `truncate`?"),
        ("data: {prompt_key: 5}", 'expected text, got `5`; write it in quotes: "5"'),
        ("data: {prompt_key: [a]}", "`data.prompt_key`: expected text, got a list"),
        ("data: {train_files: {a: b}}", "expected text or a list of texts, got a mapping"),
        ("data: {train_files: [a, [b]]}", "got a list with something nested"),
        ("optim: {betas: [0.9]}", "expected a list of two numbers, got `[0.9]`"),
        ("optim: {betas: [0.9, x]}", "got a list with `x`"),
        ("trainer: {seed: 4294967296}", "a whole number ≥ 0 and ≤ 4294967295"),
        ("trainer: {n_gpus_per_node: all}", "expected `auto` or a whole number"),
        ("model: {strategy: fsdp}", "expected `fsdp2`, got `fsdp`; did you mean `fsdp2`?"),
        ("model: {trust_remote_code: true}", "no code from a model is ever run"),
        ("trainer: {logger: [console, wandb]}", "unknown logger `wandb`; known are console"),
        ("trainer: {logger: tensorbord}", "did you mean `tensorboard`?"),
    ],
)
def test_a_bad_value_says_where_and_what_was_expected(
    tmp_path: Path, text: str, message: str
) -> None:
    (line,) = problems(tmp_path, text)
    assert line.startswith("run.yaml:1: ")
    assert message in line


def test_a_bad_flag_and_a_bad_set_name_themselves(tmp_path: Path) -> None:
    found = problems(tmp_path, sets=["optim.lr=fast"], flags={"trainer.max_steps": "many"})
    assert found == [
        "--set optim.lr: expected a number > 0, got `fast`",
        "flag --max-steps: expected a whole number ≥ 1, got `many`",
    ]
    found = problems(tmp_path, flags={"trainer.max_steps": "0"})
    assert found == ["flag --max-steps: `trainer.max_steps`: expected a whole number ≥ 1, got `0`"]


# --- keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optm: {lr: 1}", "unknown section `optm`; did you mean `optim`?"),
        ("lr: 1", "unknown section `lr`; `lr` belongs to `optim`"),
        ("optim: {learning: 1}", "unknown key `optim.learning`; known here: lr, schedule"),
        ("optim: {lrr: 1}", "unknown key `optim.lrr`; did you mean `lr`?"),
        ("data: {lr: 1}", "unknown key `data.lr`; `lr` belongs to `optim`"),
        ("model: {optim: {lr: 1}}", "section `optim` belongs at the top level, not in `model`"),
        ("model: {pth: x}", "unknown key `model.pth`; did you mean `path`?"),
        ("optim: 3", "section `optim` takes `key: value` lines, not a value"),
        ("optim: {lr: 1, lr: 2}", "`optim.lr` is given twice (first in line 1)"),
        ("optim: {[a]: 2}", "a key must be a name, found a list"),
        ("model: {path: a, partial_pretrain: b}", "are the same setting; keep one"),
        ("rl: {kl_coef: 0.1}", "`rl.kl_coef` is read by `ptc ppo` only; `ptc sft` would ignore"),
        ("trainer: {type: dpo}", "`trainer.type` is `dpo` but the command is `ptc sft`"),
        ("trainer: {type: sfd}", "expected one of `sft`, `dpo`, `ppo`, got `sfd`; did you mean"),
        ("model: {lora_alpha: 8}", "`model.lora_alpha` has no effect while `model.lora_rank` is 0"),
        (
            "trainer: {processes: 2, n_gpus_per_node: 4}",
            "`trainer.processes` counts CPU processes, but `trainer.n_gpus_per_node` is 4",
        ),
    ],
)
def test_a_wrong_key_says_where_it_belongs(tmp_path: Path, text: str, message: str) -> None:
    (line,) = problems(tmp_path, text)
    assert line.startswith("run.yaml:1: ")
    assert message in line


def test_every_mistake_is_told_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = "data:\n  max_length: 1\n  packin: true\nbogus:\n  a: 1\noptim:\n  lr: x\n"
    found = problems(
        tmp_path, text, sets=["nonsense", "a.b=1"], flags={"trainer.seed": "-1", "optim.eps": "x"}
    )
    places = [line.split(": ")[0] for line in found]
    assert places[:4] == ["run.yaml:2", "run.yaml:3", "run.yaml:4", "run.yaml:7"]
    assert sorted(places[4:]) == ["--set a.b", "--set nonsense", "flag ", "flag --seed"]


def test_tags_are_refused(tmp_path: Path) -> None:
    found = problems(tmp_path, "optim: {lr: !!python/name:os.system 1}\ndata: !x {chat: true}")
    assert found == [
        "run.yaml:1: the tag `!!python/name:os.system` is refused: config files hold plain data",
        "run.yaml:2: the tag `!x` is refused: config files hold plain data",
    ]


def test_set_needs_a_section_a_key_and_a_value(tmp_path: Path) -> None:
    for text in ("lr", "lr=1", "=1", "optim.lr"):
        (line,) = problems(tmp_path, sets=[text])
        assert line == f"--set {text}: expected `section.key=value`, such as `optim.lr=1e-5`"


# --- the file itself ----------------------------------------------------------------------------


def test_a_missing_config_file_names_the_absolute_path(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist") as caught:
        settings.load("sft", flags={}, config_file=tmp_path / "no.yaml", cwd=tmp_path)
    assert str(tmp_path / "no.yaml") in caught.value.message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"data: [1\n", "run.yaml:2:1: not valid YAML"),
        (b"data:\n\tx: 1\n", "run.yaml:2:1: not valid YAML"),
        (b"a: 1\n---\nb: 2\n", "run.yaml:2:1: not valid YAML: but found another document"),
        (b"data: \xff\n", "run.yaml:1: not UTF-8 (byte 6)"),
        (b"- a\n- b\n", "run.yaml:1: expected sections such as `data:`"),
        (b"hello\n", "found the text `hello`"),
        (b"a: *nowhere\n", "not valid YAML: found undefined alias"),
        (b"a: \x00\n", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_config(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        settings.load("sft", flags={}, config_file=file, cwd=tmp_path)
    assert message in caught.value.message


def test_a_missing_file_is_told_beside_the_other_mistakes(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        settings.load(
            "sft", flags={"optim.lr": "fast"}, config_file=tmp_path / "no.yaml", cwd=tmp_path
        )
    first, second = caught.value.problems
    assert first == f"config file `{tmp_path / 'no.yaml'}` does not exist; check --config"
    assert second == "flag --lr: expected a number > 0, got `fast`"
    with pytest.raises(UsageError) as caught:
        settings.load(None, flags={}, config_file=tmp_path / "no.yaml", cwd=tmp_path)
    assert len(caught.value.problems) == 1


def test_a_folder_is_no_config_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a directory"):
        settings.load("sft", flags={}, config_file=tmp_path, cwd=tmp_path)


def test_an_empty_file_a_mark_and_an_empty_section_are_fine(tmp_path: Path) -> None:
    assert load(tmp_path, "").config.trainer.seed == 42
    assert load(tmp_path, "\ufefftrainer: {seed: 7}").config.trainer.seed == 7
    assert load(tmp_path, "data:\ntrainer: {seed: 7}\n").config.trainer.seed == 7


def test_anchors_work_and_do_not_blow_up(tmp_path: Path) -> None:
    text = "data:\n  train_files: &f train.jsonl\n  val_files: *f\n"
    assert load(tmp_path, text).config.data.val_files == str(tmp_path / "train.jsonl")
    (line,) = problems(tmp_path, "data:\n  train_files: &a [*a]\n")
    assert "a list with something nested" in line


# --- paths --------------------------------------------------------------------------------------


def test_paths_of_a_file_are_relative_to_it_and_those_of_flags_to_the_folder(
    tmp_path: Path,
) -> None:
    inner = tmp_path / "configs"
    inner.mkdir()
    (inner / "base").mkdir()
    (inner / "run.yaml").write_text(
        "data: {train_files: [a.jsonl, '*.parquet', s3://b/k.jsonl], template: my.jinja}\n"
        "model: {partial_pretrain: base}\n"
    )
    resolved = settings.load(
        "sft",
        flags={"data.val_files": ["v.jsonl", "w.jsonl"], "trainer.default_local_dir": "out"},
        config_file=inner / "run.yaml",
        cwd=tmp_path,
    )
    data = resolved.config.data
    assert data.train_files == [
        str(inner / "a.jsonl"),
        str(inner / "*.parquet"),
        "s3://b/k.jsonl",
    ]
    assert data.val_files == [str(tmp_path / "v.jsonl"), str(tmp_path / "w.jsonl")]
    assert data.template == str(inner / "my.jinja")
    assert resolved.config.model.partial_pretrain == str(inner / "base")
    assert resolved.config.trainer.default_local_dir == str(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "is_path"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", False),
        ("gpt2", False),
        ("./gpt2", True),
        ("../gpt2", True),
        ("a/b/c", True),
        ("here", True),
        ("here/missing", True),
    ],
)
def test_a_hub_id_stays_and_a_path_becomes_absolute(
    tmp_path: Path, name: str, is_path: bool
) -> None:
    (tmp_path / "here").mkdir()
    model = load(tmp_path, f"model: {{path: {name}}}").config.model.partial_pretrain
    assert model == (os.path.normpath(tmp_path / name) if is_path else name)


def test_wildcards_of_a_folder_name_are_no_wildcards(tmp_path: Path) -> None:
    odd = tmp_path / "a[1]"
    odd.mkdir()
    (odd / "x.jsonl").write_text("{}\n")
    text = "data: {train_files: '*.jsonl', val_files: x.jsonl}"
    data = load(odd, text).config.data
    assert data.train_files == str(tmp_path / "a[[]1]" / "*.jsonl")
    assert data.val_files == str(odd / "x.jsonl")


# --- defaults -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "rank", "rate", "origin"),
    [
        ("sft", 0, 2e-5, "default (sft)"),
        ("sft", 8, 2e-4, "default (LoRA)"),
        ("dpo", 0, 5e-7, "default (dpo)"),
        ("dpo", 8, 5e-6, "default (LoRA)"),
        ("ppo", 0, 1e-6, "default (ppo)"),
        ("ppo", 8, 1e-5, "default (LoRA)"),
    ],
)
def test_learning_rate_depends_on_method_and_lora(
    tmp_path: Path, method: str, rank: int, rate: float, origin: str
) -> None:
    resolved = load(tmp_path, method=method, sets=[f"model.lora_rank={rank}"])
    assert resolved.config.optim.lr == rate
    assert resolved.origins["optim.lr"] == origin


def test_an_adapter_to_train_further_counts_as_lora(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    resolved = load(tmp_path, "model: {path: ./adapter, lora_dropout: 0.1}")
    assert resolved.config.optim.lr == 2e-4


def test_alpha_is_twice_the_rank(tmp_path: Path) -> None:
    resolved = load(tmp_path, "model: {lora_rank: 24}")
    assert resolved.config.model.lora_alpha == 48.0
    assert resolved.origins["model.lora_alpha"] == "default (twice the rank)"


@pytest.mark.parametrize(
    ("method", "text", "packing", "batch"),
    [
        ("sft", "", True, 8),
        ("sft", "data: {packing: false}", False, 32),
        ("dpo", "", False, 32),
        ("sft", "data: {train_batch_size: 5}", True, 5),
    ],
)
def test_packing_and_batch_size_go_together(
    tmp_path: Path, method: str, text: str, packing: bool, batch: int
) -> None:
    data = load(tmp_path, text, method).config.data
    assert (data.packing, data.train_batch_size) == (packing, batch)


@pytest.mark.parametrize(
    ("text", "epochs", "steps"),
    [
        ("", 1, None),
        ("trainer: {max_steps: 7}", None, 7),
        ("trainer: {total_epochs: 3}", 3, None),
        ("trainer: {total_epochs: 3, max_steps: 7}", 3, 7),
    ],
)
def test_a_default_epoch_never_cuts_max_steps(
    tmp_path: Path, text: str, epochs: int | None, steps: int | None
) -> None:
    trainer = load(tmp_path, text).config.trainer
    assert (trainer.total_epochs, trainer.max_steps) == (epochs, steps)


def test_the_run_directory_is_named_after_project_and_method(tmp_path: Path) -> None:
    resolved = load(tmp_path, 'trainer: {project_name: "../a b"}')
    assert resolved.config.trainer.default_local_dir == str(tmp_path / "runs" / "a-b-sft")


def test_train_needs_a_type(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, "", None)
    assert line.startswith("`trainer.type` is missing")


# --- dump ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_dumped_config_loads_to_the_same_config(tmp_path: Path, method: str) -> None:
    odd = "a: #b'\"\\ \u2028\x85 1e3 é 🙂"
    first = load(
        tmp_path,
        method=method,
        sets=[
            "trainer.max_steps=7",
            f"data.prompt_key={odd}",
            "data.response_key=1e3",
            "data.train_files=t.jsonl",
            "model.lora_rank=4",
            "model.target_modules=q_proj,no",
        ],
    )
    other = tmp_path / "elsewhere"
    other.mkdir()
    again = load(other, settings.dump(first.config), None)
    assert again.config == first.config
    assert again.config.data.prompt_key == odd
    assert again.method == method


def test_a_dump_says_where_values_came_from(tmp_path: Path) -> None:
    resolved = load(tmp_path, flags={"optim.lr": "3e-5"})
    text = settings.dump(resolved.config, resolved.origins)
    assert "  lr: 3e-05  # flag --lr\n" in text
    assert "rl:" not in text


# --- the schema ---------------------------------------------------------------------------------


def test_aliases_point_at_settings() -> None:
    assert set(ALIASES.values()) <= set(schema())


def test_flags_are_unique_within_a_method() -> None:
    for method in METHODS:
        flags = [row.flag for row in schema().values() if row.flag and method in row.methods]
        assert len(flags) == len(set(flags)), method
