from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parents[1] / "data" / "fixtures"


def test_a_preset_with_a_split(tmp_path: Path, ptc: Callable[..., Any]) -> None:
    done = ptc(
        *("preprocess", FIXTURES / "gsm8k.jsonl", "--preset", "gsm8k", "--out", "train.jsonl"),
        *("--val-rows", "2", "--val-out", "val.jsonl"),
        cwd=tmp_path,
    )
    assert (done.code, done.stdout) == (0, "")
    assert done.stderr.splitlines() == [
        "read 5 sft records: kept 5, dropped 0",
        "wrote 3 rows to train.jsonl",
        "wrote 2 rows to val.jsonl",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "train.jsonl",
        "train.jsonl.report.json",
        "val.jsonl",
    ]


def test_json_is_the_report(tmp_path: Path, ptc: Callable[..., Any]) -> None:
    done = ptc(
        *("preprocess", FIXTURES / "identity.json", "--preset", "alpaca", "--json"),
        *("--out", "a.parquet"),
        cwd=tmp_path,
    )
    assert done.json() == json.loads((tmp_path / "a.parquet.report.json").read_text())


def test_bad_rows_end_with_1_and_name_file_and_line(
    tmp_path: Path, ptc: Callable[..., Any]
) -> None:
    source = FIXTURES / "hh_rlhf.jsonl.gz"
    arguments = ("preprocess", source, "--preset", "hh-rlhf", "--out", "pairs.jsonl")
    done = ptc(*arguments, cwd=tmp_path)
    assert (done.code, done.stdout) == (1, "")
    assert f"{source}:3: PTC204 error: turn 2 (assistant) is empty" in done.stderr
    assert "3 of 6 rows cannot be used; nothing was written" in done.stderr
    assert "--on-error skip" in done.stderr
    assert list(tmp_path.iterdir()) == []
    done = ptc(*arguments, "--on-error", "skip", cwd=tmp_path)
    assert done.code == 0
    assert "kept 3, dropped 3" in done.stderr
    assert "listed the dropped rows in pairs.jsonl.rejects.jsonl" in done.stderr


def test_contradicting_options_are_named_together(tmp_path: Path, ptc: Callable[..., Any]) -> None:
    source = FIXTURES / "gsm8k.jsonl"
    done = ptc(
        *("preprocess", source, "--out", "o.jsonl", "--map", "x", "--val_rows", "3", "--tokenize"),
        cwd=tmp_path,
    )
    assert done.code == 2
    for words in ("`--map x` is not", "need `--val-out FILE`", "needs `--tokenizer DIR`"):
        assert words in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_missing_input_is_named_with_its_absolute_path(
    tmp_path: Path, ptc: Callable[..., Any]
) -> None:
    done = ptc("preprocess", "nothing.jsonl", "--out", "o.jsonl", cwd=tmp_path)
    assert done.code == 2
    assert f"`{tmp_path / 'nothing.jsonl'}` does not exist" in done.stderr


def test_a_killed_run_leaves_no_output_and_runs_again(tmp_path: Path) -> None:
    chosen = random.Random(4)
    with (tmp_path / "in.jsonl").open("w") as stream:
        for n in range(20_000):
            record = {"prompt": f"p {n % 15_000}", "response": f"r {n % 15_000} " + "x" * 300}
            stream.write(json.dumps(record) + "\n")
    command = [sys.executable, "-m", "posttrain_cli", "preprocess", "in.jsonl", "--out", "o.jsonl"]
    command += ["--dedup", "exact", "--val-rows", "500", "--val-out", "v.jsonl", "-q"]
    start = time.monotonic()
    subprocess.run(command, cwd=tmp_path, check=True)
    whole = time.monotonic() - start
    names = ("o.jsonl", "v.jsonl", "o.jsonl.report.json")
    expected = {name: (tmp_path / name).read_bytes() for name in names}
    for workers in (1, 1, 1, 2):
        for name in names:
            (tmp_path / name).unlink(missing_ok=True)
        child = subprocess.Popen(
            [*command, "--workers", str(workers)], cwd=tmp_path, start_new_session=True
        )
        time.sleep(chosen.uniform(0.3, 0.95) * whole)
        child.send_signal(signal.SIGKILL)
        child.wait()
        left = {name for name in names if (tmp_path / name).exists()}
        assert "o.jsonl" not in left or left == set(names)
        if workers > 1:
            wait_until_gone(child.pid)
    subprocess.run([*command, "--overwrite"], cwd=tmp_path, check=True)
    assert {name: (tmp_path / name).read_bytes() for name in names} == expected


def wait_until_gone(group: int) -> None:
    """Fail unless every process of the group ends within ten seconds."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.killpg(group, signal.SIGKILL)
    raise AssertionError("worker processes outlived their parent")
