from __future__ import annotations

import csv
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain_cli.data.records import Keys
from posttrain_cli.data.validate import Report, ValidateOptions, validate
from posttrain_cli.errors import DataError, UsageError

BOM = b"\xef\xbb\xbf"


def write(folder: Path, name: str, lines: list[Any]) -> str:
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    (folder / name).write_bytes(b"".join(text + b"\n" for text in texts))
    return str(folder / name)


def check(*paths: str, **options: Any) -> Report:
    return validate(paths, ValidateOptions(**{"workers": 1, **options}))


def told(report: Report) -> list[tuple[str, int | None, int | None]]:
    return [(f.code, f.line, f.column) for f in report.findings]


def pairs(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"p{i}", "chosen": f"c{i}", "rejected": f"r{i}"} for i in range(count)]


def test_one_of_each_fault_in_a_preference_file(tmp_path: Path) -> None:
    good = pairs(9)
    lines: list[Any] = [
        BOM + json.dumps(good[0]).encode(),
        {"prompt": "p", "chosen": "a", "rejected": {"role": "x"}},
        b"",
        {"prompt": "p", "chosen": "", "rejected": "b"},
        b'{"prompt": "p", "chosen": "\xff", "rejected": "b"}',
        b'{"prompt": "p", "chosen": "a", "rejected": "b",}',
        b'["p"]',
        b'{"prompt": "p", "chosen": "a", "rejected": "b", "prompt": "z"}',
        b'{"prompt": "p", "chosen": "\\ud83d", "rejected": "b"}',
        {"prompt": "p", "chosen": "a"},
        {"prompt": None, "chosen": "a", "rejected": "b"},
        {"prompt": "é\x01", "chosen": "a2 <|im_end|>", "rejected": "b"},
        {"prompt": "p", "chosen": "a", "rejected": "a"},
        {"prompt": "p", "chosen": "a b", "rejected": "a  b"},
        good[1],
        good[1],
        {"prompt": "p1", "chosen": "r1", "rejected": "c1"},
        {"prompt": "x", "chosen": "\ufffd", "rejected": "b"},
        b" \t\r",
    ]
    path = write(tmp_path, "a.jsonl", lines)
    report = check(path)
    assert told(report) == [
        ("PTC101", 1, 1),
        ("PTC203", 2, 44),
        ("PTC106", 3, 1),
        ("PTC204", 4, 27),
        ("PTC102", 5, 28),
        ("PTC103", 6, 47),
        ("PTC104", 7, 1),
        ("PTC107", 8, 49),
        ("PTC108", 9, 28),
        ("PTC201", 10, 1),
        ("PTC202", 11, 12),
        ("PTC301", 12, 19),
        ("PTC306", 12, 42),
        ("PTC302", 13, 44),
        ("PTC308", 14, 46),
        ("PTC303", 16, 1),
        ("PTC305", 17, 1),
        ("PTC307", 18, 28),
        ("PTC106", 19, 1),
    ]
    assert not report.ok
    assert sum(report.counts.values()) == len(report.findings)
    (file,) = report.files
    assert (file.kind, file.rows, file.good_rows, file.bad_rows) == ("preference", 17, 8, 9)
    assert file.blank_lines == 2
    assert file.sha256 == hashlib.sha256(Path(path).read_bytes()).hexdigest()
    by_code = {f.code: f for f in report.findings}
    assert by_code["PTC203"].message == "field 'rejected' is an object, expected text"
    assert (by_code["PTC203"].field, by_code["PTC203"].row) == ("rejected", 2)
    assert by_code["PTC303"].message == f"exact duplicate of {path} line 15"
    assert by_code["PTC305"].message.startswith(f"the same two answers as {path} line 15")
    assert by_code["PTC107"].message.startswith("key 'prompt' appears twice")


