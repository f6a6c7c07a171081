from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain_cli.data import prepare as module
from posttrain_cli.data.prepare import Counts, Prepared, Source, prepare
from posttrain_cli.data.records import Keys
from posttrain_cli.data.render import Policy, render_conversation
from posttrain_cli.data.tokenizer import Tokenizer
from posttrain_cli.errors import DataError
from posttrain_cli.files import sha256_file
from tests.data import zoo
from tests.data.zoo import assistant, user

ROWS: list[dict[str, Any]] = [
    {"prompt": "What is the capital of France?", "response": "Paris."},
    {"prompt": "What is two plus two? " * 8, "response": "Four."},
    {"messages": [user("Hi."), assistant("Hello."), user("你好"), assistant("😀")]},
    {"question": "How are you?", "answer": "Fine, thank you. " * 10},
    {"prompt": "a", "response": "b"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return zoo.load(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def source(tmp_path: Path) -> Callable[..., Source]:
    def write(*files: list[dict[str, Any]], policy: Policy | None = None, **more: Any) -> Source:
        paths = []
        for number, rows in enumerate(files or (ROWS,)):
            path = tmp_path / f"rows{number}.jsonl"
            lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
            path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
            paths.append(path)
        hashes = tuple(sha256_file(path) for path in paths)
        names = tuple(str(path) for path in paths)
        return Source(names, hashes, more.pop("keys", Keys()), policy or Policy(), **more)

    return write


def samples(prepared: Prepared) -> list[tuple[list[int], list[bool]]]:
    return [
        (prepared.ids(i).tolist(), prepared.mask(i).tolist()) for i in range(len(prepared.lengths))
    ]


def test_samples_are_those_of_the_render_function(
    tmp_path: Path, source: Callable[..., Source], tokenizer: Tokenizer
) -> None:
    prepared, reused = prepare(source(), tokenizer, tmp_path / "out" / "train")
    assert not reused
    turns = [
        [user(ROWS[0]["prompt"]), assistant(ROWS[0]["response"])],
        [user(ROWS[1]["prompt"]), assistant(ROWS[1]["response"])],
        ROWS[2]["messages"],
        [user(ROWS[3]["question"]), assistant(ROWS[3]["answer"])],
        [user("a"), assistant("b")],
    ]
    expected = [render_conversation(messages, tokenizer, Policy()) for messages in turns]
    assert samples(prepared) == [(r.ids, r.mask) for r in expected]
    assert prepared.lengths.tolist() == [r.length for r in expected]
    assert prepared.trained.tolist() == [r.trained for r in expected]
    assert prepared.weights is None
    assert [prepared.place(i) for i in range(5)] == [(0, n) for n in range(1, 6)]
    assert prepared.counts == Counts(
        read=5,
        kept=5,
        tokens=sum(r.length for r in expected),
        trained=sum(r.trained for r in expected),
        longest=max(r.length for r in expected),
    )


def test_files_are_read_in_their_order_across_blocks(
    tmp_path: Path,
    source: Callable[..., Source],
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_BLOCK", 2)
    files = [[{"prompt": f"{f} {r}", "response": "x"} for r in range(5)] for f in range(3)]
    prepared, _ = prepare(source(*files), tokenizer, tmp_path / "out")
    assert [prepared.place(i) for i in range(15)] == [(f, r) for f in range(3) for r in range(1, 6)]
    texts = [tokenizer.decode(prepared.ids(i).tolist()) for i in range(15)]
    assert [f"{f} {r}" in texts[5 * f + r] for f in range(3) for r in range(5)] == [True] * 15


def test_read_is_kept_plus_dropped(
    tmp_path: Path, source: Callable[..., Source], tokenizer: Tokenizer
) -> None:
    lengths = [len(i) for i, _ in samples(prepare(source(), tokenizer, tmp_path / "all")[0])]
    whole = {"keep": [0, 1, 2, 3, 4], "drop": [0, 2, 4], "truncate": [0, 2, 3, 4]}
    for overlong, kept in whole.items():
        policy = Policy(max_length=40, overlong=overlong)  # type: ignore[arg-type]
        prepared, _ = prepare(source(policy=policy), tokenizer, tmp_path / overlong)
        counts = prepared.counts
        assert [prepared.place(i)[1] - 1 for i in range(counts.kept)] == kept
        assert counts.read == counts.kept + sum(counts.dropped.values()) == 5
        limit = 40 if overlong == "truncate" else 10**9
        assert prepared.lengths.tolist() == [min(lengths[i], limit) for i in kept]
        assert counts.cut == (overlong == "truncate")
        assert counts.tokens == prepared.lengths.sum()
        assert counts.trained == prepared.trained.sum()
        assert counts.longest == max(lengths)
        dropped = {
            "keep": {},
            "drop": {"PTC401 longer than max_length": 2},
            "truncate": {"PTC402 no trained token is left": 1},
        }
        assert counts.dropped == dropped[overlong]


def test_counts_are_told_in_one_line(
    tmp_path: Path, source: Callable[..., Source], tokenizer: Tokenizer
) -> None:
    prepared, _ = prepare(source(policy=Policy(max_length=40)), tokenizer, tmp_path / "out")
    counts = prepared.counts
    share = 100 * counts.trained / counts.tokens
    assert counts.describe() == (
        "read 5 rows, kept 4, dropped 1 (PTC402 no trained token is left), cut 1; "
        f"{counts.tokens} tokens, {share:.1f} % of them trained; longest {counts.longest}"
    )
    assert Counts(read=1234, kept=1234, tokens=2000, trained=500).describe() == (
        "read 1,234 rows, kept 1,234; 2,000 tokens, 25.0 % of them trained; longest 0"
    )


def test_key_follows_content_tokenizer_template_and_every_option(
    tmp_path: Path, source: Callable[..., Source], tokenizer: Tokenizer
) -> None:
    base = source()
    variants = {
        "base": base.key(tokenizer),
        "content": source([*ROWS, ROWS[0]]).key(tokenizer),
        "order": replace(base, hashes=("b", "a")).key(tokenizer),
        "same files, other order": replace(base, hashes=("a", "b")).key(tokenizer),
        "keys": replace(base, keys=Keys(prompt="q")).key(tokenizer),
        "chat": replace(base, keys=Keys(chat=True)).key(tokenizer),
        "weight": replace(base, weight_key="w").key(tokenizer),
        "length": replace(base, policy=Policy(max_length=9)).key(tokenizer),
        "overlong": replace(base, policy=Policy(overlong="drop")).key(tokenizer),
        "train_on": replace(base, policy=Policy(train_on="last")).key(tokenizer),
        "add_eos": replace(base, policy=Policy(add_eos=True)).key(tokenizer),
        "template": base.key(zoo.load(tmp_path / "a", zoo.LLAMA3)),
        "tokenizer": base.key(zoo.load(tmp_path / "b", kind="greedy")),
        "ends": base.key(zoo.load(tmp_path / "c", generation={"eos_token_id": zoo.EOT})),
    }
    assert len(set(variants.values())) == len(variants)
    moved = replace(base, files=("/elsewhere/rows0.jsonl",))
    assert moved.key(zoo.load(tmp_path / "d")) == base.key(tokenizer)


def test_an_equal_source_is_reused_and_another_one_is_not(
    tmp_path: Path, source: Callable[..., Source], tokenizer: Tokenizer
) -> None:
    folder = tmp_path / "out"
    first, _ = prepare(source(), tokenizer, folder)
    written = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    again, reused = prepare(source(), tokenizer, folder)
    assert reused
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == written
    assert samples(again) == samples(first)
    changed, reused = prepare(source(ROWS[:2]), tokenizer, folder)
    assert not reused
    assert changed.counts.kept == len(Prepared(folder).lengths) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "rows0.jsonl"]


def test_a_failed_preparation_leaves_nothing_under_the_final_name(
    tmp_path: Path, source: Callable[..., Source], tokenizer: Tokenizer
) -> None:
    folder = tmp_path / "out"
    prepare(source(), tokenizer, folder)
    with pytest.raises(DataError):
        prepare(source([*ROWS, {"prompt": "no answer"}]), tokenizer, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["rows0.jsonl"]
    _, reused = prepare(source(), tokenizer, folder)
    assert not reused


def test_a_killed_preparation_leaves_nothing_under_the_final_name(
    tmp_path: Path, source: Callable[..., Source], tokenizer: Tokenizer
) -> None:
    rows = [{"prompt": f"question {n}", "response": "x"} for n in range(600)]
    wanted = source(rows)
    script = """
import os, signal, sys
from pathlib import Path
from posttrain_cli.data import prepare as module
from posttrain_cli.data.records import Keys
from posttrain_cli.data.render import Policy
from posttrain_cli.data.tokenizer import load_tokenizer
render, calls = module.render_conversations, []
def dying(*arguments):
    calls.append(1)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return render(*arguments)
module.render_conversations = dying
path, digest, tokenizer, folder = sys.argv[1:]
source = module.Source((path,), (digest,), Keys(), Policy())
module.prepare(source, load_tokenizer(tokenizer), Path(folder))
"""
    folder = tmp_path / "out"
    arguments = [wanted.files[0], wanted.hashes[0], str(tokenizer.folder), str(folder)]
    died = subprocess.run([sys.executable, "-c", script, *arguments], check=False)
    assert died.returncode == -signal.SIGKILL
    assert not folder.exists()
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == [".out.tmp"]
    prepared, reused = prepare(wanted, tokenizer, folder)
    assert (reused, prepared.counts.kept) == (False, 600)
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == ["out"]
    assert (folder / "ids.bin").stat().st_size == 4 * prepared.counts.tokens


# Weights


def weighted(*values: Any) -> list[dict[str, Any]]:
    return [{"prompt": "a", "response": "b", "metadata": {"w": value}} for value in values]


def test_weights_are_kept_for_the_samples_that_are_kept(
    tmp_path: Path, source: Callable[..., Source], tokenizer: Tokenizer
) -> None:
    rows = weighted(1, 0.5, 0, 3)
    rows[1]["prompt"] = "long " * 50
    policy = Policy(max_length=40, overlong="drop")
    prepared, _ = prepare(source(rows, policy=policy, weight_key="w"), tokenizer, tmp_path / "out")
    assert prepared.weights is not None
    assert prepared.weights.tolist() == [1.0, 0.0, 3.0]


@pytest.mark.parametrize(
    ("value", "shown"),
    [("2", "'2'"), (-1, "-1"), (True, "True"), (None, "None"), (1e300, "1e+300"), ([1], "[1]")],
)
def test_a_weight_that_is_no_weight_is_named(
    tmp_path: Path, source: Callable[..., Source], tokenizer: Tokenizer, value: Any, shown: str
) -> None:
    with pytest.raises(DataError) as caught:
        prepare(source(weighted(1, value), weight_key="w"), tokenizer, tmp_path / "out")
    assert caught.value.message == (
        f"{tmp_path}/rows0.jsonl: row 2: `metadata.w` is {shown}, expected a number of at least 0"
    )
    assert "data.weight_key" in caught.value.hint


def test_a_row_without_metadata_has_no_weight(
    tmp_path: Path, source: Callable[..., Source], tokenizer: Tokenizer
) -> None:
    for row in ({"prompt": "a", "response": "b"}, {"prompt": "a", "response": "b", "metadata": 1}):
        with pytest.raises(DataError, match=r"row 1: `metadata.w` is None"):
            prepare(source([row], weight_key="w"), tokenizer, tmp_path / "out")


def test_weights_that_are_all_zero_are_an_error(
    tmp_path: Path, source: Callable[..., Source], tokenizer: Tokenizer
) -> None:
    with pytest.raises(DataError, match=r"every `metadata.w` is 0: no row would ever be trained"):
        prepare(source(weighted(0, 0.0), weight_key="w"), tokenizer, tmp_path / "out")


# Rows that stop the preparation


def test_nothing_left_to_train_on_is_an_error(
    tmp_path: Path, source: Callable[..., Source], tokenizer: Tokenizer
) -> None:
    with pytest.raises(DataError) as caught:
        prepare(source(policy=Policy(max_length=4)), tokenizer, tmp_path / "out")
    assert caught.value.message == (
        f"nothing is left to train on in `{tmp_path}/rows0.jsonl`: read 5 rows; "
        "dropped 5 (PTC402 no trained token is left)"
    )
    assert "--max-length" in caught.value.hint
    assert caught.value.exit_code == 1


def test_overlong_error_names_every_row(
    tmp_path: Path, source: Callable[..., Source], tokenizer: Tokenizer
) -> None:
    policy = Policy(max_length=40, overlong="error")
    with pytest.raises(DataError, match=r"2 of 5 rows in `.*` cannot be trained on") as caught:
        prepare(source(policy=policy), tokenizer, tmp_path / "out")
    findings = caught.value.findings
    assert [(f.code, f.row, f.path) for f in findings] == [
        ("PTC401", 2, f"{tmp_path}/rows0.jsonl"),
        ("PTC401", 4, f"{tmp_path}/rows0.jsonl"),
    ]
    assert "more than the limit of 40" in findings[0].message
    assert caught.value.hint == "`ptc validate --explain PTC401` tells what to do"


@pytest.mark.parametrize(
    ("template", "rows", "expected"),
    [
        (zoo.WITHOUT_END, ROWS[:2], [("PTC403", 1), ("PTC403", 2)]),
        ("{{ bos_token }}{{ bos_token }}" + zoo.CHATML, ROWS[:1], [("PTC404", 1)]),
        (zoo.QWEN3, ROWS[:3], [("PTC405", 3)]),
        (zoo.INSTRUCT, [{"messages": [zoo.system("s"), user("a"), assistant("b")]}, ROWS[0]],
         [("PTC205", 1)]),
    ],
)  # fmt: skip
def test_rows_that_break_the_contract_once_rendered_are_named(
    tmp_path: Path,
    source: Callable[..., Source],
    template: str,
    rows: list[dict[str, Any]],
    expected: list[tuple[str, int]],
) -> None:
    tokenizer = zoo.load(tmp_path / "tokenizer", template, settings={"eos_token": "</s>"})
    with pytest.raises(DataError, match="cannot be trained on") as caught:
        prepare(source(rows), tokenizer, tmp_path / "out")
    assert [(f.code, f.row) for f in caught.value.findings] == expected
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("row", "code", "message"),
    [
        ('{"prompt": "a"', "PTC103", "row 2: "),
        ({"prompt": "a"}, "PTC201", "row 2: field 'response' is missing"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "PTC205", "row 2: turn 1"),
    ],
)
def test_a_row_that_cannot_be_read_is_named_and_never_lost(
    tmp_path: Path,
    source: Callable[..., Source],
    tokenizer: Tokenizer,
    row: Any,
    code: str,
    message: str,
) -> None:
    wanted = source([ROWS[0], row, ROWS[1]])
    with pytest.raises(DataError, match="has a row that cannot be used: row 2: ") as caught:
        prepare(wanted, tokenizer, tmp_path / "out")
    assert message in caught.value.message
    assert [(f.code, f.row, f.path) for f in caught.value.findings] == [(code, 2, wanted.files[0])]
    assert "ptc validate" in caught.value.hint


def test_blank_lines_are_no_rows(
    tmp_path: Path, source: Callable[..., Source], tokenizer: Tokenizer
) -> None:
    prepared, _ = prepare(source([ROWS[0], "", ROWS[1]]), tokenizer, tmp_path / "out")
    assert (prepared.counts.read, prepared.counts.kept) == (2, 2)


# Rows of token ids, as `preprocess --tokenize` writes them


def ids_file(path: Path, rows: list[dict[str, Any]]) -> Source:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)
    return Source((str(path),), (sha256_file(path),), Keys(), Policy(max_length=4))


PACKED = [
    {"input_ids": [9, 10, 11, 12, 13], "loss_mask": [0, 1, 1, 0, 1], "lengths": [3, 2]},
    {"input_ids": [14, 15, 16, 17, 18, 19], "loss_mask": [1, 0, 0, 0, 1, 1], "lengths": [6]},
    {"input_ids": [20, 21], "loss_mask": [0, 1], "lengths": [2]},
]


@pytest.mark.parametrize(
    ("overlong", "expected", "dropped"),
    [
        ("keep", [[9, 10, 11], [12, 13], [14, 15, 16, 17, 18, 19], [20, 21]], {}),
        ("drop", [[9, 10, 11], [12, 13], [20, 21]], {"PTC401 longer than max_length": 1}),
        ("truncate", [[9, 10, 11], [12, 13], [20, 21]], {"PTC402 no trained token is left": 1}),
    ],
)
def test_rows_of_token_ids_are_taken_as_they_are(
    tmp_path: Path,
    tokenizer: Tokenizer,
    overlong: Any,
    expected: list[list[int]],
    dropped: dict[str, int],
) -> None:
    source = ids_file(tmp_path / "packed.parquet", PACKED)
    source = replace(source, policy=replace(source.policy, overlong=overlong))
    prepared, _ = prepare(source, tokenizer, tmp_path / "out")
    assert [ids for ids, _ in samples(prepared)] == expected
    assert samples(prepared)[0] == ([9, 10, 11], [False, True, True])
    assert prepared.trained.tolist()[:2] == [2, 1]
    assert prepared.place(1) == (0, 1)  # two samples of one row
    assert prepared.counts.dropped == dropped
    assert prepared.counts.read == prepared.counts.kept + sum(dropped.values()) == 4


def test_a_too_long_sample_of_token_ids_can_be_an_error(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    source = ids_file(tmp_path / "packed.parquet", PACKED)
    source = replace(source, policy=replace(source.policy, overlong="error"))
    with pytest.raises(DataError, match="1 of 4 rows") as caught:
        prepare(source, tokenizer, tmp_path / "out")
    assert [(f.code, f.row) for f in caught.value.findings] == [("PTC401", 2)]


def test_a_cut_sample_of_token_ids_keeps_its_beginning(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    row = {"input_ids": [9, 10, 11, 12, 13, 9, 10], "loss_mask": [0, 1, 1, 1, 1, 0, 1]}
    source = ids_file(tmp_path / "one.parquet", [row | {"lengths": [5, 2]}])
    prepared, _ = prepare(source, tokenizer, tmp_path / "out")
    assert [ids for ids, _ in samples(prepared)] == [[9, 10, 11, 12], [9, 10]]
    assert prepared.counts.cut == 1
    whole = ids_file(tmp_path / "two.parquet", [row])  # without lengths it is one sample
    prepared, _ = prepare(whole, tokenizer, tmp_path / "out")
    assert samples(prepared) == [([9, 10, 11, 12], [False, True, True, True])]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": [3, 1]}, "5 `input_ids`, 5 `loss_mask` values and `lengths` that add up to 4"),
        ({"loss_mask": [0, 1]}, "5 `input_ids`, 2 `loss_mask` values"),
        ({"input_ids": [9, 10, 11, 12, 99999]}, "token 99,999 is not in the vocabulary"),
        ({"input_ids": [9, 10, 11, 12, -1]}, "`input_ids` must be a list of whole numbers"),
        ({"input_ids": [9.5, 10.0, 11.0, 12.0, 13.0]}, "`input_ids` must be a list of whole"),
        ({"input_ids": "text"}, "`input_ids` must be a list of whole numbers"),
        ({"input_ids": []}, "`input_ids` must be a list of whole numbers"),
        ({"loss_mask": None}, "`loss_mask` must be a list of whole numbers"),
        ({"lengths": 5}, "`lengths` must be a list of whole numbers"),
    ],
)
def test_rows_of_token_ids_that_do_not_add_up_are_refused(
    tmp_path: Path, tokenizer: Tokenizer, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "packed.jsonl"
    path.write_text(json.dumps(PACKED[0]) + "\n" + json.dumps(PACKED[0] | change) + "\n")
    source = Source((str(path),), (sha256_file(path),), Keys(), Policy())
    with pytest.raises(DataError) as caught:
        prepare(source, tokenizer, tmp_path / "out")
    assert "row 2: " + message in caught.value.message


def test_arrays_have_the_types_that_training_maps(
    tmp_path: Path, source: Callable[..., Source], tokenizer: Tokenizer
) -> None:
    prepared, _ = prepare(source(), tokenizer, tmp_path / "out")
    assert prepared.ids(0).dtype == np.int32
    assert prepared.mask(0).dtype == np.bool_
    assert prepared.offsets.tolist() == [0, *np.cumsum(prepared.lengths).tolist()]
    assert isinstance(prepared.ids(0), np.memmap)
