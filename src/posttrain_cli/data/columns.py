"""Arrow types for records of JSON, found by looking at every record.

Arrow would guess from the first rows, drop what comes later, or fail; here the types of all
records are merged first. What no common type can hold (text in one row, an object in the next)
is written as JSON text, so nothing is lost or converted. Integers and floats in one column
become floats.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from posttrain_cli.data.lines import encode

MAX_KEYS = 256
_INT64 = range(-(1 << 63), 1 << 63)


@dataclass(slots=True)
class Kind:
    """The type of a column so far.

    Attributes:
        name: null, bool, int, float, text, list, struct, or json (JSON text).
        item: the type of a list's items.
        fields: the types of a struct's fields, in order of first appearance.
    """

    name: str = "null"
    item: Kind | None = None
    fields: dict[str, Kind] = field(default_factory=dict)

    @property
    def holds_json(self) -> bool:
        """Whether some value in here is to be written as JSON text."""
        inner = [self.item] if self.item else list(self.fields.values())
        return self.is_json or any(kind.holds_json for kind in inner)

    @property
    def is_json(self) -> bool:
        """Whether the value itself is; Parquet has no struct without fields."""
        return self.name == "json" or (self.name == "struct" and not self.fields)


def observe(columns: dict[str, Kind], record: dict[str, Any]) -> None:
    """Widen `columns` so that they hold `record`, too."""
    for name, value in record.items():
        known = columns.get(name)
        if known is None:
            columns[name] = known = Kind()
        _widen(known, value)


def arrow_schema(columns: dict[str, Kind]) -> Any:
    """The `pyarrow.Schema` of `columns`."""
    import pyarrow as pa

    return pa.schema([pa.field(name, _arrow(kind)) for name, kind in columns.items()])


def shaped(record: dict[str, Any], columns: dict[str, Kind]) -> dict[str, Any]:
    """`record` with JSON text in the places that hold it."""
    return {
        name: _shape(value, columns[name]) if columns[name].holds_json else value
        for name, value in record.items()
    }


def _widen(kind: Kind, value: Any) -> None:
    name = _name(value)
    if name == "null" or kind.name == "json":
        return
    if {kind.name, name} == {"int", "float"}:
        name = kind.name = "float"
    if kind.name == "null":
        kind.name = name
    if kind.name != name:
        _to_json(kind)
    elif name == "list":
        kind.item = kind.item or Kind()
        for item in value:
            _widen(kind.item, item)
    elif name == "struct":
        observe(kind.fields, value)
        if len(kind.fields) > MAX_KEYS:
            _to_json(kind)


def _name(value: Any) -> str:
    if isinstance(value, str):
        return "text"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int" if value in _INT64 else "json"
    if isinstance(value, float):
        return "float"
    return "list" if isinstance(value, list) else "struct"


def _to_json(kind: Kind) -> None:
    kind.name, kind.item, kind.fields = "json", None, {}


def _arrow(kind: Kind) -> Any:
    import pyarrow as pa

    if kind.name == "list":
        assert kind.item is not None
        return pa.list_(_arrow(kind.item))
    if kind.name == "struct" and not kind.is_json:
        return pa.struct([pa.field(name, _arrow(part)) for name, part in kind.fields.items()])
    plain = {"bool": pa.bool_(), "int": pa.int64(), "float": pa.float64(), "null": pa.null()}
    return plain.get(kind.name, pa.string())


def _shape(value: Any, kind: Kind) -> Any:
    if value is None:
        return None
    if kind.is_json:
        return encode(value).decode()
    if kind.name == "list":
        assert kind.item is not None
        return [_shape(item, kind.item) for item in value]
    if kind.name == "struct":
        return {name: _shape(part, kind.fields[name]) for name, part in value.items()}
    return value
