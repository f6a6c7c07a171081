"""Overlap with benchmarks: runs of 13 words that a row shares with a text of a benchmark.

Words are compared without case and punctuation; each CJK character is a word. A benchmark text
of fewer than 13 words only matches a whole field with the same words, and texts of fewer than 6
words are not looked at: they say too little.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain_cli.data.reader import read_rows
from posttrain_cli.errors import DataError

WORDS = 13
FEWEST = 6
_WORD = re.compile(
    r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\u3040-\u30ff\uac00-\ud7af]|[^\W_]+", re.UNICODE
)


@dataclass(frozen=True, slots=True)
class Overlap:
    """What was found: the shared words, and the benchmark's file and row."""

    words: str
    path: str
    row: int

    def __str__(self) -> str:
        return f"shares “{self.words}” with row {self.row} of {self.path}"


@dataclass(slots=True)
class Benchmark:
    """The texts of benchmark files as runs of words.

    Attributes:
        runs: runs of WORDS words → where they stand first.
        whole: shorter texts → where they stand first.
        too_short: texts that were not taken in.
    """

    runs: dict[str, tuple[str, int]] = field(default_factory=dict)
    whole: dict[str, tuple[str, int]] = field(default_factory=dict)
    too_short: int = 0

    def add(self, text: str, path: str, row: int) -> None:
        """Take in one text of the benchmark."""
        words = split_words(text)
        if len(words) < FEWEST:
            self.too_short += 1
        elif len(words) < WORDS:
            self.whole.setdefault(" ".join(words), (path, row))
        for run in _runs(words):
            self.runs.setdefault(run, (path, row))

    def find(self, texts: Iterable[str]) -> Overlap | None:
        """The first overlap of `texts` with the benchmark, or None."""
        for text in texts:
            words = split_words(text)
            if FEWEST <= len(words) < WORDS and (run := " ".join(words)) in self.whole:
                return Overlap(run, *self.whole[run])
            for run in _runs(words):
                if run in self.runs:
                    return Overlap(run, *self.runs[run])
        return None


def read_benchmark(files: Sequence[str]) -> Benchmark:
    """Take in every text of every row of `files`.

    Raises:
        DataError: a row cannot be read, or there is no text to compare with.
    """
    benchmark = Benchmark()
    for path in files:
        for row in read_rows(path):
            faults = [finding for finding in row.findings if finding.severity == "error"]
            if row.record is None and faults:
                raise DataError(f"cannot read the benchmark `{path}`", findings=faults)
            for text in texts_of(row.record):
                benchmark.add(text, path, row.row)
    if not benchmark.runs and not benchmark.whole:
        raise DataError(
            f"no text of {FEWEST} words or more in {', '.join(files)}",
            hint="name a file with the questions of the benchmark",
        )
    return benchmark


def texts_of(value: Any) -> Iterator[str]:
    """Every text inside `value`, in order; names of keys are no texts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from texts_of(part)
    elif isinstance(value, list):
        for part in value:
            yield from texts_of(part)


def split_words(text: str) -> list[str]:
    """The words of `text`, without case and punctuation."""
    return _WORD.findall(text.casefold())


def _runs(words: list[str]) -> Iterator[str]:
    for start in range(len(words) - WORDS + 1):
        yield " ".join(words[start : start + WORDS])
