from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain_cli.data.request import Request, check_request, fit_options, parse_shard
from posttrain_cli.errors import UsageError

DIR = Path("tokenizer")
VAL = Path("val.jsonl")


def problems(**options: Any) -> tuple[str, ...]:
    request = Request(**{"inputs": ("in.jsonl",), "out": Path("out.jsonl"), **options})
    try:
        check_request(request)
    except UsageError as error:
        return error.problems
    return ()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"out": Path("out.txt")}, "cannot tell the format of `--out out.txt`"),
        ({"maps": ("x",)}, "`--map x` is not of the form new=old"),
        ({"val_rows": 5}, "`--val-fraction` and `--val-rows` need `--val-out FILE`"),
        ({"val_out": VAL}, "`--val-out` needs `--val-fraction F` or `--val-rows N`"),
        (
            {"val_out": VAL, "val_rows": 5, "val_fraction": 0.1},
            "`--val-fraction` and `--val-rows` exclude each other",
        ),
        ({"val_out": VAL, "val_fraction": 1.5}, "`--val-fraction 1.5` is not between 0 and 1"),
        ({"shard": "0/4"}, "`--shard 0/4` is not of the form I/N with I from 1 to N"),
        (
            {"shard": "1/4", "val_out": VAL, "val_rows": 5},
            "`--shard` cannot be split: join the shards with another `ptc preprocess` that splits",
        ),
        ({"tokenize": True}, "`--tokenize` needs `--tokenizer DIR`"),
        ({"template": "plain"}, "`--template` needs `--tokenizer DIR`"),
        ({"max_tokens": 8}, "`--max-tokens` needs `--tokenizer DIR`"),
        ({"add_eos": False}, "`--add-eos` needs `--tokenizer DIR`"),
        ({"overlong": "drop"}, "`--overlong drop` needs `--tokenizer DIR`"),
        ({"tokenizer": DIR, "pack": 64}, "`--pack` needs `--tokenize`"),
        (
            {"tokenizer": DIR, "tokenize": True, "pack": 64, "overlong": "keep"},
            "`--overlong keep` cannot be packed: a longer row fits no pack",
        ),
        (
            {"tokenizer": DIR, "tokenize": True, "pack": 64, "max_tokens": 100},
            "`--max-tokens 100` is more than `--pack 64` holds",
        ),
        (
            {"preset": "gsm8k", "kind": "preference"},
            "preset `gsm8k` makes `sft`, `prompt`, not `preference`",
        ),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], expected: str) -> None:
    assert problems(**options) == (expected,)


def test_every_mistake_is_named_at_once() -> None:
    found = problems(out=Path("x"), maps=("a",), shard="9/3", tokenize=True, val_rows=1)
    assert len(found) == 5


def test_shards_count_from_one() -> None:
    assert parse_shard("1/4") == (0, 4)
    assert parse_shard("4/4") == (3, 4)
    assert parse_shard(None) == (0, 1)
    for text in ("5/4", "1", "1/0", "-1/4", "a/b", "1/4/2"):
        with pytest.raises(UsageError, match="not of the form I/N"):
            parse_shard(text)


def test_token_options_follow_the_kind() -> None:
    request = Request(inputs=("a",), out=Path("o.jsonl"), tokenizer=DIR, tokenize=True)
    options = fit_options(request, "sft")
    assert options is not None
    assert (options.output, options.overlong, options.max_tokens) == ("ids", "truncate", 2048)
    with pytest.raises(UsageError, match="`--tokenize` writes sft rows, these are prompt rows"):
        fit_options(request, "prompt")
    request = Request(inputs=("a",), out=Path("o.jsonl"), tokenizer=DIR, overlong="truncate")
    with pytest.raises(UsageError, match="prompt rows have none"):
        fit_options(request, "prompt")
    options = fit_options(request, "preference")
    assert options is not None
    assert options.output == "records"
