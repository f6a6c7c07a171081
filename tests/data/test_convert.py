from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain_cli.data.contract import Contract, check_record
from posttrain_cli.data.convert import (
    AS_TRANSCRIPT,
    FIELDS,
    KINDS,
    Made,
    Preset,
    Refused,
    Target,
    convert,
    default_kind,
    opening,
)
from posttrain_cli.data.mapping import parse_maps, rename
from posttrain_cli.data.reader import read_rows
from posttrain_cli.data.records import Keys
from posttrain_cli.data.transcript import read_transcript, transcript
from posttrain_cli.diagnostics import CODES

FIXTURES = Path(__file__).parent / "fixtures"
LAYOUTS: dict[Preset, str] = {
    "gsm8k": "gsm8k.jsonl",
    "alpaca": "identity.json",
    "sharegpt": "dpo_zh.json",
    "hh-rlhf": "hh_rlhf.jsonl.gz",
    "oasst": "oasst_trees.jsonl",
}


def rows(name: str) -> list[dict[str, Any]]:
    return [row.record for row in read_rows(str(FIXTURES / name)) if row.record is not None]


def one(record: dict[str, Any], preset: Preset | None, kind: Any, chat: bool = False) -> Any:
    (made,) = convert(record, preset, Target(kind, chat))
    return made


def errors(record: dict[str, Any], kind: Any, chat: bool = False) -> list[str]:
    found = check_record(record, Contract(kind, Keys(chat=chat)))
    return [p.code for p in found if CODES[p.code].severity == "error"]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("preset", LAYOUTS)
def test_what_a_preset_makes_of_real_rows_fulfils_the_contract(preset: Any, chat: bool) -> None:
    for kind in KINDS[preset]:
        made = [
            m for row in rows(LAYOUTS[preset]) for m in convert(row, preset, Target(kind, chat))
        ]
        good = [m for m in made if isinstance(m, Made)]
        assert len(good) >= 3, (preset, kind)
        for row in good:
            assert errors(row.record, kind, chat) == []
            assert row.group or opening(row.record, kind, Keys(chat=chat))


def test_gsm8k_keeps_the_worked_answer_and_names_the_number() -> None:
    source = rows("gsm8k.jsonl")
    made = [one(row, "gsm8k", "sft") for row in source]
    for row, result in zip(source, made, strict=True):
        assert result.record["prompt"] == row["question"]
        assert result.record["response"] == row["answer"]
        assert not result.changes
    numbers = [m.record["metadata"]["answer"] for m in made]
    assert numbers[0] == "72"
    assert source[1]["answer"].endswith("#### 1,080")
    assert numbers[1] == "1080"
    assert "\u2028" in made[2].record["prompt"]
    assert numbers[3].startswith("-")
    prompt = one(source[0], "gsm8k", "prompt").record
    assert prompt["answer"] == "72"
    assert prompt["metadata"] == {"source": "gsm8k"}


@pytest.mark.parametrize(
    ("answer", "code"),
    [("so it is 5", "PTC201"), ("#### ", "PTC201"), ("#### 5\nor 6", "PTC201"), ("", "PTC204")],
)
def test_gsm8k_needs_a_final_number(answer: str, code: str) -> None:
    refused = one({"question": "q", "answer": answer}, "gsm8k", "sft")
    assert (refused.reason, refused.field) == (code, "answer")


def test_alpaca_joins_instruction_and_input() -> None:
    made = one({"instruction": "Add.", "input": "1 2", "output": "3"}, "alpaca", "sft")
    assert made.record == {"prompt": "Add.\n\n1 2", "response": "3"}
    for empty in ("", "  ", None):
        made = one({"instruction": "Hi", "input": empty, "output": "Yo"}, "alpaca", "sft")
        assert made.record == {"prompt": "Hi", "response": "Yo"}
    made = one({"instruction": "Hi", "output": "Yo"}, "alpaca", "prompt")
    assert made.record == {"prompt": "Hi", "answer": "Yo"}


def test_alpaca_keeps_system_and_history_as_turns() -> None:
    record = {
        "instruction": "And 2+2?",
        "output": "4",
        "system": "Be brief.",
        "history": [["1+1?", "2"]],
    }
    made = one(record, "alpaca", "sft")
    assert [(t["role"], t["content"]) for t in made.record["messages"]] == [
        ("system", "Be brief."),
        ("user", "1+1?"),
        ("assistant", "2"),
        ("user", "And 2+2?"),
        ("assistant", "4"),
    ]
    assert made.group == "1+1?"
    for history in ("x", [["only one"]], [[1, 2]]):
        assert one({**record, "history": history}, "alpaca", "sft").reason in ("PTC205", "PTC202")


