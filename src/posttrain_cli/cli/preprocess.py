"""`ptc preprocess`: raw files to contract data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from posttrain_cli.cli import console


def preprocess(
    inputs: Annotated[
        list[str], typer.Argument(metavar="INPUT...", help="files, globs, folders or s3://")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="output: .jsonl[.gz|.zst], .parquet")],
    kind: Annotated[
        Literal["auto", "sft", "preference", "prompt"],
        typer.Option(help="kind of rows to make; auto follows the preset or the first rows"),
    ] = "auto",
    preset: Annotated[
        Literal["gsm8k", "alpaca", "sharegpt", "messages", "hh-rlhf", "oasst", "article"] | None,
        typer.Option(help="layout of the input"),
    ] = None,
    maps: Annotated[
        list[str] | None,
        typer.Option(
            "--map", metavar="NEW=OLD", help="rename a field; OLD may be a path; repeatable"
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="keep turns as lists")] = False,
    carry: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD,...|all",
            help="fields to copy beside the contract's (prompt rows: all, others: none)",
        ),
    ] = None,
    encoding: Annotated[
        str | None, typer.Option(metavar="NAME", help="codec of text inputs  [default: utf-8]")
    ] = None,
    clean: Annotated[
        Literal["safe", "article", "none"],
        typer.Option(help="safe: control characters out; article: white space collapsed, too"),
    ] = "safe",
    dedup: Annotated[
        Literal["none", "exact", "near"], typer.Option(help="drop rows that repeat earlier ones")
    ] = "none",
    decontaminate: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="drop rows that share 13 words with FILE; repeatable"),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="DIR", help="folder with a tokenizer.json")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="tokens a row may have  [default: 2048]")
    ] = None,
    overlong: Annotated[
        Literal["keep", "drop", "truncate", "error"] | None,
        typer.Option(help="longer rows  [default: keep; truncate with --tokenize]"),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="write rendered text: tokenizer, chatml, plain or a Jinja file"
        ),
    ] = None,
    add_eos: Annotated[
        bool | None,
        typer.Option("--add-eos/--no-add-eos", help="end each answer with one end token"),
    ] = None,
    train_on: Annotated[
        Literal["assistant", "last", "all"], typer.Option(help="turns that --tokenize marks")
    ] = "assistant",
    tokenize: Annotated[
        bool, typer.Option("--tokenize", help="write token ids, loss mask and lengths")
    ] = False,
    pack: Annotated[
        int | None, typer.Option(metavar="N", min=8, help="fill rows of N tokens, with --tokenize")
    ] = None,
    val_out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="validation rows, no prompt on both sides")
    ] = None,
    val_fraction: Annotated[
        float | None, typer.Option(metavar="F", help="share of the rows for validation")
    ] = None,
    val_rows: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="rows for validation")
    ] = None,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, max=2**32 - 1, help="seeds the split")
    ] = 42,
    on_error: Annotated[
        Literal["fail", "skip"],
        typer.Option(help="bad rows: stop, or leave them out and list them"),
    ] = "fail",
    shard: Annotated[
        str | None, typer.Option(metavar="I/N", help="every Nth row, from the Ith (1 to N)")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="processes  [default: the cores, for large files]"),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace outputs")] = False,
) -> None:
    """Turn raw files into contract data: convert, clean, check, select, split.

    Beside FILE lies FILE.report.json: inputs with their hashes, options, how many rows came in
    and out and why, with examples. Read = kept + dropped. Rows that break the contract stop the
    run, with nothing written, or go to FILE.rejects.jsonl with --on-error skip.

    Presets: gsm8k (question, answer), alpaca (instruction, input, output), sharegpt
    (conversations), messages (OpenAI), hh-rlhf (dialogues), oasst (trees), article (CSV with
    instruction, best_response, worst_response). Without one, rows have the contract's fields.

    Cut answers (--overlong truncate) are marked `truncated` in their metadata.

    Examples:
      ptc preprocess train.jsonl --preset gsm8k --out gsm8k.jsonl
      ptc preprocess raw_annotations.csv --preset article --clean article --out dataset_v1.jsonl
      ptc preprocess raw/*.jsonl --map prompt=question --map response=best.text --out train.jsonl
      ptc preprocess trees.jsonl.gz --preset oasst --kind preference --out pairs.jsonl
      ptc preprocess raw.jsonl --dedup exact --val-rows 500 --val-out val.jsonl --out train.jsonl
      ptc preprocess chats.jsonl --tokenizer models/smollm2 --tokenize --pack 2048 --out ids.parquet
    """
    from posttrain_cli.data import preprocess as work
    from posttrain_cli.data.report import summary
    from posttrain_cli.data.request import Request

    request = Request(
        inputs=tuple(inputs),
        out=out,
        kind=kind,
        preset=preset,
        maps=tuple(maps or ()),
        chat=chat,
        carry=tuple(carry.split(",")) if carry else None,
        encoding=encoding,
        clean=clean,
        dedup=dedup,
        decontaminate=tuple(decontaminate or ()),
        tokenizer=tokenizer,
        max_tokens=max_tokens,
        overlong=overlong,
        template=template,
        add_eos=add_eos,
        train_on=train_on,
        tokenize=tokenize,
        pack=pack,
        val_out=val_out,
        val_fraction=val_fraction,
        val_rows=val_rows,
        seed=seed,
        on_error=on_error,
        shard=shard,
        workers=workers,
        overwrite=overwrite,
    )
    with console.progress("rows") as advance:
        report = work.preprocess(request, advance)
    if console.modes.json:
        console.emit(report)
        return
    for line in summary(report):
        console.say(line)
