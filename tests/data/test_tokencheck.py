from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from posttrain_cli.data.contract import Contract
from posttrain_cli.data.records import Keys, conversation
from posttrain_cli.data.render import render_conversations
from posttrain_cli.data.tokencheck import TokenChecks, check_tokens
from posttrain_cli.data.validate import ValidateOptions, validate
from posttrain_cli.errors import UsageError

SFT = Contract("sft")


def codes(records: list[dict], checks: TokenChecks, contract: Contract = SFT) -> list[list[str]]:
    found = check_tokens(records, contract, checks)
    return [[problem.code for problem in problems] for problems in found]


def with_template(model: Path, folder: Path, template: str) -> str:
    shutil.copytree(model, folder)
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    settings |= {"chat_template": template, "bos_token": "<|endoftext|>"}
    config.write_text(json.dumps(settings))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return str(folder)


def test_rows_over_the_limit_and_rows_without_an_answer_left(tiny_model: Path) -> None:
    checks = TokenChecks(str(tiny_model), max_tokens=64)
    records = [
        {"prompt": "short", "response": "fine"},
        {"prompt": "short", "response": "long " * 100},
        {"prompt": "long " * 100, "response": "cut away"},
    ]
    assert codes(records, checks) == [[], ["PTC401"], ["PTC401", "PTC402"]]
    problems = list(check_tokens(records, SFT, checks))
    assert problems[1][0].path == ("response",)
    assert "more than the limit of 64" in problems[1][0].message
    assert all(problem.hint for found in problems for problem in found)


def test_the_verdict_is_that_of_encoding_every_row(tiny_model: Path) -> None:
    random.seed(3)
    words = ["a", "hello", "的", "😀", "<|im_end|>", "\n\n", "  ", "def f():", "x" * 40, "<think>"]
    records = []
    for n in range(1, 300, 3):
        text = " ".join(random.choices(words[: 10 if n % 2 else 5], k=random.randrange(1, 40)))
        records.append({"prompt": f"q {text} q", "response": "r" * n})
    checks = TokenChecks(str(tiny_model), max_tokens=200)
    turns = [conversation(record, Keys()) for record in records]
    rendered = render_conversations(turns, checks.tokenizer, checks.policy)
    expected = [[code for code, _ in sample.problems] for sample in rendered]
    assert codes(records, checks) == expected
    assert 10 < sum(found == [] for found in expected) < 90
    bounds = [checks.bound(messages) for messages in turns]
    assert any(bound is not None and bound <= 200 for bound in bounds)
    for bound, sample in zip(bounds, rendered, strict=True):
        assert bound is None or sample.length <= bound


def test_short_rows_are_never_encoded(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = TokenChecks(str(tiny_model), max_tokens=300)
    short = {"prompt": "p", "response": "r"}
    assert codes([short], checks) == [[]]
    seen: list[int] = []
    monkeypatch.setattr(
        "posttrain_cli.data.tokencheck.render_conversations",
        lambda turns, *rest: seen.append(len(turns)) or render_conversations(turns, *rest),
    )
    assert codes([short] * 50 + [{"prompt": "p", "response": "r" * 900}], checks)[-1] == ["PTC401"]
    assert seen == [1]


def test_both_sides_of_a_pair_are_measured(tiny_model: Path) -> None:
    checks = TokenChecks(str(tiny_model), max_tokens=64)
    record = {"prompt": "p", "chosen": "c", "rejected": "long " * 100}
    (problems,) = check_tokens([record], Contract("preference"), checks)
    assert [(p.code, p.path) for p in problems] == [("PTC401", ("rejected",))]
    (problems,) = check_tokens([{"prompt": "long " * 100}], Contract("prompt"), checks)
    assert [(p.code, p.path) for p in problems] == [("PTC401", ("prompt",))]


def test_templates_that_cannot_be_trained_on(tiny_model: Path, tmp_path: Path) -> None:
    record = {"prompt": "p", "response": "r"}
    turns = [{"role": role, "content": f"<think>{role}</think>x"} for role in ("user", "assistant")]
    endless = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    checks = TokenChecks(with_template(tiny_model, tmp_path / "a", endless))
    assert codes([record], checks) == [["PTC403"]]
    rewriting = (
        "{% for m in messages %}{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
        "<|im_end|>{% endfor %}"
    )
    checks = TokenChecks(with_template(tiny_model, tmp_path / "b", rewriting))
    assert "PTC405" in codes([{"messages": turns * 2}], checks)[0]
    doubled = (
        "<|endoftext|><|endoftext|>{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    checks = TokenChecks(with_template(tiny_model, tmp_path / "d", doubled))
    assert codes([record], checks) == [["PTC404"]]
    refusing = "{{ raise_exception('no system turn') }}"
    checks = TokenChecks(with_template(tiny_model, tmp_path / "c", refusing))
    assert codes([record], checks) == [["PTC205"]]
    prompts = codes([{"prompt": "p"}], checks, Contract("prompt"))
    assert prompts == [["PTC205"]]


def test_rows_of_ids_and_rows_that_cannot_be_read_are_left_out(tiny_model: Path) -> None:
    checks = TokenChecks(str(tiny_model))
    assert codes([{"input_ids": [1]}, {"prompt": 1}], checks) == [[], []]


def test_validate_counts_tokens_and_marks_bad_rows(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [
        {"prompt": "p", "response": "r"},
        {"prompt": "long " * 100, "response": "cut"},
        {"prompt": "q", "response": "long " * 100},
        {"prompt": "x <|im_start|>", "response": " "},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ValidateOptions(tokenizer=str(tiny_model), max_tokens=64, workers=1)
    report = validate([str(path)], options)
    assert [(f.code, f.line, f.column) for f in report.findings] == [
        ("PTC401", 2, 1),
        ("PTC402", 2, 1),
        ("PTC401", 3, 1),
        ("PTC306", 4, 15),
        ("PTC204", 4, 42),
    ]
    assert report.files[0].bad_rows == 2
    tokens = report.stats["tokens"]
    assert (tokens["rows_over"], tokens["sampled_rows"], tokens["max_tokens"]) == (2, 2, 64)
    assert 0 < tokens["supervised_share"] < 1
    assert tokens["max"] > 64


def test_token_findings_keep_their_order_when_capped(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    long = json.dumps({"prompt": "p", "response": "long " * 100}) + "\n"
    path.write_text((long + "oops\n\n") * 30)
    everything = ValidateOptions(tokenizer=str(tiny_model), max_tokens=64, ignore=("PTC303",))
    full = validate([str(path)], everything)
    assert full.counts == {"PTC103": 30, "PTC106": 30, "PTC401": 30}
    for limit in (1, 20, 89):
        capped = ValidateOptions(
            tokenizer=str(tiny_model), max_tokens=64, ignore=("PTC303",), max_findings=limit
        )
        assert validate([str(path)], capped).findings == full.findings[:limit]


def test_a_missing_tokenizer_is_a_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "p", "response": "r"}\n')
    with pytest.raises(UsageError, match="no tokenizer at"):
        validate([str(path)], ValidateOptions(tokenizer=str(tmp_path / "none")))
