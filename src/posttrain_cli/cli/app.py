"""The command line: the table of commands, the options all of them know, and how errors end.

A command is a function with Typer annotations in a module of its own, imported only when it runs.
Its docstring is its help: a first line, paragraphs, and an `Examples:` section kept as written.
It may return an exit status; None is 0. It raises PtcError for mistakes and prints by `console`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import select
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, NamedTuple

import typer
from typer.main import get_command

from posttrain_cli import __version__
from posttrain_cli.cli import console
from posttrain_cli.errors import ExitCode, PtcError, RunError, UsageError, did_you_mean


class Command(NamedTuple):
    """One row of the command table."""

    name: str
    module: str
    function: str
    summary: str


_SHELL = "posttrain_cli.cli"
COMMANDS: tuple[Command, ...] = (
    Command(
        "preprocess", f"{_SHELL}.preprocess", "preprocess", "turn raw files into contract data"
    ),
    Command("validate", f"{_SHELL}.validate", "validate", "check data files, row by row"),
    Command("gen-synthetic", f"{_SHELL}.gen_synthetic", "gen_synthetic", "make rows from recipes"),
    Command("sft", f"{_SHELL}.train", "sft", "fine-tune a model on answers"),
    Command("train", f"{_SHELL}.train", "train", "start the trainer a config names"),
    Command("resume", f"{_SHELL}.train", "resume", "continue a stopped or killed run"),
    Command("infer", f"{_SHELL}.infer", "infer", "ask a model: prompts, a file or a chat"),
    Command("doctor", f"{_SHELL}.doctor", "doctor", "look at this machine"),
    Command("completion", f"{_SHELL}.completion", "completion", "print a completion script"),
)

_HELP = """Post-training from one command line: raw data to a tuned model.

raw files → preprocess → contract data → validate → sft (a run directory) → resume → infer

\b
Examples:
  ptc preprocess raw.jsonl --preset gsm8k --out train.jsonl --val-rows 64 --val-out val.jsonl
  ptc validate train.jsonl --against val.jsonl
  ptc sft --model models/smollm2 --train train.jsonl --val val.jsonl --output-dir runs/first
  ptc resume runs/first
  ptc infer --model runs/first --prompt "What is 17 + 25?"

\b
Exit codes: 0 done; 1 the data or a check said no; 2 usage, config or input cannot be used;
3 the run failed after it started; 128+n ended by signal n, after saving.
"""


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit status; nothing is raised."""
    arguments = list(argv)
    console.reset(arguments)
    try:
        status = get_command(build(_named(arguments))).main(
            arguments, prog_name="ptc", standalone_mode=False
        )
        sys.stdout.flush()
        return int(status or ExitCode.OK)
    except (Exception, SystemExit) as exc:
        return _explain(exc)
    except KeyboardInterrupt:
        return 130


def build(load: Collection[str]) -> typer.Typer:
    """The app; only the commands named in `load` are imported, the others show their summary."""
    app = typer.Typer(
        name="ptc",
        help=_HELP,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={
            "help_option_names": ["-h", "--help"],
            "token_normalize_func": lambda name: name.replace("_", "-"),
            "max_content_width": 100,
        },
    )
    app.callback()(_with_common(_root))
    for command in COMMANDS:
        if command.name in load:
            function = getattr(importlib.import_module(command.module), command.function)
            text = _help_text(function)
            app.command(command.name, help=text)(_with_common(function))
        else:
            app.command(command.name, help=command.summary)(_unloaded)
    return app


def _named(arguments: Sequence[str]) -> set[str]:
    """The command that `arguments` names, if any: only that one is imported."""
    words = [word.replace("_", "-") for word in arguments if not word.startswith("-")]
    return set(words[:1])


def _root() -> None:
    """The options that stand before the command do their work in `_with_common`."""


def _unloaded() -> None:
    raise AssertionError("a command that was not imported was called")


def _help_text(function: Callable[..., Any]) -> str:
    """The docstring without its Args and Raises, the examples kept line by line."""
    text = inspect.getdoc(function) or ""
    for heading in ("Args:", "Returns:", "Raises:"):
        text = text.split(f"\n{heading}\n")[0]
    return text.replace("\nExamples:\n", "\n\b\nExamples:\n")


def _show_version(wanted: bool) -> None:
    if wanted:
        console.out(f"ptc {__version__}")
        raise typer.Exit


_COMMON: dict[str, Any] = {
    "json": Annotated[bool, typer.Option("--json", help="one JSON object on stdout")],
    "quiet": Annotated[bool, typer.Option("--quiet", "-q", help="only results and problems")],
    "verbose": Annotated[bool, typer.Option("--verbose", "-v", help="say more")],
    "debug": Annotated[bool, typer.Option("--debug", help="show tracebacks")],
    "no_color": Annotated[bool, typer.Option("--no-color", help="no colour (as NO_COLOR)")],
    "version": Annotated[
        bool,
        typer.Option("--version", help="show the version", is_eager=True, callback=_show_version),
    ],
}


