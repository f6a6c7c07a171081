from __future__ import annotations

from typing import Any

import pytest

from posttrain_cli.data.contract import Contract, check_record, is_only_space
from posttrain_cli.data.records import Keys, place

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}


def check(record: dict[str, Any], kind: Any, **options: Any) -> list[tuple[str, str]]:
    keys = Keys(chat=options.pop("chat", False))
    problems = check_record(record, Contract(kind, keys, **options))
    return [(problem.code, place(problem.path)) for problem in problems]


def hints(record: dict[str, Any], kind: Any) -> list[str]:
    return [problem.hint for problem in check_record(record, Contract(kind))]


@pytest.mark.parametrize(
    ("kind", "record"),
    [
        ("sft", {"prompt": "p", "response": "r", "metadata": {"a": [1, None]}}),
        ("sft", {"question": "p", "answer": "r"}),
        ("sft", {"prompt": "p", "answer": "r"}),
        ("sft", {"messages": [{"role": "system", "content": ""}, USER, ANSWER, USER, ANSWER]}),
        ("sft", {"messages": [USER, ANSWER], "prompt": 3}),
        ("sft", {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "lengths": [1, 2]}),
        ("preference", {"prompt": "p", "chosen": "a\tb\r\n", "rejected": "c", "score": 1.5}),
        ("prompt", {"prompt": "p", "answer": {"nested": 1}}),
        ("prompt", {"messages": [USER]}),
        ("prompt", {"prompt": "p", "messages": 4}),
    ],
)
def test_good_records_have_no_problem(kind: str, record: dict) -> None:
    assert check(record, kind) == []


@pytest.mark.parametrize(
    ("value", "code", "message"),
    [
        (None, "PTC202", "field 'chosen' is null, expected text"),
        (True, "PTC202", "field 'chosen' is true, expected text"),
        (False, "PTC202", "field 'chosen' is false, expected text"),
        (3, "PTC202", "field 'chosen' is a number, expected text"),
        (0.5, "PTC202", "field 'chosen' is a number, expected text"),
        (["x"], "PTC203", "field 'chosen' is an array, expected text"),
        ({"text": "x"}, "PTC203", "field 'chosen' is an object, expected text"),
        ("", "PTC204", "field 'chosen' is empty"),
        (" \n\u3000", "PTC204", "field 'chosen' is only white space"),
    ],
)
def test_a_field_that_is_no_text(value: object, code: str, message: str) -> None:
    record = {"prompt": "p", "chosen": value, "rejected": "r"}
    (problem,) = check_record(record, Contract("preference"))
    assert (problem.code, problem.message, problem.path) == (code, message, ("chosen",))
    assert problem.hint


def test_chat_lists_are_refused_with_the_switch_that_allows_them() -> None:
    record = {"prompt": "p", "chosen": [ANSWER], "rejected": "r"}
    assert check(record, "preference") == [("PTC203", "chosen")]
    assert "--chat" in hints(record, "preference")[0]
    assert check(record, "preference", chat=True) == []
    assert check({"prompt": [USER], "response": "r"}, "sft") == [("PTC203", "prompt")]
    assert check({"prompt": [USER], "response": "r"}, "sft", chat=True) == []
    assert check({"prompt": [USER]}, "prompt", chat=True) == []
    assert check({"prompt": [{"role": "alien"}]}, "prompt", chat=True) == [
        ("PTC205", "prompt[0].role"),
        ("PTC205", "prompt[0]"),
    ]


@pytest.mark.parametrize(
    ("record", "command"),
    [
        (
            {"question": "p", "response_a": "a", "response_b": "b"},
            "--map prompt=question --map chosen=response_a --map rejected=response_b",
        ),
        ({"prompt": "p", "better": "a", "worse": "b"}, "--map chosen=better --map rejected=worse"),
        (
            {"prompt": "p", "best_response": "a", "worst_response": "b"},
            "--map chosen=best_response --map rejected=worst_response",
        ),
        (
            {"input": "p", "output": "a", "rejected": "b"},
            "--map prompt=input --map chosen=output",
        ),
    ],
)
def test_aliases_are_refused_with_the_map_that_fixes_them(record: dict, command: str) -> None:
    problems = check_record(record, Contract("preference"))
    assert {problem.code for problem in problems} == {"PTC201"}
    for problem in problems:
        assert f"`ptc preprocess --kind preference {command}`" in problem.hint


