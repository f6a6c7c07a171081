"""Statistics of a data set: how long its rows are, and what a token limit would cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrain_cli.data.filestate import FileState
from posttrain_cli.data.tally import LENGTH_BINS, LONGEST, Result, bin_start

BYTES_A_TOKEN = 4.3  # of byte-level BPE vocabularies: English 4.4, Chinese 4.5, code 4.1


@dataclass(slots=True)
class Statistics:
    """Sizes of all good rows, in bytes of text, in bins that grow by a constant factor."""

    lengths: NDArray[np.int64] = field(default_factory=lambda: np.zeros(LENGTH_BINS, np.int64))
    size: int = 0

    def add(self, result: Result) -> None:
        """Add the rows of a block."""
        self.lengths += result.lengths
        self.size += result.size

    def as_json(self, files: Sequence[FileState], duplicates: int, limit: int) -> dict[str, Any]:
        """The statistics of a report; token numbers are estimates from bytes."""
        rows = int(self.lengths.sum())
        longest = [(size, state, row) for state in files for size, row in state.longest]
        longest.sort(key=lambda item: -item[0])
        top = longest[0][0] if longest else 0
        over = self.rows_above(limit * BYTES_A_TOKEN)
        return {
            "rows": sum(state.rows for state in files),
            "duplicates": duplicates,
            "text_bytes": {
                "total": self.size,
                "mean": round(self.size / rows, 1) if rows else 0,
                "median": min(self.quantile(0.5), top),
                "p90": min(self.quantile(0.9), top),
                "p99": min(self.quantile(0.99), top),
                "max": top,
            },
            "histogram": self.histogram(),
            "longest": [
                {"path": state.path, "line": state.line_of(row), "row": row, "bytes": size}
                for size, state, row in longest[:LONGEST]
            ],
            "estimate": {
                "bytes_a_token": BYTES_A_TOKEN,
                "tokens": round(self.size / BYTES_A_TOKEN),
                "max_tokens": limit,
                "rows_over": over,
                "share_over": round(over / rows, 4) if rows else 0.0,
            },
        }

    def quantile(self, share: float) -> int:
        """The size that `share` of the rows do not exceed, to the width of a bin."""
        total = self.lengths.sum()
        if not total:
            return 0
        index = int(np.searchsorted(np.cumsum(self.lengths), share * total))
        return round(bin_start(index + 1))

    def rows_above(self, size: float) -> int:
        """About how many rows are larger than `size`."""
        starts = np.array([bin_start(index) for index in range(LENGTH_BINS)])
        return int(self.lengths[starts >= size].sum())

    def histogram(self) -> list[dict[str, int]]:
        """Rows by size, in steps of a factor of two, without the empty ends."""
        octaves = self.lengths.reshape(-1, 8).sum(axis=1)
        used = np.flatnonzero(octaves)
        if not len(used):
            return []
        return [
            {"from": 2**index, "to": 2 ** (index + 1), "rows": int(octaves[index])}
            for index in range(int(used[0]), int(used[-1]) + 1)
        ]
