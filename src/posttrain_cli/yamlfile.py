"""Config files as lists of entries that know their line.

YAML is read as text: what a scalar means is decided later by the field that takes it
(`values.convert`), so `no`, `on`, `010` and `12:30` reach a text field as they were written and
`2e-5` reaches a number field as a number. Only mappings, lists and scalars are understood:
no tags, no objects, no merge keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from posttrain_cli.errors import UsageError

_PLAIN_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "seq", "map")}


@dataclass(frozen=True, slots=True)
class Scalar:
    """A YAML scalar before it has a type: its text, and whether it was quoted."""

    text: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """One `section.key: value` of a file; `key` is empty for a value that is not in a section.

    Attributes:
        section: the top-level key.
        key: the key below it, or "" when the section itself holds `value`.
        value: a Scalar, a list of these, a dict (nested too deep; the caller complains), or None
            for an empty section.
        line: 1-based line of the key.
        section_line: 1-based line of the section.
    """

    section: str
    key: str
    value: Any
    line: int
    section_line: int


@dataclass(frozen=True, slots=True)
class YamlFile:
    """The entries of a config file, and what is wrong with the file itself (`line: message`)."""

    path: Path
    entries: tuple[Entry, ...]
    problems: tuple[tuple[int, str], ...]


def read(path: Path) -> YamlFile:
    """Read a config file.

    Raises:
        UsageError: the file is missing, unreadable, not UTF-8 or not YAML (with line and column).
    """
    root = _compose(path)
    problems: list[tuple[int, str]] = []
    entries: list[Entry] = []
    if root is None:
        return YamlFile(path, (), ())
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(
            f"{path}:{_line(root)}: expected sections such as `data:` and `model:`, "
            f"found {_kind(root)}"
        )
    for section, line, node in _pairs(root, "", problems):
        if isinstance(node, yaml.MappingNode):
            for key, key_line, inner in _pairs(node, f"{section}.", problems):
                entries.append(Entry(section, key, _plain(inner, problems), key_line, line))
        else:
            empty = isinstance(node, yaml.ScalarNode) and _is_null(node)
            value = None if empty else _plain(node, problems)
            entries.append(Entry(section, "", value, line, line))
    return YamlFile(path, tuple(entries), tuple(problems))


def _compose(path: Path) -> yaml.Node | None:
    try:
        text = path.read_bytes().decode("utf-8-sig")
        return _single_node(text)
    except FileNotFoundError:
        raise UsageError(
            f"config file `{path.absolute()}` does not exist", hint="check --config"
        ) from None
    except IsADirectoryError:
        raise UsageError(f"config file `{path.absolute()}` is a directory") from None
    except PermissionError:
        raise UsageError(f"config file `{path.absolute()}` cannot be read (permission)") from None
    except UnicodeDecodeError as exc:
        line = exc.object[: exc.start].count(b"\n") + 1
        raise UsageError(f"{path}:{line}: not UTF-8 (byte {exc.start})") from None
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise UsageError(f"{where}: not valid YAML: {exc.problem}") from None
    except yaml.YAMLError as exc:
        raise UsageError(f"{path}: not valid YAML: {str(exc).splitlines()[0]}") from None


def _single_node(text: str) -> yaml.Node | None:
    """The root node of the one document in `text`; scalars stay text (BaseLoader)."""
    loader = yaml.BaseLoader(text)
    try:
        node: yaml.Node | None = loader.get_single_node()
    finally:
        loader.dispose()
    return node


def _pairs(
    mapping: yaml.MappingNode, prefix: str, problems: list[tuple[int, str]]
) -> Iterator[tuple[str, int, yaml.Node]]:
    """Key, 1-based line and value of each pair; a key that comes twice is a problem."""
    _check_tag(mapping, problems)
    seen: dict[str, int] = {}
    for key_node, value in mapping.value:
        line = _line(key_node)
        if not isinstance(key_node, yaml.ScalarNode):
            problems.append((line, f"a key must be a name, found {_kind(key_node)}"))
            continue
        key = str(key_node.value)
        if key in seen:
            problems.append((line, f"`{prefix}{key}` is given twice (first in line {seen[key]})"))
            continue
        seen[key] = line
        yield key, line, value


def _plain(node: yaml.Node, problems: list[tuple[int, str]]) -> Any:
    """A node as Scalar, list of Scalars, or dict; deeper nesting is left as an empty dict."""
    _check_tag(node, problems)
    if isinstance(node, yaml.ScalarNode):
        return Scalar(str(node.value), quoted=node.style is not None)
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_tag(item, problems)
        return [
            Scalar(str(item.value), item.style is not None)
            if isinstance(item, yaml.ScalarNode)
            else {}
            for item in node.value
        ]
    return {str(key.value): {} for key, _ in node.value if isinstance(key, yaml.ScalarNode)}


def _check_tag(node: yaml.Node, problems: list[tuple[int, str]]) -> None:
    if node.tag not in _PLAIN_TAGS:
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        problems.append((_line(node), f"the tag `{tag}` is refused: config files hold plain data"))


def _is_null(node: yaml.ScalarNode) -> bool:
    return node.style is None and node.value in ("", "~", "null", "Null", "NULL")


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    return "a list" if isinstance(node, yaml.SequenceNode) else f"the text `{node.value}`"


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
