from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq


def test_the_articles_hundred_rows(tmp_path: Path, ptc: Callable[..., Any]) -> None:
    done = ptc("gen-synthetic", "--recipe", "capitals", "--out", "test_data.parquet", cwd=tmp_path)
    assert (done.code, done.stdout) == (0, "")
    assert "100 sft rows (capitals, seed 42) written to test_data.parquet" in done.stderr
    rows = pq.read_table(tmp_path / "test_data.parquet").to_pylist()
    assert rows[99] == {
        "question": "Question 99: What is the capital of France?",
        "answer": "Answer 99: The capital of France is Paris.",
        "metadata": {"synthetic": True},
    }


def test_json_describes_the_file(tmp_path: Path, ptc: Callable[..., Any]) -> None:
    arguments = ["gen-synthetic", "--kind", "prompt", "--n", "7", "--seed", "3", "--json"]
    done = ptc(*arguments, "--out", "prompts.jsonl", cwd=tmp_path)
    described = done.json()
    content = (tmp_path / "prompts.jsonl").read_bytes()
    assert described["sha256"] == hashlib.sha256(content).hexdigest()
    assert described["rows"] == 7 == len(content.splitlines())
    assert described["options"] == {"kind": "prompt", "recipe": "mixed", "rows": 7, "seed": 3}
    assert all(json.loads(line)["answer"] for line in content.splitlines())


def test_mistakes_end_with_2_and_write_nothing(tmp_path: Path, ptc: Callable[..., Any]) -> None:
    for arguments, words in (
        (["--n", "0", "--out", "a.jsonl"], "greater than or equal to 1"),
        (["--out", "a.txt"], "cannot tell the format"),
        (["--recipe", "capital", "--out", "a.jsonl"], "capitals"),
        ([], "missing option"),
    ):
        done = ptc("gen-synthetic", *arguments, cwd=tmp_path)
        assert done.code == 2
        assert words in done.stderr.lower(), done.stderr
        assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_needs_overwrite(tmp_path: Path, ptc: Callable[..., Any]) -> None:
    (tmp_path / "a.jsonl").write_text("mine")
    refused = ptc("gen-synthetic", "--out", "a.jsonl", cwd=tmp_path)
    assert refused.code == 2
    assert "--overwrite" in refused.stderr
    assert (tmp_path / "a.jsonl").read_text() == "mine"
    assert ptc("gen-synthetic", "--out", "a.jsonl", "--overwrite", "-q", cwd=tmp_path).code == 0
