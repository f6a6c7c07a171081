"""Outputs that are whole or absent: JSON lines (also .gz and .zst) and Parquet, by suffix."""

from __future__ import annotations

import gzip
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal

from posttrain_cli.data.columns import Kind, arrow_schema, observe, shaped
from posttrain_cli.data.lines import encode
from posttrain_cli.data.storage import is_remote
from posttrain_cli.errors import UsageError
from posttrain_cli.files import atomic_writer, refuse_existing

Records = Callable[[], Iterable[dict[str, Any]]]
ROW_GROUP = 4096


def output_format(target: Path, option: str = "--out") -> Literal["jsonl", "parquet"]:
    """What `target` is written as.

    Raises:
        UsageError: another suffix than .jsonl, .jsonl.gz, .jsonl.zst and .parquet, or no file.
    """
    name = target.name.lower()
    if is_remote(str(target).replace(":/", "://", 1)):
        raise UsageError(
            f"`{option} {target}` is not a local file", hint="write locally and copy it there"
        )
    if target.is_dir():
        raise UsageError(f"`{target.absolute()}` is a directory, `{option}` needs a file name")
    if name.endswith(".parquet"):
        return "parquet"
    if name.removesuffix(".gz").removesuffix(".zst").endswith(".jsonl"):
        return "jsonl"
    raise UsageError(
        f"cannot tell the format of `{option} {target}`",
        hint="end the name in .jsonl, .jsonl.gz, .jsonl.zst or .parquet",
    )


class Sink:
    """A stream that hashes and counts what passes through to `stream`."""

    closed = False

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self.size = 0

    def write(self, block: Any) -> int:
        """Pass `block` on."""
        data = memoryview(block)
        self._digest.update(data)
        self.size += data.nbytes
        self._stream.write(data)
        return data.nbytes

    def flush(self) -> None:
        """Hand what is buffered to the system."""
        self._stream.flush()

    def close(self) -> None:
        """Nothing: the file belongs to `Outputs`."""

    def sha256(self) -> str:
        """Hex SHA-256 of all that was written."""
        return self._digest.hexdigest()

    def settle(self) -> None:
        """Make the bytes durable, so that the renames that follow are quick."""
        self._stream.flush()
        os.fsync(self._stream.fileno())


class Outputs:
    """Several files that appear together: each is whole, and the first one opened appears last.

    Use as a context manager; on an exception none of them appears.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._sinks: list[Sink] = []

    def __enter__(self) -> Outputs:
        return self

    def open(self, target: Path) -> Sink:
        """A sink whose content will appear under `target`."""
        sink = Sink(self._stack.enter_context(atomic_writer(target)))
        self._sinks.append(sink)
        return sink

    def __exit__(self, *failure: Any) -> None:
        if failure[0] is None:
            for sink in self._sinks:
                sink.settle()
        self._stack.__exit__(*failure)


def write_records(sink: Sink, target: Path, records: Records) -> int:
    """Write the records in the format of `target`; `records` is called once or, for Parquet, twice.

    Returns:
        The number of records.
    """
    if output_format(target) == "parquet":
        columns: dict[str, Kind] = {}
        for record in records():
            observe(columns, record)
        return _write_parquet(sink, records(), columns)
    return write_lines(sink, target, map(encode, records()))


def write_lines(sink: Sink, target: Path, lines: Iterable[bytes]) -> int:
    """Write lines of JSON, compressed as the suffix of `target` says; return their number."""
    count = 0
    with _compressed(sink, target) as stream:
        for block in blocks(lines, ROW_GROUP):
            stream.write(b"\n".join(block) + b"\n")
            count += len(block)
    return count


def write_blocks(sink: Sink, target: Path, lines: Iterable[bytes]) -> None:
    """Write blocks of whole lines, compressed as the suffix of `target` says."""
    with _compressed(sink, target) as stream:
        for block in lines:
            stream.write(block)


def _write_parquet(sink: Sink, records: Iterable[dict[str, Any]], columns: dict[str, Kind]) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = arrow_schema(columns)
    count = 0
    with pq.ParquetWriter(pa.PythonFile(sink, "w"), schema, compression="zstd") as writer:
        for block in blocks(records, ROW_GROUP):
            rows = [shaped(record, columns) for record in block]
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
            count += len(block)
    return count


@contextmanager
def _compressed(sink: Sink, target: Path) -> Iterator[Any]:
    name = target.name.lower()
    if name.endswith(".gz"):
        with gzip.GzipFile(fileobj=sink, mode="wb", compresslevel=6, filename="", mtime=0) as out:
            yield out
    elif name.endswith(".zst"):
        import zstandard

        file: Any = sink
        with zstandard.ZstdCompressor(level=3).stream_writer(file, closefd=False) as out:
            yield out
    else:
        yield sink


def blocks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """`items` in lists of `size`; the last may be shorter."""
    remaining = iter(items)
    while block := list(islice(remaining, size)):
        yield block


def check_outputs(*targets: Path, overwrite: bool) -> None:
    """Refuse two outputs of one name, and existing ones without `overwrite`."""
    if len({target.absolute() for target in targets}) < len(targets):
        raise UsageError(f"two outputs have the name `{targets[0].absolute()}`")
    for target in targets:
        refuse_existing(target, overwrite)
