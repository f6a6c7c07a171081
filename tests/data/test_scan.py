from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain_cli.data.scan import MAX_DEPTH, JsonError, Problem, scan

BROKEN = [
    ('{"a": 1,}', 8, "trailing comma before `}`"),
    ('{"a": [1, 2, ]}', 12, "trailing comma before `]`"),
    ('{"a": NaN}', 7, "`NaN` is not JSON"),
    ('{"a": -Infinity}', 7, "`-Infinity` is not JSON"),
    ('{"a": 1} {"b": 2}', 10, "two objects on one line"),
    ('{"a": 1} [2]', 10, "two values on one line"),
    ('{"a": 1}\r{"b": 2}', 10, "two values on one line, parted by a carriage return"),
    ('{"a": 1} // note', 10, "comment: JSON has none"),
    ('{"a": 1, # note', 10, "comment: JSON has none"),
    ('{"a": /* x */ 1}', 7, "comment: JSON has none"),
    ('{"a": "cut', 11, "cut off: the text ends inside a string"),
    ('{"a": "cut\\', 12, "cut off: the text ends inside a string"),
    ('{"a": "\\u12', 12, "cut off: the text ends inside a string"),
    ('{"a"', 5, "cut off: the text ends where `:` after the key was expected"),
    ('{"a": ', 7, "cut off: the text ends where a value was expected"),
    ('{"a": [1', 9, "cut off: the text ends where `,` or `]` was expected"),
    ("{", 2, "cut off: the text ends where a key in double quotes was expected"),
    ("{'a': 1}", 2, "key in single quotes"),
    ("{\"a\": 'b'}", 7, "text in single quotes"),
    ('{"a": True}', 7, "`True` is Python, not JSON"),
    ('{"a": None}', 7, "`None` is Python, not JSON"),
    ("{a: 1}", 2, "found `a`, expected a key in double quotes"),
    ('{"a": 01}', 7, "found `01`, expected a value"),
    ('{"a": +1}', 7, "found `+1`, expected a value"),
    ('{"a": 1.}', 7, "found `1.`, expected a value"),
    ('{"a": 1e999}', 7, "number `1e999` is too large"),
    ('{"a" 1}', 6, "found `1`, expected `:` after the key"),
    ('{"a": 1 "b": 2}', 9, 'found `"`, expected `,` or `}`'),
    ('{"é": "x\ty"}', 9, "raw control character U+0009 in a string"),
    ('{"a": "\\q"}', 8, "invalid escape `\\q`"),
    ('{"a": "\\u00g0"}', 8, "`\\u` without four hex digits"),
    ('\ufeff{"a": 1}', 1, "byte-order mark in front of the record"),
    ('{"a": 1}x', 9, "found `x` after the end of the value"),
    ("", 1, "cut off: the text ends where a value was expected"),
]


@pytest.mark.parametrize(("text", "column", "message"), BROKEN)
def test_what_is_broken_is_named_at_its_column(text: str, column: int, message: str) -> None:
    with pytest.raises(JsonError) as caught:
        scan(text)
    problem = caught.value.problem
    assert (problem.code, problem.column, problem.message) == ("PTC103", column, message)


def test_columns_count_code_points() -> None:
    scanned = scan('{"emoji 😀": 1, "é": {"é": 2, "é": 3}}')
    assert [(p.code, p.column) for p in scanned.problems] == [("PTC107", 30)]
    assert scanned.problems[0].path == ("é", "é")
    assert scanned.value == {"emoji 😀": 1, "é": {"é": 3}}


def test_lone_surrogates_are_listed_and_pairs_are_not() -> None:
    scanned = scan('{"a": "\\ud83d\\ude00 \\ud83d \\udE00\\uD83D\\uDE00"}')
    assert scanned.value == {"a": "😀 \ud83d \ude00😀"}
    assert [p.column for p in scanned.problems] == [21, 28]
    assert scanned.problems[0].message.startswith("lone surrogate `\\ud83d`")


def test_integers_of_any_size_stay_exact() -> None:
    digits = "7" * 9000
    scanned = scan(f'{{"a": {digits}, "b": -{digits[:30]}, "c": 18446744073709551616}}')
    assert scanned.value["a"] % 10**12 == 777777777777
    assert scanned.value["b"] == -int(digits[:30])
    assert scanned.value["c"] == 2**64


def test_depth_is_bounded() -> None:
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert scan(deep).value is not None
    with pytest.raises(JsonError) as caught:
        scan("[" + deep + "]")
    assert caught.value.problem.message == f"nested deeper than {MAX_DEPTH} levels"
    assert caught.value.problem.column == MAX_DEPTH + 1


@pytest.mark.parametrize(
    ("problem", "column"),
    [
        (Problem("PTC204", "", ("b", 1, "c")), 29),
        (Problem("PTC201", "", ("missing",)), 2),
        (Problem("PTC201", "", ("b", 1, "missing")), 23),
        (Problem("PTC301", "", ("a",), offset=0), 9),
        (Problem("PTC301", "", ("b", 1, "c"), offset=1), 31),
        (Problem("PTC301", "", ("b", 1, "c"), offset=2), 43),
    ],
)
def test_a_problem_finds_its_column_by_path_and_offset(problem: Problem, column: int) -> None:
    scanned = scan(' {"a": "xy", "b": [0, {"c": "é\\ud83d\\ude00\\u0001"}]}')
    assert scanned.column(problem) == column


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(value=json_values, ascii_only=st.booleans(), indent=st.sampled_from([None, 1]))
def test_scanning_what_json_writes_gives_the_value_back(value, ascii_only, indent) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    scanned = scan(text)
    assert scanned.value == value
    assert [p.code for p in scanned.problems if p.code != "PTC108"] == []


@settings(max_examples=500, deadline=None)
@given(value=json_values, data=st.data())
def test_the_verdict_agrees_with_the_json_module(value, data) -> None:
    text = json.dumps(value)
    at = data.draw(st.integers(0, len(text)))
    piece = data.draw(st.sampled_from(["", ",", '"', "}", "]", "\\", "0", "\x01", "é", " ", "-"]))
    mutated = text[:at] + piece + text[at + data.draw(st.integers(0, 1)) :]
    try:
        expected = json.loads(mutated, parse_constant=_refuse)
    except (ValueError, RecursionError):
        expected = JsonError
    try:
        found = scan(mutated).value
    except JsonError as error:
        found = JsonError
        if "too large" in error.problem.message:  # json makes it infinite
            return
    assert found == expected


def _refuse(constant: str) -> None:
    raise ValueError(constant)
