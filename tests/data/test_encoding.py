from __future__ import annotations

import io

import pytest

from posttrain_cli.data.encoding import bad_bytes, guess_encoding, not_utf8_at_all, transcoded
from posttrain_cli.errors import UsageError


def _error(content: bytes) -> UnicodeDecodeError:
    with pytest.raises(UnicodeDecodeError) as caught:
        content.decode()
    return caught.value


def test_a_bad_byte_is_named_with_its_offset_and_column() -> None:
    content = '{"é": "x'.encode() + b'\xff"}'
    problem = bad_bytes(content, _error(content))
    assert (problem.code, problem.column) == ("PTC102", 9)
    assert problem.message == "not UTF-8: byte 0xff at byte offset 9 of the line"
    assert problem.hint == "pass --encoding NAME, or convert the file to UTF-8"


def test_gbk_and_western_text_are_recognised() -> None:
    chinese = '{"prompt": "今天天气怎么样？请详细说明。"}'.encode("gbk")
    assert bad_bytes(chinese, _error(chinese)).message.endswith("(looks like GBK)")
    assert bad_bytes(chinese, _error(chinese)).hint.startswith("pass --encoding gbk")
    assert guess_encoding('{"prompt": "où est le café français ?"}'.encode("cp1252")) == "cp1252"
    assert guess_encoding(bytes(range(128, 256))) == ""


@pytest.mark.parametrize(
    ("codec", "name", "hint"),
    [
        ("utf-16", "UTF-16", "--encoding utf-16,"),
        ("utf-16-le", "UTF-16", "--encoding utf-16-le,"),
        ("utf-16-be", "UTF-16", "--encoding utf-16-be,"),
        ("utf-32", "UTF-32", "--encoding utf-32,"),
    ],
)
def test_wide_encodings_are_seen_in_the_first_bytes(codec: str, name: str, hint: str) -> None:
    problem = not_utf8_at_all('{"prompt": "hello"}'.encode(codec))
    assert problem is not None
    assert problem.message.endswith(f"of the file (looks like {name})")
    assert hint in problem.hint
    assert not_utf8_at_all(b'{"prompt": "hello"}') is None
    assert not_utf8_at_all(b"") is None


@pytest.mark.parametrize("codec", ["gbk", "utf-16", "utf-16-le", "shift_jis"])
def test_other_codecs_become_utf8(codec: str) -> None:
    text = '{"a": "日本語\u3000"}\n' * 40000
    stream = io.BufferedReader(io.BytesIO(text.encode(codec)))
    assert transcoded(stream, codec).read() == text.encode()


def test_what_a_codec_cannot_decode_stays_invalid_on_its_line() -> None:
    stream = io.BufferedReader(io.BytesIO("好\n".encode("gbk") + b"\xff\n" + "好".encode("gbk")))
    lines = transcoded(stream, "gbk").read().split(b"\n")
    assert lines == ["好".encode(), b"\xff", "好".encode()]
    problem = bad_bytes(lines[1], _error(lines[1]), "gbk")
    assert problem.message == "not gbk: a character here cannot be decoded"


def test_an_unknown_codec_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="unknown encoding `klingon`"):
        transcoded(io.BufferedReader(io.BytesIO(b"")), "klingon")
    with pytest.raises(UsageError, match="unknown encoding `zlib`"):
        transcoded(io.BufferedReader(io.BytesIO(b"")), "zlib")
