"""Findings: what a check says about one place in a file, and the table of all codes.

A finding is a plain value; how it looks (text, JSON, GitHub, SARIF) is decided in `cli.render`.
The set of codes may grow; a code never changes its meaning (SPEC §2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Code:
    """One row of the code table; `why`, `fix` and `example` feed `--explain` and docs/codes.md."""

    code: str
    severity: Severity
    title: str
    why: str
    fix: str
    example: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding at one place.

    Attributes:
        path: the file as the user named it.
        code: a key of CODES.
        message: what was found and what was expected, one line, no full stop.
        line: 1-based line of a text file, or None (Parquet, JSON arrays).
        column: 1-based column in code points, or None.
        row: 1-based record number, or None for whole-file findings.
        field: the record's field concerned, or None.
        hint: what to do about it.
    """

    path: str
    code: str
    message: str
    line: int | None = None
    column: int | None = None
    row: int | None = None
    field: str | None = None
    hint: str = ""

    @property
    def severity(self) -> Severity:
        """The severity that the code table gives this code."""
        return CODES[self.code].severity


# The texts are filled in by the table below; `ptc validate --explain CODE` prints them.
CODES: dict[str, Code] = {}