def test_self_instruct_is_alpaca_one_map_away() -> None:
    maps = parse_maps(["input=instances.0.input", "output=instances.0.output"])
    made = [one(rename(row, maps), "alpaca", "sft") for row in rows("self_instruct.jsonl")]
    assert made[1].record["prompt"] == (
        "What is the relation between the given pairs?\n\nNight : Day :: Right : Left"
    )
    assert made[1].record["response"].startswith("The relation between")


def test_sharegpt_turns_get_the_standard_roles() -> None:
    source = rows("sharegpt.json")[0]
    turns = one(source, "sharegpt", "sft").record["messages"]
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * (len(turns) // 2)
    assert [turn["content"] for turn in turns] == [t["value"] for t in source["conversations"]]
    called = one(rows("glaive_toolcall.json")[0], "sharegpt", "sft").record["messages"]
    assert [turn["role"] for turn in called] == ["user", "assistant", "tool", "assistant"]


def test_sharegpt_pairs_and_their_multi_turn_prompts() -> None:
    source = rows("dpo_zh.json")
    assert default_kind("sharegpt", source[0]) == "preference"
    single = one(source[0], "sharegpt", "preference")
    assert single.record == {
        "prompt": source[0]["conversations"][0]["value"],
        "chosen": source[0]["chosen"]["value"],
        "rejected": source[0]["rejected"]["value"],
    }
    assert not single.changes
    several = one(source[2], "sharegpt", "preference")
    assert several.changes == {AS_TRANSCRIPT}
    assert several.record["prompt"].endswith("\n\nAssistant:")
    turns = one(source[2], "sharegpt", "preference", chat=True)
    assert len(turns.record["prompt"]) == len(source[2]["conversations"])
    assert not turns.changes
    taught = one(source[0], "sharegpt", "sft").record["messages"]
    assert taught[-1] == {"role": "assistant", "content": source[0]["chosen"]["value"]}


def test_messages_keep_tool_calls_and_join_text_parts() -> None:
    call = [{"function": {"name": "look", "arguments": "{}"}}]
    record = {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": None, "tool_calls": call},
            {"role": "tool", "content": "found"},
            {"role": "assistant", "content": "done"},
        ]
    }
    turns = one(record, "messages", "sft").record["messages"]
    assert turns[0]["content"] == "ab"
    assert turns[1] == {"role": "assistant", "content": "", "tool_calls": call}
    pair = {"prompt": record["messages"][:3], "chosen": "yes", "rejected": "no"}
    flat = one(pair, "messages", "preference").record["prompt"]
    assert '[{"function":{"name":"look","arguments":"{}"}}]' in flat


def test_pairs_of_whole_conversations_share_their_context() -> None:
    context = [{"role": "user", "content": "q"}]
    record = {
        "chosen": [*context, {"role": "assistant", "content": "good"}],
        "rejected": [*context, {"role": "assistant", "content": "bad"}],
    }
    assert one(record, "messages", "preference").record == {
        "prompt": "q",
        "chosen": "good",
        "rejected": "bad",
    }


def test_hh_rlhf_splits_dialogues_before_the_last_answer() -> None:
    source = rows("hh_rlhf.jsonl.gz")
    made = [one(row, "hh-rlhf", "preference") for row in source]
    assert made[0].record["prompt"] == "Hello, How are you?"
    assert made[0].record["chosen"] == "Hello, I’m doing quite well."
    assert [m.reason for m in made if isinstance(m, Refused)] == ["PTC204", "PTC309", "PTC309"]
    dialogue = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: "
    made = [one({"chosen": dialogue + "d", "rejected": dialogue + "e"}, "hh-rlhf", "preference")]
    assert made[0].record == {
        "prompt": "Human: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:",
        "chosen": "d",
        "rejected": "e",
    }
    assert made[0].group == "a"


@pytest.mark.parametrize(
    "text", ["no marker", "\n\nAssistant: alone", "\n\nHuman: a\n\nAssistant: b\n\nHuman: c"]
)
def test_hh_rlhf_needs_dialogues_with_an_answer(text: str) -> None:
    refused = one({"chosen": text, "rejected": text}, "hh-rlhf", "preference")
    assert refused.reason == "PTC205"
    assert "no dialogue" in refused.message


