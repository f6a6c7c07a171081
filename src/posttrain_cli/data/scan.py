"""The exact JSON scanner: what is wrong with one text, and in which column.

It is the definition of the rules PTC103, PTC107 and PTC108 and runs only on text that a fast
path found suspicious, so it is written for exactness: integers of any size stay integers, each
value's place is known, every duplicate key and lone surrogate is listed.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from json.decoder import scanstring  # type: ignore[attr-defined] # typeshed leaves it out
from typing import Any

MAX_DEPTH = 128

Path = tuple[str | int, ...]

_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_HALF = re.compile("[\ud800-\udfff]")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_WORD = re.compile(r"[+-]?[A-Za-z_][A-Za-z_0-9]*|[+-]?\.?\d[\w.+-]*", re.ASCII)
_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_HEX4 = re.compile(r"[0-9a-fA-F]{4}")
_WORDS = {"true": True, "false": False, "null": None}
_ESCAPES = {
    '"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t",
}  # fmt: skip
_DUMPS = "JSON needs double quotes, true, false and null; write the record with json.dumps"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong in one record, before it has a file and a line.

    Attributes:
        code: a key of CODES.
        message: what was found and what was expected.
        path: keys and indices that lead to the value concerned; () is the record.
        column: 1-based code point, or 0 when it follows from `path` and `offset`.
        offset: characters into the text at `path` where the problem starts.
        hint: what to do about it.
    """

    code: str
    message: str
    path: Path = ()
    column: int = 0
    offset: int = 0
    hint: str = ""


class JsonError(Exception):
    """The text is no JSON; carries the problem PTC103 with its column."""

    def __init__(self, message: str, index: int, hint: str = "") -> None:
        super().__init__(message)
        self.problem = Problem("PTC103", message, column=index + 1, hint=hint)


