from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from posttrain_cli.data.fix import fix_file
from posttrain_cli.data.validate import validate
from posttrain_cli.errors import DataError, UsageError

BOM = b"\xef\xbb\xbf"


def test_only_safe_fixes_are_made_and_all_other_bytes_stay(tmp_path: Path) -> None:
    kept = [
        b'{"a" : 1,}\r',
        b'{"a": "\xff \\u0001"}',
        rb'{"a": "\\u0001 \\b \u00e9 \n"}',
        b'{"b": 123456789012345678901234567890, "b": "x\\/"}',
    ]
    lines = [
        BOM + kept[0],
        b"",
        kept[1],
        kept[2],
        b"  \r",
        kept[3],
        b'{"a": "x\\u0000\\b\x7fy\\n"}',
    ]
    source = tmp_path / "a.jsonl"
    source.write_bytes(b"\n".join(lines))
    out = tmp_path / "out.jsonl"
    fixed = fix_file(str(source), out, None, overwrite=False)
    assert fixed == {"PTC101": 1, "PTC106": 2, "PTC301": 1}
    assert out.read_bytes() == b"\n".join([*kept, b'{"a": "xy\\n"}'])
    assert source.read_bytes() == b"\n".join(lines)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_one_json_array_becomes_lines(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": "p\nq", "response": "é"}, {"prompt": "p2", "response": "r", "m": {"x": []}}]
    source = tmp_path / name
    source.write_bytes(BOM + json.dumps(rows, indent=2).encode())
    fixed = fix_file(str(source), tmp_path / "out.jsonl", None, overwrite=False)
    assert fixed == {"PTC101": 1} | ({"PTC105": 1} if name == "a.jsonl" else {})
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows
    assert validate([str(tmp_path / "out.jsonl")]).ok


def test_another_encoding_becomes_utf8(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes('{"prompt": "你", "response": "好"}\n'.encode("gbk"))
    fixed = fix_file(str(source), tmp_path / "out.jsonl", "gbk", overwrite=False)
    assert fixed == {"PTC102": 1}
    assert (tmp_path / "out.jsonl").read_text() == '{"prompt": "你", "response": "好"}\n'


def test_what_cannot_be_fixed_leaves_no_file(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"a": 1}\n' * 1000)[:-9])
    with pytest.raises(DataError, match="the compressed stream ends early"):
        fix_file(str(cut), out, None, overwrite=False)
    half = tmp_path / "half.json"
    half.write_text('[{"a": 1}, {"b"')
    with pytest.raises(DataError, match="PTC109: the file ends early, inside the array"):
        fix_file(str(half), out, None, overwrite=False)
    wide = tmp_path / "wide.jsonl"
    wide.write_bytes('{"a": 1}'.encode("utf-16"))
    with pytest.raises(DataError, match="looks like UTF-16"):
        fix_file(str(wide), out, None, overwrite=False)
    table = tmp_path / "a.csv"
    table.write_text("a,b\n")
    with pytest.raises(UsageError, match="`--fix` works on JSON files"):
        fix_file(str(table), out, None, overwrite=False)
    assert not out.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.csv", "cut.jsonl.gz", "half.json", "wide.jsonl",
    ]  # fmt: skip


def test_an_output_is_not_replaced_unasked(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"a": 1}\n')
    out = tmp_path / "out.jsonl"
    out.write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        fix_file(str(source), out, None, overwrite=False)
    assert out.read_text() == "mine"
    fix_file(str(source), out, None, overwrite=True)
    assert out.read_text() == '{"a": 1}\n'
    with pytest.raises(UsageError, match="would be compressed"):
        fix_file(str(source), tmp_path / "out.jsonl.gz", None, overwrite=False)
