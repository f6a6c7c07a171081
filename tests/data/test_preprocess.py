from __future__ import annotations

import gzip
import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from posttrain_cli.data.clean import CONTROLS_REMOVED, SPACE_COLLAPSED
from posttrain_cli.data.preprocess import beside, preprocess
from posttrain_cli.data.reader import read_rows
from posttrain_cli.data.records import Keys
from posttrain_cli.data.refine import BOM_STRIPPED
from posttrain_cli.data.request import Request
from posttrain_cli.data.validate import ValidateOptions, validate
from posttrain_cli.diagnostics import CODES
from posttrain_cli.errors import DataError, UsageError

FIXTURES = Path(__file__).parent / "fixtures"


def lines(*records: Any) -> bytes:
    texts = (r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records)
    return "".join(text + "\n" for text in texts).encode()


def sft(number: int, **more: Any) -> dict[str, Any]:
    return {"prompt": f"question {number}", "response": f"answer {number}", **more}


def run(tmp_path: Path, content: bytes | None = None, **options: Any) -> dict[str, Any]:
    """Preprocess `content` (as in.jsonl) or `inputs` into out.jsonl; the report."""
    if content is not None:
        (tmp_path / "in.jsonl").write_bytes(content)
        options["inputs"] = (str(tmp_path / "in.jsonl"),)
    return preprocess(Request(**{"out": tmp_path / "out.jsonl", **options}))


def read(path: Path) -> list[dict[str, Any]]:
    return [row.record for row in read_rows(str(path)) if row.record is not None]


def dropped(report: dict[str, Any]) -> dict[str, int]:
    assert report["read"] == report["kept"] + report["dropped"]
    assert report["dropped"] == sum(entry["rows"] for entry in report["dropped_by"].values())
    return {reason: entry["rows"] for reason, entry in report["dropped_by"].items()}


@pytest.mark.parametrize("escaped", [True, False])
def test_every_control_character_is_found_whatever_the_level(tmp_path: Path, escaped: bool) -> None:
    texts = [f"a {chr(code)}\n b{number}" for number, code in enumerate([*range(32), 127])]
    rows = [sft(number, prompt=text) for number, text in enumerate(texts)]
    content = "".join(json.dumps(row, ensure_ascii=escaped) + "\n" for row in rows).encode()
    run(tmp_path, content, clean="article")
    found = [row["prompt"] for row in read(tmp_path / "out.jsonl")]
    assert found == [f"a b{number}" for number in range(33)]


def test_good_rows_pass_and_the_report_says_so(tmp_path: Path) -> None:
    content = lines(sft(1), sft(2, metadata={"k": 1}, other="x"), sft(3))
    report = run(tmp_path, content)
    assert read(tmp_path / "out.jsonl") == [sft(1), sft(2, metadata={"k": 1}), sft(3)]
    assert (report["read"], report["kept"], report["dropped"]) == (3, 3, 0)
    assert report["kind"] == "sft"
    assert report["inputs"] == [
        {
            "path": str(tmp_path / "in.jsonl"),
            "sha256": hashlib.sha256(content).hexdigest(),
            "rows": 3,
            "blank_lines": 0,
        }
    ]
    written = (tmp_path / "out.jsonl").read_bytes()
    assert report["outputs"] == [
        {
            "path": str(tmp_path / "out.jsonl"),
            "rows": 3,
            "bytes": len(written),
            "sha256": hashlib.sha256(written).hexdigest(),
        }
    ]
    assert report["fields_left_out"] == {"other": 1}
    assert json.loads(beside(tmp_path / "out.jsonl", "report.json").read_text()) == report
    assert not beside(tmp_path / "out.jsonl", "rejects.jsonl").exists()


def test_a_line_separator_inside_a_text_ends_no_row(tmp_path: Path) -> None:
    source = FIXTURES / "gsm8k.jsonl"
    report = run(tmp_path, inputs=(str(source),), preset="gsm8k")
    assert (report["read"], report["kept"]) == (5, 5)
    out = (tmp_path / "out.jsonl").read_bytes()
    assert out.count(b"\n") == 5
    assert "\u2028".encode() in out


