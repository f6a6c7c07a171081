"""Structure-aware fuzzing of `validate`: faults are planted with the truth beside them.

`PTC_FUZZ_CASES=5000000 PTC_FUZZ_SEED=7 pytest tests/data/test_fuzz.py` runs as many lines as one
likes; every case is drawn from the seed.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest

from posttrain_cli.data import blocks
from posttrain_cli.data.records import Kind
from posttrain_cli.data.validate import Report, ValidateOptions, validate

CASES = int(os.environ.get("PTC_FUZZ_CASES", "200000"))
SEED = int(os.environ.get("PTC_FUZZ_SEED", "20"))
FILE = 50_000  # lines of one fuzzed file

FIELDS = ("prompt", "chosen", "rejected")
PIECES = (
    "plain words", "你好，世界", "é😀", '"k": 1, ', "\\b\\u0000", "\u2028", "\u0085", ": x", "\n\n",
    "| a | b |", "a < b [INST]", "<html>", "http://x/y", "\t", "{}[]", "'q'", "\U0001f600",
    "\u00a0",
)  # fmt: skip

Truth = list[tuple[str, int]]  # (code, column) in the order of the report
Written = tuple[bytes, Truth]


class Writer:
    """One record written in a random style; knows the column where each value starts."""

    def __init__(self, rng: random.Random, number: int) -> None:
        self.rng = rng
        self.values = {
            "prompt": f"p{number} " + "".join(rng.choices(PIECES, k=rng.randrange(4))),
            "chosen": f"c{number}" + "".join(rng.choices(PIECES, k=rng.randrange(4))),
            "rejected": f"r{number}" + "".join(rng.choices(PIECES, k=rng.randrange(4))),
        }
        self.ascii = rng.random() < 0.3
        self.comma, self.colon = rng.choice(
            [(", ", ": "), (",", ":"), (" ,\t", " : "), (",", ":  ")]
        )
        self.columns: dict[str, int] = {}

    def text(self, keys: list[str] | None = None, raw: dict[str, str] | None = None) -> str:
        """The record as JSON; `raw` replaces the JSON text of values."""
        keys = keys if keys is not None else self.rng.sample(list(self.values), len(self.values))
        text = "{"
        for key in keys:
            text += self.comma if len(text) > 1 else ""
            text += json.dumps(key) + self.colon
            self.columns[key] = len(text) + 1
            value = (raw or {}).get(key)
            text += value if value is not None else self.dump(self.values[key])
        return text + "}"

    def dump(self, value: object) -> str:
        return json.dumps(value, ensure_ascii=self.ascii)


def _value(code: str, *values: object) -> Callable[[Writer], Written]:
    """A fault that is one field holding one of `values`."""

    def plant(writer: Writer) -> Written:
        field = writer.rng.choice(FIELDS)
        writer.values[field] = writer.rng.choice(values)  # type: ignore[assignment]
        return writer.text().encode(), [(code, writer.columns[field])]

    return plant


def _inside(
    piece: str, code: str, shift: int = 0, ends: bool = False
) -> Callable[[Writer], Written]:
    """A fault that is `piece` of JSON written at the start of a text."""

    def plant(writer: Writer) -> Written:
        field = writer.rng.choice(FIELDS)
        value = '"' + piece + writer.dump(writer.values[field])[1:]
        text = writer.text(raw={field: value})
        return text.encode(errors="surrogatepass"), [(code, writer.columns[field] + 1 + shift)]

    return plant


def _cut(writer: Writer) -> Written:
    text = writer.text()
    text = text[: writer.rng.randrange(1, len(text))].rstrip(" \t")
    return text.encode(), [("PTC103", len(text) + 1)]


def _trailing_comma(writer: Writer) -> Written:
    text = writer.text()
    return text[:-1].encode() + b" ,}", [("PTC103", len(text) + 1)]


def _missing(writer: Writer) -> Written:
    field = writer.rng.choice(FIELDS)
    del writer.values[field]
    return writer.text().encode(), [("PTC201", 1)]


def _alias(writer: Writer) -> Written:
    new = {"prompt": "question", "chosen": "response_a", "rejected": "response_b"}
    field = writer.rng.choice(FIELDS)
    writer.values = {new[k] if k == field else k: v for k, v in writer.values.items()}
    return writer.text().encode(), [("PTC201", 1)]


def _twice(writer: Writer) -> Written:
    field = writer.rng.choice(FIELDS)
    keys = [*FIELDS, field]
    text = writer.text(keys)
    column = writer.columns[field] - len(json.dumps(field) + writer.colon)
    return text.encode(), [("PTC107", column)]


def _bad_byte(writer: Writer) -> Written:
    field = writer.rng.choice(FIELDS)
    writer.values[field] = "\x00MARK" + writer.values[field]
    text = writer.text()
    bad = writer.rng.choice([b"\xff", b"\xc3(", b"\xe4\xbd", b"\xed\xa0\x80", b"\xf8"])
    return text.encode().replace(b"\\u0000MARK", bad), [("PTC102", writer.columns[field] + 1)]


def _same(writer: Writer) -> Written:
    writer.values["rejected"] = writer.values["chosen"]
    return writer.text().encode(), [("PTC302", writer.columns["rejected"])]


def _spaces(writer: Writer) -> Written:
    writer.values["rejected"] = " " + writer.values["chosen"].replace("c", "c \u3000", 1)
    return writer.text().encode(), [("PTC308", writer.columns["rejected"])]


def _behind(tail: str, shift: int = 1) -> Callable[[Writer], Written]:
    def plant(writer: Writer) -> Written:
        text = writer.text()
        return (text + tail).encode(), [("PTC103", len(text) + shift + 1)]

    return plant


def _word(word: str) -> Callable[[Writer], Written]:
    def plant(writer: Writer) -> Written:
        text = writer.text([*writer.rng.sample(FIELDS, 3), "score"], raw={"score": word})
        return text.encode(), [("PTC103", writer.columns["score"])]

    return plant


def _extra(writer: Writer) -> Written:
    extras = ({"a": [1, None, {"b": 2}]}, [], 10**30, 1.5e300, "", None, True, [[["x"]]], "\x07")
    writer.values["meta"] = writer.rng.choice(extras)  # type: ignore[assignment]
    return writer.text().encode(), []


FAULTS: dict[str, Callable[[Writer], Written]] = {
    "cut": _cut,
    "trailing comma": _trailing_comma,
    "mark": lambda w: (b"\xef\xbb\xbf" + w.text().encode(), [("PTC103", 1)]),
    "missing": _missing,
    "alias": _alias,
    "number": _value("PTC202", 0, -7, 1.5, 10**25),
    "null": _value("PTC202", None),
    "boolean": _value("PTC202", True, False),
    "list": _value("PTC203", [], ["x"], [{"role": "user", "content": "x"}]),
    "object": _value("PTC203", {}, {"text": "x"}),
    "empty": _value("PTC204", ""),
    "white space": _value("PTC204", " ", "\n\t", "\u3000\u00a0"),
    "twice": _twice,
    "nan": _word("NaN"),
    "infinity": _word("-Infinity"),
    "python": _word("None"),
    "bad byte": _bad_byte,
    "half": _inside("\\ud83d", "PTC108"),
    "other half": _inside("x\\uDE00", "PTC108", 1),
    "raw control": _inside("\x01", "PTC103"),
    "raw tab": _inside("x\t", "PTC103", 1),
    "bad escape": _inside("\\q", "PTC103"),
    "control": _inside("\\u0000", "PTC301"),
    "short control": _inside("é\\b", "PTC301", 1),
    "delete": _inside("\x7f", "PTC301"),
    "token": _inside("<|im_end|>", "PTC306"),
    "escaped token": _inside("\\u003c|x\\u007c>", "PTC306"),
    "replacement": _inside("\ufffd", "PTC307"),
    "escaped replacement": _inside("\\ufFFd", "PTC307"),
    "same": _same,
    "spaces": _spaces,
    "blank": lambda w: (w.rng.choice([b"", b" ", b"\r", b"\t \r"]), [("PTC106", 1)]),
    "array": lambda w: (f"[{w.text()}]".encode(), [("PTC104", 1)]),
    "scalar": lambda w: (w.rng.choice([b"1", b'"x"', b"null", b"true"]), [("PTC104", 1)]),
    "two": _behind(' {"x": 1}'),
    "comment": _behind(" // x"),
    "garbage": _behind("x", 0),
    "carriage return": lambda w: (w.text().encode() + b"\r", []),
    "space around": lambda w: (b" \t" + w.text().encode() + b"  ", []),
    "extra": _extra,
}
WARNINGS = {"PTC106", "PTC107", "PTC301", "PTC306", "PTC307", "PTC308", "PTC303", "PTC305"}


def lines_of(rng: random.Random, count: int, share: float) -> Iterator[Written]:
    """Good lines with faults of every kind among them, each line with its truth."""
    kinds = list(FAULTS)
    good: dict[int, dict[str, str]] = {}
    for number in range(1, count + 1):
        writer = Writer(rng, number)
        draw = rng.random()
        if draw < share:
            yield FAULTS[kinds[rng.randrange(len(kinds))]](writer)
        elif draw < share * 1.1 and good:
            writer.values = dict(good.pop(rng.choice(list(good))))
            swapped = rng.random() < 0.5
            if swapped:
                values = writer.values
                values["chosen"], values["rejected"] = values["rejected"], values["chosen"]
            yield writer.text().encode(), [("PTC305" if swapped else "PTC303", 1)]
        else:
            if len(good) < 50:
                good[number] = writer.values
            yield writer.text().encode(), []


def write(path: Path, lines: list[Written]) -> list[tuple[int, str, int]]:
    """Write the lines; what must be reported, as (line, code, column)."""
    path.write_bytes(b"\n".join(line for line, _ in lines) + b"\n")
    return [
        (number, code, column)
        for number, (_, truth) in enumerate(lines, 1)
        for code, column in truth
    ]


def told(report: Report) -> list[tuple[int | None, str, int | None]]:
    return [(f.line, f.code, f.column) for f in report.findings]


def run(path: Path, block: int = 1 << 24, kind: Kind = "preference") -> Report:
    return validate([str(path)], ValidateOptions(kind, workers=1, block_size=block))


def test_every_planted_fault_is_found_at_its_place_and_nothing_else(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    path = tmp_path / "a.jsonl"
    for start in range(0, CASES, FILE):
        lines = list(lines_of(rng, min(FILE, CASES - start), 0.08))
        truth = write(path, lines)
        report = run(path, rng.choice([1 << 12, 1 << 16, 1 << 20, 1 << 24]))
        found = told(report)
        assert found == truth, _first_difference(found, truth, lines)
        blank = sum(truth == [("PTC106", 1)] for _, truth in lines)
        bad = sum(any(code not in WARNINGS for code, _ in truth) for _, truth in lines)
        (file,) = report.files
        assert (file.blank_lines, file.rows) == (blank, len(lines) - blank)
        assert (file.bad_rows, file.good_rows) == (bad, len(lines) - blank - bad)
        assert sum(report.counts.values()) == len(found)


def _first_difference(found: list, truth: list, lines: list[Written]) -> str:
    wrong = sorted(set(found) ^ set(truth))[0]
    return f"found={wrong in found}: {wrong} in {lines[wrong[0] - 1][0]!r}"


@pytest.fixture
def only_exact(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Report]:
    """`validate` without its fast path: every line goes to the exact scanner."""

    class Loads:
        JSONDecodeError = orjson.JSONDecodeError

        @staticmethod
        def loads(line: bytes) -> None:
            return None

    def check(path: Path, kind: Kind = "preference") -> Report:
        with monkeypatch.context() as patch:
            patch.setattr(blocks, "orjson", Loads)
            return run(path, kind=kind)

    return check


def test_the_fast_path_and_the_exact_scanner_give_the_same_report(
    tmp_path: Path, only_exact: Callable[..., Report]
) -> None:
    rng = random.Random(SEED + 1)
    path = tmp_path / "a.jsonl"
    write(path, list(lines_of(rng, max(2000, CASES // 40), 0.5)))
    assert run(path) == only_exact(path)


def test_torn_bytes_lose_no_row_and_both_paths_agree(
    tmp_path: Path, only_exact: Callable[..., Report]
) -> None:
    rng = random.Random(SEED + 2)
    path = tmp_path / "a.jsonl"
    lines = [Writer(rng, 0).text().encode()]
    pieces = [
        b"",
        b'"',
        b"\\",
        b"{",
        b"}",
        b"[",
        b",",
        b":",
        b"\xff",
        b"\x00",
        b"\r",
        b"\xe4",
        b"\\u00",
    ]
    for number in range(max(3000, CASES // 40)):
        line = bytearray(Writer(rng, number).text().encode())
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            at = rng.randrange(len(line) + 1)
            line[at : at + rng.randrange(3)] = rng.choice(pieces)
        lines.append(bytes(line).replace(b"\n", b" "))
    path.write_bytes(b"\n".join(lines))
    report = run(path)
    assert report == only_exact(path)
    assert report == run(path, 700)
    (file,) = report.files
    assert file.rows + file.blank_lines == len(lines)
    broken = {f.line for f in report.findings if f.code in ("PTC102", "PTC103")}
    assert broken == {n for n, line in enumerate(lines, 1) if line.strip() and not _loads(line)}


@pytest.mark.parametrize("kind", ["sft", "prompt"])
def test_conversations_and_prompts_agree_on_both_paths(
    tmp_path: Path, only_exact: Callable[..., Report], kind: Kind
) -> None:
    rng = random.Random(SEED + 3)
    roles = ["user", "assistant", "system", "tool", "human", "gpt", "alien", 3, None]
    texts = ["x", "", " ", None, 5, "a\x00", "<|im_end|>", "\ufffd", "é", {"a": 1}, []]
    lines = []
    for number in range(3000):
        role, text = rng.choice([("role", "content"), ("from", "value")])
        turns = [
            {
                role: rng.choice(roles[: rng.choice([2, 9])]),
                text: rng.choice(texts[:1] * 30 + texts),
            }
            for _ in range(rng.randrange(5))
        ]
        name = rng.choice(["messages", "conversations", "prompt", "question"])
        record = {name: turns if rng.random() < 0.8 else f"{number}", "answer": rng.choice(texts)}
        line = bytearray(json.dumps(record, ensure_ascii=rng.random() < 0.5).encode())
        if rng.random() < 0.2:
            line.insert(rng.randrange(len(line)), rng.choice(b'",\\\x00\xff}'))
        lines.append(bytes(line))
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    assert run(path, kind=kind) == only_exact(path, kind)
    assert run(path, 999, kind) == run(path, kind=kind)


def test_arrays_lose_no_element_to_a_torn_one(tmp_path: Path) -> None:
    rng = random.Random(SEED + 5)
    path = tmp_path / "a.json"
    elements, truth = [], []
    for number in range(3000):
        kind = rng.choice(["good"] * 9 + ["trailing comma", "nan", "bad byte", "twice", "python"])
        line, found = (Writer(rng, number).text().encode(), [])
        if kind != "good":
            line, found = FAULTS[kind](Writer(rng, number))
        elements.append(line)
        truth += [(number + 1, code) for code, _ in found]
    path.write_bytes(b"[\n" + b",\n ".join(elements) + b"\n]\n")
    report = run(path)
    assert [(f.row, f.code) for f in report.findings] == truth
    assert report.files[0].rows == 3000


def _loads(line: bytes) -> bool:
    """The verdict of Python's own parser, with its laxness taken back."""
    try:
        json.loads(line.decode(), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(constant)
