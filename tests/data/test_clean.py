from __future__ import annotations

import re
import sys

import pytest

from posttrain_cli.data.clean import (
    CONTROLS_REMOVED,
    SPACE_COLLAPSED,
    clean_text,
    clean_value,
    collapse,
    without_controls,
)


def articles_clean_text(text: str) -> str:
    """The function of the first article, as printed there."""
    text = re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", "", text)
    return re.sub(r"\s+", " ", text.strip())


def test_safe_removes_the_articles_set_and_nothing_else() -> None:
    every = "".join(map(chr, range(0x250)))
    assert without_controls(every) == re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", "", every)
    code = "def f():\n\treturn 1\r\n\n\n    # two  blanks \u2028\x85\xa0"
    assert clean_text(code, "safe") == (code, frozenset())


def test_unchanged_text_is_the_same_object() -> None:
    text = "nothing to do \n\t here"
    assert without_controls(text) is text


def test_article_is_the_articles_function_for_every_character() -> None:
    for start in range(0, sys.maxunicode + 1, 1 << 16):
        text = "".join(f" a{chr(code)}{chr(code)}b \n" for code in range(start, start + (1 << 16)))
        assert collapse(without_controls(text)) == articles_clean_text(text), hex(start)


@pytest.mark.parametrize(
    ("text", "level", "expected", "changes"),
    [
        ("a\x00b\x7f", "safe", "ab", {CONTROLS_REMOVED}),
        ("a\x00b", "none", "a\x00b", set()),
        (" a  b\n", "article", "a b", {SPACE_COLLAPSED}),
        ("\x07a\x0cb \n c", "article", "ab c", {CONTROLS_REMOVED, SPACE_COLLAPSED}),
        ("a b", "article", "a b", set()),
        ("日本\x1f語", "safe", "日本語", {CONTROLS_REMOVED}),
    ],
)
def test_levels_and_what_they_say_they_did(
    text: str, level: str, expected: str, changes: set[str]
) -> None:
    assert clean_text(text, level) == (expected, changes)  # type: ignore[arg-type]


def test_plain_text_is_cleaned_as_any_other() -> None:
    text = " a\t b \n\n\u3000c "
    assert clean_text(text, "article", plain=True) == clean_text(text, "article")
    assert clean_text(text, "safe", plain=True) == (text, frozenset())


def test_turns_are_cleaned_in_either_spelling() -> None:
    turns = [
        {"role": "user", "content": "a\x00", "name": "x\x00"},
        {"from": "gpt", "value": "\x01b"},
        {"role": "assistant", "content": None},
        "no turn",
    ]
    cleaned = clean_value(turns, "safe")
    assert cleaned.value == [
        {"role": "user", "content": "a", "name": "x\x00"},
        {"from": "gpt", "value": "b"},
        {"role": "assistant", "content": None},
        "no turn",
    ]
    assert cleaned.changes == {CONTROLS_REMOVED}
    assert turns[0]["content"] == "a\x00"


def test_a_value_that_is_no_text_is_left_to_the_contract_check() -> None:
    for value in (3, None, True, {"content": "a\x00"}):
        assert clean_value(value, "article").value is value