def test_a_mark_and_blank_lines_are_counted_and_gone(tmp_path: Path) -> None:
    report = run(tmp_path, b"\xef\xbb\xbf" + lines(sft(1), "", "  ", sft(2)))
    assert report["changed"][BOM_STRIPPED]["rows"] == 1
    assert report["inputs"][0]["blank_lines"] == 2
    assert report["read"] == 2
    assert (tmp_path / "out.jsonl").read_bytes() == lines(sft(1), sft(2)).replace(
        b": ", b":"
    ).replace(b", ", b",")


BAD = lines(
    sft(1),
    "{not json",
    sft(2),
    {"prompt": "only"},
    [1, 2],
    {"prompt": "p", "response": 3},
    {"prompt": "p", "response": " "},
    '{"prompt": "p", "response": "\\ud83d"}',
    sft(3),
)
WRONG = {"PTC103": 1, "PTC201": 1, "PTC104": 1, "PTC202": 1, "PTC204": 1, "PTC108": 1}


def test_bad_rows_stop_the_run_and_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match="6 of 9 rows cannot be used; nothing was written"
    ) as caught:
        run(tmp_path, BAD)
    assert "--on-error skip" in caught.value.hint
    assert [(f.line, f.code) for f in caught.value.findings] == [
        (2, "PTC103"),
        (4, "PTC201"),
        (5, "PTC104"),
        (6, "PTC202"),
        (7, "PTC204"),
        (8, "PTC108"),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_folder_is_made_for_the_output_and_only_for_an_output(tmp_path: Path) -> None:
    out = tmp_path / "new" / "deep" / "out.jsonl"
    with pytest.raises(DataError):
        run(tmp_path, BAD, out=out)
    assert not (tmp_path / "new").exists()
    run(tmp_path, lines(sft(1)), out=out)
    assert read(out) == [sft(1)]


def test_bad_rows_are_listed_with_their_reasons(tmp_path: Path) -> None:
    report = run(tmp_path, BAD, on_error="skip")
    assert dropped(report) == WRONG
    assert report["kept"] == 3
    assert report["dropped_by"]["PTC204"]["what"] == CODES["PTC204"].title
    assert report["dropped_by"]["PTC204"]["examples"][0]["line"] == 7
    rejects = read(beside(tmp_path / "out.jsonl", "rejects.jsonl"))
    assert report["rejects"] == str(tmp_path / "out.jsonl.rejects.jsonl")
    assert [(r["line"], r["reason"]) for r in rejects][:2] == [(2, "PTC103"), (4, "PTC201")]
    assert rejects[1]["record"] == {"prompt": "only"}
    assert rejects[3]["field"] == "response"


def test_a_stale_rejects_file_goes_with_the_output_it_belonged_to(tmp_path: Path) -> None:
    run(tmp_path, BAD, on_error="skip")
    run(tmp_path, lines(sft(1)), overwrite=True)
    assert not beside(tmp_path / "out.jsonl", "rejects.jsonl").exists()


def test_a_file_that_ends_early_is_never_a_partial_success(tmp_path: Path) -> None:
    whole = gzip.compress(lines(*map(sft, range(3000))))
    (tmp_path / "in.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="cannot be used") as caught:
        run(tmp_path, inputs=(str(tmp_path / "in.jsonl.gz"),), on_error="skip")
    assert caught.value.findings[0].code == "PTC109"
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl.gz"]


def test_an_array_in_a_jsonl_says_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="one JSON array") as caught:
        run(tmp_path, json.dumps([sft(1), sft(2)], indent=1).encode(), on_error="skip")
    assert caught.value.findings[0].code == "PTC105"


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_nothing_to_read(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError, match="holds no records"):
        run(tmp_path, content)
    assert not (tmp_path / "out.jsonl").exists()


def test_nothing_left_says_what_was_dropped(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no usable record is left: dropped 2 empty"):
        run(tmp_path, lines(sft(1, response=""), sft(2, response=" ")), on_error="skip")


def test_the_articles_workflow(tmp_path: Path) -> None:
    source = tmp_path / "raw_annotations.csv"
    source.write_bytes(
        b"instruction,best_response,worst_response,annotator\r\n"
        b'"Say ""hi""  twice","  hi\n\nhi ",no,007\r\n'
        b"007,NA,null,b\r\n"
        b"empty best,,x,c\r\n"
    )
    report = run(
        tmp_path,
        inputs=(str(source),),
        preset="article",
        clean="article",
        on_error="skip",
        carry=("annotator",),
    )
    assert read(tmp_path / "out.jsonl") == [
        {"prompt": 'Say "hi" twice', "chosen": "hi hi", "rejected": "no", "annotator": "007"},
        {"prompt": "007", "chosen": "NA", "rejected": "null", "annotator": "b"},
    ]
    assert report["changed"][SPACE_COLLAPSED]["rows"] == 1
    assert dropped(report) == {"PTC204": 1}


def test_safe_cleaning_is_the_default_and_keeps_code(tmp_path: Path) -> None:
    code = "def f():\n\treturn 1  # x\r\n\n"
    report = run(tmp_path, lines(sft(1, response=f"\x00{code}\x7f"), sft(2)))
    assert read(tmp_path / "out.jsonl")[0]["response"] == code
    assert report["changed"][CONTROLS_REMOVED]["rows"] == 1
    report = run(tmp_path, lines(sft(1, response=f"\x00{code}")), clean="none", overwrite=True)
    assert report["changed"] == {}
    assert report["warnings"]["PTC301"]["rows"] == 1


def test_a_text_of_control_characters_only_is_empty_after_cleaning(tmp_path: Path) -> None:
    report = run(tmp_path, lines(sft(1), sft(2, response="\x00\x01")), on_error="skip")
    assert dropped(report) == {"PTC204": 1}


def test_fields_are_renamed_and_carried(tmp_path: Path) -> None:
    record = {"q": {"text": "hello"}, "a": ["x", "yes"], "id": 2**70, "score": 1.5, "junk": 0}
    maps = ("prompt=q.text", "response=a.1")
    report = run(tmp_path, lines(record), maps=maps, carry=("id", "score"))
    assert read(tmp_path / "out.jsonl") == [
        {"prompt": "hello", "response": "yes", "id": 2**70, "score": 1.5}
    ]
    assert report["fields_left_out"] == {"a": 1, "junk": 1, "q": 1}
    run(tmp_path, lines(record), maps=maps, carry=("all",), overwrite=True)
    assert set(read(tmp_path / "out.jsonl")[0]) == {"prompt", "response", "q", "a", *record} - {""}


def test_a_map_that_finds_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        run(tmp_path, lines({"q": "x", "response": "y"}), maps=("prompt=question",))
    finding = caught.value.findings[0]
    assert (finding.code, finding.field) == ("PTC201", "prompt")
    assert finding.hint == "`--map prompt=question` finds nothing in this row"


def test_prompt_rows_carry_what_rewards_may_need(tmp_path: Path) -> None:
    record = {"prompt": "No commas, please.", "kwargs": [{"n": 1}], "key": 1}
    run(tmp_path, lines(record))
    assert read(tmp_path / "out.jsonl") == [record]


def test_a_carried_field_that_no_row_has_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="`--carry scroe`: no row has this field") as caught:
        run(tmp_path, lines(sft(1, score=1)), carry=("scroe",))
    assert caught.value.hint == "did you mean `score`?"
    assert not (tmp_path / "out.jsonl").exists()


def test_exact_duplicates_go_and_name_the_first(tmp_path: Path) -> None:
    content = lines(sft(1), sft(2), sft(1, metadata={"n": 1}), sft(3), sft(2))
    report = run(tmp_path, content, dedup="exact", on_error="skip")
    assert dropped(report) == {"PTC303": 2}
    assert [r["prompt"] for r in read(tmp_path / "out.jsonl")] == [
        "question 1",
        "question 2",
        "question 3",
    ]
    example = report["dropped_by"]["PTC303"]["examples"][1]
    assert example["line"] == 5
    assert example["message"] == f"same as {tmp_path / 'in.jsonl'}:2"
    rejects = read(beside(tmp_path / "out.jsonl", "rejects.jsonl"))
    assert [r["line"] for r in rejects] == [3, 5]
    assert rejects[1]["record"] == sft(2)


def test_duplicates_are_found_across_files_after_cleaning(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(sft(1)))
    (tmp_path / "b.jsonl").write_bytes(lines(sft(1, response="answer\x00 1"), sft(2)))
    inputs = (str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"))
    report = run(tmp_path, inputs=inputs, dedup="exact")
    assert dropped(report) == {"PTC303": 1}
    assert report["dropped_by"]["PTC303"]["examples"][0]["path"] == inputs[1]


def test_near_duplicates(tmp_path: Path) -> None:
    chosen = random.Random(1)
    words = [str(chosen.randrange(10**6)) for _ in range(200)]
    other = [str(chosen.randrange(10**6)) for _ in range(200)]
    edited = [*words[:100], "edited", *words[101:]]
    texts = [" ".join(text) for text in (words, other, edited)]
    content = lines(
        *(sft(n, response=text) for n, text in enumerate(texts)), sft(1, response=texts[1])
    )
    report = run(tmp_path, content, dedup="near")
    assert dropped(report) == {"PTC303": 1, "PTC304": 1}
    assert report["dropped_by"]["PTC304"]["examples"][0]["line"] == 3
    assert [r["response"] for r in read(tmp_path / "out.jsonl")] == texts[:2]


def test_rows_that_overlap_a_benchmark_go(tmp_path: Path) -> None:
    question = "How many apples does Mia have if she buys seven and eats two of them today"
    (tmp_path / "bench.jsonl").write_bytes(lines({"question": question}))
    content = lines(sft(1), sft(2, prompt=f"Now: {question.upper()}?"), sft(3))
    report = run(tmp_path, content, decontaminate=(str(tmp_path / "bench.jsonl"),))
    assert dropped(report) == {"PTC502": 1}
    assert "with row 1 of" in report["dropped_by"]["PTC502"]["examples"][0]["message"]


def test_splits_keep_prompts_together_and_both_in_order(tmp_path: Path) -> None:
    records = [sft(n // 2, response=f"answer {n}") for n in range(200)]
    options = {"val_out": tmp_path / "val.jsonl", "val_fraction": 0.1}
    report = run(tmp_path, lines(*records), **options)
    train, val = read(tmp_path / "out.jsonl"), read(tmp_path / "val.jsonl")
    assert (len(train), len(val)) == (180, 20)
    assert [output["rows"] for output in report["outputs"]] == [180, 20]
    assert not {r["prompt"] for r in train} & {r["prompt"] for r in val}
    merged = iter(records)
    assert all(row in merged for row in train)  # a subsequence of the input
    first = (tmp_path / "val.jsonl").read_bytes()
    run(tmp_path, lines(*records), **options, overwrite=True)
    assert (tmp_path / "val.jsonl").read_bytes() == first
    run(tmp_path, lines(*records), **options, overwrite=True, seed=7)
    assert (tmp_path / "val.jsonl").read_bytes() != first
    run(tmp_path, lines(*records), val_out=tmp_path / "val.jsonl", val_rows=34, overwrite=True)
    assert len(read(tmp_path / "val.jsonl")) == 34


def test_dialogues_with_one_opening_stay_on_one_side(tmp_path: Path) -> None:
    trees = str(FIXTURES / "oasst_trees.jsonl")
    options: dict[str, Any] = {"preset": "oasst", "kind": "preference", "inputs": (trees,)}
    run(tmp_path, **options, val_out=tmp_path / "val.jsonl", val_rows=6)
    sides = [
        {row["metadata"]["message_tree_id"] for row in read(tmp_path / name)}
        for name in ("out.jsonl", "val.jsonl")
    ]
    assert not sides[0] & sides[1]


def test_shards_add_up_to_the_whole(tmp_path: Path) -> None:
    content = lines(*map(sft, range(10)))
    parts = []
    for index in range(1, 4):
        run(tmp_path, content, shard=f"{index}/3", overwrite=True)
        parts.append([r["prompt"] for r in read(tmp_path / "out.jsonl")])
    assert parts[0] == ["question 0", "question 3", "question 6", "question 9"]
    assert sorted(prompt for part in parts for prompt in part) == sorted(
        f"question {n}" for n in range(10)
    )


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.zst", "out.parquet"])
def test_the_number_of_processes_changes_no_byte(tmp_path: Path, name: str) -> None:
    chosen = random.Random(2)
    records: list[Any] = []
    for n in range(1700):
        records.append(sft(chosen.randrange(1500), response=f"a{n % 900}\x01", tag=n))
        if n % 97 == 0:
            records.append("broken")
    files: dict[int, dict[str, bytes]] = {}
    for workers in (1, 3):
        folder = tmp_path / str(workers)
        (tmp_path / "in.jsonl").write_bytes(lines(*records))
        run(
            folder,
            inputs=(str(tmp_path / "in.jsonl"),),
            out=folder / name,
            val_out=folder / "val.jsonl",
            val_rows=100,
            dedup="exact",
            on_error="skip",
            workers=workers,
            carry=("tag",),
        )
        files[workers] = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(files[1]) == 4
    for file, content in files[3].items():
        if file.endswith("report.json"):
            content = content.replace(b"/3/", b"/1/")
        assert content == files[1][file], file


def test_encodings(tmp_path: Path) -> None:
    content = '{"prompt": "你好吗？", "response": "很好"}\n'.encode("gb18030")
    with pytest.raises(DataError):
        run(tmp_path, content)
    run(tmp_path, content, encoding="gb18030")
    assert read(tmp_path / "out.jsonl") == [{"prompt": "你好吗？", "response": "很好"}]


def test_kinds_are_taken_from_the_first_row_and_held(tmp_path: Path) -> None:
    pair = {"prompt": "p", "chosen": "a", "rejected": "b"}
    report = run(tmp_path, lines(pair, sft(1)), on_error="skip")
    assert report["kind"] == "preference"
    assert dropped(report) == {"PTC201": 1}
    report = run(tmp_path, lines(pair, {**pair, "rejected": "a"}), on_error="skip", overwrite=True)
    assert dropped(report) == {"PTC302": 1}


def test_chat_lists_need_chat(tmp_path: Path) -> None:
    pair = {
        "prompt": [{"role": "user", "content": "p"}],
        "chosen": [{"role": "assistant", "content": "a"}],
        "rejected": [{"role": "assistant", "content": "b"}],
    }
    with pytest.raises(DataError) as caught:
        run(tmp_path, lines(pair))
    assert caught.value.findings[0].code == "PTC203"
    run(tmp_path, lines(pair, {"prompt": "p", "chosen": "a", "rejected": "b"}), chat=True)
    assert read(tmp_path / "out.jsonl")[0] == pair


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gsm8k.jsonl", {"preset": "gsm8k"}),
        ("gsm8k.jsonl", {"preset": "gsm8k", "kind": "prompt"}),
        ("hh_rlhf.jsonl.gz", {"preset": "hh-rlhf"}),
        ("hh_rlhf.jsonl.gz", {"preset": "hh-rlhf", "chat": True}),
        ("oasst_trees.jsonl", {"preset": "oasst"}),
        ("oasst_trees.jsonl", {"preset": "oasst", "kind": "preference"}),
        ("dpo_zh.json", {"preset": "sharegpt"}),
        ("dpo_zh.json", {"preset": "sharegpt", "kind": "prompt", "chat": True}),
        ("glaive_toolcall.json", {"preset": "sharegpt", "carry": ("all",)}),
        ("identity.json", {"preset": "alpaca"}),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_every_output_passes_validate(
    tmp_path: Path, name: str, options: dict[str, Any], suffix: str
) -> None:
    out = tmp_path / f"out.{suffix}"
    report = run(
        tmp_path,
        inputs=(str(FIXTURES / name),),
        out=out,
        on_error="skip",
        dedup="exact",
        **options,
    )
    keys = Keys(chat=options.get("chat", False))
    verdict = validate([str(out)], ValidateOptions(keys=keys, workers=1))
    assert verdict.ok
    assert not verdict.counts.get("PTC303")
    assert verdict.files[0].kind == report["kind"]
    assert verdict.files[0].good_rows == report["kept"]


def test_outputs_must_not_be_inputs_or_there_already(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(lines(sft(1)))
    with pytest.raises(UsageError, match="is an input and an output"):
        run(tmp_path, inputs=(str(tmp_path),), out=source, overwrite=True)
    (tmp_path / "out.jsonl").write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        run(tmp_path, inputs=(str(source),))
    assert (tmp_path / "out.jsonl").read_text() == "mine"


def test_reports_and_rejects_are_no_inputs_of_the_next_run(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "raw.jsonl").write_bytes(BAD)
    run(tmp_path, inputs=(str(folder),), out=folder / "clean.jsonl", on_error="skip")
    report = run(tmp_path, inputs=(str(folder / "*"),), on_error="skip")
    assert [Path(entry["path"]).name for entry in report["inputs"]] == ["clean.jsonl", "raw.jsonl"]
