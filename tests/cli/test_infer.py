from __future__ import annotations

import io
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain_cli.cli import app
from posttrain_cli.rewards.math import share_interval

GREEDY = ["--temperature", "0", "--max-new-tokens", "6", "--gpus", "0"]
WARM = ["--max-new-tokens", "6", "--gpus", "0"]

QUESTIONS = [{"prompt": f"What is {row} + {row * 7 % 5}?" + " Why?" * (row % 4), "id": row}
             for row in range(21)]  # fmt: skip


@pytest.fixture
def infer(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run `ptc infer` in this process: the imports are paid once."""

    def run(*args: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        code = app.run(["infer", *map(str, args)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    return write(tmp_path / "questions.jsonl", QUESTIONS)


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_prompts_give_text_or_json_lines_on_stdout_and_the_rest_on_stderr(
    infer: Callable[..., tuple[int, str, str]], tiny_model: Path
) -> None:
    code, out, err = infer("--model", tiny_model, "--prompt", "Hello", *WARM)
    assert code == 0
    assert out.endswith("\n")
    assert err == "engine hf (the one that is here) on the CPU\n"
    code, lines, _ = infer(
        "--model", tiny_model, "--prompt", "Hello", "--prompt", "Who?", "--n", "2", "--json", *WARM
    )
    records = [json.loads(line) for line in lines.splitlines()]
    assert [record["prompt"] for record in records] == ["Hello", "Who?"]
    assert all(record["responses"][0] == record["response"] for record in records)
    assert all(len(set(record["responses"])) == 2 for record in records)
    assert out == records[0]["response"] + "\n"
    code, both, _ = infer(
        "--model", tiny_model, "--prompt", "Hello", "--prompt", "Who?", "--n", "2", *WARM
    )
    expected = [f"> {r['prompt']}\n" + "\n---\n".join(r["responses"]) + "\n" for r in records]
    assert both == "".join(expected)


def test_a_file_keeps_order_and_fields_whatever_the_batch(
    infer: Callable[..., tuple[int, str, str]], tiny_model: Path, questions: Path, tmp_path: Path
) -> None:
    outs = []
    for size in ("1", "4", "64"):
        out = tmp_path / f"out{size}.jsonl"
        code, stdout, err = infer(
            "--model", tiny_model, "--input", questions, "--out", out, "--batch-size", size, *WARM
        )
        assert (code, stdout) == (0, "")
        assert "21 answers" in err
        outs.append(out.read_bytes())
    assert outs[0] == outs[1] == outs[2]
    records = read(out)
    assert [{k: r[k] for k in ("prompt", "id")} for r in records] == QUESTIONS
    assert all(list(record) == ["prompt", "id", "response"] for record in records)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [questions.name, "out1.jsonl", "out4.jsonl", "out64.jsonl"]
    )


def test_the_prompt_is_rendered_as_in_training(
    infer: Callable[..., tuple[int, str, str]], tiny_model: Path
) -> None:
    from posttrain_cli.data.render import Policy, render_conversation
    from posttrain_cli.data.tokenizer import load_tokenizer
    from posttrain_cli.rollout.session import open_session
    from posttrain_cli.runs.resolve import resolve_model

    turns = [{"role": "user", "content": "Hi <|im_end|> there"}]
    session = open_session(resolve_model(tiny_model), raw=False, device="cpu")
    trained = render_conversation(
        [*turns, {"role": "assistant", "content": "Yes"}], load_tokenizer(tiny_model), Policy()
    )
    first = trained.mask.index(True)
    assert session.prompt_ids(turns) == trained.ids[:first]
    raw = open_session(resolve_model(tiny_model), raw=True, device="cpu")
    assert (
        raw.prompt_ids([{"role": "user", "content": "Hello"}]) == raw.tokenizer.encode(["Hello"])[0]
    )


def test_contract_rows_keep_their_answer_as_reference(
    infer: Callable[..., tuple[int, str, str]], tiny_model: Path, tmp_path: Path
) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b 5"}]
    source = write(
        tmp_path / "in.jsonl",
        [{"prompt": "p", "response": "r"}, {"messages": turns}, {"question": "q", "answer": "3"}],
    )
    out = tmp_path / "out.jsonl"
    assert infer("--model", tiny_model, "--input", source, "--out", out, *GREEDY)[0] == 0
    flat, chat, alias = read(out)
    assert (flat["prompt"], flat["reference"]) == ("p", "r")
    assert chat["messages"] == turns
    assert (alias["question"], alias["answer"]) == ("q", "3")
    assert all("response" in record for record in (flat, chat, alias))
    write(source, [{"prompt": "p", "response": "r", "reference": "x"}])
    code, _, err = infer("--model", tiny_model, "--input", source, "--out", out, "--overwrite")
    assert code == 2
    assert "both `response` and `reference`" in err


def test_stdin_to_stdout(
    infer: Callable[..., tuple[int, str, str]],
    tiny_model: Path,
    questions: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out.jsonl"
    infer("--model", tiny_model, "--input", questions, "--out", out, *GREEDY)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(questions.read_bytes())))
    code, stdout, _ = infer("--model", tiny_model, "--input", "-", *GREEDY)
    assert code == 0
    assert stdout.encode() == out.read_bytes()
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 0 + 0?"))
    code, stdout, _ = infer("--model", tiny_model, "--prompt", "-", *GREEDY)
    assert stdout == read(out)[0]["response"] + "\n"


def test_json_gives_one_summary_when_the_answers_go_to_a_file(
    infer: Callable[..., tuple[int, str, str]], tiny_model: Path, questions: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    _, stdout, _ = infer(
        "--model", tiny_model, "--input", questions, "--out", out, "--json", *GREEDY
    )
    summary = json.loads(stdout)
    assert (summary["rows"], summary["resumed"], summary["out"]) == (21, 0, str(out))
    assert 0 < summary["tokens"] <= 21 * 6
    assert 0 <= summary["unfinished"] <= 1
    assert summary["tokens_per_second"] > 0


def test_math_reward_scores_each_answer_and_the_whole(
    infer: Callable[..., tuple[int, str, str]],
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from posttrain_cli.rollout.session import Session

    replies = iter(["so 72", "73", "none", "-5", "1", "2", "72", "72", "3", "4"])
    monkeypatch.setattr(Session, "text", lambda self, completion: next(replies))
    answers = ["#### 72", "#### 72", "#### 72", "it is -5", "no number"]
    source = write(
        tmp_path / "in.jsonl", [{"question": f"q{i}", "answer": a} for i, a in enumerate(answers)]
    )
    out = tmp_path / "out.jsonl"
    arguments = ("--model", tiny_model, "--input", source, "--reward", "math", *WARM)
    code, stdout, _ = infer(*arguments, "--out", out, "--json")
    assert code == 0
    assert [record["reward"] for record in read(out)] == [1.0, 0.0, 0.0, 1.0, None]
    low, high = share_interval(2, 4)
    assert json.loads(stdout)["reward"] == {
        "mean": 0.5, "low": low, "high": high, "rows": 4, "unscored": 1
    }  # fmt: skip
    replies = iter(["72", "1", "72", "72", "3", "4", "5", "-5", "7", "8"])
    monkeypatch.setattr(Session, "text", lambda self, completion: next(replies))
    code, _, err = infer(*arguments, "--n", "2", "--out", out, "--overwrite")
    records = read(out)
    assert [record["reward"] for record in records] == [0.5, 1.0, 0.0, 0.5, None]
    assert records[0]["rewards"] == [1.0, 0.0]
    assert "math: 50.0 % right (95 % interval" in err
    assert "4 questions, 1 without a reference" in err


def test_compare_asks_two_models_the_same(
    infer: Callable[..., tuple[int, str, str]],
    tiny_model: Path,
    tiny_factory: Callable[..., Path],
    questions: Path,
    tmp_path: Path,
) -> None:
    out = tmp_path / "out.jsonl"
    other = tiny_factory(seed=5)
    common = ("--input", questions, "--out", out, "--overwrite", *WARM)
    assert infer("--model", tiny_model, "--compare", tiny_model, *common)[0] == 0
    assert all(r["response"] == r["compare_response"] for r in read(out))
    infer("--model", tiny_model, "--compare", other, *common)
    assert any(r["response"] != r["compare_response"] for r in read(out))
    _, stdout, _ = infer("--model", tiny_model, "--compare", other, "--prompt", "Hello", *WARM)
    assert f"── {tiny_model}\n" in stdout
    assert f"── {other}\n" in stdout


@pytest.mark.slow
def test_killed_again_and_again_it_ends_in_the_file_of_an_unbroken_run(
    infer: Callable[..., tuple[int, str, str]], tiny_model: Path, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": f"Say {n}", "id": n} for n in range(150)])
    out, part = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"
    arguments = ["--model", str(tiny_model), "--input", str(source), "--batch-size", "4",
                 "--max-new-tokens", "24", "--gpus", "0"]  # fmt: skip
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-m", "posttrain_cli", "infer", *arguments, "--out", str(out)],
            stderr=subprocess.DEVNULL,
        )
        before = part.stat().st_size if part.exists() else 0
        deadline = time.monotonic() + 60
        while (part.stat().st_size if part.exists() else 0) < before + 300:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert not out.exists()
    code, _, err = infer(*arguments, "--temperature", "0.1", "--out", out)
    assert code == 2
    assert "holds the beginning of other answers: `sampling` differed" in err
    code, _, err = infer(*arguments, "--out", out)
    assert code == 0
    assert "going on after" in err
    whole = tmp_path / "whole.jsonl"
    infer(*arguments, "--out", whole)
    assert out.read_bytes() == whole.read_bytes()
    assert [record["id"] for record in read(out)] == list(range(150))


def test_an_existing_output_needs_overwrite(
    infer: Callable[..., tuple[int, str, str]], tiny_model: Path, questions: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("mine")
    arguments = ("--model", tiny_model, "--input", questions, "--out", out, *GREEDY)
    code, _, err = infer(*arguments)
    assert (code, out.read_text()) == (2, "mine")
    assert f"`{out}` exists already" in err
    assert infer(*arguments, "--overwrite")[0] == 0
    assert len(read(out)) == 21


def test_rows_that_cannot_be_asked_are_all_named_and_none_is_answered(
    infer: Callable[..., tuple[int, str, str]], tiny_model: Path, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "ok"}\n\n{"prompt": 3}\n{"propmt": "x"}\n{bad\n{"prompt": " "}\n')
    with source.open("a") as stream:
        stream.write(json.dumps({"prompt": "long " * 5000}) + "\n")
    out = tmp_path / "out.jsonl"
    code, _, err = infer("--model", tiny_model, "--input", source, "--out", out, *GREEDY)
    assert code == 1
    for expected in (":3: PTC202", ":4: PTC201", ":5:2: PTC103", ":6: PTC204", ":7: PTC401"):
        assert f"{source}{expected}" in err
    assert "tokens, the model's context is 4,096" in err
    assert f"5 records of `{source}` cannot be answered, none was" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]
    source.write_text("")
    code, _, err = infer("--model", tiny_model, "--input", source, "--out", out, *GREEDY)
    assert code == 1


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ((), ["nothing to answer: there is no prompt, and no terminal for a chat"]),
        (
            ("--prompt", "a", "--input", "b", "--raw", "--system", "c", "--top-p", "0"),
            [
                "`--prompt` and `--input` cannot go together",
                "`--raw` and `--system` cannot go together",
                "`--top-p` and 0 cannot go together",
            ],
        ),
        (
            ("--prompt", "a", "--out", "x.jsonl", "--reward", "math"),
            [
                "`--out` without `--input` cannot go together",
                "`--reward` without `--input` cannot go together",
            ],
        ),
        (("--prompt", "a", "--engine", "vllm"), ["the engine `vllm` needs the package `vllm`"]),
        (("--prompt", "a", "--gpus", "3"), ["3 GPUs asked for, 0 found here"]),
        (("--prompt", "a", "--gpus", "all"), ["`--gpus all` is neither a number nor `auto`"]),
        (("--input", "gone.jsonl", "--out", "x.jsonl"), ["gone.jsonl"]),
        (("--prompt", ""), ["the prompt is empty"]),
        (("--prompt", "a", "--base", "/nowhere"), ["is a whole model, a base cannot be put"]),
        (("--prompt", "a", "--tmperature", "0"), ["unknown option `--tmperature`"]),
    ],
)
def test_mistakes_of_the_command_line_are_explained(
    infer: Callable[..., tuple[int, str, str]],
    tiny_model: Path,
    arguments: tuple[str, ...],
    messages: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.chdir(tmp_path)
    code, out, err = infer("--model", tiny_model, *arguments)
    assert (code, out) == (2, "")
    for message in messages:
        assert message in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_outputs_and_inputs_that_cannot_be_used_are_named(
    infer: Callable[..., tuple[int, str, str]], tiny_model: Path, questions: Path, tmp_path: Path
) -> None:
    code, _, err = infer(
        "--model", tiny_model, "--input", questions, "--out", tmp_path / "x.parquet", *GREEDY
    )
    assert code == 2
    assert "answers are JSON lines" in err
    shutil.copy(questions, tmp_path / "more.jsonl")
    code, _, err = infer("--model", tiny_model, "--input", f"{tmp_path}/*.jsonl", *GREEDY)
    assert code == 2
    assert "means 2 files, expected one" in err
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
    write(questions, [{"messages": turns[:3]}])
    code, _, err = infer("--model", tiny_model, "--input", questions, "--raw", *GREEDY)
    assert code == 1
    assert "a conversation cannot be sent raw" in err


def test_a_system_turn_goes_in_front_unless_the_record_brings_one() -> None:
    from posttrain_cli.data.questions import with_system

    user = [{"role": "user", "content": "a"}]
    own = [{"role": "system", "content": "mine"}, *user]
    assert with_system(user, "be kind") == [{"role": "system", "content": "be kind"}, *user]
    assert with_system(own, "be kind") == own
    assert with_system(user, "") == user


def test_chat_streams_obeys_and_saves(
    infer: Callable[..., tuple[int, str, str]], tiny_model: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "saved.jsonl"
    model = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 128}
    (model / "config.json").write_text(json.dumps(config))
    terminal = Terminal(["infer", "--model", str(model), *GREEDY, "--system", "Be kind"])
    terminal.expect("/quit ends")
    terminal.type("Hello there")
    terminal.expect("> ")
    for line, reply in [
        (f"/save {saved}", "saved to"),
        (f"/save {saved}", "not saved"),
        ("/save", "say where"),
        ("/what", "unknown command `/what`"),
        ("/reset", "forgotten"),
        (f"/save {tmp_path}/other", "nothing said yet"),
        ("/system Be brief", "system turn set"),
        ("long " * 200, "the model's context is 128; /reset starts anew"),
    ]:
        terminal.type(line)
        terminal.expect(reply)
    terminal.type("/quit")
    assert terminal.close() == 0
    (record,) = read(saved)
    assert [turn["role"] for turn in record["messages"]] == ["system", "user", "assistant"]
    assert record["messages"][1]["content"] == "Hello there"
    _, out, _ = infer(
        "--model", model, *GREEDY, "--system", "Be kind", "--prompt", "Hello there", "--json"
    )
    answer = json.loads(out)["response"]
    assert record["messages"][2]["content"] == answer
    assert answer in terminal.seen.replace("\r\n", "\n")


class Terminal:
    """A `ptc` process on a pseudo-terminal."""

    def __init__(self, arguments: list[str]) -> None:
        self.process, self.descriptor = pty.fork()
        if self.process == 0:
            os.execv(sys.executable, [sys.executable, "-m", "posttrain_cli", *arguments])
        self.seen = ""
        self.read = 0

    def type(self, line: str) -> None:
        os.write(self.descriptor, line.encode() + b"\n")

    def expect(self, text: str) -> None:
        deadline = time.monotonic() + 60
        while text not in self.seen[self.read :]:
            assert time.monotonic() < deadline, self.seen
            if select.select([self.descriptor], [], [], 0.2)[0]:
                self.seen += os.read(self.descriptor, 4096).decode(errors="replace")
        self.read = self.seen.index(text, self.read) + len(text)

    def close(self) -> int:
        deadline = time.monotonic() + 60
        while True:
            assert time.monotonic() < deadline, self.seen
            try:
                if not os.read(self.descriptor, 4096):
                    break
            except OSError:
                break
        _, status = os.waitpid(self.process, 0)
        os.close(self.descriptor)
        return os.waitstatus_to_exitcode(status)
