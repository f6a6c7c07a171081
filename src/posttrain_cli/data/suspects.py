"""Which lines of a block may hold what a JSON parser does not tell, seen by a few byte tests.

Parsing alone cannot see duplicate keys, escaped control characters or control tokens. Testing
each line for them costs more than parsing it; testing a whole block at once in numpy does not.
The tests may suspect a clean line, which is then looked at again; they never pass a faulty one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from posttrain_cli.data.contract import KNOWN_TOKENS

Bytes = NDArray[np.uint8]
Flags = NDArray[np.bool_]
Positions = NDArray[np.intp]

_QUOTE, _COLON, _BACKSLASH, _DELETE, _BAR, _LESS, _ZERO, _SPACE = b'":\\\x7f|<0 '
_FEW = 100  # hits in a block
_SHORTEST = 8  # bytes of a block that the tests can be run on


def token_bytes(tokens: Iterable[str]) -> tuple[bytes, ...]:
    """The bytes under which each control text may stand in JSON, without exotic escapes.

    Texts that `contract.KNOWN_TOKENS` matches are left out: their bytes are looked for anyway.
    """
    forms: set[bytes] = set()
    for token in tokens:
        if not KNOWN_TOKENS.search(token):
            plain = json.dumps(token, ensure_ascii=False)[1:-1]
            escaped = json.dumps(token)[1:-1]
            forms |= {text.encode() for text in (plain, escaped, plain.replace("/", "\\/"))}
    return tuple(sorted(forms))


class Inspector:
    """Looks at blocks of lines; keeps its buffers, since fresh ones cost more than the tests.

    Args:
        tokens: control texts to look for beside the well-known ones, from `token_bytes`.
    """

    def __init__(self, tokens: tuple[bytes, ...] = ()) -> None:
        self._tokens = tokens
        self._flags: tuple[Flags, ...] = ()

    def inspect(self, block: bytes, ends: Positions) -> tuple[NDArray[np.int64], Flags]:
        """Look at all lines of a block at once.

        Args:
            block: whole lines, each with its line feed.
            ends: (N,) index behind the line feed of each line.

        Returns:
            (N,) keys written in each line, if it is valid JSON (now and then a text counts as
            one, too), and (N,) whether its texts need a look for control characters and tokens.
        """
        if len(block) < _SHORTEST:
            return np.full(len(ends), -1), np.ones(len(ends), np.bool_)
        octets = np.frombuffer(block, np.uint8)
        if not self._flags or len(self._flags[0]) < len(octets):
            self._flags = tuple(np.zeros(len(octets), np.bool_) for _ in range(3))
        keys = self._count_keys(octets, ends)
        texts = np.zeros(len(ends), np.bool_)
        for hits in (*self._escapes(octets), *self._plain(block, octets)):
            if len(hits):
                texts[_lines_of(hits, ends)] = True
        for token in self._tokens:
            at = block.find(token)
            while at >= 0:
                line = int(np.searchsorted(ends, at, side="right"))
                texts[line] = True
                at = block.find(token, int(ends[line]))
        return keys, texts

    def _equal(self, octets: Bytes, value: int, buffer: int) -> Flags:
        """`octets == value`, in one of the buffers."""
        flags = self._flags[buffer][: len(octets)]
        np.equal(octets, value, out=flags)
        return flags

    def _count_keys(self, octets: Bytes, ends: Positions) -> NDArray[np.int64]:
        """Keys in each line: colons behind a closing quote."""
        colons = np.flatnonzero(self._equal(octets, _COLON, 0))
        before, second = octets[colons - 1], octets[colons - 2]
        quote = before == _QUOTE
        escaped = second == _BACKSLASH
        keys = _tally(colons[quote & ~escaped], ends)
        spaced = (before <= _SPACE) & ((second <= _SPACE) | (second == _QUOTE))
        behind = colons[quote & escaped]
        behind = behind[octets[behind - 3] == _BACKSLASH]  # else the quote itself is escaped
        unsure = behind.tolist() + colons[spaced].tolist()
        rare = [at for at in unsure if _closes_a_text(octets, at - 1)]
        return keys + _tally(np.array(rare, np.intp), ends) if rare else keys

    def _escapes(self, octets: Bytes) -> Iterator[Positions]:
        """Where an escape may make a control character or a piece of a control token.

        Valid JSON ends behind an escape with a quote and a brace at least, so no escape of four
        digits starts in the last six bytes of a block.
        """
        letters = octets[1:]
        escape = self._equal(octets[:-1], _BACKSLASH, 0)
        found = self._equal(letters, ord("b"), 1)
        found |= self._equal(letters, ord("f"), 2)
        found &= escape
        yield _escaped(octets, _where(found))
        escape &= self._equal(letters, ord("u"), 1)
        unit = escape[:-4]
        unit &= self._equal(octets[2:-3], _ZERO, 1)
        unit &= self._equal(octets[3:-2], _ZERO, 1)
        at = _where(unit)  # U+0000 to U+00FF
        low = _HEX[octets[at + 4]] << 4 | _HEX[octets[at + 5]]
        yield _escaped(octets, at[_FLAGGED[low]])

    def _plain(self, block: bytes, octets: Bytes) -> Iterator[Positions]:
        """Where DEL or the start of a well-known control token stands unescaped."""
        if b"\x7f" in block:
            yield np.flatnonzero(octets == _DELETE)
        token = self._equal(octets[:-1], _LESS, 0)
        token &= self._equal(octets[1:], _BAR, 1)
        yield _where(token)


def _where(flags: Flags) -> Positions:
    """Where flags are set; faster than `np.flatnonzero` where hardly any is."""
    count = np.count_nonzero(flags)
    if count > _FEW:
        return np.flatnonzero(flags)
    raw = flags.tobytes() if count else b""
    places: list[int] = []
    for _ in range(count):
        places.append(raw.find(1, places[-1] + 1 if places else 0))
    return np.array(places, np.intp)


def _tally(positions: Positions, ends: Positions) -> NDArray[np.int64]:
    """(N,) how many positions lie in each line."""
    return np.bincount(_lines_of(positions, ends), minlength=len(ends))


def _closes_a_text(octets: Bytes, at: int) -> bool:
    """Whether a quote that is not escaped stands at `at`, or before it over white space."""
    while at > 0 and octets[at] in (0x20, 0x09, 0x0D):
        at -= 1
    return bool(octets[at] == _QUOTE) and _run_before(octets, at) % 2 == 0


def _lines_of(positions: Positions, ends: Positions) -> Positions:
    """The line that each position lies in."""
    return np.searchsorted(ends, positions, side="right")


def _escaped(octets: Bytes, at: Positions) -> Positions:
    """Those of the backslashes `at` that are not themselves escaped."""
    doubled = at[octets[at - 1] == _BACKSLASH]
    if not len(doubled):
        return at
    keep = [index for index in doubled.tolist() if _run_before(octets, index) % 2 == 0]
    return np.concatenate([at[octets[at - 1] != _BACKSLASH], np.array(keep, np.intp)])


def _run_before(octets: Bytes, index: int) -> int:
    """How many backslashes stand directly in front of `index`."""
    count = 0
    while index > count and octets[index - count - 1] == _BACKSLASH:
        count += 1
    return count


def _hex_values() -> NDArray[np.uint16]:
    values = np.zeros(256, np.uint16)
    for digit in range(16):
        values[ord(f"{digit:x}")] = values[ord(f"{digit:X}")] = digit
    return values


def _flagged_units() -> Flags:
    """Code units below 256 whose escape needs a look: ASCII, of which tokens are made.

    Characters beyond are looked for in the texts (`contract.has_rare`).
    Left out are white space and what many writers escape as a rule (quotes, `&`, `=`, `>`).
    """
    flags = np.zeros(256, np.bool_)
    flags[:0x80] = True
    flags[[0x09, 0x0A, 0x0D, *b"\"&'=>\\"]] = False
    return flags


_HEX = _hex_values()
_FLAGGED = _flagged_units()
