"""The only place that talks: results on stdout, everything else on stderr, errors as one shape."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from posttrain_cli.errors import DataError, PtcError, UsageError

SHOWN_FINDINGS = 100  # of those of a DataError; --json has them all


@dataclass(slots=True)
class Modes:
    """How this invocation talks (`-q`, `-v`, `--debug`, `--no-color`, `--json`), and its words."""

    quiet: bool = False
    verbose: bool = False
    debug: bool = False
    color: bool = True
    json: bool = False
    command: tuple[str, ...] = ()


modes = Modes()


def reset(command: Sequence[str]) -> None:
    """Back to the defaults before `command` is parsed; errors may already need to be JSON."""
    modes.quiet = modes.verbose = modes.debug = False
    modes.color = True
    modes.json = "--json" in command
    modes.command = tuple(command)


def out(text: str = "") -> None:
    """A line of the result, on stdout."""
    print(text)


def emit(result: Mapping[str, Any]) -> None:
    """The one JSON object of `--json`, or one JSON line of a stream of records, on stdout."""
    print(json.dumps(result, ensure_ascii=False, default=str))


def say(text: str) -> None:
    """A line of progress or summary, on stderr; silent with `-q`."""
    if not modes.quiet:
        print(text, file=sys.stderr, flush=True)


def detail(text: str) -> None:
    """A line for the curious, on stderr with `-v` or `--debug`."""
    if modes.verbose or modes.debug:
        print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """A warning, on stderr even with `-q`."""
    print(f"{paint('warning', '33')}: {text}", file=sys.stderr, flush=True)


def fail(error: PtcError) -> None:
    """Explain an error on stderr; with `--json` one object on stdout as well."""
    if modes.json:
        emit({"ok": False, "error": as_json(error)})
    mark = paint("error", "31;1")
    problems = error.problems if isinstance(error, UsageError) else ()
    if problems and all(problem in error.message for problem in problems):
        lines = [f"{mark}: {problem}" for problem in problems]  # the message only joins them
    else:
        lines = [f"{mark}: {error.message}", *(f"  {problem}" for problem in problems)]
    lines = [*_findings(error), *lines]
    if error.hint:
        lines += ["", f"{paint('hint', '36')}: {error.hint}"]
    print("\n".join(lines), file=sys.stderr, flush=True)


def _findings(error: PtcError) -> list[str]:
    """The places a data error is about, the first of them if there are many."""
    found = error.findings if isinstance(error, DataError) else ()
    more = len(found) - SHOWN_FINDINGS
    lines = [str(finding) for finding in found[:SHOWN_FINDINGS]]
    return [*lines, f"... and {more:,} more"] if more > 0 else lines


def as_json(error: PtcError) -> dict[str, Any]:
    """The JSON form of an error: exit code, message, hint, and every problem."""
    problems = list(error.problems) if isinstance(error, UsageError) else []
    found = error.findings if isinstance(error, DataError) else ()
    return {
        "exit_code": int(error.exit_code),
        "message": error.message,
        "hint": error.hint,
        "problems": problems,
        "findings": [{**asdict(finding), "severity": finding.severity} for finding in found],
    }


def stdout() -> TextIO:
    """The stream of results, for `paint`."""
    return sys.stdout


def paint(text: str, code: str, stream: TextIO | None = None) -> str:
    """`text` in an ANSI colour when `stream` (default stderr) is a terminal that wants it."""
    return f"\x1b[{code}m{text}\x1b[0m" if colored(stream or sys.stderr) else text


def colored(stream: TextIO) -> bool:
    """Whether colour goes to `stream`: a terminal, no NO_COLOR, no `--no-color`, no dumb TERM."""
    wanted = modes.color and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return wanted and stream.isatty()


def live() -> bool:
    """Whether a moving progress bar may be drawn on stderr: a terminal, not CI, not `-q`."""
    return sys.stderr.isatty() and not modes.quiet and not os.environ.get("CI")


@contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Any]:
    """Yield `advance(n=1)`: a bar on a terminal, nothing elsewhere.

    Args:
        title: what is being done, a few words.
        total: how many units there are, if known.
    """
    if not live():
        yield lambda n=1: None
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True, no_color=not colored(sys.stderr))
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda n=1: bar.advance(task, n)


def table(rows: Iterable[tuple[str, ...]], *, indent: str = "") -> list[str]:
    """Rows as left-aligned columns, for people; the last column is not padded."""
    lines = [tuple(str(cell) for cell in row) for row in rows]
    if not lines:
        return []
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return [
        indent
        + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
