from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain_cli.data.contamination import Benchmark, read_benchmark, split_words
from posttrain_cli.errors import DataError

LONG = "A train leaves the station at noon and travels sixty miles an hour for three hours"


def test_thirteen_shared_words_are_found_wherever_they_stand() -> None:
    benchmark = Benchmark()
    benchmark.add(LONG, "bench.jsonl", 7)
    hidden = "Some text. a TRAIN leaves, the station: at noon and travels sixty miles an hour! End."
    found = benchmark.find(["unrelated", hidden])
    assert found is not None
    assert (found.path, found.row) == ("bench.jsonl", 7)
    assert found.words == "a train leaves the station at noon and travels sixty miles an hour"
    assert "with row 7 of bench.jsonl" in str(found)


def test_twelve_shared_words_are_not_enough() -> None:
    benchmark = Benchmark()
    benchmark.add(LONG, "b", 1)
    words = LONG.split()
    assert benchmark.find([" ".join([*words[:12], "other", *words[13:]])]) is None
    assert benchmark.find([" ".join(words[:13])]) is not None


def test_short_texts_match_whole_fields_only() -> None:
    benchmark = Benchmark()
    benchmark.add("What is the capital of France?", "b", 1)
    assert benchmark.find(["what is the capital of france"]) is not None
    assert benchmark.find(["Tell me: what is the capital of France?"]) is None
    benchmark.add("Hi there", "b", 2)
    assert benchmark.too_short == 1
    assert benchmark.find(["Hi there"]) is None


def test_each_chinese_character_is_a_word() -> None:
    assert split_words("我想买car，好吗？") == ["我", "想", "买", "car", "好", "吗"]
    benchmark = Benchmark()
    benchmark.add("我想买一辆新汽车，请问燃油车和电动车哪个好一些？", "b", 1)
    assert benchmark.find(["有人说：我想买一辆新汽车请问燃油车和电动车"]) is not None


def test_files_of_any_layout_are_read(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    path.write_text(json.dumps({"id": 1, "turns": [{"content": LONG}]}) + "\n\n")
    assert read_benchmark([str(path)]).find([LONG]) is not None


def test_a_benchmark_that_cannot_be_read_or_says_nothing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    path.write_text('{"a": "short"}\n')
    with pytest.raises(DataError, match="no text of 6 words or more"):
        read_benchmark([str(path)])
    path.write_text(json.dumps({"a": LONG}) + "\n{broken\n")
    with pytest.raises(DataError, match="cannot read the benchmark") as caught:
        read_benchmark([str(path)])
    assert [finding.code for finding in caught.value.findings] == ["PTC103"]