def test_missing_fields_are_all_named_with_what_may_be_meant() -> None:
    assert check({"x": 1}, "preference") == [
        ("PTC201", "prompt"),
        ("PTC201", "chosen"),
        ("PTC201", "rejected"),
    ]
    assert hints({"x": 1}, "prompt") == ["the record has `x`"]
    assert hints({}, "prompt") == ["the record has no fields"]
    (hint,) = hints({"prompt": "p", "respons": "r"}, "sft")
    assert hint == (
        "did you mean `respons`? `ptc preprocess --kind sft --map response=respons` renames it"
    )
    assert (
        hints({"instruction": "i", "output": "o"}, "sft")
        == ["`ptc preprocess --preset alpaca` reads this layout"] * 2
    )
    tree = {"message_tree_id": "1", "prompt": {"role": "prompter", "replies": []}}
    assert hints(tree, "prompt") == ["`ptc preprocess --preset oasst` reads this layout"]
    pair = {"conversations": [], "chosen": {"from": "gpt"}, "rejected": {"from": "gpt"}}
    assert set(hints(pair, "preference")) == {
        "`ptc preprocess --preset sharegpt` reads this layout"
    }
    dialogue = "\n\nHuman: hi\n\nAssistant: hello"
    assert hints({"chosen": dialogue, "rejected": dialogue + "!"}, "preference") == [
        "`ptc preprocess --preset hh-rlhf` reads this layout"
    ]


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ("user assistant", []),
        ("system user assistant tool assistant", []),
        ("user tool tool assistant", []),
        ("assistant user assistant", [("PTC206", "messages[0]")]),
        ("user user assistant", [("PTC206", "messages[1]")]),
        ("user assistant assistant", [("PTC206", "messages[2]")]),
        ("user assistant user", [("PTC206", "messages[2]")]),
        ("user system assistant", [("PTC206", "messages[1]")]),
        ("user", [("PTC205", "messages")]),
        ("assistant", [("PTC205", "messages")]),
        ("system", [("PTC205", "messages"), ("PTC205", "messages")]),
        ("assistant assistant user user", [("PTC206", f"messages[{i}]") for i in (0, 1, 3)]),
    ],
)
def test_the_order_of_roles(roles: str, expected: list) -> None:
    record = {"messages": [{"role": role, "content": "x"} for role in roles.split()]}
    assert check(record, "sft") == expected


def test_prompts_may_not_end_with_an_answer() -> None:
    assert check({"messages": [USER, ANSWER]}, "prompt") == [("PTC206", "messages[1]")]
    assert check({"messages": [ANSWER]}, "prompt") == [("PTC205", "messages")]


def test_every_turn_is_looked_at() -> None:
    turns = [
        {"role": "user", "content": ""},
        {"from": "gpt", "value": "a\x00b"},
        {"role": "robot", "content": "\ufffd"},
        "x",
    ]
    assert check({"messages": turns}, "sft") == [
        ("PTC204", "messages[0].content"),
        ("PTC205", "messages[2].role"),
        ("PTC205", "messages[3]"),
        ("PTC301", "messages[1].value"),
        ("PTC307", "messages[2].content"),
    ]
    assert check({"messages": "x"}, "sft") == [("PTC202", "messages")]


def test_sides_that_are_the_same() -> None:
    same = {"prompt": "p", "chosen": "a b", "rejected": "a b"}
    assert check(same, "preference") == [("PTC302", "rejected")]
    spaced = {**same, "rejected": "a\n b "}
    assert check(spaced, "preference") == [("PTC308", "rejected")]
    lists = {"prompt": "p", "chosen": [ANSWER], "rejected": "a"}
    assert check(lists, "preference", chat=True) == [("PTC302", "rejected")]
    other = [{"role": "user", "content": "z"}, ANSWER]
    crossed = {"prompt": "p", "chosen": [USER, ANSWER], "rejected": other}
    assert check(crossed, "preference", chat=True) == [("PTC309", "chosen")]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("a b", "ab", True),
        ("  x", "x\n", True),
        ("x" * 100 + " y", "x" * 100 + "\ty", True),
        ("x" * 100 + "y", "x" * 100 + "z", False),
        ("a", "a b", False),
        (" " * 60 + "a", "a", True),
        (" " * 60 + "a", "b", False),
    ],
)
def test_only_white_space_differs(one: str, other: str, same: bool) -> None:
    assert is_only_space(one, other) is same


def test_characters_that_are_warned_about() -> None:
    record = {"prompt": "a\x07\x1b", "response": "x <|im_end|> \ufffd\ufffd"}
    problems = check_record(record, Contract("sft"))
    assert [(p.code, p.path[0], p.offset) for p in problems] == [
        ("PTC301", "prompt", 1),
        ("PTC306", "response", 2),
        ("PTC307", "response", 13),
    ]
    assert problems[0].message == "field 'prompt' holds the control character U+0007 and 1 more"
    assert problems[1].message == "field 'response' holds the control token `<|im_end|>`"
    assert problems[2].message == "field 'response' holds 2 replacement characters (U+FFFD)"


def test_a_tokenizer_adds_its_own_control_texts() -> None:
    record = {"prompt": "[INST] hi </s>", "response": "ok"}
    assert check(record, "sft") == []
    assert check(record, "sft", tokens=("</s>", "[INST]")) == [("PTC306", "prompt")]
    (problem,) = check_record(record, Contract("sft", tokens=("</s>", "[INST]")))
    assert problem.offset == 0


@pytest.mark.parametrize(
    ("record", "code", "field"),
    [
        ({"input_ids": [1, 2]}, "PTC201", "loss_mask"),
        ({"input_ids": ["a"], "loss_mask": [1]}, "PTC202", "input_ids"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "PTC202", "loss_mask"),
        ({"input_ids": [1, 2], "loss_mask": [1, 1], "lengths": [1]}, "PTC202", "lengths"),
    ],
)
def test_rows_of_token_ids_must_fit_together(record: dict, code: str, field: str) -> None:
    assert check(record, "sft") == [(code, field)]
