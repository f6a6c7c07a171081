from __future__ import annotations

import pytest

from posttrain_cli.data.records import (
    ROLES,
    Keys,
    Refusal,
    conversation,
    detect_kind,
    pair,
    prompt_messages,
    read_turns,
)

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
OTHER = {"role": "assistant", "content": "b"}
CHAT = Keys(chat=True)


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({"prompt": "p", "response": "r"}, "sft"),
        ({"question": "p", "answer": "r"}, "sft"),
        ({"messages": []}, "sft"),
        ({"conversations": [], "id": 1}, "sft"),
        ({"prompt": "p", "respons": "r"}, "sft"),
        ({"prompt": "p", "completion": "r"}, "sft"),
        ({"instruction": "i", "input": "", "output": "o"}, "sft"),
        ({"text": "t"}, "sft"),
        ({"prompt": "p", "chosen": "c"}, "preference"),
        ({"prompt": "p", "chosen": "c", "rejected": "r", "response": "x"}, "preference"),
        ({"question": "p", "response_a": "c", "response_b": "r"}, "preference"),
        ({"prompt": "p", "better": "c", "worse": "r"}, "preference"),
        ({"prompt": "p", "choosen": "c"}, "preference"),
        ({"prompt": "p"}, "prompt"),
        ({"prompt": "p", "answer": "42"}, "prompt"),
        ({"question": "p", "id": 3}, "prompt"),
    ],
)
def test_kinds_are_told_by_the_fields(record: dict, kind: str) -> None:
    assert detect_kind(record, Keys()) == kind


def test_named_keys_have_no_aliases() -> None:
    keys = Keys(prompt="ask", response="say", messages="talk")
    assert detect_kind({"ask": "p", "say": "r"}, keys) == "sft"
    assert conversation({"ask": "q", "say": "a"}, keys) == [USER, ANSWER]
    with pytest.raises(Refusal, match="PTC201: field 'ask' is missing"):
        conversation({"question": "q", "answer": "a"}, keys)
    assert conversation({"talk": [USER, ANSWER]}, keys) == [USER, ANSWER]


def test_every_dialect_of_a_conversation_becomes_the_same_turns() -> None:
    expected = [{"role": "system", "content": "s"}, USER, ANSWER]
    sharegpt = [
        {"from": "system", "value": "s"},
        {"from": "Human", "value": "q"},
        {"from": "GPT ", "value": "a"},
    ]
    parts = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        ANSWER,
    ]
    assert conversation({"conversations": sharegpt}, Keys()) == expected
    assert conversation({"messages": parts}, Keys()) == expected
    assert conversation({"prompt": "q", "response": "a"}, Keys()) == [USER, ANSWER]
    assert conversation({"question": "q", "answer": "a"}, Keys()) == [USER, ANSWER]
    assert conversation({"messages": None, "prompt": "q", "response": "a"}, Keys()) == [
        USER,
        ANSWER,
    ]
    assert conversation({"prompt": [USER], "response": "a"}, CHAT) == [USER, ANSWER]


def test_tool_calls_are_kept_and_null_text_beside_them_is_empty() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "name": None}
    reply = {"role": "tool", "content": "4", "tool_call_id": "1"}
    assert read_turns([USER, call, reply, ANSWER]) == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
        ANSWER,
    ]
    glaive = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": "{}"},
        {"from": "observation", "value": "4"},
    ]
    assert [turn["role"] for turn in read_turns(glaive)] == ["user", "assistant", "tool"]


