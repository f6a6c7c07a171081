"""The report beside the output of `ptc preprocess`: what went in, what came out, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrain_cli import __version__
from posttrain_cli.data import storage
from posttrain_cli.data.reasons import Place, Reasons
from posttrain_cli.data.refine import Drop, Steps
from posttrain_cli.data.request import Request
from posttrain_cli.data.spool import Flags, Spool


@dataclass(slots=True)
class Counts:
    """What became of the rows so far."""

    rows: dict[str, int] = field(default_factory=dict)  # by file
    blank_lines: dict[str, int] = field(default_factory=dict)  # by file
    dropped: Reasons = field(default_factory=Reasons)
    changed: Reasons = field(default_factory=Reasons)
    warnings: Reasons = field(default_factory=Reasons)
    left_out: Reasons = field(default_factory=Reasons)
    errors: list[Drop] = field(default_factory=list)
    error_rows: int = 0
    fields: set[str] = field(default_factory=set)


def build_report(
    request: Request,
    files: Sequence[str],
    steps: Steps,
    counts: Counts,
    spool: Spool,
    alive: Flags,
    written: list[dict[str, Any]],
) -> dict[str, Any]:
    """The report as it is stored: the same for the same inputs and options.

    `rows` counts rows of the files, `read` what the preset made of them (the same, but for
    trees); read = kept + dropped.
    """
    kept = int(alive.sum())
    dropped = counts.dropped.total
    inputs = [
        {
            "path": path,
            "sha256": storage.sha256(path),
            "rows": counts.rows.get(path, 0),
            "blank_lines": counts.blank_lines.get(path, 0),
        }
        for path in files
    ]
    return {
        "version": __version__,
        "kind": steps.target.kind,
        "options": request.described(),
        "inputs": inputs,
        "rows": sum(counts.rows.values()),
        "read": kept + dropped,
        "kept": kept,
        "dropped": dropped,
        "dropped_by": counts.dropped.report(),
        "changed": counts.changed.report(),
        "warnings": counts.warnings.report(),
        "fields_left_out": dict(sorted(counts.left_out.rows.items())),
        "outputs": written,
        "tokens": _token_statistics(spool.tokens[alive]) if steps.fit else None,
    }


def _token_statistics(tokens: NDArray[np.int64]) -> dict[str, Any]:
    """Of the kept rows: lengths before any cut, and trained tokens after it."""
    lengths = tokens[:, 0]
    return {
        "total": int(lengths.sum()),
        "trained": int(tokens[:, 1].sum()),
        "mean": round(float(lengths.mean()), 1),
        "median": int(np.median(lengths)),
        "p95": int(np.percentile(lengths, 95)),
        "longest": int(lengths.max()),
    }


def summary(report: dict[str, Any]) -> list[str]:
    """The report as lines for people."""
    rows = "" if report["rows"] == report["read"] else f" from {report['rows']:,} rows"
    read = f"read {report['read']:,} {report['kind']} records{rows}"
    lines = [f"{read}: kept {report['kept']:,}, dropped {report['dropped']:,}"]
    for label, part in (("dropped", "dropped_by"), ("changed", "changed"), ("warned", "warnings")):
        for reason, entry in report[part].items():
            what = reason if entry["what"] == reason else f"{reason} {entry['what']}"
            lines.append(f"  {label} {entry['rows']:,}: {what} ({_first(entry['examples'][0])})")
    if report["fields_left_out"]:
        names = (f"{name} ({n:,})" for name, n in report["fields_left_out"].items())
        lines.append(f"  fields left out (--carry keeps them): {', '.join(names)}")
    if report["tokens"]:
        tokens = report["tokens"]
        lines.append(
            f"  tokens {tokens['total']:,}, longest {tokens['longest']:,}, "
            f"median {tokens['median']:,}, trained {tokens['trained']:,}"
        )
    lines += [f"wrote {output['rows']:,} rows to {output['path']}" for output in report["outputs"]]
    if report["rejects"]:
        lines.append(f"listed the dropped rows in {report['rejects']}")
    return lines


def _first(example: dict[str, Any]) -> str:
    where = Place(example["path"], example["row"], example["line"])
    return f"{where}: {example['message']}" if "message" in example else f"first at {where}"
