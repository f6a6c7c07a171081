from __future__ import annotations

import io
import json

import numpy as np
import pytest

from posttrain_cli.data.ranges import lines_of_range, lines_of_stream
from posttrain_cli.data.suspects import Inspector, token_bytes


def inspect(lines: list[bytes], tokens: tuple[str, ...] = ()) -> list[tuple[int, bool]]:
    block = b"".join(line + b"\n" for line in lines)
    ends = np.cumsum([len(line) + 1 for line in lines])
    keys, texts = Inspector(token_bytes(tokens)).inspect(block, ends)
    return list(zip(keys.tolist(), texts.tolist(), strict=True))


def test_keys_are_counted_by_their_colons() -> None:
    assert inspect(
        [
            b'{"a": 1, "b":2, "c": {"d":[{"e": 1}]}}',
            b'{"a": "\\"k\\": 1", "b": "x\\\\"}',
            b'{"a" : 1}',
            b'{"a"\t:1}',
            b'{"a\\\\" \t :1}',
            b"",
            b'{"x": "say \\" : x \\\\\\" : y  : z"}',
        ]
    ) == [(5, False), (2, False), (1, False), (1, False), (1, False), (0, False), (1, False)]


@pytest.mark.parametrize(
    "text",
    [
        rb"\u0000", rb"\u001F", rb"\u007f", rb"\b", rb"\f", b"\x7f",
        rb"\\\b", b"<|im_end|>", rb"\u003c|im_end|>", rb"<\u007cx|>",
    ],
)  # fmt: skip
def test_texts_that_need_a_look(text: bytes) -> None:
    around = [b'{"a": "fine"}', b'{"a": "%s"}' % text, b'{"a": "fine"}']
    assert [look for _, look in inspect(around)] == [False, True, False]


@pytest.mark.parametrize(
    "text",
    [
        rb"\n\t\r\"\/\\",
        rb"\\b\\f",
        rb"\\u0000",
        rb"\u000a\u0022\u4e00\uff0c\ufffd\uff5c",
        b"a | b < c",
    ],
)
def test_texts_that_need_none(text: bytes) -> None:
    assert inspect([b'{"a": "%s"}' % text]) == [(1, False)]


def test_many_hits_and_few_are_placed_alike() -> None:
    lines = [rb'{"a": "\b\u0001\u00e9"}' if n % 3 else b'{"a": "x"}' for n in range(900)]
    assert [look for _, look in inspect(lines)] == [n % 3 > 0 for n in range(900)]


def test_a_tokenizers_texts_are_found_in_every_spelling() -> None:
    tokens = ("</s>", "<|known|>", "▁é")
    assert token_bytes(tokens) == tuple(
        sorted([b"</s>", rb"<\/s>", "▁é".encode(), json.dumps("▁é")[1:-1].encode()])
    )
    lines = [b'{"a": "x</s>"}', b'{"a": ""}', rb'{"a": "<\/s>"}', json.dumps({"a": "▁é"}).encode()]
    assert [look for _, look in inspect(lines, tokens)] == [True, False, True, True]


LINES = b"".join(b"x" * n + b"\n" for n in (0, 5, 1, 0, 0, 40, 3, 17)) + b"last"


@pytest.mark.parametrize("piece", [1, 2, 7, 30, 1000])
@pytest.mark.parametrize("step", [1, 3, 16, 33, 500])
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_ranges_share_out_every_line_once(tmp_path, piece: int, step: int, end: bytes) -> None:
    path = tmp_path / "a"
    path.write_bytes(LINES + end)
    size = path.stat().st_size
    parts = [
        block
        for start in range(0, size, step)
        for block in lines_of_range(str(path), start, min(start + step, size), piece)
    ]
    assert b"".join(parts) == LINES + end
    assert all(part.endswith(b"\n") for part in parts[:-1])
    stream = io.BufferedReader(io.BytesIO(LINES + end), 8)
    blocks = list(lines_of_stream(stream, piece))
    assert b"".join(blocks) == LINES + end
    assert all(block.endswith(b"\n") for block in blocks[:-1])
