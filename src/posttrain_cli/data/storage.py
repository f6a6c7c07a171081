"""Where data lies: names to files, files to bytes. Local disk and `s3://`, plain, gzip or zstd."""

from __future__ import annotations

import glob as globbing
import hashlib
import io
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from posttrain_cli.errors import DataError, UsageError
from posttrain_cli.files import sha256_file

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
COMPRESSED = (".gz", ".zst")
GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_PIECE = 1 << 14  # compressed bytes fed at once, so that one piece cannot expand without bound
_BUFFER = 1 << 18
_S3_BLOCK = 1 << 22
_OWN_OUTPUTS = (".report.json", ".rejects.jsonl")


class DamagedStream(DataError):
    """A compressed stream that ends early or is corrupt; becomes finding PTC109."""


def expand(patterns: Sequence[str], base: Path | None = None) -> list[str]:
    """Turn what the user named into single files, in the order given.

    A directory stands for its data files and a glob for its matches, both in byte order of
    their names, without the reports and rejects that ptc puts beside its outputs. A name that
    exists is never read as a glob.

    Args:
        patterns: local paths, globs, directories or `s3://bucket/key`.
        base: folder that relative local names start from; the working directory if absent.

    Raises:
        UsageError: a name matches nothing; every such name is listed with its absolute path.
    """
    files: list[str] = []
    problems: list[str] = []
    for pattern in patterns:
        found = _expand_s3(pattern) if is_remote(pattern) else _expand_local(pattern, base)
        files += found
        if not found:
            problems.append(_nothing_at(pattern, base))
    if problems:
        raise UsageError(
            problems[0],
            hint="check the path; relative paths start from the working directory, "
            "in a config file from the folder of that file",
            problems=problems,
        )
    return files


def is_remote(path: str) -> bool:
    """Whether `path` is an object in a bucket."""
    return path.startswith("s3://")


def data_suffix(path: str) -> str:
    """The suffix that names the format, lower case, without `.gz` or `.zst`; may be empty."""
    name = path.lower()
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return Path(name).suffix


def open_raw(path: str, digest: Any = None) -> io.BufferedReader:
    """Open the bytes of `path` as they are stored.

    Args:
        path: a local file or an object in a bucket.
        digest: a hashlib object that is fed every byte that is read.

    Raises:
        UsageError: the file cannot be opened.
    """
    try:
        if is_remote(path):
            raw = _s3().open(path, "rb", block_size=_S3_BLOCK)
        else:
            raw = open(path, "rb", buffering=0)  # noqa: SIM115 closed by the reader around it
    except OSError as error:
        raise UsageError(f"cannot read `{absolute(path)}`: {error.strerror or error}") from error
    return io.BufferedReader(raw if digest is None else _Hashed(raw, digest), _BUFFER)


def open_bytes(path: str, digest: Any = None) -> io.BufferedReader:
    """Open the bytes of `path`, decompressed when the content is gzip or zstd.

    All members of a joined archive are read. A stream that ends early or is corrupt raises
    `DamagedStream` from `read`, after every byte in front of the damage was handed out.

    Args:
        path: a local file or an object in a bucket.
        digest: a hashlib object that is fed every stored byte that is read.
    """
    raw = open_raw(path, digest)
    magic = raw.peek(4)
    if not magic.startswith((GZIP_MAGIC, ZSTD_MAGIC)):
        return raw
    return io.BufferedReader(_Decompressed(raw, magic.startswith(GZIP_MAGIC)), _BUFFER)


def is_compressed(path: str) -> bool:
    """Whether the content of `path` is gzip or zstd."""
    with open_raw(path) as raw:
        return raw.peek(4).startswith((GZIP_MAGIC, ZSTD_MAGIC))


def sha256(path: str) -> str:
    """Hex SHA-256 of the stored bytes of `path`."""
    if not is_remote(path):
        return sha256_file(Path(path))
    digest = hashlib.sha256()
    with open_raw(path) as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def absolute(path: str) -> str:
    """The full name of `path` for messages."""
    return path if is_remote(path) else str(Path(path).absolute())


