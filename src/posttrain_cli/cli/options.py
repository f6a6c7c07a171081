"""From the schema to command-line flags: one flag a setting, its help and default from there.

Values stay text here; `settings.load` gives them their type, so that every mistake of flags,
`--set` and files is found together and told in the same words.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain_cli.config import METHODS, Method
from posttrain_cli.schema import FILE_KEYS, MODEL_KEYS, Setting, settings
from posttrain_cli.settings import Resolved, load

# Second names of flags, for old habits and the articles' commands.
_ALSO: dict[str, tuple[str, ...]] = {"--train": ("--dataset-path",)}
_METAVARS = {
    "data.template": "tokenizer|chatml|plain|FILE",
    "trainer.default_local_dir": "DIR",
    "trainer.n_gpus_per_node": "N|auto|0",
    "trainer.logger": "NAME,...",
    "model.target_modules": "NAME,...|all-linear",
    **dict.fromkeys(FILE_KEYS, "FILE"),
    **dict.fromkeys(MODEL_KEYS, "DIR"),
}

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", "--config-path", metavar="FILE", help="YAML file, stronger than ./ptc.yaml"
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="any setting, such as optim.eps=1e-6; repeatable"
    ),
]


def with_settings(method: Method | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the flags of `method`; it gets a `Resolved` as `resolved` instead.

    Args:
        method: the command's method; None (for `ptc train`) takes it from `trainer.type` and
            offers the flags that every method reads.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(
            *,
            flags: dict[str, Any],
            config: Path | None = None,
            sets: list[str] | None = None,
            **arguments: Any,
        ) -> Any:
            resolved = load(method, flags=flags, sets=sets or (), config_file=config)
            return function(resolved=resolved, **arguments)

        own = inspect.signature(function, eval_str=True).parameters.values()
        files = [_keyword("config", ConfigFile), _keyword("sets", Sets)]
        given = [row for row in own if row.annotation is not Resolved]
        _sign(command, [*files, *given])
        return with_flags(flag_settings(method))(command)

    return decorate


def with_flags(rows: list[Setting]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the flags of `rows`; it gets their texts by key as `flags` instead."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(**arguments: Any) -> Any:
            flags = {row.key: arguments.pop(_identifier(row)) for row in rows}
            return function(flags=flags, **arguments)

        own = inspect.signature(function, eval_str=True).parameters
        given = [row for name, row in own.items() if name != "flags"]
        options = [_keyword(_identifier(row), _option(row)) for row in rows]
        at = 2 if "config" in own else 0  # --config and --set come first
        _sign(command, [*given[:at], *options, *given[at:]])
        return command

    return decorate


def flag_settings(method: Method | None) -> list[Setting]:
    """The settings that are flags of a method's command, in schema order."""
    readers = set(METHODS) if method is None else {method}
    return [row for row in settings().values() if row.flag and readers <= set(row.methods)]


def _sign(command: Callable[..., Any], parameters: list[inspect.Parameter]) -> None:
    """Give `command` the signature that Typer reads: these parameters, by keyword only."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(kind=keyword) for parameter in parameters]
    )


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=None
    )


def _option(row: Setting) -> Any:
    """The Typer annotation of a setting's flag."""
    names = (row.flag, *_ALSO.get(row.flag, ()))
    text = row.text + _shown_default(row)
    if bool in row.types:
        names = (f"{row.flag}/--no-{row.flag.removeprefix('--')}",)
        return Annotated[bool | None, typer.Option(*names, help=text)]
    option = typer.Option(*names, help=text, metavar=_metavar(row))
    return Annotated[list[str] | None if row.key in FILE_KEYS else str | None, option]


def _shown_default(row: Setting) -> str:
    if row.default is None or "default" in row.text:
        return ""
    shown = str(row.default).lower() if isinstance(row.default, bool) else row.default
    return f" [default: {shown}]"


def _metavar(row: Setting) -> str:
    if row.key in _METAVARS:
        return _METAVARS[row.key]
    if row.choices:
        return "|".join(str(choice) for choice in row.choices)
    if int in row.types:
        return "N"
    return "X" if float in row.types else "TEXT"


def _identifier(row: Setting) -> str:
    return row.key.replace(".", "__")
