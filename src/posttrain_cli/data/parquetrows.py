"""Parquet rows, one row group in memory at a time."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from typing import IO, Any

from posttrain_cli.data import storage
from posttrain_cli.data.reader import Row, ends_early

_BATCH = 1024


def parquet_rows(path: str) -> Iterator[Row]:
    """Yield the rows of a Parquet file; keys of structs that only hold null are left out.

    Arrow gives every struct all keys seen anywhere in its column, filled with null; those were
    never in the record. A file that ends early or is no Parquet is PTC109.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    try:
        with _seekable(path) as stream:
            table = pq.ParquetFile(stream)
            for batch in table.iter_batches(batch_size=_BATCH):
                for record in batch.to_pylist():
                    row += 1
                    yield Row(row, None, {key: _pruned(item) for key, item in record.items()})
    except (pa.ArrowInvalid, OSError, storage.DamagedStream) as error:
        reason = str(error).split("\n")[0].rstrip(".")
        damage = storage.DamagedStream(f"not a whole Parquet file: {reason};")
        yield ends_early(path, damage, None, row)


def _seekable(path: str) -> IO[bytes]:
    """The file itself, or its decompressed copy in a temporary file."""
    if not storage.is_compressed(path):
        return storage.open_raw(path)
    copy = tempfile.TemporaryFile()  # noqa: SIM115 closed by the caller
    with storage.open_bytes(path) as stream:
        shutil.copyfileobj(stream, copy)
    copy.seek(0)
    return copy


def _pruned(value: Any) -> Any:
    """`value` without the null keys of its structs."""
    if isinstance(value, dict):
        return {key: _pruned(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_pruned(item) for item in value]
    return value