class _Hashed(io.RawIOBase):
    """Bytes of a stream, hashed as they pass."""

    def __init__(self, raw: Any, digest: Any) -> None:
        self._raw = raw
        self._digest = digest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size: int = self._raw.readinto(buffer)
        self._digest.update(memoryview(buffer)[:size])
        return size

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Decompressed(io.RawIOBase):
    """Bytes out of a gzip or zstd stream, member after member."""

    def __init__(self, raw: IO[bytes], is_gzip: bool) -> None:
        self._raw = raw
        self._is_gzip = is_gzip
        self._member: Any = None  # the decompressor of the member being read
        self._compressed = b""
        self._ready = memoryview(b"")
        self._damage: DamagedStream | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and self._damage is None and self._fill():
            pass
        if not self._ready and self._damage is not None:
            raise self._damage
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def close(self) -> None:
        self._raw.close()
        super().close()

    def _fill(self) -> bool:
        """Decompress one piece; False at the end of the last member."""
        if not self._compressed:
            self._compressed = self._raw.read(_PIECE)
        if not self._compressed:
            if self._member is not None:
                self._damage = DamagedStream("the compressed stream ends early")
            return False
        if self._member is None and self._is_gzip:
            self._compressed = self._compressed.lstrip(b"\0")  # padding between members
            if not self._compressed:
                return True
        if self._member is None:
            self._member = _decompressor(self._is_gzip)
        try:
            self._ready = memoryview(self._member.decompress(self._compressed))
        except Exception as error:  # zlib.error and zstandard.ZstdError share no base
            self._damage = DamagedStream(f"the compressed stream is damaged: {error}")
            return False
        self._compressed = b""
        if self._member.eof:
            self._compressed = self._member.unused_data
            self._member = None
        return True


def _decompressor(is_gzip: bool) -> Any:
    if is_gzip:
        return zlib.decompressobj(wbits=31)
    import zstandard

    return zstandard.ZstdDecompressor().decompressobj()


def _expand_local(pattern: str, base: Path | None) -> list[str]:
    name = _located(pattern, base)
    if Path(name).is_dir():
        inside = sorted(Path(name).iterdir(), key=os.fsencode)
        return [str(path) for path in inside if _is_data_name(path.name) and path.is_file()]
    if Path(name).exists():
        return [name]
    if not globbing.has_magic(name):
        return []
    matches = sorted(globbing.glob(name, recursive=True), key=os.fsencode)  # noqa: PTH207 any root
    return [m for m in matches if Path(m).is_file() and not m.endswith(_OWN_OUTPUTS)]


def _located(pattern: str, base: Path | None) -> str:
    """The local name, as it was given unless `~` or `base` changes it."""
    name = str(Path(pattern).expanduser()) if pattern.startswith("~") else pattern
    return name if base is None else str(base / name)


def _is_data_name(name: str) -> bool:
    known = data_suffix(name) in SUFFIXES
    return known and not name.startswith(".") and not name.endswith(_OWN_OUTPUTS)


def _nothing_at(pattern: str, base: Path | None) -> str:
    if is_remote(pattern):
        return f"`{pattern}` does not exist"
    name = absolute(_located(pattern, base))
    if Path(name).is_dir():
        return f"`{name}` holds no data file ({', '.join(SUFFIXES)}, also .gz or .zst)"
    if globbing.has_magic(name):
        return f"`{name}` matches no file"
    return f"`{name}` does not exist"


def _expand_s3(pattern: str) -> list[str]:
    store = _s3()
    try:
        if globbing.has_magic(pattern):
            keys = [key for key in store.glob(pattern) if store.isfile(key)]
        elif store.isfile(pattern):
            return [pattern]
        elif store.isdir(pattern):
            keys = [key for key in store.ls(pattern, detail=False) if store.isfile(key)]
            keys = [key for key in keys if _is_data_name(key.rsplit("/", 1)[1])]
        else:
            return []
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot list `{pattern}`: {error}",
            hint="check AWS_ENDPOINT_URL and the AWS_* credentials in the environment",
        ) from error
    return [f"s3://{key}" for key in sorted(keys, key=os.fsencode)]


def _s3() -> Any:
    try:
        import fsspec

        return fsspec.filesystem("s3")
    except ImportError as error:
        raise UsageError(
            "`s3://` paths need the package `s3fs`", hint="pip install 'posttrain-cli[s3]'"
        ) from error
