"""Findings: what a check says about one place in a file, and the table of all codes.

A finding is a plain value; how it looks (text, JSON, GitHub, SARIF) is decided in `cli.render`.
The set of codes may grow; a code never changes its meaning (SPEC §2).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from posttrain_cli.errors import UsageError, did_you_mean

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Code:
    """One row of the code table; `why`, `fix` and `example` feed `--explain` and docs/codes.md."""

    code: str
    severity: Severity
    title: str
    why: str
    fix: str
    example: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding at one place.

    Attributes:
        path: the file as the user named it.
        code: a key of CODES.
        message: what was found and what was expected, one line, no full stop.
        line: 1-based line of a text file, or None (Parquet, JSON arrays).
        column: 1-based column in code points, or None.
        row: 1-based record number, or None for whole-file findings.
        field: the record's field concerned, or None.
        hint: what to do about it.
    """

    path: str
    code: str
    message: str
    line: int | None = None
    column: int | None = None
    row: int | None = None
    field: str | None = None
    hint: str = ""

    @property
    def severity(self) -> Severity:
        """The severity that the code table gives this code."""
        return CODES[self.code].severity

    @property
    def place(self) -> str:
        """`path:line:column`, as far as known; `path:row N` for formats without lines."""
        if self.line is None:
            return self.path if self.row is None else f"{self.path}:row {self.row}"
        return f"{self.path}:{self.line}" + (f":{self.column}" if self.column else "")

    def __str__(self) -> str:
        return f"{self.place}: {self.code} {self.severity}: {self.message}"


def select_codes(select: Iterable[str] = (), ignore: Iterable[str] = ()) -> frozenset[str]:
    """The codes that count: all, or those of `select`, without those of `ignore`.

    A name stands for every code that starts with it: `PTC2` is PTC201 to PTC206.

    Raises:
        UsageError: a name stands for no code; every such name is listed.
    """
    problems: list[str] = []

    def named(names: Iterable[str]) -> set[str]:
        chosen: set[str] = set()
        for name in names:
            found = {code for code in CODES if name and code.startswith(name.upper())}
            chosen |= found
            if not found:
                near = did_you_mean(name.upper(), CODES)
                problems.append(f"unknown code `{name}`" + (f"; {near}" if near else ""))
        return chosen

    wanted = named(select) or set(CODES)
    wanted -= named(ignore)
    if problems:
        raise UsageError(
            problems[0],
            hint="`ptc validate --explain CODE` tells about a code, `--explain all` lists them",
            problems=problems,
        )
    return frozenset(wanted)