def test_the_role_table_is_complete() -> None:
    assert set(ROLES.values()) == {"user", "assistant", "system", "tool"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("text", "PTC202: field 'messages' is text, expected a list of turns"),
        ([], "PTC205: field 'messages' has no turns"),
        (["hi"], "PTC205: turn 1 is text, expected an object with a role and text"),
        ([{"content": "x"}], "PTC205: turn 1 has no role"),
        ([{"role": 3, "content": "x"}], "PTC205: turn 1 has a number for its role"),
        ([{"role": "alien", "content": "x"}], "PTC205: turn 1 has the unknown role 'alien'"),
        ([USER, {"role": "assistant"}], "PTC205: turn 2 has no text"),
        ([{"role": "user", "content": None, "tool_calls": [1]}], "PTC205: turn 1 has no text"),
        ([{"role": "user", "content": 5}], "PTC202: turn 1 has a number for its text, expected"),
        ([{"role": "user", "content": {}}], "PTC203: turn 1 has an object for its text"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "PTC205: turn 1 has a part that is no text (image_url)",
        ),
        ([{"from": "gpt", "value": " "}], "PTC204: turn 1 (assistant) is empty"),
    ],
)
def test_broken_turns_are_refused(value: object, message: str) -> None:
    with pytest.raises(Refusal) as caught:
        conversation({"messages": value}, Keys())
    assert str(caught.value).startswith(message)


def test_a_misspelt_role_gets_a_suggestion() -> None:
    with pytest.raises(Refusal) as caught:
        read_turns([{"role": "asistant", "content": "x"}])
    assert caught.value.hint.startswith("did you mean `assistant`?")


def test_prompts_leave_their_answers_out() -> None:
    assert prompt_messages({"prompt": "q", "messages": [OTHER]}, Keys()) == [USER]
    assert prompt_messages({"messages": [USER, ANSWER]}, Keys()) == [USER]
    assert prompt_messages({"question": "q", "answer": "4"}, Keys()) == [USER]
    assert prompt_messages({"prompt": [USER, ANSWER, USER]}, CHAT) == [USER, ANSWER, USER]
    with pytest.raises(Refusal, match="PTC203: field 'prompt' is an array, expected text"):
        prompt_messages({"prompt": [USER]}, Keys())


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": [ANSWER], "rejected": [OTHER]},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": "b"},
        {"prompt": "q", "chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
        {"prompt": [USER], "chosen": [USER, ANSWER], "rejected": [OTHER]},
        {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
        {"prompt": "q", "chosen": ANSWER, "rejected": {"from": "gpt", "value": "b"}},
    ],
)
def test_pairs_in_every_shape_are_one_context_and_two_answers(record: dict) -> None:
    found = pair(record, CHAT)
    assert (found.prompt, found.chosen, found.rejected) == ([USER], [ANSWER], [OTHER])


def test_a_pair_keeps_the_longest_context() -> None:
    system = {"role": "system", "content": "s"}
    found = pair({"prompt": "q", "chosen": [system, USER, ANSWER], "rejected": [OTHER]}, CHAT)
    assert found.prompt == [system, USER]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"chosen": [USER, ANSWER], "rejected": [{"role": "user", "content": "z"}, OTHER]},
            "PTC309: 'chosen' and 'rejected' answer different prompts",
        ),
        (
            {"prompt": "z", "chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
            "PTC309: field 'prompt' is not the prompt that the two sides repeat",
        ),
        ({"chosen": [USER, ANSWER], "rejected": [OTHER]}, "PTC201: field 'prompt' is missing"),
        ({"prompt": "q", "chosen": [USER], "rejected": [OTHER]}, "PTC205: field 'chosen' has no"),
        ({"prompt": "q", "chosen": "", "rejected": "b"}, "PTC204: field 'chosen' is empty"),
        ({"prompt": "q", "chosen": 1, "rejected": "b"}, "PTC202: field 'chosen' is a number"),
    ],
)
def test_broken_pairs_are_refused(record: dict, message: str) -> None:
    with pytest.raises(Refusal) as caught:
        pair(record, CHAT)
    assert str(caught.value).startswith(message)


def test_lists_in_a_pair_need_chat() -> None:
    with pytest.raises(Refusal, match="PTC203: field 'chosen' is an array, expected text"):
        pair({"prompt": "q", "chosen": [ANSWER], "rejected": "b"}, Keys())
