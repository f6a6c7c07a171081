"""Every setting of `ptc sft` is seen to do what it says; one process, no launcher."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from posttrain_cli.engine import api, train
from posttrain_cli.errors import DataError, UsageError
from posttrain_cli.runs.directory import RunDirectory
from posttrain_cli.settings import load
from tests.e2e.support import metrics


@dataclass(frozen=True)
class Ran:
    """A finished training run and what was said about its data."""

    run: RunDirectory
    said: list[str]

    @property
    def lines(self) -> list[dict[str, Any]]:
        return metrics(self.run.path)

    @property
    def adapter(self) -> dict[str, torch.Tensor]:
        return load_file(self.run.model / "adapter_model.safetensors")

    @property
    def counts(self) -> dict[str, Any]:
        counts: dict[str, Any] = json.loads(self.run.record.read_text())["samples"]["train"]
        return counts

    @property
    def checkpoints(self) -> list[int]:
        return sorted(
            int(path.name.removeprefix("step_")) for path in self.run.checkpoints.iterdir()
        )


Train = Callable[..., Ran]


@pytest.fixture
def ran(
    tiny_model: Path,
    sft_train: Path,
    sft_val: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Train]:
    """`ran(**{"optim.lr": "1e-3"})`: train the tiny model with these settings, in this process."""
    monkeypatch.setenv("PYTHONHASHSEED", os.environ.get("PYTHONHASHSEED", "0"))
    made = 0

    def start(**settings: str) -> Ran:
        nonlocal made
        made += 1
        flags: dict[str, Any] = {
            "model.partial_pretrain": str(tiny_model),
            "model.lora_rank": "4",
            "data.train_files": [str(sft_train)],
            "data.val_files": [str(sft_val)],
            "data.max_length": "256",
            "data.train_batch_size": "4",
            "optim.lr": "1e-3",
            "trainer.default_local_dir": str(tmp_path / f"run-{made}"),
            "trainer.logger": "jsonl",
            "trainer.n_gpus_per_node": "0",
        }
        files = {k: [v] if k.endswith("_files") else v for k, v in settings.items()}
        resolved = load("sft", flags=flags | files, cwd=tmp_path)
        said: list[str] = []
        api.set_up(resolved, api.Options(), said.append)
        run = RunDirectory(api.run_path(resolved.config))
        train.body(run)
        return Ran(run, said)

    yield start
    torch.use_deterministic_algorithms(False)


def test_length_of_the_run(ran: Train) -> None:
    assert len(ran(**{"trainer.total_epochs": "2"}).lines) == 6
    assert len(ran(**{"trainer.max_steps": "4"}).lines) == 4  # epochs repeat
    both = {"trainer.max_steps": "7", "trainer.total_epochs": "2"}
    assert len(ran(**both).lines) == 6


def test_batch_size_and_packing(ran: Train) -> None:
    assert len(ran(**{"data.train_batch_size": "9"}).lines) == 1
    assert len(ran(**{"data.packing": "false", "data.train_batch_size": "16"}).lines) == 3
    assert len(ran(**{"data.max_length": "128"}).lines) > 3


def test_schedules_and_warm_up(ran: Train) -> None:
    def rates(**settings: str) -> list[float]:
        lines = ran(**{"trainer.max_steps": "5", **settings}).lines
        return [round(line["train/lr"] / 1e-3, 3) for line in lines]

    assert rates(**{"optim.schedule": "constant", "optim.warmup_steps": "2"}) == [0.5, 1, 1, 1, 1]
    assert rates(**{"optim.schedule": "linear", "optim.warmup_steps": "0"}) == [
        1,
        0.8,
        0.6,
        0.4,
        0.2,
    ]
    assert rates(**{"optim.warmup_steps_ratio": "0.4"})[:3] == [0.5, 1, 1]
    assert rates(**{"optim.lr": "2e-3", "optim.warmup_steps": "1"})[0] == 2


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("optim.weight_decay", "0.9"),
        ("optim.clip_grad_norm", "1e-7"),
        ("optim.betas", "[0.5, 0.5]"),
        ("optim.eps", "1.0"),
        ("trainer.seed", "7"),
        ("model.lora_dropout", "0.5"),
        ("model.lora_alpha", "64"),
        ("data.shuffle", "false"),
    ],
)
def test_what_changes_the_weights(setting: str, value: str, ran: Train) -> None:
    """Each of these leads to another adapter, and the same value to the same one."""
    settings = {"trainer.max_steps": "2", "optim.warmup_steps": "0"}
    plain, changed, again = ran(**settings), ran(**settings, **{setting: value}), ran(**settings)
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    assert torch.equal(plain.adapter[key], again.adapter[key])
    assert not torch.equal(plain.adapter[key], changed.adapter[key])


def test_lora_shape(ran: Train) -> None:
    made = ran(
        **{
            "model.lora_rank": "2",
            "model.target_modules": "q_proj,v_proj",
            "trainer.max_steps": "1",
        }
    )
    config = json.loads((made.run.model / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 4)  # alpha is twice the rank by default
    assert {name.split(".")[-3] for name in made.adapter} == {"q_proj", "v_proj"}


def test_targets_that_match_nothing(ran: Train) -> None:
    with pytest.raises(UsageError, match="`qproj` match no layer") as caught:
        ran(**{"model.target_modules": "qproj"})
    assert "q_proj" in caught.value.hint


def test_checkpoints(ran: Train) -> None:
    settings = {"trainer.max_steps": "7", "trainer.save_interval": "2"}
    assert ran(**settings, **{"trainer.keep_checkpoints": "9"}).checkpoints == [2, 4, 6, 7]
    # 6 ends an epoch and is validated; it is the best until 7, the last, is better
    assert ran(**settings, **{"trainer.keep_checkpoints": "1"}).checkpoints == [7]


def test_the_best_checkpoint_outlives_newer_ones(ran: Train) -> None:
    settings = {
        "trainer.max_steps": "8",
        "trainer.save_interval": "1",
        "trainer.keep_checkpoints": "1",
    }
    worse = {"optim.lr": "300", "optim.warmup_steps": "8"}  # ever higher, far too high at last
    made = ran(**settings, **worse, **{"trainer.eval_interval": "1"})
    losses = {line["step"]: line["val/loss"] for line in made.lines}
    best = min(losses, key=lambda step: losses[step])
    assert best < 8, "a rate this high must make the model worse"
    assert made.checkpoints == [best, 8]


def test_validation_interval(ran: Train) -> None:
    made = ran(**{"trainer.max_steps": "5", "trainer.eval_interval": "2"})
    assert [line["step"] for line in made.lines if "val/loss" in line] == [2, 4, 5]


def test_loggers(ran: Train, capsys: pytest.CaptureFixture[str]) -> None:
    made = ran(**{"trainer.max_steps": "3", "trainer.logger": "jsonl"})
    assert "step 3 |" not in capsys.readouterr().out
    assert not made.run.tensorboard.exists()
    settings = {"trainer.max_steps": "3", "trainer.log_interval": "2"}
    made = ran(**settings, **{"trainer.logger": "console,tensorboard"})
    shown = [line.split(" |")[0] for line in capsys.readouterr().out.splitlines() if "| lr" in line]
    assert shown == ["step 2", "step 3"]
    assert list(made.run.tensorboard.iterdir())
    assert len(made.lines) == 3  # always written


def test_which_turns_are_trained(ran: Train, tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "One is the first."},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "Two."},
    ]
    talk = tmp_path / "talk.jsonl"
    talk.write_text(json.dumps({"talk": turns}) + "\n")
    base = {"data.train_files": str(talk), "data.messages_key": "talk", "trainer.max_steps": "1"}
    last, answers, everything = (
        ran(**base, **{"data.train_on": which}).counts["trained"]
        for which in ("last", "assistant", "all")
    )
    assert 0 < last < answers < everything


def test_names_of_fields(ran: Train, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"ask": "One?", "say": "Two."}\n')
    settings = {"data.prompt_key": "ask", "data.response_key": "say"}
    settings |= {"data.train_files": str(rows), "data.val_files": str(rows)}
    assert ran(**settings, **{"trainer.max_steps": "1"}).counts["kept"] == 1


def test_longer_samples(ran: Train, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    long = {"prompt": "Tell me.", "response": "word " * 100}
    short = {"prompt": "One?", "response": "Two."}
    rows.write_text("".join(json.dumps(row) + "\n" for row in (long, short)))
    base = {"data.train_files": str(rows), "data.max_length": "64", "trainer.max_steps": "1"}
    cut = ran(**base).counts
    assert (cut["kept"], cut["cut"]) == (2, 1)
    dropped = ran(**base, **{"data.overlong": "drop"}).counts
    assert (dropped["kept"], sum(dropped["dropped"].values())) == (1, 1)
    whole = ran(**base, **{"data.overlong": "keep"}).counts
    assert (whole["kept"], whole["cut"]) == (2, 0)
    assert whole["tokens"] > cut["tokens"]
    with pytest.raises(DataError) as caught:
        ran(**base, **{"data.overlong": "error"})
    assert [(f.code, f.row, f.line) for f in caught.value.findings] == [("PTC401", 1, 1)]


def test_templates(ran: Train, tmp_path: Path) -> None:
    base = {"trainer.max_steps": "1"}
    made = ran(**base, **{"data.template": "plain"})
    assert "im_start" not in (made.run.model / "chat_template.jinja").read_text()
    endless = tmp_path / "endless.jinja"
    endless.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    with pytest.raises(DataError) as caught:
        ran(**base, **{"data.template": str(endless)})
    assert {finding.code for finding in caught.value.findings} == {"PTC403"}
    ended = ran(**base, **{"data.template": str(endless), "data.add_eos_token": "true"})
    without = ran(**base, **{"data.template": str(endless), "data.add_eos_token": "false"})
    assert ended.counts["trained"] - without.counts["trained"] == 48  # one a row


def test_weights_of_rows(ran: Train, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    records = [
        {"prompt": "One?", "response": "Two.", "metadata": {"w": 0}},
        {"prompt": "Say a lot.", "response": "a lot of words " * 9, "metadata": {"w": 1}},
    ]
    rows.write_text("".join(json.dumps(row) + "\n" for row in records))
    base = {"data.train_files": str(rows), "trainer.max_steps": "1", "data.packing": "false"}
    plain = ran(**base).lines[0]["train/tokens"]
    weighted = ran(**base, **{"data.weight_key": "w"}).lines[0]["train/tokens"]
    assert weighted > plain  # the long row twice, the short one never
    with pytest.raises(DataError, match=r"metadata\.x"):
        ran(**base, **{"data.weight_key": "x"})


def test_compute_type(ran: Train) -> None:
    made = ran(**{"model.dtype": "bfloat16", "trainer.max_steps": "1"})
    assert {tensor.dtype for tensor in made.adapter.values()} == {torch.bfloat16}


def test_kernels_that_need_a_gpu(ran: Train, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"`model\.attention: varlen` needs a GPU"):
        ran(**{"model.attention": "varlen"})
    with pytest.raises(UsageError, match=r"`model\.compile` needs a GPU"):
        ran(**{"model.compile": "true"})
    ran(**{"model.use_liger": "true", "trainer.max_steps": "1"})
    assert "Liger's kernels need a GPU" in capsys.readouterr().out


def test_deterministic_kernels(ran: Train) -> None:
    ran(**{"trainer.deterministic": "true", "trainer.max_steps": "1"})
    assert torch.are_deterministic_algorithms_enabled()


def test_whole_weights_beside_checkpoints(ran: Train) -> None:
    made = ran(**{"trainer.save_full_state_dict": "true", "trainer.max_steps": "1"})
    full = load_file(made.run.checkpoints / "step_00000001" / "full.safetensors")
    assert len(full) == len(made.adapter)


def test_kind_must_be_that_of_the_method(ran: Train) -> None:
    with pytest.raises(UsageError, match=r"`data\.kind` is `preference`"):
        ran(**{"data.kind": "preference"})
