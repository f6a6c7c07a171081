from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from posttrain_cli.data.answers import AnswerFile
from posttrain_cli.errors import UsageError

PLAN = {"seed": 1, "temperature": 0.5}
RECORDS = [{"id": row, "text": f"line\u2028{row}", "big": 2**70 + row} for row in range(10)]
WHOLE = "".join(
    json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n" for record in RECORDS
).encode()


def write(target: Path, upto: int, *, unit: int = 2, finish: bool = False) -> int:
    with AnswerFile(target, PLAN, unit, overwrite=False) as answers:
        done = answers.done
        for start in range(done, upto, unit):
            answers.append(RECORDS[start : min(start + unit, upto)])
        if finish:
            assert answers.finish() == hashlib.sha256(WHOLE).hexdigest()
    return done


def test_an_unbroken_attempt_leaves_only_the_file(tmp_path: Path) -> None:
    target = tmp_path / "sub" / "out.jsonl"
    assert write(target, 10, finish=True) == 0
    assert target.read_bytes() == WHOLE
    assert list(target.parent.iterdir()) == [target]


def test_a_broken_attempt_goes_on_behind_its_last_whole_unit(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    write(target, 7)
    assert not target.exists()
    assert write(target, 10, finish=True) == 6
    assert target.read_bytes() == WHOLE


@pytest.mark.parametrize(
    "damage", [b'{"id": 6, "te', b'{"id": 6}', b"\x00" * 40, b"\x00" * 40 + b"\n", b"[1]\n", b"\n"]
)
def test_what_is_torn_is_cut_off(tmp_path: Path, damage: bytes) -> None:
    target = tmp_path / "out.jsonl"
    write(target, 6)
    with (tmp_path / "out.jsonl.part").open("ab") as stream:
        stream.write(damage)
    assert write(target, 10, finish=True) == 6
    assert target.read_bytes() == WHOLE


def test_every_cut_of_the_bytes_ends_in_the_same_file(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    for size in range(0, len(WHOLE), 7):
        (tmp_path / "out.jsonl.part").write_bytes(WHOLE[:size])
        (tmp_path / "out.jsonl.part.json").write_text(json.dumps(PLAN))
        write(target, 10, unit=3, finish=True)
        assert target.read_bytes() == WHOLE
        target.unlink()


def test_kept_records_are_read_back(tmp_path: Path) -> None:
    write(tmp_path / "out.jsonl", 4)
    with AnswerFile(tmp_path / "out.jsonl", PLAN, 2, overwrite=False) as answers:
        assert list(answers.kept()) == RECORDS[:4]


def test_another_plan_is_refused_and_named(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    write(target, 4)
    with pytest.raises(UsageError) as caught:
        AnswerFile(target, {"seed": 2, "temperature": 0.5, "n": 1}, 2, overwrite=False)
    part = tmp_path / "out.jsonl.part"
    assert caught.value.message == (
        f"`{part}` holds the beginning of other answers: `n`, `seed` differed"
    )
    assert "--overwrite" in caught.value.hint
    assert part.read_bytes() == b"".join(WHOLE.splitlines(keepends=True)[:4])
    with AnswerFile(target, {"seed": 2}, 2, overwrite=True) as answers:
        assert answers.done == 0


def test_an_existing_output_is_refused_and_replaced_only_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text("old")
    with pytest.raises(UsageError, match="exists already"):
        write(target, 10)
    with AnswerFile(target, PLAN, 2, overwrite=True) as answers:
        answers.append(RECORDS)
        assert target.read_text() == "old"
        answers.finish()
    assert target.read_bytes() == WHOLE


def test_nothing_stays_when_nothing_was_written(tmp_path: Path) -> None:
    with AnswerFile(tmp_path / "out.jsonl", PLAN, 2, overwrite=False):
        pass
    assert not list(tmp_path.iterdir())


def test_two_processes_cannot_write_one_output(tmp_path: Path) -> None:
    with (
        AnswerFile(tmp_path / "out.jsonl", PLAN, 2, overwrite=False),
        pytest.raises(UsageError, match="another process is writing"),
    ):
        AnswerFile(tmp_path / "out.jsonl", PLAN, 2, overwrite=False)


WRITER = """
import sys
from pathlib import Path
from posttrain_cli.data.answers import AnswerFile
with AnswerFile(Path(sys.argv[1]), {}, 3, overwrite=False) as answers:
    for start in range(answers.done, 3000, 3):
        answers.append({"id": row} for row in range(start, start + 3))
    answers.finish()
"""


def test_killed_again_and_again_the_records_are_whole_in_order_and_once(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    for _ in range(5):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(target)])
        size = _size(target)
        while _size(target) < size + 500 and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run([sys.executable, "-c", WRITER, str(target)], check=True)
    ids = [json.loads(line)["id"] for line in target.read_bytes().splitlines()]
    assert ids == list(range(3000))


def _size(target: Path) -> int:
    part = target.with_name("out.jsonl.part")
    return part.stat().st_size if part.exists() else 0
