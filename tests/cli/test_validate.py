"""`ptc validate` as a user runs it: streams, forms, exit codes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain_cli.diagnostics import CODES

LINE = re.compile(r"^(.+):(\d+):(\d+): (PTC\d{3}) (error|warning): (.+)$")
GOOD = {"prompt": "p", "chosen": "a", "rejected": "b"}


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """Two errors and two warnings in four rows, with a blank line."""
    lines = [
        json.dumps({**GOOD, "rejected": {"role": "assistant"}}),
        "",
        json.dumps({"question": "p", "response_a": "a, 100%:\n", "response_b": "b"}),
        json.dumps(GOOD),
        json.dumps(GOOD),
    ]
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_text_is_one_line_a_finding(ptc: Callable[..., Any], bad: Path) -> None:
    result = ptc("validate", "train.jsonl", cwd=bad.parent)
    assert result.code == 1
    lines = result.stdout.splitlines()
    assert lines[0] == (
        "train.jsonl:1:44: PTC203 error: field 'rejected' is an object, expected text"
    )
    found = [LINE.fullmatch(line) for line in lines]
    assert [match.group(2, 4) for match in found if match] == [
        ("1", "PTC203"), ("2", "PTC106"),
        ("3", "PTC201"), ("3", "PTC201"), ("3", "PTC201"), ("5", "PTC303"),
    ]  # fmt: skip
    assert "train.jsonl: 4 rows, preference: 2 good, 2 bad, 1 blank lines" in result.stderr
    assert "--map prompt=question --map chosen=response_a" in result.stderr
    assert result.stderr.splitlines()[-1] == "not ok: 4 errors, 2 warnings"
    quiet = ptc("validate", "train.jsonl", "-q", cwd=bad.parent)
    assert (quiet.stdout, quiet.stderr) == (result.stdout, "")


def test_a_file_without_rows_is_not_called_good(ptc: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    result = ptc("validate", "a.jsonl", cwd=tmp_path)
    assert result.code == 1
    assert "a.jsonl: 0 rows\n" in result.stderr
    assert "good" not in result.stdout + result.stderr


def test_json_is_one_object_and_nothing_else(ptc: Callable[..., Any], bad: Path) -> None:
    result = ptc("validate", bad, "--json", "-q")
    assert result.code == 1
    form = result.json()
    assert form["ok"] is False
    assert form["counts"] == {"PTC106": 1, "PTC201": 3, "PTC203": 1, "PTC303": 1}
    assert form["files"][0]["rows"] == 4
    assert ptc("validate", bad, "--format", "json").json() == form


def test_github_annotations(ptc: Callable[..., Any], bad: Path) -> None:
    result = ptc("validate", "train.jsonl", "--format", "github", cwd=bad.parent)
    lines = result.stdout.splitlines()
    assert lines[1] == ("::warning file=train.jsonl,line=2,col=1,title=PTC106::blank line, skipped")
    assert lines[0].startswith("::error file=train.jsonl,line=1,col=44,title=PTC203::field ")
    assert len(lines) == 6


def test_sarif_has_rules_and_places(ptc: Callable[..., Any], bad: Path) -> None:
    result = ptc("validate", "train.jsonl", "--format", "sarif", cwd=bad.parent)
    log = result.json()
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    assert run["columnKind"] == "unicodeCodePoints"
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert rules == ["PTC106", "PTC201", "PTC203", "PTC303"]
    for found in run["results"]:
        assert rules[found["ruleIndex"]] == found["ruleId"]
    first = run["results"][0]
    assert first["level"] == "error"
    assert first["locations"][0]["physicalLocation"] == {
        "artifactLocation": {"uri": "train.jsonl"},
        "region": {"startLine": 1, "startColumn": 44},
    }


def test_printing_is_capped_and_the_totals_are_told(
    ptc: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("oops\n" * 250)
    shown = ptc("validate", path)
    assert len(shown.stdout.splitlines()) == 100
    assert "150 more findings are not shown" in shown.stderr
    assert "PTC103 error         250" in shown.stderr
    assert len(ptc("validate", path, "--max-findings", "3").stdout.splitlines()) == 3
    assert len(ptc("validate", path, "--max-findings", "0").stdout.splitlines()) == 250
    form = ptc("validate", path, "--json").json()
    assert len(form["findings"]) == form["counts"]["PTC103"] == 250
    assert len(ptc("validate", path, "--json", "--max-findings", "2").json()["findings"]) == 2


def test_good_files_are_ok_and_strict_refuses_warnings(
    ptc: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n")
    result = ptc("validate", path, "--stats")
    assert result.code == 0
    assert result.stderr.splitlines()[-1] == "ok: 0 errors, 1 warning"
    assert "█" in result.stderr
    assert f"{path}:1" in result.stderr
    strict = ptc("validate", path, "--strict")
    assert strict.code == 1
    assert "(warnings count as errors)" in strict.stderr
    assert ptc("validate", path, "--strict", "--ignore", "PTC106,PTC303").code == 0


def test_explain_tells_about_codes(ptc: Callable[..., Any]) -> None:
    result = ptc("validate", "--explain", "PTC203")
    assert result.code == 0
    for part in ("PTC203 (error): nested value", "  why  ", "  fix  ", "  example  "):
        assert part in result.stdout
    listed = ptc("validate", "--explain", "all").stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(CODES)
    assert ptc("validate", "--explain", "PTC1", "--json").json()["codes"][0]["code"] == "PTC101"
    unknown = ptc("validate", "--explain", "PTC20O")
    assert unknown.code == 2
    assert "unknown code `PTC20O`; did you mean `PTC20" in unknown.stderr


def test_fix_writes_a_copy_and_checks_it(ptc: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\n\n\n")
    result = ptc("validate", path, "--fix", "--out", tmp_path / "b.jsonl", "--strict")
    assert result.code == 0
    assert "fixed PTC101 1 ×" in result.stderr
    assert "fixed PTC106 2 ×" in result.stderr
    assert (tmp_path / "b.jsonl").read_text() == json.dumps(GOOD) + "\n"
    again = ptc("validate", path, "--fix", "--out", tmp_path / "b.jsonl")
    assert again.code == 2
    assert "--overwrite" in again.stderr
    alone = ptc("validate", path, "--fix")
    assert alone.code == 2
    assert "`--fix` and `--out FILE` go together" in alone.stderr
    two = ptc("validate", path, path, "--fix", "--out", tmp_path / "c.jsonl")
    assert "`--fix` takes one file, not 2" in two.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.jsonl"], "none.jsonl` does not exist"),
        ([], "no files to check"),
        (["x.jsonl", "--select", "PTC9"], "unknown code `PTC9`"),
        (["x.jsonl", "--encoding", "klingon"], "unknown encoding `klingon`"),
        (["x.jsonl", "--kind", "sf"], "'sf' is not one of"),
        (["x.jsonl", "--tokenizer", "none"], "no tokenizer at"),
        (["x.jsonl", "--against", "none"], "none` does not exist"),
        (["x.jsonl", "--max-token", "5"], "did you mean `--max-tokens`?"),
    ],
)
def test_mistakes_of_use_are_exit_2(
    ptc: Callable[..., Any], tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps(GOOD) + "\n")
    result = ptc("validate", *arguments, cwd=tmp_path)
    assert result.code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_options_reach_the_checks(
    ptc: Callable[..., Any], tmp_path: Path, tiny_model: Path
) -> None:
    rows = [
        {"ask": "long " * 80, "say": "r"},
        {"ask": [{"role": "user", "content": "q"}], "say": "r"},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = ["--prompt_key", "ask", "--response-key", "say", "--kind", "sft"]
    assert ptc("validate", path, *named, "--json").json()["counts"] == {"PTC203": 1}
    tokens = ["--tokenizer", tiny_model, "--max-tokens", "50"]
    form = ptc("validate", path, *named, "--chat", *tokens, "--json").json()
    assert form["counts"] == {"PTC401": 1, "PTC402": 1}
    shown = ptc("validate", path, *named, "--chat", *tokens)
    assert "tokens: 1 rows over 50" in shown.stderr
    leak = ptc("validate", path, *named, "--chat", "--against", path, "--near-duplicates", "--json")
    assert leak.json()["counts"] == {"PTC501": 2}
    bench = ["--decontaminate", path]
    overlap = ptc("validate", path, *named, "--chat", *bench, "--json")
    assert overlap.json()["counts"] == {"PTC502": 1}


def test_several_files_folders_and_globs(ptc: Callable[..., Any], tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl"):
        (tmp_path / name).write_text(json.dumps({**GOOD, "prompt": name}) + "\n")
    for pattern in (".", "*.jsonl"):
        form = ptc("validate", pattern, "--json", cwd=tmp_path).json()
        assert [Path(file["path"]).name for file in form["files"]] == ["a.jsonl", "b.jsonl"]
