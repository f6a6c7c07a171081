from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from posttrain_cli.data.preprocess import preprocess
from posttrain_cli.data.reader import read_rows
from posttrain_cli.data.records import Keys, conversation
from posttrain_cli.data.render import Policy, Rendered, render_conversation
from posttrain_cli.data.request import Request
from posttrain_cli.data.tokenizer import load_tokenizer
from posttrain_cli.errors import DataError

LONG = " ".join(f"word{n}" for n in range(200))
ROWS: list[dict[str, Any]] = [
    {"prompt": "Say hello.", "response": "Hello there."},
    {"prompt": "Say much.", "response": LONG},
    {"prompt": LONG, "response": "Short."},
    {"prompt": "Say bye.", "response": "Bye."},
]


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Callable[..., dict[str, Any]]:
    def call(rows: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
        source = tmp_path / "in.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        defaults: dict[str, Any] = {"out": tmp_path / "out.jsonl", "tokenizer": tiny_model}
        return preprocess(Request(inputs=(str(source),), overwrite=True, **{**defaults, **options}))

    return call


def read(path: Path) -> list[dict[str, Any]]:
    return [row.record for row in read_rows(str(path)) if row.record is not None]


def rendered(tiny_model: Path, record: dict[str, Any], **policy: Any) -> Rendered:
    tokenizer = load_tokenizer(tiny_model)
    return render_conversation(conversation(record, Keys()), tokenizer, Policy(**policy))


def test_token_statistics_come_from_the_render_function(
    tmp_path: Path, tiny_model: Path, run: Callable[..., Any]
) -> None:
    report = run(ROWS, max_tokens=64)
    lengths = [rendered(tiny_model, row, max_length=None).length for row in ROWS]
    assert report["tokens"]["total"] == sum(lengths)
    assert report["tokens"]["longest"] == max(lengths)
    assert report["tokens"]["trained"] == sum(
        rendered(tiny_model, row, max_length=None).trained for row in ROWS
    )
    assert report["warnings"]["PTC401"]["rows"] == 2
    assert read(tmp_path / "out.jsonl") == ROWS


def test_longer_rows_are_dropped_and_counted(tmp_path: Path, run: Callable[..., Any]) -> None:
    report = run(ROWS, max_tokens=64, overlong="drop")
    assert report["dropped_by"]["PTC401"]["rows"] == 2
    assert read(tmp_path / "out.jsonl") == [ROWS[0], ROWS[3]]


def test_longer_rows_can_be_errors(run: Callable[..., Any]) -> None:
    with pytest.raises(DataError, match="2 of 4 rows cannot be used") as caught:
        run(ROWS, max_tokens=64, overlong="error")
    assert [finding.code for finding in caught.value.findings] == ["PTC401", "PTC401"]
    assert "more than the limit of 64" in caught.value.findings[0].message


def test_answers_are_cut_to_the_longest_beginning_that_fits(
    tmp_path: Path, tiny_model: Path, run: Callable[..., Any]
) -> None:
    report = run(ROWS, max_tokens=64, overlong="truncate")
    assert report["changed"]["answer cut at the token limit"]["rows"] == 1
    assert report["dropped_by"]["PTC402"]["rows"] == 1
    hello, cut, bye = read(tmp_path / "out.jsonl")
    assert (hello, bye) == (ROWS[0], ROWS[3])
    assert cut["metadata"] == {"truncated": True}
    assert LONG.startswith(cut["response"])
    assert rendered(tiny_model, cut, max_length=None).length <= 64
    more = {**cut, "response": LONG[: len(cut["response"]) + 1]}
    assert rendered(tiny_model, more, max_length=None).length > 64


def test_pairs_are_cut_on_both_sides(tmp_path: Path, run: Callable[..., Any]) -> None:
    pair = {"prompt": "p", "chosen": "x " + LONG, "rejected": "y " + LONG}
    run([pair], max_tokens=48, overlong="truncate")
    (cut,) = read(tmp_path / "out.jsonl")
    assert pair["chosen"].startswith(cut["chosen"])
    assert pair["rejected"].startswith(cut["rejected"])
    assert max(len(cut["chosen"]), len(cut["rejected"])) < 200


def test_conversations_lose_turns_from_the_end(tmp_path: Path, run: Callable[..., Any]) -> None:
    turns = [
        {"role": "user", "content": "Say hello."},
        {"role": "assistant", "content": "Hello there."},
        {"role": "user", "content": LONG},
        {"role": "assistant", "content": "Short."},
    ]
    run([{"messages": turns}], max_tokens=64, overlong="truncate")
    assert read(tmp_path / "out.jsonl")[0]["messages"] == turns[:2]


def test_prompt_rows_are_measured_as_the_model_will_see_them(
    tmp_path: Path, run: Callable[..., Any]
) -> None:
    rows = [{"prompt": "short", "answer": "1"}, {"prompt": LONG, "answer": "2"}]
    report = run(rows, kind="prompt", max_tokens=64, overlong="drop")
    assert report["dropped_by"]["PTC401"]["rows"] == 1
    assert read(tmp_path / "out.jsonl") == rows[:1]


def test_rendered_text_is_what_the_template_prints(
    tmp_path: Path, tiny_model: Path, run: Callable[..., Any]
) -> None:
    run(ROWS[:1], template="chatml")
    (row,) = read(tmp_path / "out.jsonl")
    tokenizer = load_tokenizer(tiny_model, "chatml")
    turns = conversation(ROWS[0], Keys())
    assert row["prompt"] + row["response"] == tokenizer.render(turns, generation_prompt=False)
    assert row["prompt"] == "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n"
    pair = {"prompt": "p", "chosen": "a", "rejected": "b", "metadata": {"k": 1}}
    run([pair], template="chatml")
    (row,) = read(tmp_path / "out.jsonl")
    assert (row["chosen"], row["rejected"]) == ("a<|im_end|>\n", "b<|im_end|>\n")
    assert row["metadata"] == {"k": 1}
    run([{"prompt": "p", "answer": "1"}], kind="prompt", template="chatml")
    (row,) = read(tmp_path / "out.jsonl")
    assert row["prompt"].endswith("<|im_start|>assistant\n")
    assert row["answer"] == "1"


def test_an_end_token_is_added_where_the_template_has_none(
    tmp_path: Path, tiny_model: Path, run: Callable[..., Any]
) -> None:
    template = tmp_path / "bare.jinja"
    template.write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    end = load_tokenizer(tiny_model).tokens["eos_token"]
    run(ROWS[:1], template=str(template), add_eos=True)
    (row,) = read(tmp_path / "out.jsonl")
    assert row == {"prompt": "[user]Say hello.[assistant]", "response": "Hello there." + end}
    with pytest.raises(DataError) as caught:
        run(ROWS[:1], template=str(template))
    assert caught.value.findings[0].code == "PTC403"


@pytest.mark.parametrize("name", ["ids.jsonl", "ids.parquet"])
def test_token_ids_are_those_of_training(
    tmp_path: Path, tiny_model: Path, run: Callable[..., Any], name: str
) -> None:
    report = run(ROWS, tokenize=True, max_tokens=64, out=tmp_path / name)
    assert report["dropped_by"]["PTC402"]["rows"] == 1
    found = read(tmp_path / name)
    expected = [rendered(tiny_model, row, max_length=64) for row in (ROWS[0], ROWS[1], ROWS[3])]
    assert [row["input_ids"] for row in found] == [r.ids for r in expected]
    assert [[bool(m) for m in row["loss_mask"]] for row in found] == [r.mask for r in expected]
    assert [row["lengths"] for row in found] == [[len(r.ids)] for r in expected]
    assert len(found[1]["input_ids"]) == 64
    assert report["tokens"]["trained"] == sum(r.trained for r in expected)


def test_packs_hold_every_sample_once_and_no_more_than_fits(
    tmp_path: Path, tiny_model: Path, run: Callable[..., Any]
) -> None:
    rows = [{"prompt": f"q {n}", "response": "word " * (n % 23 + 1)} for n in range(100)]
    report = run(rows, tokenize=True, pack=128, out=tmp_path / "packs.parquet")
    packs = read(tmp_path / "packs.parquet")
    assert report["outputs"][0]["rows"] == len(packs) < 50
    samples = []
    for pack in packs:
        assert len(pack["input_ids"]) == len(pack["loss_mask"]) == sum(pack["lengths"]) <= 128
        start = 0
        for length in pack["lengths"]:
            samples.append(tuple(pack["input_ids"][start : start + length]))
            start += length
    assert sorted(samples) == sorted(
        tuple(rendered(tiny_model, row, max_length=None).ids) for row in rows
    )
    schema = pq.read_schema(tmp_path / "packs.parquet")
    assert str(schema.field("input_ids").type) == "list<element: int32>"
    assert schema.metadata[b"ptc.tokenizer"].decode() == load_tokenizer(tiny_model).sha256


def test_processes_and_splits_work_on_token_ids(tmp_path: Path, run: Callable[..., Any]) -> None:
    rows = [{"prompt": f"q {n}", "response": f"answer {n}"} for n in range(700)]
    written = []
    for workers in (1, 2):
        out, val = tmp_path / f"{workers}.parquet", tmp_path / f"{workers}-val.parquet"
        run(rows, tokenize=True, pack=64, out=out, val_out=val, val_rows=20, workers=workers)
        written.append((out.read_bytes(), val.read_bytes()))
    assert written[0] == written[1]
