"""Counting what happened to rows, by reason, with the first examples of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from posttrain_cli.diagnostics import CODES

EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row stands: 1-based `row`, and `line` where its format has lines."""

    path: str
    row: int
    line: int | None

    def example(self, **more: Any) -> dict[str, Any]:
        """The place as part of a report, with `more` behind it."""
        return {"path": self.path, "line": self.line, "row": self.row, **more}

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" if self.line else f"{self.path}:row {self.row}"


@dataclass(slots=True)
class Reasons:
    """Rows by reason, in the order in which the reasons first came up."""

    rows: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, reason: str, example: dict[str, Any]) -> None:
        """Count one row; keep it as an example if it is among the first."""
        self.rows[reason] = self.rows.get(reason, 0) + 1
        kept = self.examples.setdefault(reason, [])
        if len(kept) < EXAMPLES:
            kept.append(example)

    def merge(self, later: Reasons) -> None:
        """Add the counts of rows that come behind those counted so far."""
        for reason, count in later.rows.items():
            self.rows[reason] = self.rows.get(reason, 0) + count
            kept = self.examples.setdefault(reason, [])
            kept += later.examples[reason][: EXAMPLES - len(kept)]

    @property
    def total(self) -> int:
        """All rows, whatever the reason."""
        return sum(self.rows.values())

    def report(self) -> dict[str, Any]:
        """As part of a report: reason → rows, what it means, examples."""
        return {
            reason: {"rows": count, "what": title(reason), "examples": self.examples[reason]}
            for reason, count in self.rows.items()
        }


def title(reason: str) -> str:
    """What a reason means: the title of a code, or the reason itself."""
    return CODES[reason].title if reason in CODES else reason
