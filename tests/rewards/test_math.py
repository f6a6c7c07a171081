from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pytest

from posttrain_cli.rewards.math import final_number, math_reward, mean_interval, share_interval

GSM8K = Path(__file__).parents[2] / "examples" / "gsm8k"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("… = 72 clips.\n#### 72", "72"),
        ("#### 1,234,567", "1234567"),
        ("#### $18.50 in all, not 20", "18.50"),
        ("#### -5", "-5"),
        ("#### −5", "-5"),
        ("first #### 1 then #### 2", "2"),
        ("The answer is 3, no, 12.", "12"),
        ("She pays $5.", "5"),
        ("10-7 = 3", "3"),
        ("from 10-7", "7"),
        ("it is -7", "-7"),
        ("half is .5", "0.5"),
        ("page 12,34", "34"),
        ("7 apples\n#### none", "7"),
        ("about 72.00", "72"),
        ("model2b has 4B", "4"),
        ("no number", None),
        ("", None),
    ],
)
def test_final_number(text: str, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Decimal(number))


def test_every_answer_of_gsm8k_is_its_own_last_line() -> None:
    for name in ("train.jsonl", "test.jsonl"):
        for line in (GSM8K / name).read_bytes().splitlines():
            answer = json.loads(line)["answer"]
            last = answer.rpartition("#### ")[2].replace(",", "")
            assert final_number(answer) == Decimal(last)


def test_math_reward_judges_values_and_leaves_out_what_has_no_reference() -> None:
    completions = ["so 72", "#### 72.0", "73", "nothing", "5"]
    references = ["#### 72", "72", "72", "72", "no number here"]
    assert math_reward([""] * 5, completions, references) == [1.0, 1.0, 0.0, 0.0, None]


def test_share_interval_agrees_with_published_values() -> None:
    # Wilson's score interval for 81 of 263 (Newcombe 1998, table I): 0.2553 to 0.3662.
    low, high = share_interval(81, 263)
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)
    low, high = share_interval(0, 20)
    assert (low, round(high, 4)) == (0.0, 0.1611)
    assert share_interval(20, 20)[1] == 1.0


def test_mean_interval_by_hand() -> None:
    low, high = mean_interval([0.0, 1.0, 0.5, 0.5])
    assert (round(low, 4), round(high, 4)) == (0.0999, 0.9001)
    assert mean_interval([1.0]) == (float("-inf"), float("inf"))