def test_transcripts_can_be_read_back() -> None:
    turns = read_transcript("\n\nHuman:  two blanks\n\nAssistant: x\n\nHuman: y\n")
    assert turns == [
        {"role": "user", "content": " two blanks"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "y\n"},
    ]
    again = read_transcript("\n\n" + transcript(turns).removesuffix("\n\nAssistant:"))
    assert again == turns
    assert transcript(turns[2:]) == "y\n"


def test_oasst_pairs_are_all_ranked_siblings() -> None:
    two, several, unranked = rows("oasst_trees.jsonl")
    made = convert(two, "oasst", Target("preference"))
    assert [m.record["chosen"][:12] for m in made if isinstance(m, Made)] == ["Honeycombs a"]
    answers = two["prompt"]["replies"]
    assert made[0].record == {  # type: ignore[union-attr]
        "prompt": "Who invented the honeycomb?",
        "chosen": answers[0]["text"],
        "rejected": answers[1]["text"],
        "metadata": {"source": "oasst", "message_tree_id": two["message_tree_id"]},
    }
    made = convert(several, "oasst", Target("preference"))
    assert len(made) == 6  # three answers to the root, three to a later turn
    assert {m.group for m in made if isinstance(m, Made)} == {"Who are you?"}
    reasons = [
        m.reason for m in convert(unranked, "oasst", Target("preference")) if isinstance(m, Refused)
    ]
    assert reasons == ["answers without ranks", "answers without ranks"]


def test_oasst_best_path_follows_ranks_and_answered_turns() -> None:
    def message(role: str, text: str, *replies: Any, **more: Any) -> dict[str, Any]:
        return {"role": role, "text": text, "replies": list(replies), **more}

    tree = message(
        "prompter",
        "q",
        message("assistant", "worse", rank=1),
        message(
            "assistant",
            "best",
            message("prompter", "unanswered", rank=0),
            message("prompter", "more", message("assistant", "end"), rank=1),
            rank=0,
        ),
        message("assistant", "gone", rank=-1, deleted=True),
    )
    turns = one({"prompt": tree}, "oasst", "sft").record["messages"]
    assert [turn["content"] for turn in turns] == ["q", "best", "more", "end"]
    assert one({"prompt": message("prompter", "q")}, "oasst", "sft").reason == (
        "question without an answer"
    )
    lonely = message("prompter", "q", message("assistant", "a", rank=0))
    assert one({"prompt": lonely}, "oasst", "preference").reason == "no two answers to compare"


@pytest.mark.parametrize("tree", [None, "text", {"role": "prompter"}, {"role": "x", "text": "t"}])
def test_oasst_refuses_what_is_no_tree(tree: Any) -> None:
    assert one({"prompt": tree}, "oasst", "preference").reason == "PTC205"


def test_a_tree_without_end_is_refused_not_followed() -> None:
    tree: dict[str, Any] = {"role": "assistant", "text": "end", "replies": []}
    for _ in range(1000):
        tree = {"role": "prompter", "text": "t", "replies": [tree]}
    assert one({"prompt": tree}, "oasst", "preference").reason == "PTC205"


def test_the_articles_csv_fields() -> None:
    record = {"instruction": "i", "best_response": "b", "worst_response": "w"}
    assert default_kind("article", record) == "preference"
    assert one(record, "article", "preference").record == {
        "prompt": "i",
        "chosen": "b",
        "rejected": "w",
    }
    assert one(record, "article", "sft").record == {"prompt": "i", "response": "b"}
    refused = one({"instruction": "i", "best_response": "b"}, "article", "preference")
    assert (refused.reason, refused.field) == ("PTC201", "worst_response")


def test_without_a_preset_the_contract_fields_stay_as_they_are() -> None:
    record = {"question": "q", "answer": "a", "difficulty": 3}
    assert one(record, None, "sft").record == {"question": "q", "answer": "a"}
    turns = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    made = one(turns, None, "sft")
    assert (made.record, opening(made.record, "sft", Keys())) == (turns, "q")
    assert one({"prompt": "p", "x": 1}, None, "preference").record == {"prompt": "p"}
    assert one({"question": "q", "answer": "4"}, None, "prompt").record == {"question": "q"}


def test_every_preset_says_what_it_reads() -> None:
    assert set(FIELDS) == set(KINDS)
    for preset, name in LAYOUTS.items():
        known = {key for row in rows(name) for key in row}
        assert known & set(FIELDS[preset]), preset
    assert json.dumps(sorted(KINDS)) == json.dumps(
        ["alpaca", "article", "gsm8k", "hh-rlhf", "messages", "oasst", "sharegpt"]
    )
