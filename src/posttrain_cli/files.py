"""Files that are whole or absent: temporary name beside the target, fsync, rename."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from posttrain_cli.errors import UsageError

_BLOCK = 1 << 20


def fsync_dir(folder: Path) -> None:
    """Make the names inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    """Make the bytes of `path` durable."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


@contextmanager
def atomic_writer(target: Path) -> Iterator[IO[bytes]]:
    """Yield a binary stream whose content appears under `target` only if the block succeeds.

    The bytes go to a temporary name beside the target (same file system), are fsynced and
    renamed over it. On any exception the temporary file is removed and `target` is untouched.
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
        fsync_dir(target.parent)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise


def atomic_write(target: Path, content: bytes | str) -> None:
    """Write `content` to `target`, whole or not at all."""
    with atomic_writer(target) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of the bytes of `path`."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def refuse_existing(target: Path, overwrite: bool) -> None:
    """Raise UsageError when `target` is there already and the user did not say --overwrite."""
    if target.exists() and not overwrite:
        raise UsageError(
            f"`{target.absolute()}` exists already",
            hint="name another output, or pass --overwrite to replace it",
        )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
