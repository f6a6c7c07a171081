"""The data benchmark runs end to end, and notices counts that are wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SMALL = [
    *("--size", "1MB", "--repeat", "1", "--near-rows", "400", "--index-rows", "20000"),
    *("--token-rows", "120", "--lengths", "200000"),
]


def bench(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "data.py"), *flags],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )


def test_every_piece_runs_and_its_figures_are_of_the_right_size(tmp_path: Path) -> None:
    done = bench(tmp_path, *SMALL, "--out", "data.json")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "data.json").read_text())
    assert result["rows"]["bad"] == 1 and result["rows"]["repeated"] == 1
    assert 1_000_000 <= result["rows"]["bytes"] < 1_020_000
    figures: dict[str, dict[str, Any]] = {
        f"{each['piece']}: {each['what']}": each for each in result["figures"]
    }
    assert len(figures) == len(result["figures"])
    fill = figures["pack to 2048: fill (bins as plain best-fit-decreasing)"]
    assert 99.9 < fill["value"] <= 100
    assert figures["near: recall on 2 % of the words changed"]["value"] > 0.9
    assert 80 < figures["tokens: answers passed unseen"]["value"] < 100
    one = figures["validate: largest process, 1 worker"]
    assert (
        10 < one["value"] < 200
        and one["most"] is True
        and one["met"] is (one["value"] <= one["bar"])
    )
    assert set(result["costs"]["validate"]) == {
        *("article", "orjson", "ptc, 1 worker", "ptc, 2 workers"),
    }
    lines = done.stdout.splitlines()
    assert lines[0] == "| piece | figure | measured | bar | met |"
    assert len(lines) == 2 + len(figures)
    assert not (tmp_path / "runs" / "data-benchmark").exists()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--size", "1"), "`1` is no size, expected such as 200MB or 1GB"),
        (("--only", "pack,speed"), "`speed` is no piece, expected some of validate, preprocess"),
    ],
)
def test_wrong_flags_are_named(tmp_path: Path, flags: tuple[str, ...], expected: str) -> None:
    done = bench(tmp_path, *flags, "--out", "data.json")
    assert done.returncode == 2
    assert expected in done.stderr


def test_the_same_seed_gives_the_same_rows(tmp_path: Path) -> None:
    script = "import sys; sys.path.insert(0, sys.argv[1]); from data_rows import write; "
    script += "from pathlib import Path; write(Path(sys.argv[2]), 200_000, int(sys.argv[3]))"
    made = []
    for number, seed in enumerate(("7", "7", "8")):
        path = tmp_path / f"{number}.jsonl"
        argv = [sys.executable, "-c", script, str(ROOT / "benchmarks"), str(path), seed]
        subprocess.run(argv, check=True)
        made.append(path.read_bytes())
    assert made[0] == made[1] != made[2]
