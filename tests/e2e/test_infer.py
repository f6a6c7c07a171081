from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from posttrain_cli.cli import app
from posttrain_cli.data.render import Policy, render_conversation
from posttrain_cli.data.tokenizer import load_tokenizer
from posttrain_cli.rollout.session import open_session
from posttrain_cli.runs.resolve import resolve_model

ASKED = [{"role": "user", "content": "What is 3 plus 4?"}]


def answer(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The greedy answer of `ptc infer`, which must warn of nothing."""
    capsys.readouterr()
    code = app.run(
        ["infer", *map(str, arguments), "--prompt", "What is 3 plus 4?", "--json",
         "--temperature", "0", "--max-new-tokens", "12", "--gpus", "0"]
    )  # fmt: skip
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert "warning" not in captured.err
    return str(json.loads(captured.out)["response"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [("--lora-rank", "8"), ()], ids=["lora", "full"])
def test_run_checkpoint_and_artefact_answer_alike_and_not_as_the_base(
    ptc: Callable[..., object],
    capsys: pytest.CaptureFixture[str],
    tiny_model: Path,
    sft_train: Path,
    tmp_path: Path,
    kind: tuple[str, ...],
) -> None:
    base, run = shutil.copytree(tiny_model, tmp_path / "base"), tmp_path / "run"
    trained = ptc(
        "sft", "--model", base, "--train", sft_train, "--output-dir", run, "--gpus", "0", *kind,
        "--template", "plain", "--lr", "5e-2", "--max-steps", "4", "--batch-size", "2",
        "--max-length", "256", "--save-interval", "2",
    )  # fmt: skip
    assert trained.code == 0, trained.stderr  # type: ignore[attr-defined]
    checkpoint = run / "checkpoints" / "step_00000004"
    expected = answer(capsys, "--model", run)
    assert answer(capsys, "--model", run / "model") == expected
    assert answer(capsys, "--model", checkpoint) == expected
    assert answer(capsys, "--model", base) != expected

    rendered = render_conversation(
        [*ASKED, {"role": "assistant", "content": "7"}], load_tokenizer(base, "plain"), Policy()
    )
    prompt = rendered.ids[: rendered.mask.index(True)]
    for name in (run, checkpoint):
        session = open_session(resolve_model(name), raw=False, device="cpu")
        assert session.prompt_ids(ASKED) == prompt
        assert session.tokenizer.end_ids == load_tokenizer(base).end_ids
        assert list(session.changes()) == []

    moved = tmp_path / "elsewhere" / "run"
    moved.parent.mkdir()
    shutil.move(run, moved)
    assert answer(capsys, "--model", moved) == expected
    if kind:
        base.rename(tmp_path / "elsewhere" / "base")
        code = app.run(["infer", "--model", str(moved), "--prompt", "a", "--gpus", "0"])
        assert code == 2
        assert f"it is stored as `{base}`" in capsys.readouterr().err
        below = ("--base", tmp_path / "elsewhere" / "base")
        assert answer(capsys, "--model", moved, *below) == expected
        assert (
            answer(capsys, "--model", moved / "checkpoints" / checkpoint.name, *below) == expected
        )
