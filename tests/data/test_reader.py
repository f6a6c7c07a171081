from __future__ import annotations

import csv
import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain_cli.data.jsonarray import elements
from posttrain_cli.data.reader import Row, quick, read_rows
from posttrain_cli.data.sniff import look

BOM = b"\xef\xbb\xbf"


def write(tmp_path: Path, name: str, content: bytes | str) -> str:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def told(rows: list[Row]) -> list[tuple]:
    return [(f.code, f.line, f.column, f.row) for row in rows for f in row.findings]


def test_lines_split_on_line_feeds_and_nothing_else(tmp_path: Path) -> None:
    text = "a\u2028b\u0085c\u2029d\x0c\x1c"
    path = write(tmp_path, "a.jsonl", json.dumps({"t": text}, ensure_ascii=False) + '\r\n{"t": 1}')
    rows = list(read_rows(path))
    assert [row.record for row in rows] == [{"t": "a\u2028b\u0085c\u2029d\x0c\x1c"}, {"t": 1}]
    assert [(row.row, row.line) for row in rows] == [(1, 1), (2, 2)]


def test_a_bad_line_stops_nothing(tmp_path: Path) -> None:
    lines = [
        b'{"a": 1}',
        b"",
        b'{"a": 1,}',
        b'["a"]',
        b'{"a": "\xff"}',
        b" \t\r",
        b'{"a": 1, "a": 2}',
        b'{"a": "\\ud800"}',
        b"null",
        b'{"a": NaN}',
        b'{"b": 2}',
    ]
    rows = list(read_rows(write(tmp_path, "a.jsonl", b"\n".join(lines))))
    assert told(rows) == [
        ("PTC106", 2, 1, None),
        ("PTC103", 3, 8, 2),
        ("PTC104", 4, 1, 3),
        ("PTC102", 5, 8, 4),
        ("PTC106", 6, 1, None),
        ("PTC107", 7, 10, 5),
        ("PTC108", 8, 8, 6),
        ("PTC104", 9, 1, 7),
        ("PTC103", 10, 7, 8),
    ]
    assert [row.record for row in rows if row.record] == [
        {"a": 1},
        {"a": 2},
        {"a": "\ud800"},
        {"b": 2},
    ]
    assert [row.row for row in rows] == [1, 1, 2, 3, 4, 4, 5, 6, 7, 8, 9]


def test_not_an_object_says_what_it_is(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", '[1]\n"x"\n3\ntrue\nnull\n')
    messages = [row.findings[0].message for row in read_rows(path)]
    assert messages == [
        f"the line is {what}, expected an object"
        for what in ("an array", "a text", "a number", "true or false", "null")
    ]


def test_rows_behind_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", BOM + b'{"a": 1}\n' + BOM + b'{"a": 2}\n')
    rows = list(read_rows(path))
    assert told(rows) == [("PTC101", 1, 1, None), ("PTC103", 2, 1, 2)]
    assert rows[0].record == {"a": 1}
    assert rows[1].findings[0].message == "byte-order mark in front of the record"


def test_integers_beyond_64_bits_and_odd_spacing_stay_exact(tmp_path: Path) -> None:
    big = 2**64 + 1
    path = write(tmp_path, "a.jsonl", f'{{"id" : {big}, "x": [{{"y" :-{big}}}], "f": 1e300}}')
    assert [row.record for row in read_rows(path)] == [{"id": big, "x": [{"y": -big}], "f": 1e300}]


def test_quick_passes_only_what_needs_no_second_look() -> None:
    assert quick(b'{"a": ": x", "b": "\\"k\\": 1", "c": {"d": [1.5]}}') is not None
    assert quick(b'{"a" : 1, "b": 2}') == {"a": 1, "b": 2}
    assert quick(b'{"a\\\\": 1}') == {"a\\": 1}
    for text in (b'{"a": 1, "a": 2}', b'{"a" : 1, "a": 2}', b'{"x": {"a\\\\": 1, "a\\\\": 2}}'):
        assert quick(text) is None
    for text in (b'{"a": 18446744073709551616}', b"[1]", b'{"a": 1', b'{"a": "\\ud800"}'):
        assert quick(text) is None


@pytest.mark.parametrize("suffix", [".jsonl", ".data", ".json", ""])
def test_lines_are_lines_under_any_name(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path, f"a{suffix}", '{"a": 1}\n{"a": 2}\n')
    assert [(row.line, row.record) for row in read_rows(path)] == [(1, {"a": 1}), (2, {"a": 2})]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ('[\n  {"a": 1},\n  {"a": 2}\n]\n', "array"),
        ('[{"a": 1},\n{"a": 2}]', "array"),
        ('[{"a": 1}, {"a": 2}]\n', "array"),
        ("[\n{}\n]", "array"),
        ('{\n  "a": 1\n}\n', "object"),
        ('{"a": {\n "b": 1}}', "object"),
    ],
)
def test_one_json_text_in_a_jsonl_is_one_finding(tmp_path: Path, content: str, what: str) -> None:
    rows = list(read_rows(write(tmp_path, "a.jsonl", content)))
    assert told(rows) == [("PTC105", 1, 1, None)]
    assert rows[0].findings[0].message == (
        f"the file is one JSON {what}, expected one object a line"
    )
    assert "rename it to .json" in rows[0].findings[0].hint
    again = list(read_rows(write(tmp_path, "a.json", content)))
    assert told(again) == []
    assert again[0].record is not None
    assert again[0].line is None


