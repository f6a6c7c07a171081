"""`ptc validate`: every row of every file against the data contract."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from posttrain_cli.cli import console
from posttrain_cli.diagnostics import CODES, select_codes
from posttrain_cli.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from posttrain_cli.data.validate import Report, ValidateOptions

_SHOWN = 100

Files = Annotated[
    list[str] | None,
    typer.Argument(metavar="FILE...", help="files, globs, folders or s3:// names"),
]
KindOption = Annotated[
    Literal["auto", "sft", "preference", "prompt"],
    typer.Option("--kind", help="kind of record; auto looks at the first rows"),
]
PromptKey = Annotated[str, typer.Option(metavar="NAME", help="field with the prompt")]
ResponseKey = Annotated[str, typer.Option(metavar="NAME", help="field with the answer")]
ChosenKey = Annotated[str, typer.Option(metavar="NAME", help="field with the better answer")]
RejectedKey = Annotated[str, typer.Option(metavar="NAME", help="field with the worse answer")]
MessagesKey = Annotated[str, typer.Option(metavar="NAME", help="field with the conversation")]
Chat = Annotated[
    bool, typer.Option("--chat", help="accept chat lists in prompt, chosen and rejected")
]
TokenizerDir = Annotated[
    str | None, typer.Option("--tokenizer", metavar="DIR", help="turns on the token checks")
]
TemplateOption = Annotated[
    str, typer.Option("--template", metavar="NAME|FILE", help="tokenizer, chatml, plain or a file")
]
MaxTokens = Annotated[int, typer.Option(metavar="N", min=1, help="tokens a row may have")]
Against = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE", help="the other split: rows in both are leakage"),
]
Decontaminate = Annotated[
    list[str] | None, typer.Option(metavar="FILE", help="benchmark: rows that overlap it are named")
]
Near = Annotated[bool, typer.Option("--near-duplicates", help="also look for near duplicates")]
Select = Annotated[
    list[str] | None,
    typer.Option(metavar="CODE,...", help="only these codes; PTC2 is all that start so"),
]
Ignore = Annotated[list[str] | None, typer.Option(metavar="CODE,...", help="not these codes")]
Strict = Annotated[bool, typer.Option("--strict", help="warnings count as errors")]
Form = Annotated[
    Literal["text", "json", "github", "sarif"],
    typer.Option("--format", help="form of the findings on stdout"),
]
MaxFindings = Annotated[
    int | None,
    typer.Option(metavar="N", min=0, help="findings printed, 0 for all (default: text 100)"),
]
Encoding = Annotated[
    str | None, typer.Option(metavar="NAME", help="encoding of text files, such as gbk")
]
Fix = Annotated[bool, typer.Option("--fix", help="write a copy with the safe fixes to --out")]
Out = Annotated[str | None, typer.Option(metavar="FILE", help="where --fix writes")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace the file --out")]
Workers = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="processes (default: one a processor)")
]
Stats = Annotated[bool, typer.Option("--stats", help="show the lengths and the longest rows")]
Explain = Annotated[
    str | None, typer.Option(metavar="CODE", help="tell about a code, or all, and stop")
]


def validate(
    files: Files = None,
    kind: KindOption = "auto",
    prompt_key: PromptKey = "prompt",
    response_key: ResponseKey = "response",
    chosen_key: ChosenKey = "chosen",
    rejected_key: RejectedKey = "rejected",
    messages_key: MessagesKey = "messages",
    chat: Chat = False,
    tokenizer: TokenizerDir = None,
    template: TemplateOption = "tokenizer",
    max_tokens: MaxTokens = 2048,
    against: Against = None,
    decontaminate: Decontaminate = None,
    near_duplicates: Near = False,
    select: Select = None,
    ignore: Ignore = None,
    strict: Strict = False,
    form: Form = "text",
    max_findings: MaxFindings = None,
    encoding: Encoding = None,
    fix: Fix = False,
    out: Out = None,
    overwrite: Overwrite = False,
    workers: Workers = None,
    stats: Stats = False,
    explain: Explain = None,
) -> int:
    """Check every row of data files and say exactly what is wrong, and where.

    Findings go to stdout, one a line: path, line, column, code, message. The summary goes to
    stderr. Exit 1 if there is an error; `--explain CODE` tells what a code means and what to do.

    Examples:
      ptc validate train.jsonl
      ptc validate data/*.jsonl --kind preference --against val.jsonl
      ptc validate train.jsonl --tokenizer models/smollm2 --max-tokens 2048
      ptc validate raw.jsonl --fix --out clean.jsonl
      ptc validate train.jsonl --format github --ignore PTC303
      ptc validate --explain PTC203
    """
    from posttrain_cli.data import storage
    from posttrain_cli.data.records import Keys
    from posttrain_cli.data.validate import ValidateOptions
    from posttrain_cli.data.validate import validate as check

    if explain is not None:
        return _explain(explain)
    select_codes(_codes(select), _codes(ignore))
    as_json = console.modes.json or form == "json"
    if max_findings is None and not as_json and form != "sarif":
        max_findings = _SHOWN
    options = ValidateOptions(
        kind=kind,
        keys=Keys(prompt_key, response_key, chosen_key, rejected_key, messages_key, chat),
        tokenizer=tokenizer,
        template=template,
        max_tokens=max_tokens,
        against=tuple(storage.expand(against or [])),
        decontaminate=tuple(storage.expand(decontaminate or [])),
        near_duplicates=near_duplicates,
        select=_codes(select),
        ignore=_codes(ignore),
        strict=strict,
        max_findings=max_findings or None,
        encoding=encoding,
        workers=workers,
    )
    checked = storage.expand(files or [])
    if fix or out:
        checked = [_fix(checked, fix, out, overwrite, encoding)]
        options = dataclasses.replace(options, encoding=None)
    report = check(checked, options)
    _show(report, "json" if as_json else form, options, stats)
    return ExitCode.OK if report.ok else ExitCode.DATA


def _codes(written: Iterable[str] | None) -> tuple[str, ...]:
    """`["PTC1,PTC301"]` as names; unknown ones are refused before any file is read."""
    names = [name.strip() for part in written or () for name in part.split(",")]
    return tuple(name for name in names if name)


def _fix(
    files: list[str], fix: bool, out: str | None, overwrite: bool, encoding: str | None
) -> str:
    """Write the corrected copy, say what was fixed, and name the copy."""
    from pathlib import Path

    from posttrain_cli.data.fix import fix_file

    if not (fix and out):
        raise UsageError("`--fix` and `--out FILE` go together", hint="the input is never changed")
    if len(files) != 1:
        raise UsageError(f"`--fix` takes one file, not {len(files)}", hint="fix them one by one")
    fixed = fix_file(files[0], Path(out), encoding, overwrite)
    for code, count in fixed.items():
        console.say(f"fixed {code} {count:,} ×: {CODES[code].title}")
    console.say(f"wrote {out}; what follows is about it")
    return out


def _explain(name: str) -> int:
    """Tell about one code, about several that start the same, or list all."""
    from posttrain_cli.cli import render

    if name.lower() == "all":
        if console.modes.json:
            console.emit({"codes": [dataclasses.asdict(row) for row in CODES.values()]})
        else:
            render.show_codes()
        return ExitCode.OK
    rows = [CODES[code] for code in sorted(select_codes([name]))]
    if console.modes.json:
        console.emit({"codes": [dataclasses.asdict(row) for row in rows]})
    else:
        console.out("\n\n".join(render.explain(row) for row in rows))
    return ExitCode.OK


def _show(report: Report, form: str, options: ValidateOptions, statistics: bool) -> None:
    """Findings on stdout, the summary on stderr."""
    from posttrain_cli.cli import render

    if form == "json":
        console.emit(report.as_json())
    elif form == "sarif":
        console.out(render.sarif(report))
    else:
        line = render.text_line if form == "text" else render.github_line
        for found in report.findings:
            console.out(line(found))
    for text in render.summary(report, len(report.findings), options.strict, statistics):
        console.say(text)
