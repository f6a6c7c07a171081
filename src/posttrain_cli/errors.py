"""The exceptions users may see, and the exit codes they end with.

    PtcError
    ├── DataError     1   the data or a check said no
    ├── UsageError    2   usage, config or input cannot be used
    └── RunError      3   the run failed after it started
        Interrupted 128+n ended by signal n, after saving what was promised

User mistakes raise one of these; broken invariants are asserts that carry their values.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """Exit status of every command (SPEC §1)."""

    OK = 0
    DATA = 1
    USAGE = 2
    FAILED = 3


class PtcError(Exception):
    """A mistake explained to the user: what, where, what was expected, and what to do.

    Args:
        message: one sentence, lower case, no full stop, names in backticks.
        hint: what to do about it; printed after a blank line.
    """

    exit_code: int = ExitCode.FAILED

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class DataError(PtcError):
    """The data or a check said no: exit 1. `findings` lists each place (diagnostics.Finding)."""

    exit_code = ExitCode.DATA

    def __init__(self, message: str, hint: str = "", findings: Iterable[Any] = ()) -> None:
        super().__init__(message, hint)
        self.findings = tuple(findings)


class UsageError(PtcError):
    """Usage, config or input cannot be used: exit 2. `problems` lists every mistake found."""

    exit_code = ExitCode.USAGE

    def __init__(self, message: str, hint: str = "", problems: Iterable[str] = ()) -> None:
        super().__init__(message, hint)
        self.problems = tuple(problems)


class RunError(PtcError):
    """The run failed after it started: exit 3."""

    exit_code = ExitCode.FAILED


class Interrupted(PtcError):
    """Ended by signal `signum`, after saving what was promised: exit 128 + signum."""

    def __init__(self, signum: int, message: str = "", hint: str = "") -> None:
        super().__init__(message or f"stopped by {signal.Signals(signum).name}", hint)
        self.exit_code = 128 + signum


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean `x`?` for the nearest of `known`, or an empty string."""
    import difflib

    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean `{near[0]}`?" if near else ""
