"""One JSON array, element by element, in memory bounded by its longest element."""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Generator, Iterator

from posttrain_cli.data.encoding import BOM
from posttrain_cli.data.scan import Problem

_PIECE = 1 << 20
_SPACE = re.compile(r"[ \t\r\n]*")
# A whole string, a bracket, or the quote of a string that goes on behind the buffer.
_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\]]|"', re.DOTALL)
_SCALAR = re.compile(r"[^,\]\[{}\s]+")
_DECODER = json.JSONDecoder(strict=False)


def elements(stream: io.BufferedReader) -> Iterator[bytes | Problem]:
    """Yield the text of each element of the array in `stream`, faults between them as problems.

    A text that is no array counts as one element. The text of an element is not checked, only
    delimited; what follows a fault is still read where brackets allow it. The byte-order mark
    and the end before the closing bracket come as PTC101 and PTC109.
    """
    text = _Text(stream)
    if text.has_mark:
        yield Problem("PTC101", "UTF-8 byte-order mark at the start of the file", column=1)
    text.skip_space()
    if text.peek() != "[":
        yield text.take_rest()
        return
    text.at += 1
    text.skip_space()
    if text.peek() != "]" and not (yield from _between_brackets(text)):
        return
    text.at += 1
    text.skip_space()
    if text.peek():
        yield Problem("PTC103", f"found `{text.peek()}` after the end of the array")


def _between_brackets(text: _Text) -> Generator[bytes | Problem, None, bool]:
    """Elements up to the closing bracket, which is left in place; whether there is one."""
    while True:
        element = text.take_element()
        if element is None:
            yield Problem("PTC109", "the file ends early, inside the array")
            return False
        if element:
            yield element
        else:
            yield Problem("PTC103", f"found `{text.peek()}`, expected a record")
            text.at += 1
        text.skip_space()
        if text.peek() == ",":
            text.at += 1
            text.skip_space()
            if text.peek() == "]":
                yield Problem("PTC103", "trailing comma before `]`", hint="remove the comma")
                return True
        elif text.peek() == "]":
            return True
        elif text.peek() and element:
            yield Problem("PTC103", f"found `{text.peek()}`, expected `,` or `]`")


class _Text:
    """A window over decoded text; bytes that are not UTF-8 pass through unchanged."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._piece = _PIECE
        self._ended = False
        self.buffer = ""
        self.at = 0
        self.grow()
        self.has_mark = self.buffer.startswith(BOM.decode())
        self.at = int(self.has_mark)

    def grow(self) -> bool:
        """Append the next piece of the stream; False at its end."""
        if self._ended:
            return False
        if self.at > len(self.buffer) // 2:
            self.buffer, self.at = self.buffer[self.at :], 0
        raw = self._stream.read1(self._piece)
        self._ended = not raw
        self.buffer += self._decoder.decode(raw, final=self._ended)
        return True

    def peek(self) -> str:
        """The character at the cursor, or an empty string at the end."""
        while self.at >= len(self.buffer) and self.grow():
            pass
        return self.buffer[self.at : self.at + 1]

    def skip_space(self) -> None:
        while True:
            match = _SPACE.match(self.buffer, self.at)
            assert match is not None
            self.at = match.end()
            if self.at < len(self.buffer) or not self.grow():
                return

    def take_rest(self) -> bytes:
        while self.grow():
            pass
        rest, self.at = self.buffer[self.at :].rstrip(), len(self.buffer)
        return rest.encode("utf-8", "surrogateescape")

    def take_element(self) -> bytes | None:
        """The next element; empty when none starts here, None when the text ends inside it."""
        first = self.peek()
        try:
            end = _DECODER.raw_decode(self.buffer, self.at)[1]
        except (ValueError, RecursionError):
            end = -1
        if end < 0 or end == len(self.buffer):
            found = self._end_of_brackets() if first in ("{", "[") else self._end_of_scalar()
            if found is None:
                return None
            end = found
        element, self.at = self.buffer[self.at : end], end
        return element.encode("utf-8", "surrogateescape")

    def _end_of_brackets(self) -> int | None:
        """The index behind the bracket that closes the one at the cursor."""
        depth, offset = 0, 0  # offset from the cursor, which `grow` may move
        piece = self._piece
        while True:
            match = _TOKEN.search(self.buffer, self.at + offset)
            token = match.group() if match else ""
            if not match or token == '"':
                offset = (match.start() if match else len(self.buffer)) - self.at
                self._piece *= 2  # a long string is scanned again, each time twice as far
                if not self.grow():
                    return None
                continue
            offset = match.end() - self.at
            depth += (token in "{[") - (token in "}]")
            if depth == 0:
                self._piece = piece
                return match.end()

    def _end_of_scalar(self) -> int | None:
        if self.peek() == '"':
            while True:
                match = _TOKEN.match(self.buffer, self.at)
                if match and match.group() != '"':
                    return match.end()
                if not self.grow():
                    return None
        while True:
            match = _SCALAR.match(self.buffer, self.at)
            end = match.end() if match else self.at
            if end < len(self.buffer) or not self.grow():
                return end if self.peek() else None