@dataclass(slots=True)
class Scan:
    """One scanned text: its value, where each part of it starts, and what is wrong with it."""

    text: str
    value: Any = None
    places: dict[Path, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def column(self, problem: Problem) -> int:
        """The 1-based column of `problem` in code points."""
        if problem.column:
            return problem.column
        path = problem.path
        while path not in self.places:  # a missing field is shown at the object it misses from
            path = path[:-1]
        index = self.places[path]
        if problem.offset and self.text[index : index + 1] == '"':
            index = _skip_characters(self.text, index + 1, problem.offset)
        elif problem.code in _INSIDE_TEXT and self.text[index : index + 1] == '"':
            index += 1
        return index + 1


_INSIDE_TEXT = {"PTC301", "PTC306", "PTC307"}


def scan(text: str) -> Scan:
    """Scan one complete JSON text.

    Raises:
        JsonError: the text is not JSON, with the column and the reason.
    """
    result = Scan(text)
    scanner = _Scanner(result)
    result.value = scanner.value(scanner.skip(0), (), 1)
    end = scanner.skip(scanner.end)
    if end < len(text):
        raise _after_the_end(text, end)
    return result


class _Scanner:
    """A recursive descent over `scan.text`; `end` is the index behind the last value read."""

    def __init__(self, into: Scan) -> None:
        self.text = into.text
        self.scan = into
        self.end = 0

    def skip(self, index: int) -> int:
        """The index of the first character at or behind `index` that is not white space."""
        match = _SPACE.match(self.text, index)
        assert match is not None
        return match.end()

    def value(self, index: int, path: Path, depth: int) -> Any:
        self.scan.places[path] = index
        first = self.text[index : index + 1]
        if first == '"':
            return self.string(index)
        if first in ("{", "["):
            if depth > MAX_DEPTH:
                raise JsonError(f"nested deeper than {MAX_DEPTH} levels", index)
            return (self.object if first == "{" else self.array)(index, path, depth)
        if not first:
            raise _cut_off("where a value was expected", index)
        return self.scalar(index)

    def object(self, index: int, path: Path, depth: int) -> dict[str, Any]:
        record: dict[str, Any] = {}
        at = self.skip(index + 1)
        while self.text[at : at + 1] != "}":
            key = self._key(at, path, record)
            at = self.skip(self.end)
            if self.text[at : at + 1] != ":":
                raise self._unexpected(at, "`:` after the key")
            record[key] = self.value(self.skip(at + 1), (*path, key), depth + 1)
            at = self.skip(self.end)
            if self.text[at : at + 1] != "}":
                at = self._comma(at, "}")
        self.end = at + 1
        return record

    def array(self, index: int, path: Path, depth: int) -> list[Any]:
        items: list[Any] = []
        at = self.skip(index + 1)
        while self.text[at : at + 1] != "]":
            items.append(self.value(at, (*path, len(items)), depth + 1))
            at = self.skip(self.end)
            if self.text[at : at + 1] != "]":
                at = self._comma(at, "]")
        self.end = at + 1
        return items

    def string(self, index: int) -> str:
        """The text whose opening quote is at `index`."""
        try:  # the C scanner first; what it refuses or half characters are read by hand
            value: str
            value, self.end = scanstring(self.text, index + 1)
            if value.isascii() or not _HALF.search(value):
                return value
        except ValueError:
            pass
        return self._string_by_hand(index)

    def _string_by_hand(self, index: int) -> str:
        parts: list[str] = []
        at = index + 1
        while True:
            match = _PLAIN.match(self.text, at)
            assert match is not None
            parts.append(match.group())
            at = match.end()
            stop = self.text[at : at + 1]
            if stop == '"':
                self.end = at + 1
                return "".join(parts)
            if not stop:
                raise _cut_off("inside a string", at)
            if stop != "\\":
                raise JsonError(
                    f"raw control character U+{ord(stop):04X} in a string", at,
                    hint="write it as an escape, such as `\\n` or `\\t`",
                )  # fmt: skip
            decoded, at = self._escape(at)
            parts.append(decoded)

    def _key(self, index: int, path: Path, record: dict[str, Any]) -> str:
        """Read the key at `index` and note it when the object has it already."""
        if self.text[index : index + 1] == "'":
            raise JsonError("key in single quotes", index, hint=_DUMPS)
        if self.text[index : index + 1] != '"':
            raise self._unexpected(index, "a key in double quotes")
        key = self.string(index)
        if key in record:
            self.scan.problems.append(
                Problem(
                    "PTC107",
                    f"key {key!r} appears twice in one object; the last value is used",
                    (*path, key),
                    column=index + 1,
                    hint="keep one of the two values",
                )
            )
        return key

    def scalar(self, index: int) -> Any:
        number = _NUMBER.match(self.text, index)
        word = _WORD.match(self.text, index)
        if number and (word is None or word.end() <= number.end()):
            self.end = number.end()
            if number.group(1) is None and number.group(2) is None:
                return _integer(number.group())
            value = float(number.group())
            if math.isinf(value):
                raise JsonError(f"number `{number.group()[:40]}` is too large", index)
            return value
        if word and word.group() in _WORDS:
            self.end = word.end()
            return _WORDS[word.group()]
        raise self._no_value(index, word.group() if word else "")

    def _escape(self, index: int) -> tuple[str, int]:
        """Decode the escape at `index`: its text and the index behind it."""
        letter = self.text[index + 1 : index + 2]
        if letter in _ESCAPES:
            return _ESCAPES[letter], index + 2
        if not letter:
            raise _cut_off("inside a string", index + 1)
        if letter != "u":
            raise JsonError(
                f"invalid escape `\\{letter}`", index, hint="write a backslash as `\\\\`"
            )
        unit = self._unit(index)
        if 0xD800 <= unit < 0xDC00 and self.text[index + 6 : index + 8] == "\\u":
            low = self._unit(index + 6)
            if 0xDC00 <= low < 0xE000:
                return chr(0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00)), index + 12
        if 0xD800 <= unit < 0xE000:
            self.scan.problems.append(
                Problem(
                    "PTC108",
                    f"lone surrogate `\\u{unit:04x}`: half of a character, no text can hold it",
                    column=index + 1,
                    hint="the text was cut inside an emoji or another rare character; "
                    "write the whole pair or remove the escape",
                )
            )
        return chr(unit), index + 6

    def _unit(self, index: int) -> int:
        match = _HEX4.match(self.text, index + 2)
        if match is None:
            if index + 6 > len(self.text):
                raise _cut_off("inside a string", len(self.text))
            raise JsonError("`\\u` without four hex digits", index)
        return int(match.group(), 16)

    def _comma(self, index: int, closer: str) -> int:
        """Step over the comma at `index`; the index of what follows it."""
        if self.text[index : index + 1] != ",":
            raise self._unexpected(index, f"`,` or `{closer}`")
        following = self.skip(index + 1)
        if self.text[following : following + 1] in ("}", "]"):
            raise JsonError(
                f"trailing comma before `{self.text[following]}`", index, hint="remove the comma"
            )
        return following

    def _unexpected(self, index: int, expected: str) -> JsonError:
        first = self.text[index : index + 1]
        if not first:
            return _cut_off(f"where {expected} was expected", index)
        if first in ("/", "#"):
            return _comment(index)
        return JsonError(f"found `{first}`, expected {expected}", index)

    def _no_value(self, index: int, word: str) -> JsonError:
        first = self.text[index]
        if word.lstrip("+-") in ("NaN", "Infinity", "inf", "nan", "Inf"):
            return JsonError(
                f"`{word}` is not JSON", index,
                hint="leave the value out or write null; numbers in JSON are finite",
            )  # fmt: skip
        if word in ("None", "True", "False"):
            return JsonError(f"`{word}` is Python, not JSON", index, hint=_DUMPS)
        if first == "'":
            return JsonError("text in single quotes", index, hint=_DUMPS)
        if first in ("/", "#"):
            return _comment(index)
        if first == "\ufeff":
            return _byte_order_mark(index)
        return JsonError(f"found `{word[:40] or first}`, expected a value", index)


