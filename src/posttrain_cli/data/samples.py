"""Token ids ready to train: one sample or one pack a row, as Parquet or JSON lines.

Each row has `input_ids`, `loss_mask` (1 where a token is trained) and `lengths` (tokens of each
sample in the row, which do not see each other).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from posttrain_cli.data.lines import encode
from posttrain_cli.data.pack import Ints, pack
from posttrain_cli.data.spool import Flags, Spool
from posttrain_cli.data.writer import ROW_GROUP, Sink, blocks, output_format, write_lines

Sample = dict[str, list[int]]


def samples(spool: Spool, wanted: Flags, capacity: int | None, limit: int) -> Iterator[Sample]:
    """The wanted samples, one a row, or packed best-fit-decreasing into rows of `capacity`.

    Packs are in the order of their first samples, and samples inside a pack in input order.

    Args:
        spool: holds the samples as lines.
        wanted: (N,) which of them.
        capacity: tokens of a pack, or None.
        limit: tokens to which longer samples were cut.
    """
    rows = np.flatnonzero(wanted)
    if capacity is None:
        bins: Iterable[Ints] = rows.reshape(-1, 1)
    else:
        bins = _bins(rows, np.minimum(spool.tokens[rows, 0], limit), capacity)
    for members in bins:
        parts = [spool.record(row) for row in members.tolist()]
        yield {
            name: [value for part in parts for value in part[name]]
            for name in ("input_ids", "loss_mask", "lengths")
        }


def _bins(rows: Ints, lengths: Ints, capacity: int) -> list[Ints]:
    assignment, count = pack(lengths, capacity)
    by_bin = np.argsort(assignment, kind="stable")
    edges = np.cumsum(np.bincount(assignment, minlength=count))[:-1]
    return sorted(np.split(rows[by_bin], edges), key=lambda members: int(members[0]))


def write_samples(
    sink: Sink, target: Path, rows: Iterator[Sample], identity: dict[str, str]
) -> int:
    """Write the rows in the format of `target`; return their number.

    Args:
        sink: where the bytes go.
        target: the name that says the format.
        rows: the samples or packs.
        identity: tokenizer and template, stored with a Parquet file.
    """
    if output_format(target) == "jsonl":
        return write_lines(sink, target, map(encode, rows))
    import pyarrow as pa
    import pyarrow.parquet as pq

    fields: list[Any] = [
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("lengths", pa.list_(pa.int32())),
    ]
    schema = pa.schema(fields, metadata=identity)
    count = 0
    with pq.ParquetWriter(pa.PythonFile(sink, "w"), schema, compression="zstd") as writer:
        for block in blocks(rows, ROW_GROUP):
            writer.write_table(pa.Table.from_pylist(block, schema=schema))
            count += len(block)
    return count
