from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from posttrain_cli.data.clean import CONTROL
from posttrain_cli.data.convert import Target
from posttrain_cli.data.gather import gather
from posttrain_cli.data.linerows import Block, LineReader, count_rows, is_flat_and_good
from posttrain_cli.data.reader import read_rows
from posttrain_cli.data.reasons import Reasons
from posttrain_cli.data.refine import Batch, Refiner, Steps

PIECES = [
    *(
        "plain text",
        "日本語",
        "a\\nb",
        '\\"quoted\\"',
        "tab\\t",
        "<|im_end|>",
        "<",
        "|x|>",
        "｜",
        "\ufffd",
    ),
    *("\\u0000", "\\u0007", "\\b", "\\f", "\x7f", "\\u003c|im_end|>", "\\ud83d", "\\ud83d\\ude00"),
    *("  ", "", "\u2028", "\\\\u0001", "\\\\", "fin\\r\\n", "\xa0", '\\":', '" :'),
]


def line(chosen: random.Random) -> str:
    """A row that is good, or broken in one of many ways."""
    text = lambda: "".join(chosen.choices(PIECES[:-2], k=chosen.randrange(4)))  # noqa: E731
    first = text()
    match chosen.randrange(12):
        case 0:
            return chosen.choice(["", " ", "\t", "[]", "null", "{", '{"prompt": 1}', "\r", "{}"])
        case 1:
            return f'{{"prompt": "{first}", "chosen": "x", "chosen": "y", "rejected": "{text()}"}}'
        case 2:
            return f'{{"prompt": "{first}", "chosen": "same", "rejected": "{text()}same"}}'
        case 3:
            return f'{{"prompt" : "{first}", "chosen": {{"a": 1}}, "rejected": "{text()}"}}'
        case 4:
            return f'{{"prompt": "{first}", "chosen": "a b", "rejected": "a  b", "x": NaN}}'
        case 5:
            return f'{{"prompt": "{first}", "chosen": "c", "rejected": "d", "id": {10**30}}}'
        case _:
            fields = f'"prompt": "p{first}", "chosen": "c{text()}", "rejected": "r{text()}"'
            more = chosen.choice(["", ', "metadata": {"k": [1]}', ', "other": ":"'])
            return "{" + fields + more + "}"


def outcome(batches: list[Batch]) -> Any:
    """All that a batch says, put together over blocks."""
    return (
        sum(batch.rows for batch in batches),
        sum(batch.blank_lines for batch in batches),
        [drop for batch in batches for drop in batch.drops],
        [row for batch in batches for row in batch.lines],
        [place for batch in batches for place in batch.places],
        [digest for batch in batches for digest in batch.digests],
        merged([batch.changed for batch in batches]),
        merged([batch.warnings for batch in batches]),
        merged([batch.left_out for batch in batches]),
    )


def merged(parts: list[Reasons]) -> Reasons:
    whole = Reasons()
    for part in parts:
        whole.merge(part)
    return whole


@pytest.mark.parametrize("clean", ["safe", "article", "none"])
def test_the_fast_way_and_the_slow_way_agree(tmp_path: Path, clean: Any) -> None:
    chosen = random.Random(11)
    path = tmp_path / "in.jsonl"
    steps = Steps(Target("preference"), clean=clean, keep_refused=True)
    refiner = Refiner(steps)
    for _ in range(150):
        lines = "\n".join(line(chosen) for _ in range(20))
        path.write_bytes((chosen.choice(["", "\ufeff"]) + lines).encode())
        fast = list(gather([str(path)], steps, None, workers=1))
        slow = [refiner.refine(Block(str(path), rows=tuple(read_rows(str(path)))))]
        assert outcome(fast) == outcome(slow)


def test_plain_means_that_cleaning_changes_nothing() -> None:
    reader = LineReader(())
    for octet in range(0x80):
        text = json.dumps({"prompt": f"a{chr(octet)}b", "response": "c"}) + "\n"
        for written in (text, text.replace("\\u00", "\\u00".upper().replace("U", "u"))):
            ((row, plain),) = reader.read(Block("x", written.encode()))
            assert row.record is not None
            assert not (plain and octet in CONTROL)
    ((_, plain),) = reader.read(Block("x", b'{"prompt": "a", "response": "b\\n"}\n'))
    assert plain


@pytest.mark.parametrize(
    ("lines", "rows"),
    [
        (b"{}\n", 1),
        (b"{}", 1),
        (b"{}\n\n{}\n", 2),
        (b"\n", 0),
        (b" \t\n{}\n", 1),
        (b"\xef\xbb\xbf{}\n{}", 2),
        (b"\xef\xbb\xbf\n{}", 1),
        (b"x\ny", 2),
        (b"{}\n[1]\n\r\n", 2),
    ],
)
def test_rows_are_counted_without_reading_them(lines: bytes, rows: int) -> None:
    assert count_rows(lines) == rows


def test_flat_and_good_is_never_said_of_a_doubtful_record() -> None:
    good = {"prompt": "p", "chosen": "a", "rejected": "b"}
    assert is_flat_and_good(good, "preference")
    for field, value in (
        ("prompt", " "),
        ("chosen", "b"),
        ("chosen", " b"),
        ("rejected", None),
        ("prompt", ["p"]),
        ("rejected", "\ufffd"),
        ("prompt", "<｜end｜>"),
    ):
        assert not is_flat_and_good({**good, field: value}, "preference")
    assert not is_flat_and_good({"question": "q", "answer": "a"}, "sft")