def _with_common(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the options that every command knows; they set `console.modes`."""
    signature = inspect.signature(function, eval_str=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [parameter.replace(kind=keyword) for parameter in signature.parameters.values()]
    common = [
        inspect.Parameter(name, keyword, annotation=kind, default=False)
        for name, kind in _COMMON.items()
    ]

    @functools.wraps(function)
    def command(**arguments: Any) -> Any:
        given = {name: arguments.pop(name) for name in _COMMON}
        modes = console.modes
        modes.json = modes.json or given["json"]
        modes.quiet = modes.quiet or given["quiet"]
        modes.verbose = modes.verbose or given["verbose"]
        modes.debug = modes.debug or given["debug"]
        modes.color = modes.color and not given["no_color"]
        try:
            return function(**arguments)
        except BrokenPipeError as exc:  # Typer would end the process without a word
            raise _BrokenPipe from exc

    command.__signature__ = signature.replace(parameters=[*own, *common])  # type: ignore[attr-defined]
    return command


class _BrokenPipe(Exception):
    """A BrokenPipeError on its way past Typer."""


def _explain(exc: Exception | SystemExit) -> int:
    """Say what went wrong and return the exit status. A traceback is shown only by `--debug`."""
    if isinstance(exc, BrokenPipeError | _BrokenPipe | SystemExit) and _reader_gone():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - stays open until the process ends
        return ExitCode.OK
    if isinstance(exc, SystemExit):
        return exc.code if isinstance(exc.code, int) else ExitCode.FAILED
    if _is_bare_help(exc):
        console.say(str(exc))
        return ExitCode.USAGE
    if console.modes.debug:
        traceback.print_exception(exc)
    error = _as_ptc_error(exc)
    console.fail(error)
    return int(error.exit_code)


def _is_bare_help(exc: Exception) -> bool:
    """Whether `ptc` was called without arguments: Typer raises the help as a usage error."""
    context = getattr(exc, "ctx", None)
    return context is not None and str(exc) == context.get_help()


def _as_ptc_error(exc: Exception) -> PtcError:
    if isinstance(exc, PtcError):
        return exc
    if isinstance(exc, typer.TyperException):
        return _usage_error(exc)
    if isinstance(exc, ModuleNotFoundError) and not (exc.name or "").startswith("posttrain_cli"):
        return _missing_package(exc.name or str(exc))
    if isinstance(exc, _BrokenPipe):
        return RunError("a pipe or socket was closed by the other side")
    if isinstance(exc, OSError) and exc.strerror:
        where = f" `{exc.filename}`" if exc.filename else ""
        kind = UsageError if isinstance(exc, _INPUT_ERRORS) else RunError
        return kind(f"{exc.strerror.lower()}:{where}" if where else exc.strerror.lower())
    return RunError(
        f"unexpected {type(exc).__name__}: {exc}",
        hint="this is a fault of ptc; please report it with the output of the same command and "
        "`--debug`, and that of `ptc doctor`",
    )


_INPUT_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


def _usage_error(exc: typer.TyperException) -> UsageError:
    """A mistake of the command line in our own shape, with the nearest name."""
    context = getattr(exc, "ctx", None)
    message = exc.format_message()
    message = message[:1].lower() + message[1:].rstrip(".")
    hint = f"`{context.command_path} --help` shows what there is" if context else ""
    option = getattr(exc, "option_name", None)
    if context and option and message.startswith("no such option"):
        known = [name for param in context.command.params for name in param.opts]
        return UsageError(f"unknown option `{option}`", hint=did_you_mean(option, known) or hint)
    if message.startswith("no such command"):
        name = message.split("'")[1]
        near = did_you_mean(name, [row.name for row in COMMANDS])
        return UsageError(f"unknown command `{name}`", hint=near or hint)
    if message.startswith("invalid value for"):
        return _bad_value(exc, message, hint)
    return UsageError(message, hint=hint)


def _bad_value(exc: typer.TyperException, message: str, hint: str) -> UsageError:
    """A value that an option does not take: what it takes, what was given, the nearest name."""
    faults: list[dict[str, object]] = getattr(exc.__cause__, "errors", list)()
    if not faults:
        return UsageError(message, hint=hint)
    given = str(faults[0]["input"])
    option, _, expected = message.partition(": ")
    names = re.findall(r"'([^']*)'", expected.partition(" is not one of ")[2])
    if names:
        hint = did_you_mean(given, names) or hint
        return UsageError(f"{option}: {expected.removeprefix('Value error, ')}", hint=hint)
    return UsageError(f"{option}: {expected[:1].lower()}{expected[1:]}, got `{given}`", hint=hint)


def _missing_package(name: str) -> UsageError:
    from posttrain_cli.extras import extra_of

    package = name.split(".")[0]
    extra = extra_of(package)
    if extra:
        return UsageError(
            f"this needs the package `{package}`, which is not installed",
            hint=f"pip install 'posttrain-cli[{extra}]'",
        )
    return UsageError(f"the package `{package}` is not installed", hint=f"pip install {package}")


def _reader_gone() -> bool:
    """Whether the reader of stdout has closed it (as `head` does), which is no error of ours."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