@pytest.mark.parametrize(
    "content", ['[1]\n{"a": 2}\n', '[1, 2\n{"a": 2}\n', '{"a": "x\n{"a": 2}\n', '{"a": 1,\n{}\n']
)
def test_a_bad_first_line_does_not_make_it_one_json_text(tmp_path: Path, content: str) -> None:
    assert look(write(tmp_path, "a.jsonl", content)).fault is None


def test_an_array_is_read_element_by_element(tmp_path: Path) -> None:
    long = "x" * 3_000_000  # longer than the window
    text = json.dumps([{"t": "é😀\n"}, {"t": long}, 7, {"u": {"v": [1, [2]]}}], indent=1)
    rows = list(read_rows(write(tmp_path, "a.json", text)))
    assert [row.record for row in rows] == [
        {"t": "é😀\n"},
        {"t": long},
        None,
        {"u": {"v": [1, [2]]}},
    ]
    assert told(rows) == [("PTC104", None, None, 3)]
    assert [row.row for row in rows] == [1, 2, 3, 4]


def test_a_bad_element_does_not_hide_the_others(tmp_path: Path) -> None:
    text = b'[{"a": 1,}, {"a": "\xff"}, {"a": NaN}, {"a": {"b": }}, {"a": 1, "a": 2}, {"a": 3}]'
    rows = list(read_rows(write(tmp_path, "a.json", text)))
    assert told(rows) == [
        ("PTC103", None, None, 1),
        ("PTC102", None, None, 2),
        ("PTC103", None, None, 3),
        ("PTC103", None, None, 4),
        ("PTC107", None, None, 5),
    ]
    assert rows[-1].record == {"a": 3}


@pytest.mark.parametrize(
    ("text", "codes", "records"),
    [
        ("[]", [], []),
        ('[{"a": 1}', ["PTC109"], [{"a": 1}]),
        ('[{"a": 1}, {"a": "x', ["PTC109"], [{"a": 1}]),
        ('[{"a": 1},]', ["PTC103"], [{"a": 1}]),
        ('[{"a": 1} {"a": 2}]', ["PTC103"], [{"a": 1}, {"a": 2}]),
        ('[{"a": 1}]]', ["PTC103"], [{"a": 1}]),
        ('[, {"a": 1}]', ["PTC103"], [{"a": 1}]),
        ("[\n12", ["PTC104", "PTC109"], []),
        ('[\n"x', ["PTC109"], []),
    ],
)
def test_faults_between_elements(tmp_path: Path, text: str, codes: list, records: list) -> None:
    rows = list(read_rows(write(tmp_path, "a.json", text)))
    assert [code for code, *_ in told(rows)] == codes
    assert [row.record for row in rows if row.record is not None] == records


def test_an_array_with_a_byte_order_mark(tmp_path: Path) -> None:
    rows = list(read_rows(write(tmp_path, "a.json", BOM + b'[\n{"a": 1}\n]')))
    assert told(rows) == [("PTC101", None, None, None)]
    assert rows[1].record == {"a": 1}


def test_elements_of_any_window_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    text = json.dumps([{"a": '\\"]}é' * 9}, [1, "x]"], -1.5e3, 'q"[', True, {}]).encode()
    expected = [json.dumps(e).encode() for e in json.loads(text)]
    for piece in (1, 2, 3, 7, 50, 10_000):
        monkeypatch.setattr("posttrain_cli.data.jsonarray._PIECE", piece)
        stream = io.BufferedReader(io.BytesIO(text))
        assert [json.dumps(json.loads(e)).encode() for e in elements(stream)] == expected


