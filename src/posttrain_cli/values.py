"""What a written value means for the setting that takes it, and how to say what was expected."""

from __future__ import annotations

import re
from typing import Any

from posttrain_cli.errors import did_you_mean
from posttrain_cli.schema import FILE_KEYS, Setting
from posttrain_cli.yamlfile import Scalar

_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_CANONICAL_NUMBER = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_NULL = ("", "~", "null", "Null", "NULL")


class BadValue(ValueError):
    """A value that its setting cannot take; the text says what was expected."""


def from_yaml(value: Any, setting: Setting) -> Any:
    """The typed value of a YAML node.

    Args:
        value: a Scalar, a list of Scalars, or a dict (always wrong).
        setting: the setting that takes it.

    Raises:
        BadValue: it cannot be taken.
    """
    if isinstance(value, Scalar):
        return _from_scalar(value, setting)
    if isinstance(value, list) and list in setting.types:
        return [_item(part, setting) for part in value]
    shown = "a list" if isinstance(value, list) else "a mapping"
    raise BadValue(f"expected {expected(setting)}, got {shown}")


def from_text(text: str, setting: Setting) -> Any:
    """The typed value of a flag or of `--set`: text is text, `a,b` or `[a, b]` a list of names.

    Raises:
        BadValue: it cannot be taken.
    """
    if list in setting.types and setting.key not in FILE_KEYS:
        inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        parts = [part.strip().strip("\"'") for part in inner.split(",")]
        if len(parts) > 1 or inner != text or str not in setting.types:
            return [_item(Scalar(part, quoted=setting.item is str), setting) for part in parts]
    is_text = str in setting.types
    return _from_scalar(Scalar(text, quoted=is_text), setting)


def expected(setting: Setting) -> str:
    """What a setting takes, in words."""
    ways = [f"`{_plain_name(choice)}`" for choice in setting.choices]
    if len(ways) > 1:
        ways = [f"one of {', '.join(ways)}"]
    bounds = f" {' and '.join(setting.bounds)}" if setting.bounds else ""
    if bool in setting.types:
        ways.append("`true` or `false`")
    if int in setting.types:
        ways.append(f"a whole number{bounds}")
    if float in setting.types:
        ways.append(f"a number{bounds}")
    if str in setting.types:
        ways.append("text")
    if list in setting.types:
        ways.append("a list of two numbers" if setting.item is float else "a list of texts")
    return " or ".join(ways)


def explain(shown: str, setting: Setting) -> str:
    """The whole complaint about a value: what was expected, what came, and the nearest choice."""
    near = did_you_mean(shown, [str(choice) for choice in setting.choices])
    if setting.choices == (False,):
        near = "no code from a model is ever run"
    return f"expected {expected(setting)}, got `{shown}`" + (f"; {near}" if near else "")


def _from_scalar(scalar: Scalar, setting: Setting) -> Any:
    text = scalar.text
    plain = not scalar.quoted
    if plain and text in _NULL and type(None) in setting.types:
        return None
    if plain and text in _BOOL and (bool in setting.types or _BOOL[text] in setting.choices):
        return _BOOL[text]
    if plain and int in setting.types and (number := _whole(text)) is not None:
        return number
    if plain and float in setting.types and _FLOAT.fullmatch(text):
        return float(text)
    if text in setting.choices:
        return text
    if str in setting.types and not (plain and _looks_typed(text)):
        return text
    raise BadValue(_complaint(scalar, setting))


def _complaint(scalar: Scalar, setting: Setting) -> str:
    text = scalar.text
    message = explain(text, setting)
    if str in setting.types:
        return f'{message}; write it in quotes: "{text}"'
    if scalar.quoted and {int, float, bool} & setting.types:
        return f"{message} in quotes; write it without"
    if bool in setting.types and text.lower() in ("yes", "on", "no", "off"):
        return f"{message}; did you mean `{'true' if text.lower() in ('yes', 'on') else 'false'}`?"
    return message


def _item(part: Any, setting: Setting) -> Any:
    if isinstance(part, Scalar):
        if setting.item is float and not part.quoted and _FLOAT.fullmatch(part.text):
            return float(part.text)
        if setting.item is str and (part.quoted or not _looks_typed(part.text)):
            return part.text
    shown = f"`{part.text}`" if isinstance(part, Scalar) else "something nested"
    raise BadValue(f"expected {expected(setting)}, got a list with {shown}")


def _whole(text: str) -> int | None:
    """A whole number: decimal digits (a leading zero means nothing), or 1e3."""
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and float(text).is_integer():
        return int(float(text))
    return None


def _looks_typed(text: str) -> bool:
    """Whether plain YAML text is a number, a truth value or nothing rather than text."""
    return text in _NULL or text in _BOOL or bool(_CANONICAL_NUMBER.fullmatch(text))


def _plain_name(choice: Any) -> str:
    return str(choice).lower() if isinstance(choice, bool) else str(choice)
