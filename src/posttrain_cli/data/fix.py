"""`validate --fix`: a copy with only the fixes that cannot change what a record says.

The byte-order mark goes (PTC101), text is written as UTF-8 (PTC102 with a named encoding), one
JSON array becomes lines (PTC105), blank lines go (PTC106), control characters go (PTC301). All
other bytes stay as they are, whatever else is wrong with them.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from posttrain_cli.data import storage
from posttrain_cli.data.encoding import BOM, is_utf8, transcoded
from posttrain_cli.data.jsonarray import elements
from posttrain_cli.data.reader import exact, quick
from posttrain_cli.data.sniff import Format, look
from posttrain_cli.errors import DataError, UsageError
from posttrain_cli.files import atomic_writer, refuse_existing

# An escaped control character, any other escape (kept), or DEL.
_ESCAPE = re.compile(
    rb"\\(?:u00(?:0[0-8bBcCeEfF]|1[0-9a-fA-F]|7[fF])|[bf])|\\(?:u[0-9a-fA-F]{4}|.)|\x7f", re.DOTALL
)
_CONTROL = re.compile(rb"\\(?:u00(?:0[0-8bBcCeEfF]|1[0-9a-fA-F]|7[fF])|[bf])|\x7f")
_LINE_BREAK = re.compile(rb"[ \t\r]*\n[ \t\r\n]*")


def fix_file(path: str, out: Path, encoding: str | None, overwrite: bool) -> dict[str, int]:
    """Write a corrected copy of `path` to `out`; how often each code was fixed.

    Raises:
        UsageError: `out` exists or is no plain name, or the format has no safe fixes.
        DataError: the file cannot be read to its end, so no copy would be whole.
    """
    if out.suffix in storage.COMPRESSED:
        raise UsageError(f"`--out {out}` would be compressed", hint="name a plain .jsonl file")
    seen = look(path, encoding)
    if seen.format in ("csv", "tsv", "parquet"):
        raise UsageError(
            f"`--fix` works on JSON files, and `{path}` is {seen.format}",
            hint="`ptc preprocess` reads it and writes contract records",
        )
    if seen.fault is not None and seen.fault.code != "PTC105":
        raise DataError(f"{path}: {seen.fault.message}", hint=seen.fault.hint)
    refuse_existing(out, overwrite)
    fixed: Counter[str] = Counter()
    fixed["PTC102"] += not is_utf8(encoding)
    fixed["PTC105"] += seen.fault is not None
    as_array = seen.format == "json" or seen.fault is not None
    try:
        with storage.open_bytes(path) as raw, atomic_writer(out) as target:
            stream = transcoded(raw, encoding)
            for line in _lines(stream, "json" if as_array else "jsonl", fixed):
                target.write(line)
    except storage.DamagedStream as damage:
        raise DataError(f"{path}: {damage.message}", hint="fetch the file again") from damage
    return {code: count for code, count in sorted(fixed.items()) if count}


def _lines(stream: io.BufferedReader, kind: Format, fixed: Counter[str]) -> Iterator[bytes]:
    """The lines of the copy, each with its line feed as it was."""
    if kind == "json":
        for element in elements(stream):
            if isinstance(element, bytes):
                line = _LINE_BREAK.sub(b" ", element)
                yield _without_controls(line, fixed) + b"\n"
            elif element.code == "PTC101":
                fixed["PTC101"] += 1
            else:
                raise DataError(f"{element.code}: {element.message}", hint=element.hint)
        return
    for number, raw in enumerate(stream):
        line = raw
        if number == 0 and line.startswith(BOM):
            line = line[len(BOM) :]
            fixed["PTC101"] += 1
        if not line or line.isspace():
            fixed["PTC106"] += 1
        else:
            yield _without_controls(line, fixed)


def _without_controls(line: bytes, fixed: Counter[str]) -> bytes:
    """The line without control characters, if it is JSON; else as it is."""
    if not _CONTROL.search(line):
        return line
    cleaned = _ESCAPE.sub(_keep, line)
    if cleaned == line or (quick(line) is None and exact(line.rstrip(b"\n")).value is None):
        return line
    fixed["PTC301"] += 1
    return cleaned


def _keep(match: re.Match[bytes]) -> bytes:
    return b"" if _CONTROL.fullmatch(match.group()) else match.group()
