"""What `ptc preprocess` is asked to do, and whether that makes sense."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from posttrain_cli.data.clean import Level
from posttrain_cli.data.convert import KINDS, Preset
from posttrain_cli.data.fit import FitOptions
from posttrain_cli.data.mapping import parse_maps
from posttrain_cli.data.records import Kind
from posttrain_cli.data.render import Overlong, TrainOn
from posttrain_cli.data.select import Dedup
from posttrain_cli.data.writer import output_format
from posttrain_cli.errors import UsageError

MAX_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The options of one call; `docs/cli.md` explains each under the flag of its name.

    None stands for "not given" where that differs from every value.
    """

    inputs: tuple[str, ...]
    out: Path
    kind: Literal["auto", "sft", "preference", "prompt"] = "auto"
    preset: Preset | None = None
    maps: tuple[str, ...] = ()
    chat: bool = False
    carry: tuple[str, ...] | None = None
    encoding: str | None = None
    clean: Level = "safe"
    dedup: Dedup = "none"
    decontaminate: tuple[str, ...] = ()
    tokenizer: Path | None = None
    max_tokens: int | None = None
    overlong: Overlong | None = None
    template: str | None = None
    add_eos: bool | None = None
    train_on: TrainOn = "assistant"
    tokenize: bool = False
    pack: int | None = None
    val_out: Path | None = None
    val_fraction: float | None = None
    val_rows: int | None = None
    seed: int = 42
    on_error: Literal["fail", "skip"] = "fail"
    shard: str | None = None
    workers: int | None = None
    overwrite: bool = False

    @property
    def splits(self) -> bool:
        """Whether some rows go into a validation file."""
        return self.val_out is not None

    def described(self) -> dict[str, Any]:
        """The options as the report holds them: those that can change the output."""
        names = [name for name in self.__slots__ if name not in ("inputs", "workers", "overwrite")]
        return {name: _plain(getattr(self, name)) for name in names}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def check_request(request: Request) -> None:
    """Refuse options that contradict each other.

    Raises:
        UsageError: every problem found.
    """
    problems = list(_problems(request))
    if problems:
        raise UsageError(problems[0], hint="see `ptc preprocess --help`", problems=problems)


def _problems(request: Request) -> Iterator[str]:
    for parse in (lambda: parse_maps(request.maps), lambda: parse_shard(request.shard)):
        try:
            parse()
        except UsageError as error:
            yield from error.problems or (error.message,)
    for option, target in (("--out", request.out), ("--val-out", request.val_out)):
        try:
            if target is not None:
                output_format(target, option)
        except UsageError as error:
            yield error.message
    yield from _split_problems(request)
    yield from _token_problems(request)
    if request.preset and request.kind not in ("auto", *KINDS[request.preset]):
        made = ", ".join(f"`{kind}`" for kind in KINDS[request.preset])
        yield f"preset `{request.preset}` makes {made}, not `{request.kind}`"


def _split_problems(request: Request) -> Iterator[str]:
    sizes = (request.val_fraction, request.val_rows)
    if sizes != (None, None) and request.val_out is None:
        yield "`--val-fraction` and `--val-rows` need `--val-out FILE`"
    if sizes == (None, None) and request.val_out is not None:
        yield "`--val-out` needs `--val-fraction F` or `--val-rows N`"
    if None not in sizes:
        yield "`--val-fraction` and `--val-rows` exclude each other"
    if request.val_fraction is not None and not 0 < request.val_fraction < 1:
        yield f"`--val-fraction {request.val_fraction}` is not between 0 and 1"
    if request.shard and request.splits:
        yield "`--shard` cannot be split: join the shards with another `ptc preprocess` that splits"


def _token_problems(request: Request) -> Iterator[str]:
    needs = {
        "--tokenize": request.tokenize,
        "--template": request.template is not None,
        "--max-tokens": request.max_tokens is not None,
        "--add-eos": request.add_eos is not None,
        f"--overlong {request.overlong}": request.overlong not in (None, "keep"),
    }
    if request.tokenizer is None:
        for option, given in needs.items():
            if given:
                yield f"`{option}` needs `--tokenizer DIR`"
    if request.pack is not None and not request.tokenize:
        yield "`--pack` needs `--tokenize`"
    if request.pack is not None and request.overlong == "keep":
        yield "`--overlong keep` cannot be packed: a longer row fits no pack"
    limit = request.max_tokens
    if request.pack is not None and limit is not None and limit > request.pack:
        yield f"`--max-tokens {limit}` is more than `--pack {request.pack}` holds"


def parse_shard(text: str | None) -> tuple[int, int]:
    """`I/N` as (index from 0, number); the whole when `text` is None.

    Raises:
        UsageError: not two numbers with 1 ≤ I ≤ N.
    """
    if text is None:
        return 0, 1
    index, _, count = text.partition("/")
    if index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count):
        return int(index) - 1, int(count)
    raise UsageError(
        f"`--shard {text}` is not of the form I/N with I from 1 to N", hint="such as --shard 1/4"
    )


def fit_options(request: Request, kind: Kind) -> FitOptions | None:
    """How rows are fitted, or None without a tokenizer.

    Raises:
        UsageError: the options do not suit the kind.
    """
    if request.tokenizer is None:
        return None
    if request.tokenize and kind != "sft":
        raise UsageError(f"`--tokenize` writes sft rows, these are {kind} rows")
    overlong = request.overlong or ("truncate" if request.tokenize else "keep")
    if overlong == "truncate" and kind == "prompt":
        raise UsageError(
            "`--overlong truncate` cuts answers, and prompt rows have none",
            hint="use --overlong drop or error",
        )
    output: Literal["records", "text", "ids"] = "records"
    if request.tokenize:
        output = "ids"
    elif request.template is not None or request.add_eos is not None:
        output = "text"
    return FitOptions(
        tokenizer=request.tokenizer,
        template=request.template or "tokenizer",
        max_tokens=request.max_tokens or request.pack or MAX_TOKENS,
        overlong=overlong,
        add_eos=request.add_eos,
        train_on=request.train_on,
        output=output,
    )