def test_the_json_form_is_that_of_the_contract(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", [{"prompt": "p", "chosen": "a", "rejected": {}}])
    form = check(path).as_json()
    assert list(form) == ["files", "counts", "findings", "stats", "ok"]
    assert form["files"] == [
        {
            "path": path,
            "kind": "preference",
            "sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest(),
            "rows": 1,
            "good_rows": 0,
            "bad_rows": 1,
            "blank_lines": 0,
        }
    ]
    assert form["counts"] == {"PTC203": 1}
    assert form["findings"] == [
        {
            "path": path,
            "line": 1,
            "column": 44,
            "row": 1,
            "code": "PTC203",
            "severity": "error",
            "field": "rejected",
            "message": "field 'rejected' is an object, expected text",
            "hint": "flatten it to text, for example with `ptc preprocess --map new=old.path`",
        }
    ]
    assert form["ok"] is False


def test_good_rows_of_each_kind_are_ok(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    files = [
        write(tmp_path, "a.jsonl", [{"prompt": "p", "response": "r"}]),
        write(tmp_path, "b.jsonl", [{"messages": messages}]),
        write(tmp_path, "c.jsonl", pairs(3)),
        write(tmp_path, "d.jsonl", [{"prompt": "2+2", "answer": "4"}]),
    ]
    report = check(*files)
    assert report.ok
    assert report.counts == {}
    assert [file.kind for file in report.files] == ["sft", "sft", "preference", "prompt"]


def test_the_kind_is_that_of_most_of_the_first_rows(tmp_path: Path) -> None:
    rows: list[Any] = [{"prompt": "p"}, b"oops", *pairs(3)]
    path = write(tmp_path, "a.jsonl", rows)
    report = check(path)
    assert report.files[0].kind == "preference"
    assert report.counts == {"PTC103": 1, "PTC201": 2}
    assert check(path, kind="prompt").counts == {"PTC103": 1}
    assert check(path, kind="sft").counts == {"PTC103": 1, "PTC201": 4}


@pytest.mark.parametrize("content", [b"", b"\n\n", BOM])
def test_a_file_without_records_is_ptc110(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    report = check(str(path))
    assert report.counts["PTC110"] == 1
    assert report.files[0].kind is None
    assert not report.ok


def test_a_header_and_an_empty_array_and_table_hold_no_records(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,response\n")
    (tmp_path / "b.json").write_text("[]")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "c.parquet")
    for name in ("a.csv", "b.json", "c.parquet"):
        assert check(str(tmp_path / name)).counts == {"PTC110": 1}


def test_whole_file_faults_stand_alone(tmp_path: Path) -> None:
    wide = tmp_path / "a.jsonl"
    wide.write_bytes('{"prompt": "p", "response": "r"}\n'.encode("utf-16"))
    assert check(str(wide)).counts == {"PTC102": 1}
    assert check(str(wide), encoding="utf-16").ok
    array = write(tmp_path, "b.jsonl", [b"[", b'{"prompt": "p", "response": "r"}', b"]"])
    assert told(check(array)) == [("PTC105", 1, 1)]
    assert (check(array).files[0].rows, check(array).files[0].bad_rows) == (0, 0)
    cut = tmp_path / "c.jsonl.gz"
    row = b'{"prompt": "p", "response": "r"}\n'
    cut.write_bytes(gzip.compress(row * 9, mtime=0)[:-8])
    report = check(str(cut))
    assert report.counts == {"PTC109": 1, "PTC303": 8}
    assert told(report)[-1] == ("PTC109", 10, 1)  # where reading ended, as `preprocess` says
    assert report.files[0].rows == 9


def test_a_gbk_file_is_bad_row_by_row_until_its_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = '{"prompt": "你好吗", "response": "我很好，谢谢"}\n{"prompt": "a", "response": "b"}\n'
    path.write_bytes(rows.encode("gbk"))
    report = check(str(path))
    assert told(report) == [("PTC102", 1, 13)]
    assert report.findings[0].message.endswith("(looks like GBK)")
    assert (report.files[0].rows, report.files[0].bad_rows) == (2, 1)
    assert check(str(path), encoding="gbk").ok


def test_csv_json_and_parquet_rows(tmp_path: Path) -> None:
    rows = [*pairs(3), pairs(1)[0], {"prompt": "p", "chosen": " ", "rejected": "x\ny"}]
    table = tmp_path / "a.csv"
    with table.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, ["prompt", "chosen", "rejected"])
        writer.writeheader()
        writer.writerows([{**rows[0], "prompt": 'two\nlines "x"'}, *rows])
        stream.write("\nonly\n")
    report = check(str(table))
    assert told(report) == [
        ("PTC303", 7, 1),
        ("PTC204", 8, 1),
        ("PTC106", 10, 1),
        ("PTC111", 11, 1),
    ]
    assert report.findings[0].message == f"exact duplicate of {table} line 4"
    assert (report.files[0].rows, report.files[0].bad_rows, report.files[0].blank_lines) == (
        7,
        2,
        1,
    )
    array = tmp_path / "b.json"
    array.write_text(json.dumps(rows, indent=2))
    parquet = tmp_path / "c.parquet"
    pq.write_table(pa.Table.from_pylist(rows), parquet)
    for path in (array, parquet):
        report = check(str(path))
        assert told(report) == [("PTC303", None, None), ("PTC204", None, None)]
        assert [f.row for f in report.findings] == [4, 5]
        assert report.findings[0].message == f"exact duplicate of {path} row 1"


def test_a_parquet_null_is_a_wrong_type(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": "p", "response": None}]), path)
    report = check(str(path))
    assert [f.message for f in report.findings] == ["field 'response' is null, expected text"]


def test_duplicates_reach_over_files_and_spellings(tmp_path: Path) -> None:
    one = write(tmp_path, "a.jsonl", [b"", {"prompt": "é", "response": "r", "metadata": {"i": 1}}])
    line = b'{"response":"r","prompt":"\xc3\xa9"}'
    two = write(tmp_path, "b.jsonl", [line, {"prompt": "e", "response": "r"}])
    report = check(one, two)
    assert [(f.path, f.line, f.message) for f in report.findings if f.code == "PTC303"] == [
        (two, 1, f"exact duplicate of {one} line 2")
    ]
    assert report.stats["duplicates"] == 1
    assert report.ok


def test_prompts_are_the_same_only_with_what_their_reward_needs(tmp_path: Path) -> None:
    rows = [
        {"prompt": "2+2", "answer": "4", "id": 1},
        {"prompt": "2+2", "answer": "4", "id": 2, "metadata": {}},
        {"prompt": "2+2", "answer": "5"},
    ]
    assert told(check(write(tmp_path, "a.jsonl", rows))) == [("PTC303", 2, 1)]


def test_leakage_names_the_row_of_the_other_split(tmp_path: Path) -> None:
    train = write(tmp_path, "train.jsonl", [*pairs(5), pairs(5)[4]])
    val = write(tmp_path, "val.jsonl", [pairs(9)[8], pairs(5)[4], pairs(5)[4], b"oops"])
    report = check(val, against=(train,))
    assert told(report) == [("PTC501", 2, 1), ("PTC303", 3, 1), ("PTC501", 3, 1), ("PTC103", 4, 1)]
    assert report.findings[0].message == f"the row is also in {train} line 5"
    assert (report.files[0].rows, report.files[0].bad_rows) == (4, 3)
    assert [file.path for file in report.files] == [val]
    with pytest.raises(DataError, match=r"no row of .* can be compared"):
        check(val, against=(write(tmp_path, "none.jsonl", [b"oops"]),))


def test_near_duplicates_are_not_exact_ones(tmp_path: Path) -> None:
    words = " ".join(f"word{i * 7919 % 1000}" for i in range(300))
    rows = [
        {"prompt": "p", "response": words},
        {"prompt": "p", "response": words.replace("word42", "really")},
        {"prompt": "p", "response": words},
        {"prompt": "p", "response": words[::-1]},
        b"oops",
        b"oops",
    ]
    path = write(tmp_path, "a.jsonl", rows)
    report = check(path, near_duplicates=True)
    assert told(report)[:2] == [("PTC304", 2, 1), ("PTC303", 3, 1)]
    assert report.findings[0].message == f"near duplicate of {path} line 1"
    assert report.counts == {"PTC103": 2, "PTC303": 1, "PTC304": 1}


def test_overlap_with_a_benchmark(tmp_path: Path) -> None:
    question = "A train leaves the station at noon and travels sixty miles an hour for three hours"
    bench = write(tmp_path, "bench.jsonl", [{"q": "other text"}, {"question": question}])
    path = write(tmp_path, "a.jsonl", [{"prompt": "hi", "response": "x " + question.upper()}])
    report = check(path, decontaminate=(bench,))
    assert told(report) == [("PTC502", 1, 1)]
    assert f"with row 2 of {bench}" in report.findings[0].message
    assert report.ok


def test_select_ignore_and_strict(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", [b"", b"oops", {"prompt": "a\x01", "response": " "}])
    assert check(path).counts == {"PTC103": 1, "PTC106": 1, "PTC204": 1, "PTC301": 1}
    assert check(path, select=("PTC1",)).counts == {"PTC103": 1, "PTC106": 1}
    report = check(path, select=("PTC1", "PTC301"), ignore=("PTC103",))
    assert report.counts == {"PTC106": 1, "PTC301": 1}
    assert report.ok
    assert report.files[0].bad_rows == 0
    strict = check(path, select=("PTC301",), strict=True)
    assert not strict.ok
    assert strict.files[0].bad_rows == 1
    with pytest.raises(UsageError) as caught:
        check(path, select=("PTC1", "PTC999"), ignore=("nope",))
    assert caught.value.problems == (
        "unknown code `PTC999`; did you mean `PTC309`?",
        "unknown code `nope`",
    )


def test_printing_is_capped_and_totals_are_not(tmp_path: Path) -> None:
    rows: list[Any] = [b"oops", b"", *pairs(1), *pairs(1)] * 50
    path = write(tmp_path, "a.jsonl", rows)
    everything = check(path)
    for limit in (1, 7, 60):
        capped = check(path, max_findings=limit)
        assert capped.findings == everything.findings[:limit]
        assert capped.counts == everything.counts
        assert capped.files == everything.files
    assert everything.counts == {"PTC103": 50, "PTC106": 50, "PTC303": 99}


def test_keys_of_ones_own(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", [{"ask": "p", "win": "a", "lose": 1}])
    report = check(path, keys=Keys("ask", chosen="win", rejected="lose"))
    assert [f.message for f in report.findings] == ["field 'lose' is a number, expected text"]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_the_report_is_the_same_for_any_workers_and_blocks(tmp_path: Path, suffix: str) -> None:
    rows: list[Any] = []
    for i, row in enumerate(pairs(3000)):
        rows += [row, b"", row] if i % 701 == 0 else [row]
        rows += [b'{"prompt": "%s", "chosen": 1}' % (b"x" * (i % 900))] if i % 97 == 0 else []
    path = tmp_path / f"a.jsonl{suffix}"
    content = Path(write(tmp_path, "plain.jsonl", rows)).read_bytes()
    path.write_bytes(gzip.compress(content) if suffix else content)
    expected = check(str(path))
    assert expected.files[0].rows == 3000 + 5 + 31
    for block in (1 << 10, 5000, 77_777):
        assert check(str(path), block_size=block) == expected


def test_worker_processes_give_the_same_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain_cli.data.checkfile.SMALL", 0)
    monkeypatch.setattr("posttrain_cli.data.checkfile._PIECE", 30_000)
    rows: list[Any] = [*pairs(3000), b"oops", *pairs(7)]
    path = write(tmp_path, "a.jsonl", rows)
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(Path(path).read_bytes())[:-9])
    for name in (path, str(packed)):
        one = check(name)
        assert check(name, workers=2, block_size=40_000) == one
    assert one.counts["PTC109"] == 1


def test_statistics(tmp_path: Path) -> None:
    rows: list[Any] = [{"prompt": "x" * 10, "response": "y" * n} for n in (90, 90, 90, 190, 99990)]
    path = write(tmp_path, "a.jsonl", [*rows, b"oops"])
    stats = check(path, max_tokens=1000).stats
    assert stats["rows"] == 6
    assert stats["duplicates"] == 2
    assert stats["text_bytes"]["total"] == 3 * 100 + 200 + 100_000
    assert stats["text_bytes"]["max"] == 100_000
    assert 100 <= stats["text_bytes"]["median"] <= 110
    assert stats["histogram"][0] == {"from": 64, "to": 128, "rows": 3}
    assert sum(one["rows"] for one in stats["histogram"]) == 5
    assert stats["longest"][0] == {"path": path, "line": 5, "row": 5, "bytes": 100_000}
    assert stats["estimate"]["rows_over"] == 1
    assert stats["estimate"]["share_over"] == 0.2
    assert stats["estimate"]["tokens"] == round(100_500 / 4.3)


def test_no_files_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no files to check"):
        validate([])


def test_a_line_longer_than_every_buffer_is_a_row(tmp_path: Path) -> None:
    big = {"prompt": "p", "response": "x" * 5_000_000}
    path = write(tmp_path, "a.jsonl", [big, {"prompt": "p", "response": 1}, big])
    report = check(path, block_size=1 << 20)
    assert told(report) == [("PTC202", 2, 29), ("PTC303", 3, 1)]
