"""Rows between reading and writing: their lines on disk, a few numbers for each in memory.

The file has no name, so nothing is left behind when the process is killed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from posttrain_cli.data.dedup import SLOTS, Signatures
from posttrain_cli.data.index import RowIndex
from posttrain_cli.data.lines import decode
from posttrain_cli.data.reasons import Place
from posttrain_cli.data.refine import Batch
from posttrain_cli.data.rowkeys import join

Flags = NDArray[np.bool_]
_BLOCK = 1 << 20


def nameless_file(folder: Path) -> IO[bytes]:
    """A file without a name on the file system where `folder` is, or will be."""
    while not folder.is_dir():
        folder = folder.parent
    return tempfile.TemporaryFile(dir=folder)  # the caller closes it


class Spool:
    """Kept rows in input order.

    Args:
        folder: where the lines are put; the file system of the output.
    """

    def __init__(self, folder: Path) -> None:
        self.index = RowIndex()  # finds equal rows
        self._stream = nameless_file(folder)
        self._sizes: list[NDArray[np.int64]] = []
        self._places: list[NDArray[np.int64]] = []
        self._groups: list[Any] = []
        self._tokens: list[Any] = []
        self._signatures = nameless_file(folder)
        self._files: dict[str, int] = {}

    def add(self, batch: Batch) -> None:
        """Append the kept rows of a batch."""
        if not batch.lines:
            return
        self._stream.write(b"".join(line + b"\n" for line in batch.lines))
        self._sizes.append(np.array([len(line) + 1 for line in batch.lines]))
        places = [
            (self._files.setdefault(at.path, len(self._files)), at.row, at.line or 0)
            for at in batch.places
        ]
        self._places.append(np.array(places, np.int64))
        self.index.add(join(batch.digests))
        for column, values in ((self._groups, batch.groups), (self._tokens, batch.tokens)):
            if values is not None:
                column.append(values)
        if batch.signatures is not None:
            self._signatures.write(batch.signatures.tobytes())

    def __len__(self) -> int:
        return sum(map(len, self._sizes))

    @property
    def groups(self) -> NDArray[np.uint64]:
        """(N,) hashes of the prompts, if there is a split."""
        return np.concatenate([np.zeros(0, np.uint64), *self._groups])

    @property
    def tokens(self) -> NDArray[np.int64]:
        """(N, 2) tokens before any cut, and trained tokens, if there is a tokenizer."""
        return np.concatenate([np.zeros((0, 2), np.int64), *self._tokens])

    @property
    def signatures(self) -> Signatures:
        """(N, SLOTS) near-duplicate signatures, if they are wanted."""
        if not len(self):
            return np.zeros((0, SLOTS), np.uint16)
        self._signatures.flush()
        return np.memmap(self._signatures, np.uint16, "r").reshape(-1, SLOTS)

    def places(self, rows: Any) -> list[Place]:
        """Where the rows with these numbers stood."""
        names = list(self._files)
        chosen = np.concatenate([np.zeros((0, 3), np.int64), *self._places])[rows]
        return [Place(names[file], row, line or None) for file, row, line in chosen.tolist()]

    def blocks(self, wanted: Flags) -> Iterator[bytes]:
        """The lines of the wanted rows as bytes, whole lines in each block."""
        ends = self._ends
        edges = np.flatnonzero(np.diff(np.concatenate([[False], wanted, [False]]).astype(np.int8)))
        for first, last in edges.reshape(-1, 2).tolist():
            at = first
            while at < last:
                start = int(ends[at - 1]) if at else 0
                stop = min(last, int(np.searchsorted(ends, start + _BLOCK, side="right")))
                stop = max(stop, at + 1)
                self._stream.seek(start)
                yield self._stream.read(int(ends[stop - 1]) - start)
                at = stop

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        """(N,) where each line ends; all rows must have been added."""
        return np.cumsum(np.concatenate([np.zeros(0, np.int64), *self._sizes]))

    def record(self, row: int) -> dict[str, Any]:
        """The record of one row."""
        start = int(self._ends[row - 1]) if row else 0
        self._stream.seek(start)
        return decode(self._stream.read(int(self._ends[row]) - start - 1))

    def lines(self, wanted: Flags) -> Iterator[bytes]:
        """The lines of the wanted rows, without their line feeds."""
        for block in self.blocks(wanted):
            yield from block[:-1].split(b"\n")

    def close(self) -> None:
        """Give the disk space back."""
        self._stream.close()
        self._signatures.close()
        self.index.close()
