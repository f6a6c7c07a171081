from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from posttrain_cli.data.records import Refusal
from posttrain_cli.data.tokenizer import load_tokenizer
from posttrain_cli.errors import UsageError
from posttrain_cli.rollout.protocol import Request, Sampling
from posttrain_cli.rollout.session import Session, open_session
from posttrain_cli.runs.lineage import folder_identity
from posttrain_cli.runs.resolve import resolve_model

GREEDY = Sampling(max_new_tokens=3, temperature=0.0, top_p=1.0, top_k=0, n=1, seed=0)


def session(name: Path, *, raw: bool = False) -> Session:
    return open_session(resolve_model(name), raw=raw, device="cpu")


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Path:
    """A run of full training: its record, a checkpoint and its result."""
    base = shutil.copytree(tiny_model, tmp_path / "base")
    folder = tmp_path / "run"
    checkpoint = folder / "checkpoints" / "step_00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "MANIFEST.json").write_text("{}")
    (folder / "config.yaml").write_text(json.dumps({"model": {"partial_pretrain": str(base)}}))
    shutil.copytree(tiny_model, folder / "model")
    record = {
        "tokenizer": {"sha256": load_tokenizer(base).sha256},
        "result_tokenizer": {"sha256": load_tokenizer(folder / "model").sha256},
        "model": folder_identity(base),
    }
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def test_an_untouched_run_has_no_changes(run: Path) -> None:
    assert list(session(run).changes()) == []
    assert list(session(run / "checkpoints" / "step_00000001").changes()) == []


def test_a_changed_template_is_noticed_in_result_and_base(run: Path, tmp_path: Path) -> None:
    (run / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert list(session(run).changes()) == ["tokenizer or chat template"]
    (tmp_path / "base" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert list(session(run / "checkpoints" / "step_00000001").changes()) == [
        "tokenizer or chat template"
    ]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_another_base_is_noticed(run: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "base" / name
    path.write_bytes(path.read_bytes() + b"\n")
    checkpoint = session(run / "checkpoints" / "step_00000001")
    assert list(checkpoint.changes()) == [f"base model `{tmp_path / 'base'}`"]


@pytest.mark.parametrize(
    ("raw", "messages", "problem"),
    [
        (False, [{"role": "user", "content": "long " * 5000}], "PTC401: the prompt has"),
        (True, [{"role": "user", "content": "a"}] * 2, "PTC203: a conversation cannot be sent raw"),
        (True, [{"role": "user", "content": ""}], "PTC204: the prompt has no tokens"),
    ],
)
def test_prompts_that_cannot_be_asked(
    tiny_model: Path, raw: bool, messages: list[dict[str, Any]], problem: str
) -> None:
    with pytest.raises(Refusal) as caught:
        session(tiny_model, raw=raw).prompt_ids(messages)
    assert caught.value.message.startswith(problem)
    assert caught.value.hint


def test_a_template_that_refuses_turns_is_a_refusal_of_the_record(
    tmp_path: Path, tiny_model: Path
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('only one turn') }}")
    with pytest.raises(Refusal, match=r"PTC205: .*only one turn"):
        session(folder).prompt_ids([{"role": "user", "content": "a"}])


def test_a_gpu_that_torch_cannot_use_is_no_traceback(tiny_model: Path) -> None:
    on_gpu = open_session(resolve_model(tiny_model), raw=False, device="cuda")
    with pytest.raises(UsageError, match="this torch cannot use it"):
        _ = on_gpu.engine


def test_streamed_text_waits_for_whole_characters(tiny_model: Path) -> None:
    talk = session(tiny_model)
    (ids,) = talk.tokenizer.encode(["né 数 😀"])

    class Echo:
        def stream(self, request: Request, sampling: Sampling) -> Any:
            return iter([*ids, *talk.tokenizer.end_ids])

    talk.__dict__["engine"] = Echo()
    pieces = list(talk.stream(0, [5], GREEDY))
    assert "".join(pieces) == "né 数 😀"
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert len(pieces) > 2