def _integer(digits: str) -> int:
    """The exact integer; digit by digit in pieces, beyond the interpreter's limit on digits."""
    if len(digits) <= 4000:
        return int(digits)
    sign, body = (-1, digits[1:]) if digits[0] == "-" else (1, digits)
    value = 0
    for start in range(0, len(body), 4000):
        piece = body[start : start + 4000]
        value = value * 10 ** len(piece) + int(piece)
    return sign * value


def _cut_off(where: str, index: int) -> JsonError:
    return JsonError(
        f"cut off: the text ends {where}", index,
        hint="the writer was stopped, or a line break was written unescaped inside the record",
    )  # fmt: skip


def _comment(index: int) -> JsonError:
    return JsonError("comment: JSON has none", index, hint="remove the comment")


def _byte_order_mark(index: int) -> JsonError:
    return JsonError(
        "byte-order mark in front of the record", index,
        hint="files were joined that each began with a mark; remove it",
    )  # fmt: skip


def _after_the_end(text: str, index: int) -> JsonError:
    first = text[index]
    if first in ("{", "["):
        if "\r" in text[:index]:
            return JsonError(
                "two values on one line, parted by a carriage return", index,
                hint="end each line with a line feed",
            )  # fmt: skip
        return JsonError(
            "two objects on one line" if first == "{" else "two values on one line", index,
            hint="put each record on a line of its own",
        )  # fmt: skip
    if first in ("/", "#"):
        return _comment(index)
    return JsonError(f"found `{first}` after the end of the value", index)


def _skip_characters(text: str, index: int, count: int) -> int:
    """The index in `text` after `count` decoded characters of the JSON string at `index`."""
    while count > 0 and index < len(text):
        match = _PLAIN.match(text, index)
        assert match is not None
        plain = match.end() - index
        if plain >= count:
            return index + count
        count -= plain
        index = match.end()
        if text[index + 1 : index + 2] != "u":
            index += 2
        elif _PAIR.match(text, index):
            index += 12
        else:
            index += 6
        count -= 1
    return index
