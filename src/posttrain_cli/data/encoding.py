"""Text encodings: strict UTF-8, other codecs on request, and a guess for the hint."""

from __future__ import annotations

import codecs
import io
from typing import Any

from posttrain_cli.data.scan import Problem
from posttrain_cli.errors import UsageError

BOM = b"\xef\xbb\xbf"

_PIECE = 1 << 18
_UTF32 = (b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff")
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_CJK = ((0x3000, 0x303F), (0x4E00, 0x9FFF), (0xFF00, 0xFFEF), (0x2010, 0x2026))


def is_utf8(encoding: str | None) -> bool:
    """Whether `encoding` (None is the default) names plain UTF-8.

    Raises:
        UsageError: Python knows no such text codec.
    """
    if encoding is None:
        return True
    try:
        known = codecs.lookup(encoding)
        "".encode(encoding)
    except (LookupError, ValueError) as error:
        raise UsageError(
            f"unknown encoding `{encoding}`", hint="for example gbk, gb18030, utf-16, cp1252"
        ) from error
    return known.name == "utf-8"


def transcoded(stream: io.BufferedReader, encoding: str | None) -> io.BufferedReader:
    """`stream` as UTF-8; what `encoding` cannot decode becomes a byte that UTF-8 refuses too."""
    if is_utf8(encoding):
        return stream
    assert encoding is not None
    return io.BufferedReader(_Transcoder(stream, encoding), _PIECE)


def bad_bytes(content: bytes, error: UnicodeDecodeError, encoding: str | None = None) -> Problem:
    """PTC102 for a line that is not UTF-8 (or not `encoding`).

    Args:
        content: the bytes of the line.
        error: where strict UTF-8 decoding of `content` stopped.
        encoding: the codec the user named, if any.
    """
    column = len(content[: error.start].decode()) + 1
    if not is_utf8(encoding):
        return Problem(
            "PTC102", f"not {encoding}: a character here cannot be decoded", column=column,
            hint="name the real encoding with --encoding",
        )  # fmt: skip
    found = content[error.start]
    guess = guess_encoding(content)
    message = f"not UTF-8: byte 0x{found:02x} at byte offset {error.start} of the line"
    return Problem(
        "PTC102",
        message + (f" (looks like {guess.upper()})" if guess else ""),
        column=column,
        hint=f"pass --encoding {guess or 'NAME'}, or convert the file to UTF-8",
    )


def not_utf8_at_all(head: bytes) -> Problem | None:
    """PTC102 for a whole file in UTF-16 or UTF-32, seen by its first bytes."""
    name = ""
    if head.startswith(_UTF32):
        name = "UTF-32"
    elif head.startswith(_UTF16) or _every_other_is_nul(head):
        name = "UTF-16"
    if not name:
        return None
    codec = name.lower()
    if not head.startswith(_UTF16 + _UTF32):
        codec += "-le" if head[1:2] == b"\0" else "-be"
    return Problem(
        "PTC102",
        f"not UTF-8: byte 0x{head[0]:02x} at byte offset 0 of the file (looks like {name})",
        column=1,
        hint=f"pass --encoding {codec}, or convert the file to UTF-8",
    )


def guess_encoding(content: bytes) -> str:
    """`gbk` or `cp1252` when the bytes look like it, else an empty string."""
    high = sum(byte >= 0x80 for byte in content)
    try:
        wide = [ord(char) for char in content.decode("gbk") if char > "\x7f"]
    except UnicodeDecodeError:
        wide = []
    if wide and high >= 1.6 * len(wide):  # common Chinese has the high bit in both bytes
        common = sum(any(low <= char <= top for low, top in _CJK) for char in wide)
        if common >= 0.9 * len(wide):
            return "gbk"
    try:
        text = content.decode("cp1252")
    except UnicodeDecodeError:
        return ""
    letters = sum(char.isalpha() for char in text if char > "\x7f")
    return "cp1252" if high <= 0.2 * len(content) and letters >= 0.5 * high else ""


def _every_other_is_nul(head: bytes) -> bool:
    sample = head[:256]
    if len(sample) < 4:
        return False
    half = len(sample) // 2
    return max(sample[::2].count(0), sample[1::2].count(0)) > 0.7 * half


class _Transcoder(io.RawIOBase):
    """UTF-8 bytes out of a stream in another codec."""

    def __init__(self, stream: io.BufferedReader, encoding: str) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder(encoding)(errors="ptc-mark")
        self._ready = memoryview(b"")
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and not self._ended:
            piece = self._stream.read1(_PIECE)
            self._ended = not piece
            text = self._decoder.decode(piece, final=self._ended)
            self._ready = memoryview(text.encode("utf-8", "surrogateescape"))
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size


def _mark(error: UnicodeError) -> tuple[str, int]:
    """Stand in for undecodable input: a character that encodes to the byte 0xFF."""
    assert isinstance(error, UnicodeDecodeError)
    return "\udcff", error.end


codecs.register_error("ptc-mark", _mark)
