"""Whole lines out of a byte range or a stream, in pieces of bounded size."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator

PIECE = 1 << 18


def lines_of_range(path: str, start: int, end: int, piece: int = PIECE) -> Iterator[bytes]:
    """Yield the lines that start in bytes [start, end) of a file, many at a time.

    Ranges that adjoin yield every line once, wherever they are cut. Only the last line of the
    file may lack its line feed.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        position = _line_start(descriptor, start, piece)
        held: list[bytes] = []  # of a line that is longer than a piece
        while position < end or held:
            block = os.pread(descriptor, piece, position)
            if not block:
                break
            if position + len(block) >= end:  # the line that crosses `end` is the last
                cut = block.find(b"\n", max(0, end - 1 - position)) + 1
            else:
                cut = block.rfind(b"\n") + 1
            if cut == 0:
                held.append(block)
                position += len(block)
                continue
            yield b"".join([*held, block[:cut]])
            held = []
            position += cut
        if held:
            yield b"".join(held)
    finally:
        os.close(descriptor)


def lines_of_stream(stream: io.BufferedReader, piece: int = PIECE) -> Iterator[bytes]:
    """Yield the lines of `stream`, many at a time."""
    held: list[bytes] = []
    while block := stream.read1(piece):
        cut = block.rfind(b"\n") + 1
        if cut == 0:
            held.append(block)
            continue
        yield b"".join([*held, block[:cut]])
        held = [block[cut:]] if cut < len(block) else []
    if held:
        yield b"".join(held)


def _line_start(descriptor: int, start: int, piece: int) -> int:
    """The first position at or behind `start` where a line starts."""
    position = start - 1
    while start and (block := os.pread(descriptor, piece, position)):
        at = block.find(b"\n")
        if at >= 0:
            return position + at + 1
        position += len(block)
    return position + 1 if not start else position
