"""metrics.jsonl: no gap, no repeat, no NaN hidden."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from posttrain_cli.runs.metrics import Cut, MetricsFile, cut_metrics, read_metrics


def write(path, steps):
    file = MetricsFile(path)
    for step in steps:
        file.append(step, {"train/loss": 1 / step, "train/tokens": step * 100})
    file.close()


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_values_come_back_with_every_bit(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    values = {
        "train/loss": 0.1 + 0.2,
        "train/lr": 2e-5,
        "train/tokens": 2**53 + 1,
        "train/grad_norm": math.nan,
        "val/loss": math.inf,
        "kl/reference": -math.inf,
        "value/loss": float(np.float32(0.3)),
    }
    file.append(1, values)
    file.close()
    line = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert next(iter(line)) == "step"
    assert line["train/grad_norm"] == "nan"
    assert (line["val/loss"], line["kl/reference"]) == ("inf", "-inf")
    (back,) = read_metrics(path)
    assert math.isnan(back.pop("train/grad_norm"))
    del values["train/grad_norm"]
    assert back == {"step": 1} | values


def test_a_line_is_there_as_soon_as_it_is_appended(tmp_path):
    path = tmp_path / "metrics.jsonl"
    code = (
        "import os, sys; from pathlib import Path; from posttrain_cli.runs.metrics import *\n"
        "file = MetricsFile(Path(sys.argv[1])); file.append(1, {'a': 1.5}); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, path], check=False).returncode == -9
    assert path.read_text() == '{"step":1,"a":1.5}\n'


def test_sync_reaches_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append(1, {})
    assert synced == []
    file.sync()
    assert len(synced) == 1
    file.close()
    assert len(synced) == 2


def test_later_steps_are_cut_and_the_file_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 8))
    assert cut_metrics(path, 5) == Cut(kept=5, dropped=2, torn=False)
    write(path, [6])
    assert steps(path) == [1, 2, 3, 4, 5, 6]


def test_a_file_that_needs_no_cut_is_not_touched(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2])
    inode = path.stat().st_ino
    assert cut_metrics(path, 2) == Cut(kept=2, dropped=0, torn=False)
    assert path.stat().st_ino == inode


@pytest.mark.parametrize("tail", [b'{"step":3,"train/lo', b'{"step":3}', b"\0\0\0\0", b"[3]\n"])
def test_a_torn_last_line_is_repaired(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2])
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    assert [each["step"] for each in read_metrics(path)] == [1, 2]
    assert cut_metrics(path, 5) == Cut(kept=2, dropped=0, torn=True)
    assert path.read_bytes() == whole


def test_a_missing_file_is_made_and_step_zero_empties_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert cut_metrics(path, 3) == Cut(0, 0, False)
    assert path.read_bytes() == b""
    write(path, [1])
    assert cut_metrics(path, 0) == Cut(0, 1, False)
    assert path.read_bytes() == b""
