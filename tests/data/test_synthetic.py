from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from posttrain_cli.data.recipes import Draw
from posttrain_cli.data.synthetic import SyntheticOptions, generate, make_row, make_rows
from posttrain_cli.errors import UsageError

RECIPES = ("capitals", "arithmetic", "format", "extraction", "dialogue", "mixed")
KINDS = ("sft", "preference", "prompt")


def passes(row: dict[str, Any], text: str) -> bool:
    """Whether `text` is a right answer by the row's own metadata."""
    answer, check = row["metadata"]["answer"], row["metadata"]["check"]
    if check == "number":
        return text.rpartition("####")[2].strip() == answer
    return answer in text if check == "contains" else text == answer


def test_capitals_are_the_rows_of_the_article() -> None:
    expected = [
        {
            "question": f"Question {i}: What is the capital of France?",
            "answer": f"Answer {i}: The capital of France is Paris.",
            "metadata": {"synthetic": True},
        }
        for i in range(100)
    ]
    for seed in (42, 7):
        assert list(make_rows(SyntheticOptions("sft", "capitals", 100, seed))) == expected


@pytest.mark.parametrize("recipe", RECIPES)
def test_preference_rows_hold_a_right_and_a_wrong_answer(recipe: Any) -> None:
    for row in make_rows(SyntheticOptions("preference", recipe, 300)):
        assert list(row) == ["prompt", "chosen", "rejected", "metadata"]
        assert passes(row, row["chosen"])
        assert not passes(row, row["rejected"])
        assert row["metadata"]["corruption"]


@pytest.mark.parametrize("recipe", RECIPES[1:])
def test_sft_answers_are_right_and_prompts_carry_them(recipe: Any) -> None:
    for index in range(100):
        taught = make_row(SyntheticOptions("sft", recipe), index)
        asked = make_row(SyntheticOptions("prompt", recipe), index)
        response = taught["messages"][-1]["content"] if "messages" in taught else taught["response"]
        assert passes(taught, response)
        assert asked["answer"] == taught["metadata"]["answer"]
        assert asked["prompt"]


def test_arithmetic_steps_compute() -> None:
    for row in make_rows(SyntheticOptions("sft", "arithmetic", 200)):
        *steps, final = row["response"].split("\n")
        for step in steps:
            formula, value = step.split(" = ")
            assert eval(formula) == int(value)
        assert final == f"#### {steps[-1].split(' = ')[1]}"


def test_mixed_holds_every_flat_recipe_about_equally() -> None:
    rows = list(make_rows(SyntheticOptions("sft", "mixed", 2000)))
    counts = Counter(row["metadata"]["recipe"] for row in rows)
    assert set(counts) == {"arithmetic", "format", "extraction", "capitals"}
    assert min(counts.values()) > 400
    assert len({json.dumps(row) for row in rows}) == 2000


def test_a_row_depends_on_seed_and_index_only() -> None:
    long = list(make_rows(SyntheticOptions("sft", "arithmetic", 50, 1)))
    assert list(make_rows(SyntheticOptions("sft", "arithmetic", 20, 1))) == long[:20]
    assert make_row(SyntheticOptions("sft", "arithmetic", 1, 1), 37) == long[37]
    assert make_row(SyntheticOptions("sft", "arithmetic", 1, 2), 37) != long[37]


def test_draws_are_the_same_on_every_python() -> None:
    draw = Draw(42, "arithmetic", 3)
    assert [draw.below(1000) for _ in range(4)] == [325, 447, 468, 659]
    assert sorted(Draw(1, "x", 1).sample("abcdef", 6)) == list("abcdef")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_same_seed_same_bytes(tmp_path: Path, name: str) -> None:
    options = SyntheticOptions("preference", "mixed", 300, 5)
    first, second = tmp_path / "one" / name, tmp_path / "two" / name
    described = generate(options, first, overwrite=False)
    generate(options, second, overwrite=False)
    assert first.read_bytes() == second.read_bytes()
    assert described["rows"] == 300
    assert described["bytes"] == first.stat().st_size
    assert [p.name for p in first.parent.iterdir()] == [name]


def test_parquet_holds_the_rows_with_metadata_as_a_struct(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    for recipe in ("capitals", "mixed"):
        options = SyntheticOptions("sft", recipe, 100)
        generate(options, tmp_path / f"{recipe}.parquet", overwrite=False)
        assert pq.read_table(tmp_path / f"{recipe}.parquet").to_pylist() == list(make_rows(options))


def test_an_existing_file_is_kept_unless_overwrite(tmp_path: Path) -> None:
    target = tmp_path / "rows.jsonl"
    target.write_text("mine")
    with pytest.raises(UsageError, match=r"rows\.jsonl` exists already"):
        generate(SyntheticOptions(), target, overwrite=False)
    assert target.read_text() == "mine"
    generate(SyntheticOptions(rows=3), target, overwrite=True)
    assert len(target.read_bytes().splitlines()) == 3


@pytest.mark.parametrize("name", ["rows.json", "rows.txt", "rows"])
def test_a_suffix_that_says_no_format_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot tell the format of `--out") as caught:
        generate(SyntheticOptions(), tmp_path / name, overwrite=False)
    assert ".parquet" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
