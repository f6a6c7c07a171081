"""How a validation report looks: text, GitHub annotations, SARIF; and its summary for people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from posttrain_cli import __version__
from posttrain_cli.cli import console
from posttrain_cli.data.validate import Report
from posttrain_cli.diagnostics import CODES, Code, Finding

_SARIF = "https://json.schemastore.org/sarif-2.1.0.json"
_BAR = 40
_HINTS = 8


def text_line(found: Finding) -> str:
    """`train.jsonl:17:24: PTC203 error: field 'rejected' is an object, expected text`."""
    place = f"{found.path}:{found.line or found.row or 1}:{found.column or 1}"
    return f"{place}: {found.code} {found.severity}: {found.message}"


def github_line(found: Finding) -> str:
    """A workflow command that annotates the line in a pull request."""
    values = {"file": found.path, "line": found.line, "col": found.column, "title": found.code}
    properties = ",".join(f"{k}={_property(str(v))}" for k, v in values.items() if v is not None)
    row = f"row {found.row}: " if found.line is None and found.row else ""
    text = row + found.message + (f" ({found.hint})" if found.hint else "")
    return f"::{found.severity} {properties}::{_escaped(text)}"


def sarif(report: Report) -> str:
    """The report as a SARIF 2.1.0 log, for code scanning."""
    used = sorted({found.code for found in report.findings})
    driver = {
        "name": "ptc validate",
        "semanticVersion": __version__,
        "rules": [_rule(CODES[code]) for code in used],
    }
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(found, used.index(found.code)) for found in report.findings],
    }
    log = {"$schema": _SARIF, "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=2, ensure_ascii=False)


def explain(row: Code) -> str:
    """One code in full: what it is, why it hurts, what to do, an example."""
    return "\n".join(
        [
            f"{row.code} ({row.severity}): {row.title}",
            "",
            f"  why      {row.why}",
            f"  fix      {row.fix}",
            f"  example  {row.example}",
        ]
    )


def summary(report: Report, shown: int, strict: bool, statistics: bool) -> Iterator[str]:
    """Lines about the whole: files, codes with their hints, lengths, the verdict."""
    total = sum(report.counts.values())
    if shown < total:
        yield f"{total - shown:,} more findings are not shown; --max-findings 0 shows all"
    for file in report.files:
        kind = f", {file.kind}" if file.kind else ""
        blank = f", {file.blank_lines:,} blank lines" if file.blank_lines else ""
        good = _good(file.good_rows, file.bad_rows)
        yield f"{file.path}: {file.rows:,} rows{kind}{good}{blank}"
    hints = _first_hints(report.findings)
    for code, count in report.counts.items():
        yield f"  {code} {CODES[code].severity:7} {count:>9,}  {CODES[code].title}"
        if code in hints and len(report.counts) <= _HINTS:
            yield f"          hint: {hints[code]}"
    yield from _lengths(report.stats, statistics)
    yield _verdict(report, strict)


def _good(good: int, bad: int) -> str:
    if not good + bad:
        return ""
    return f": {good:,} good, {bad:,} bad" if bad else ": all good"


def _first_hints(findings: Iterable[Finding]) -> dict[str, str]:
    hints: dict[str, str] = {}
    for found in findings:
        if found.hint:
            hints.setdefault(found.code, found.hint)
    return hints


def _lengths(stats: dict[str, Any], in_full: bool) -> Iterator[str]:
    sizes, guess = stats["text_bytes"], stats["estimate"]
    if not sizes["max"]:
        return
    yield (
        f"text a row: median {sizes['median']:,} bytes, 99 % under {sizes['p99']:,}, "
        f"longest {sizes['max']:,}; about {guess['tokens']:,} tokens"
    )
    tokens = stats.get("tokens")
    if tokens:
        yield (
            f"tokens: {tokens['rows_over']:,} rows over {tokens['max_tokens']:,}; "
            f"{100 * tokens['supervised_share']:.1f} % of tokens trained "
            f"(from {tokens['sampled_rows']:,} rows)"
        )
    elif guess["rows_over"]:
        yield (
            f"about {guess['rows_over']:,} rows ({100 * guess['share_over']:.1f} %) are longer "
            f"than {guess['max_tokens']:,} tokens; --tokenizer DIR counts exactly"
        )
    if in_full:
        yield from _histogram(stats["histogram"])
        for row in stats["longest"]:
            place = f"{row['path']}:{row['line'] or row['row']}"
            yield f"  {row['bytes']:>12,} bytes  {place}"


def _histogram(bins: list[dict[str, int]]) -> Iterator[str]:
    most = max((one["rows"] for one in bins), default=1)
    for one in bins:
        bar = "█" * -(-one["rows"] * _BAR // most)
        yield f"  {one['from']:>10,} – {one['to']:<10,} {one['rows']:>10,} {bar}"


def _verdict(report: Report, strict: bool) -> str:
    errors = sum(n for code, n in report.counts.items() if CODES[code].severity == "error")
    warnings = sum(report.counts.values()) - errors
    counted = f"{_many(errors, 'error')}, {_many(warnings, 'warning')}"
    if strict and warnings:
        counted += " (warnings count as errors)"
    return f"{'ok' if report.ok else 'not ok'}: {counted}"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")


def _rule(row: Code) -> dict[str, Any]:
    return {
        "id": row.code,
        "shortDescription": {"text": row.title},
        "fullDescription": {"text": row.why},
        "help": {"text": f"{row.fix}\n\nExample: {row.example}"},
        "defaultConfiguration": {"level": row.severity},
    }


def _result(found: Finding, index: int) -> dict[str, Any]:
    location: dict[str, Any] = {"artifactLocation": {"uri": _uri(found.path)}}
    if found.line is not None:
        location["region"] = {"startLine": found.line, "startColumn": found.column or 1}
    row = f"row {found.row}: " if found.line is None and found.row else ""
    return {
        "ruleId": found.code,
        "ruleIndex": index,
        "level": found.severity,
        "message": {"text": row + found.message + (f"\n{found.hint}" if found.hint else "")},
        "locations": [{"physicalLocation": location}],
        "properties": {"row": found.row, "field": found.field},
    }


def _uri(path: str) -> str:
    if "://" in path:
        return path
    return Path(path).as_uri() if Path(path).is_absolute() else quote(Path(path).as_posix())


def show_codes() -> None:
    """The table of all codes, on stdout."""
    for line in console.table((row.code, row.severity, row.title) for row in CODES.values()):
        console.out(line)
