"""The schema as a flat table: one row a setting, for flags, YAML checks and generated documents."""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from posttrain_cli.config import Config, Method, Section

# Other spellings of a key, from the articles' configs.
ALIASES = {
    "model.path": "model.partial_pretrain",
    "dataset.path": "data.train_files",
    "dataset.split": "data.split",
}

# Keys that hold files: relative to the file that names them.
FILE_KEYS = ("data.train_files", "data.val_files")
# Keys that hold a model folder, or a hub id, which stays as it is.
MODEL_KEYS = (
    "model.partial_pretrain",
    "dpo.reference_model",
    "rl.critic_model",
    "trainer.reward_model",
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of the schema.

    Attributes:
        key: `section.name`.
        types: the plain types it takes, out of bool, int, float, str, list and NoneType.
        choices: the literal values it takes.
        item: the type of a list's items (str or float).
        bounds: such as ("≥ 1",).
        default: the schema's default.
        text: one clause of help.
        flag: its command-line flag, or "".
        methods: the methods that read it.
    """

    key: str
    types: frozenset[type]
    choices: tuple[Any, ...]
    item: type
    bounds: tuple[str, ...]
    default: Any
    text: str
    flag: str
    methods: tuple[Method, ...]

    @property
    def section(self) -> str:
        """The section it belongs to."""
        return self.key.split(".")[0]

    @property
    def name(self) -> str:
        """Its name inside the section."""
        return self.key.split(".")[1]


@functools.cache
def settings() -> dict[str, Setting]:
    """Every setting by key, in schema order. The `dataset` section is only spelling (ALIASES)."""
    table = {}
    for section, field in Config.model_fields.items():
        kind = field.annotation
        assert isinstance(kind, type) and issubclass(kind, Section), section
        for name, info in kind.model_fields.items():
            key = f"{section}.{name}"
            if key not in ALIASES:
                table[key] = _setting(key, info)
    return table


def sections() -> tuple[str, ...]:
    """The sections of a config file, in schema order."""
    return tuple(Config.model_fields)


def _setting(key: str, info: Any) -> Setting:
    plain: set[type] = set()
    choices: list[Any] = []
    item: type = str
    for part in _flatten(info.annotation):
        if get_origin(part) is Literal:
            choices += get_args(part)
        elif get_origin(part) is list:
            plain.add(list)
            item = next(iter(_flatten(get_args(part)[0])))
        else:
            plain.add(part)
    extra = info.json_schema_extra
    return Setting(
        key=key,
        types=frozenset(plain),
        choices=tuple(choices),
        item=item,
        bounds=tuple(_bounds(info.metadata)),
        default=info.default,
        text=info.description,
        flag=extra["flag"],
        methods=tuple(extra["methods"]),
    )


def _flatten(annotation: Any) -> list[Any]:
    """The members of a union, without their Annotated wrappers."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _flatten(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [part for member in get_args(annotation) for part in _flatten(member)]
    return [annotation]


def _bounds(metadata: list[Any]) -> list[str]:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    return [
        f"{sign} {getattr(rule, name)}"
        for rule in metadata
        for name, sign in signs.items()
        if hasattr(rule, name)
    ]
