"""`ptc gen-synthetic`: rows from recipes whose answers can be checked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from posttrain_cli.cli import console


def gen_synthetic(
    out: Annotated[
        Path, typer.Option(metavar="FILE", help=".jsonl, .jsonl.gz, .jsonl.zst or .parquet")
    ],
    kind: Annotated[
        Literal["sft", "preference", "prompt"], typer.Option(help="kind of the rows")
    ] = "sft",
    n: Annotated[int, typer.Option("--n", metavar="N", min=1, help="number of rows")] = 100,
    recipe: Annotated[
        Literal["capitals", "arithmetic", "format", "extraction", "dialogue", "mixed"],
        typer.Option(help="what the rows are about"),
    ] = "mixed",
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="same seed, same bytes")] = 42,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace FILE")] = False,
) -> None:
    """Make synthetic rows without a model: deterministic, with answers that can be checked.

    Nothing needs to be installed or downloaded. Row i is a function of the seed and of i, so
    a longer file begins with the rows of a shorter one.

    capitals: the rows of a first test run, all about the capital of France. arithmetic: word
    problems of two steps, answered as in GSM8K. format: instructions about the form of the
    answer. extraction: one fact out of a note. dialogue: a fact told, then asked for. mixed:
    all of them but dialogue.

    Preference rows hold a right answer and a known corruption of it. Metadata has the `answer`,
    how to `check` it (number, exact, contains) and the name of the `corruption`.

    Examples:
      ptc gen-synthetic --out train.jsonl
      ptc gen-synthetic --recipe capitals --n 100 --out test_data.parquet
      ptc gen-synthetic --kind preference --recipe arithmetic --n 2000 --seed 7 --out pairs.jsonl
      ptc gen-synthetic --kind prompt --recipe arithmetic --n 500 --out prompts.jsonl
    """
    from posttrain_cli.data.synthetic import SyntheticOptions, generate

    options = SyntheticOptions(kind=kind, recipe=recipe, rows=n, seed=seed)
    written = generate(options, out, overwrite=overwrite)
    if console.modes.json:
        console.emit(written)
    else:
        console.say(f"{n:,} {kind} rows ({recipe}, seed {seed}) written to {out}")