def test_csv_cells_are_text_and_lines_are_where_rows_start(tmp_path: Path) -> None:
    content = (
        'id,prompt,note\r\n007,"two\nlines, ""quoted""",NA\r\n\r\n'
        "1,é,\r\n2,x\r\n3,a,b,c\n" + f'4,"{"y" * 200_000}",null\n'
    )
    rows = list(read_rows(write(tmp_path, "a.csv", content)))
    assert [row.record for row in rows if row.record] == [
        {"id": "007", "prompt": 'two\nlines, "quoted"', "note": "NA"},
        {"id": "1", "prompt": "é", "note": ""},
        {"id": "4", "prompt": "y" * 200_000, "note": "null"},
    ]
    assert told(rows) == [("PTC106", 4, 1, None), ("PTC111", 6, 1, 3), ("PTC111", 7, 1, 4)]
    assert [row.line for row in rows] == [2, 4, 5, 6, 7, 8]
    short, many = (row.findings[0] for row in rows[3:5])
    assert short.message == "the row has 2 fields, the header has 3"
    assert short.hint == "no value for `note`"
    assert many.message == "the row has 4 fields, the header has 3"


def test_an_unclosed_quote_is_shown_where_it_opened(tmp_path: Path) -> None:
    content = 'a,b\n1,2\n"x\ny",3\n4,"say ""hi"" and\nmore\n5,6\n'
    rows = list(read_rows(write(tmp_path, "a.csv", content)))
    assert [row.record for row in rows[:2]] == [{"a": "1", "b": "2"}, {"a": "x\ny", "b": "3"}]
    assert told(rows) == [("PTC111", 5, 3, 3)]
    assert rows[-1].findings[0].message.startswith("quote opened here is never closed")


def test_csv_bytes_that_are_not_utf8_and_a_double_header(tmp_path: Path) -> None:
    content = BOM + b'a,b,a\n1,"x\ny \xe9",3\n4,5,6\n'
    rows = list(read_rows(write(tmp_path, "a.csv", content)))
    assert told(rows) == [("PTC101", 1, 1, None), ("PTC107", 1, 1, None), ("PTC102", 3, 3, 1)]
    assert rows[-1].record == {"a": "6", "b": "5"}


def test_tsv_and_encodings(tmp_path: Path) -> None:
    path = write(tmp_path, "a.tsv", "名\tb\n值\t1,2\n".encode("gbk"))
    assert [row.record for row in read_rows(path, "gbk")] == [{"名": "值", "b": "1,2"}]
    wide = write(tmp_path, "b.jsonl", '{"a": "ü"}\n'.encode("utf-16"))
    assert [row.record for row in read_rows(wide, "utf-16")] == [{"a": "ü"}]
    assert told(list(read_rows(wide))) == [("PTC102", 1, 1, None)]


def test_a_cut_archive_gives_its_whole_rows_and_says_where_it_ends(tmp_path: Path) -> None:
    lines = b"".join(b'{"n": %d, "h": "%x"}\n' % (i, i * 2654435761) for i in range(3000))
    path = write(tmp_path, "a.jsonl.gz", gzip.compress(lines)[:-4000])
    rows = list(read_rows(path))
    whole = rows[-2].row
    assert [row.record["n"] for row in rows[:-1]] == list(range(whole))
    assert 0 < whole < 3000
    assert told(rows) == [("PTC109", whole + 1, 1, None)]
    assert f"after {whole:,} whole records" in rows[-1].findings[0].message


def test_parquet_drops_keys_that_arrow_filled_with_null(tmp_path: Path) -> None:
    records = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b", "id": 1}]},
        {"messages": None},
        {"messages": []},
    ]
    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist(records), path, row_group_size=1)
    assert [(row.row, row.line, row.record) for row in read_rows(path)] == [
        (1, None, records[0]),
        (2, None, records[1]),
        (3, None, records[2]),
    ]
    packed = write(tmp_path, "a.parquet.gz", gzip.compress(Path(path).read_bytes()))
    assert [row.record for row in read_rows(packed)] == records


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1 not really PAR1", b"not a table"])
def test_what_is_no_whole_parquet_is_ptc109(tmp_path: Path, content: bytes) -> None:
    rows = list(read_rows(write(tmp_path, "a.parquet", content)))
    assert told(rows) == [("PTC109", None, None, None)]
    assert rows[0].findings[0].message.startswith("not a whole Parquet file: ")


def test_parquet_is_known_by_its_magic(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    pq.write_table(pa.table({"a": ["x"]}), path)
    assert [row.record for row in read_rows(str(path))] == [{"a": "x"}]


def test_csv_cells_come_back_as_they_were_written(tmp_path: Path) -> None:
    rng = random.Random(4)
    pieces = ["a", '"', ",", "\n", "\r\n", "é", "\u2028", "\x1c", " ", "NA", "007", ""]
    rows = [["".join(rng.choices(pieces, k=rng.randrange(5))) for _ in "abc"] for _ in range(5000)]
    path = tmp_path / "a.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, quoting=csv.QUOTE_ALL).writerows(["abc", *rows])
    read = list(read_rows(str(path)))
    assert [list(row.record.values()) for row in read if row.record] == rows
    line = 2
    for row, cells in zip(read, rows, strict=True):
        assert row.line == line
        line += 1 + sum(cell.count("\n") for cell in cells)