_TABLE: tuple[Code, ...] = (
    Code(
        "PTC101",
        "error",
        "UTF-8 byte-order mark at the start",
        "the mark becomes an invisible character in front of the first key or column name, so "
        "the first record is refused or its field is not found",
        "save as UTF-8 without BOM; `ptc validate --fix --out NEW` and `ptc preprocess` strip it",
        "a file that starts with the bytes EF BB BF, as Excel, Notepad and PowerShell write it",
    ),
    Code(
        "PTC102",
        "error",
        "not UTF-8",
        "bytes in another encoding cannot be read without guessing, and a wrong guess puts "
        "wrong characters into the training text",
        "name the encoding with `--encoding gbk` (or utf-16, cp1252 …), or convert the file: "
        "`iconv -f GBK -t UTF-8`",
        '"café" with the last letter as the byte E9 (Latin-1); in UTF-8 it is the two bytes C3 A9',
    ),
    Code(
        "PTC103",
        "error",
        "not valid JSON",
        "the record cannot be read, so it would be lost, or stop the run hours later",
        "write records with a JSON library (`json.dumps`), one a line; the message names the "
        "place and the reason",
        '{"prompt": "2+2?", "response": "4",}',
    ),
    Code(
        "PTC104",
        "error",
        "valid JSON, but not an object",
        "a record has named fields; a bare list, text or number has none",
        "write each record as an object with the fields of its kind",
        '["2+2?", "4"]',
    ),
    Code(
        "PTC105",
        "error",
        "a `.jsonl` that is one JSON array or object",
        "JSON lines hold one record a line; readers that split lines see only broken pieces",
        "rename the file to `.json`, which is read as it is, or convert it: `ptc validate FILE "
        "--fix --out NEW.jsonl`",
        "a file that starts with a line `[` and ends with a line `]`",
    ),
    Code(
        "PTC106",
        "warning",
        "blank line",
        "harmless by itself, but line numbers of other tools shift, and it often marks lost rows",
        "remove the line; `ptc validate --fix --out NEW` does",
        "an empty line between two records",
    ),
    Code(
        "PTC107",
        "warning",
        "duplicate key in an object",
        "which of the values counts depends on the reader: some take the first, some the last, "
        "some fail",
        "keep one of the two",
        '{"prompt": "a", "response": "b", "response": "c"}',
    ),
    Code(
        "PTC108",
        "error",
        "lone surrogate escape",
        "half of a character is no text: it cannot be encoded, and writers or tokenizers crash "
        "on it later",
        "write the whole pair, or remove the escape; it comes from text cut inside an emoji",
        '{"prompt": "hi \\ud83d", "response": "hello"}',
    ),
    Code(
        "PTC109",
        "error",
        "file or compressed stream ends early",
        "an interrupted download or copy; what is missing would be left out of training "
        "without a word",
        "fetch or write the file again",
        "a `.gz` without its last block",
    ),
    Code(
        "PTC110",
        "error",
        "no records",
        "there is nothing to train on; trainers fail on it later with an obscure message",
        "check the path and the step that wrote the file",
        "an empty file, or a CSV with a header and nothing else",
    ),
    Code(
        "PTC111",
        "error",
        "CSV row with too many or too few fields, or a quote that is never closed",
        "fields move into the wrong columns, or the rest of the file becomes one field",
        "put text with commas, quotes or line breaks in double quotes, and write a quote "
        "inside it twice",
        "the header `prompt,response` and the row `Hello, world,Hi`",
    ),
    Code(
        "PTC201",
        "error",
        "field missing",
        "without its fields a record cannot be trained on",
        "add the field, or rename one: `ptc preprocess --map response=output`",
        '{"prompt": "2+2?", "respons": "4"}',
    ),
    Code(
        "PTC202",
        "error",
        "field of the wrong type",
        "numbers, true and null are no text; readers turn them into text or drop them, each in "
        "its own way",
        "write the value as text in double quotes",
        '{"prompt": "2+2?", "response": 4}',
    ),
    Code(
        "PTC203",
        "error",
        "nested value where flat text is required",
        "flat trainers print the structure itself into the training text",
        "flatten it with `ptc preprocess --map new=old.path`; chat lists are read with `--chat`",
        '{"prompt": "a", "chosen": {"text": "b"}, "rejected": "c"}',
    ),
    Code(
        "PTC204",
        "error",
        "empty, or only white space",
        "a model trained on empty answers learns to say nothing; an empty prompt teaches "
        "answers to nothing",
        "remove the record or fill the text",
        '{"prompt": "2+2?", "response": "  "}',
    ),
    Code(
        "PTC205",
        "error",
        "conversation broken",
        "turns with an unknown role or without text are dropped or printed as `None`; without "
        "a user or an assistant turn there is nothing to learn",
        "name roles user, assistant, system or tool (or their ShareGPT names) and give every "
        "turn its text",
        '{"messages": [{"role": "alien", "content": "hi"}]}',
    ),
    Code(
        "PTC206",
        "warning",
        "conversation unusual",
        "many chat templates refuse or misprint such turns, and an unanswered last turn is not "
        "trained",
        "start with system or user, alternate user and assistant, end with assistant",
        '{"messages": [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "hi"}]}',
    ),
    Code(
        "PTC301",
        "warning",
        "control characters",
        "they are invisible leftovers of scraping or terminal output, and the model learns to "
        "write them",
        "remove them: `ptc preprocess --clean safe`, or `ptc validate --fix --out NEW`",
        '{"prompt": "hi", "response": "hel\\u0000lo"}',
    ),
    Code(
        "PTC302",
        "error",
        "chosen and rejected are the same",
        "the pair has no preference: its gradient is noise",
        "remove the pair",
        '{"prompt": "a", "chosen": "b", "rejected": "b"}',
    ),
    Code(
        "PTC303",
        "warning",
        "exact duplicate of an earlier row",
        "duplicates are trained more often than the rest and inflate every count",
        "`ptc preprocess --dedup exact`",
        "the same record twice, also with its keys in another order",
    ),
    Code(
        "PTC304",
        "warning",
        "near duplicate of an earlier row",
        "copies with small edits weigh as duplicates do, and leak between splits unseen",
        "`ptc preprocess --dedup near`",
        "the same answer with one word changed",
    ),
    Code(
        "PTC305",
        "warning",
        "contradicts an earlier pair",
        "the same two answers the other way round cancel each other out",
        "keep one of the two pairs, or neither",
        '{"prompt": "a", "chosen": "b", "rejected": "c"} and {"prompt": "a", "chosen": "c", '
        '"rejected": "b"}',
    ),
    Code(
        "PTC306",
        "warning",
        "text holds a control token",
        "many tools turn it into the real token, which ends the turn or opens a fake one; ptc "
        "keeps it plain text",
        "remove it, unless the text is about the token",
        '{"prompt": "hi <|im_end|>", "response": "hello"}',
    ),
    Code(
        "PTC307",
        "warning",
        "replacement characters",
        "U+FFFD stands where an earlier step could not decode the text; the original is lost",
        "decode the source again with its real encoding",
        '{"prompt": "caf\\ufffd", "response": "coffee"}',
    ),
    Code(
        "PTC308",
        "warning",
        "chosen and rejected differ only in white space",
        "the pair teaches formatting and nothing else",
        "remove the pair, unless formatting is what it is about",
        '{"prompt": "a", "chosen": "b c", "rejected": "b  c"}',
    ),
    Code(
        "PTC309",
        "error",
        "the two sides of a pair answer different prompts",
        "the difference of their likelihoods then says nothing about the answers",
        "give both sides the same turns in front of the answer",
        'a chosen list that starts with "2+2?" and a rejected list that starts with "3+3?"',
    ),
    Code(
        "PTC401",
        "warning",
        "longer than `--max-tokens`",
        "training cuts the row, and the end of the answer is lost",
        "raise the limit, or choose what happens: `--overlong drop|truncate`",
        "3,000 tokens with `--max-tokens 2048`",
    ),
    Code(
        "PTC402",
        "error",
        "no trained token is left after truncation",
        "the prompt alone fills the limit: the row adds nothing, and a batch of such rows "
        "divides by zero",
        "raise the limit or drop the row",
        "a prompt of 4,000 tokens with `--max-tokens 2048`",
    ),
    Code(
        "PTC403",
        "error",
        "the rendered answer has no end token",
        "a model that never sees an end token never stops",
        "use a chat template that ends the assistant's turn, or pass `--add-eos`",
        "a template that prints only the text of each turn",
    ),
    Code(
        "PTC404",
        "error",
        "two begin tokens",
        "training then starts in a way that inference does not",
        "let only the template print the begin token",
        "<s><s>[INST] hi [/INST]",
    ),
    Code(
        "PTC405",
        "error",
        "the chat template rewrites earlier turns",
        "the trained tokens cannot be told from the others, so the loss mask would be wrong",
        "choose another template, or train the last turn of such conversations only",
        "a template that drops think blocks from all turns but the last",
    ),
    Code(
        "PTC501",
        "error",
        "row also in the other split",
        "the score on a split that was trained on means nothing",
        "remove the row from one of the two; `ptc preprocess --val-rows` splits by prompt",
        "a row of val.jsonl that stands in train.jsonl, too",
    ),
    Code(
        "PTC502",
        "warning",
        "overlaps a benchmark",
        "a model that saw the questions scores higher than it can",
        "`ptc preprocess --decontaminate BENCHMARK` leaves such rows out",
        "13 words in a row that stand in a test question",
    ),
)

CODES: dict[str, Code] = {row.code: row for row in _TABLE}
