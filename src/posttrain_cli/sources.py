"""Where settings are written: config files, `--set` and flags, each value with its origin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain_cli import values, yamlfile
from posttrain_cli.errors import did_you_mean
from posttrain_cli.paths import absolute
from posttrain_cli.schema import ALIASES, Setting, sections, settings


@dataclass(frozen=True, slots=True)
class Given:
    """One written value.

    Attributes:
        key: the canonical `section.key`.
        spelled: as the user spelled it, such as `dataset.path` or `--train`.
        value: the typed value, relative paths made absolute.
        origin: `sft.yaml:12`, `--set optim.lr` or `flag --lr`.
        written: the value as written, for messages.
    """

    key: str
    spelled: str
    value: Any
    origin: str
    written: str


def from_file(path: Path, problems: list[str]) -> list[Given]:
    """The values of a config file; relative paths are taken from the file's own folder."""
    file = yamlfile.read(path)
    problems += [f"{path}:{line}: {message}" for line, message in file.problems]
    given: list[Given] = []
    for entry in file.entries:
        if entry.value is None and entry.section in sections():
            continue  # a section with nothing in it
        if entry.section not in sections():
            find(entry.section, "", f"{path}:{entry.section_line}", problems)
            continue
        origin = f"{path}:{entry.line}"
        setting = find(entry.section, entry.key, origin, problems)
        if setting is None:
            continue
        spelled = f"{entry.section}.{entry.key}"
        try:
            value = values.from_yaml(entry.value, setting)
        except values.BadValue as exc:
            problems.append(f"{origin}: `{spelled}`: {exc}")
            continue
        value = absolute(setting.key, value, path.absolute().parent)
        given.append(Given(setting.key, spelled, value, origin, _shown(entry.value)))
    return _once(given, problems)


def from_sets(sets: Sequence[str], folder: Path, problems: list[str]) -> list[Given]:
    """The values of `--set section.key=value`; the last of two equal keys wins, as with flags."""
    given: list[Given] = []
    for text in sets:
        spelled, equals, written = text.partition("=")
        origin = f"--set {spelled.strip()}"
        section, _, key = spelled.strip().partition(".")
        if not equals or not key:
            problems.append(f"--set {text}: expected `section.key=value`, such as `optim.lr=1e-5`")
            continue
        setting = find(section, key, origin, problems)
        if setting is None:
            continue
        try:
            value = None if _unsets(written, setting) else values.from_text(written, setting)
        except values.BadValue as exc:
            problems.append(f"{origin}: {exc}")
            continue
        value = absolute(setting.key, value, folder)
        given.append(Given(setting.key, spelled.strip(), value, origin, written))
    return given


def from_flags(flags: Mapping[str, Any], folder: Path, problems: list[str]) -> list[Given]:
    """The values of flags: text, a truth value, or a list of texts; None was not given."""
    given: list[Given] = []
    for key, written in flags.items():
        setting = settings()[key]
        origin = f"flag {setting.flag}"
        if written is None or written == []:
            continue
        text = written[0] if isinstance(written, list) and len(written) == 1 else written
        try:
            value = values.from_text(text, setting) if isinstance(text, str) else text
        except values.BadValue as exc:
            problems.append(f"{origin}: {exc}")
            continue
        value = absolute(key, value, folder)
        given.append(Given(key, setting.flag, value, origin, str(text)))
    return given


def find(section: str, key: str, origin: str, problems: list[str]) -> Setting | None:
    """The setting of a written key, or None with a problem that names the right place."""
    spelled = f"{section}.{key}" if key else section
    canonical = ALIASES.get(spelled, spelled)
    if canonical in settings():
        return settings()[canonical]
    if section not in sections():
        problems.append(f"{origin}: unknown section `{section}`; {_advice(section)}")
    elif not key:
        problems.append(f"{origin}: section `{section}` takes `key: value` lines, not a value")
    elif key in sections():
        problems.append(f"{origin}: section `{key}` belongs at the top level, not in `{section}`")
    else:
        problems.append(f"{origin}: unknown key `{spelled}`; {_advice(key, section)}")
    return None


def _advice(name: str, section: str = "") -> str:
    """Where a name belongs, what it was meant to be, or what there is."""
    owners = [row.section for row in settings().values() if row.name == name]
    if owners:
        return f"`{name}` belongs to `{'` or `'.join(owners)}`"
    own = [row.name for row in settings().values() if row.section == section]
    own += [alias.split(".")[1] for alias in ALIASES if alias.split(".")[0] == section]
    near = did_you_mean(name, own or sections())
    if near:
        return near
    elsewhere = did_you_mean(name, [row.name for row in settings().values()])
    if elsewhere:
        return elsewhere
    return f"known here: {', '.join(own or sections())}"


def _once(given: list[Given], problems: list[str]) -> list[Given]:
    """Drop a setting that one file gives under two spellings, and complain."""
    first: dict[str, Given] = {}
    for item in given:
        if item.key in first:
            other = first[item.key]
            problems.append(
                f"{item.origin}: `{item.spelled}` and `{other.spelled}` ({other.origin}) "
                "are the same setting; keep one"
            )
        first.setdefault(item.key, item)
    return list(first.values())


def _unsets(written: str, setting: Setting) -> bool:
    return written == "null" and type(None) in setting.types


def _shown(value: Any) -> str:
    if isinstance(value, yamlfile.Scalar):
        return value.text
    if isinstance(value, list):
        return f"[{', '.join(_shown(item) for item in value)}]"
    return "a mapping"
