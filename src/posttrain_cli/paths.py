"""Which written values are paths, and what they are relative to."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path
from typing import Any

from posttrain_cli.schema import FILE_KEYS, MODEL_KEYS

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_TEMPLATES = ("tokenizer", "chatml", "plain")


def absolute(key: str, value: Any, base: Path) -> Any:
    """The value of `key` with relative paths made absolute against `base`.

    URLs such as `s3://…`, hub ids such as `Qwen/Qwen2.5-0.5B` and template names stay as written.
    """
    if isinstance(value, list) and key in FILE_KEYS:
        return [absolute(key, item, base) for item in value]
    if not isinstance(value, str) or "://" in value:
        return value
    if key in FILE_KEYS:
        return _pattern(value, base)
    if key == "trainer.default_local_dir":
        return _join(value, base)
    if key in MODEL_KEYS and looks_like_path(value, base):
        return _join(value, base)
    if key == "data.template" and value not in _TEMPLATES:
        return _join(value, base)
    return value


def looks_like_path(name: str | Path, folder: Path | None = None) -> bool:
    """Whether `name` means a place on disk rather than a hub id (`name` or `owner/name`).

    True for Path objects, for anything with a leading slash, dot or tilde, for what cannot be
    a hub id, and for anything whose first part exists below `folder`.
    """
    text = str(name)
    if isinstance(name, Path) or text.startswith(("/", ".", "~")):
        return True
    if not _HUB_ID.fullmatch(text):
        return True
    return ((folder or Path.cwd()) / text.split("/")[0]).exists()


def _pattern(value: str, base: Path) -> str:
    """A file, folder or glob; the base is escaped so that only the user's own wildcards count."""
    whole = _join(value, base)
    if glob.has_magic(value) and not os.path.lexists(whole) and not Path(value).is_absolute():
        return os.path.normpath(Path(glob.escape(str(base))) / value)
    return whole


def _join(value: str, base: Path) -> str:
    return os.path.normpath(base / os.path.expanduser(value))  # noqa: PTH111 - `~nobody` stays text
