"""A file of questions to a file of answers: checked first, then answered unit by unit."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import posttrain_cli
from posttrain_cli.cli import console
from posttrain_cli.data import storage
from posttrain_cli.data.answers import AnswerFile
from posttrain_cli.data.lines import encode
from posttrain_cli.data.questions import Question, Unusable, read_questions
from posttrain_cli.data.reader import finding
from posttrain_cli.data.records import Keys, Refusal
from posttrain_cli.diagnostics import Finding
from posttrain_cli.errors import DataError, PtcError, UsageError
from posttrain_cli.rewards.math import math_reward, mean_interval, share_interval

if TYPE_CHECKING:
    from posttrain_cli.rollout.protocol import Sampling
    from posttrain_cli.rollout.session import Session


@dataclass(frozen=True, slots=True)
class Job:
    """What `ptc infer --input` is to do; the fields are its options."""

    sessions: list[Session]
    sampling: Sampling
    source: str
    out: str
    keys: Keys
    system: str
    reward: str | None
    overwrite: bool

    @property
    def unit(self) -> int:
        """Questions answered together: what fills one batch of the engine."""
        return max(1, self.sessions[0].batch_size // self.sampling.n)


@dataclass(slots=True)
class Tally:
    """What is counted over the records, those of an earlier attempt included."""

    rows: int = 0
    resumed: int = 0
    tokens: int = 0
    unfinished: int = 0
    seconds: float = 0.0
    scores: dict[str, list[list[float]]] = field(default_factory=dict)
    unscored: int = 0

    def count(self, record: dict[str, Any]) -> None:
        """Take in one finished record."""
        self.rows += 1
        if "reward" in record and record["reward"] is None:
            self.unscored += 1
        for name in ("reward", "compare_reward"):
            if record.get(name) is not None:
                values = record.get(f"{name}s", [record[name]])
                self.scores.setdefault(name, []).append(values)


def answer_file(job: Job) -> None:
    """Check every question, answer those that are not answered yet, say how it went.

    Raises:
        DataError: some records cannot be asked; all of them are named and none is answered.
    """
    tally = Tally()
    with _local(job.source) as path:
        total = _check(job, path)
        if job.out == "-":
            _generate(job, path, total, tally, None)
            return _report(job, tally, None)
        target = _target(job.out)
        with AnswerFile(target, _plan(job, path), job.unit, overwrite=job.overwrite) as answers:
            for record in answers.kept():
                tally.count(record)
            tally.resumed = answers.done
            if answers.done:
                console.say(f"going on after {answers.done:,} of {total:,} answers")
            try:
                _generate(job, path, total, tally, answers)
            except (PtcError, KeyboardInterrupt):
                console.say(f"{tally.rows:,} answers are kept: the same command goes on with them")
                raise
            digest = answers.finish()
    return _report(job, tally, digest)


def _check(job: Job, path: str) -> int:
    """Count the questions, after making sure that each can be asked of each model."""
    findings: list[Finding] = []
    count = bad = 0
    for read in read_questions(path, job.keys, job.system):
        found = _objections(job, read)
        findings += (replace(each, path=job.source) for each in found)
        bad += bool(found)
        count += 1
    if bad:
        raise DataError(
            f"{bad:,} records of `{job.source}` cannot be answered, none was",
            hint="`ptc validate --explain CODE` explains each code; `ptc preprocess` repairs or "
            "leaves out rows",
            findings=findings,
        )
    if not count:
        raise DataError(f"`{job.source}` holds no records", hint="expected one JSON object a line")
    return count


def _objections(job: Job, read: Question | Unusable) -> tuple[Finding, ...]:
    """Why a record cannot be asked; empty if it can."""
    if isinstance(read, Unusable):
        return read.findings
    try:
        for session in job.sessions:
            session.prompt_ids(read.messages)
    except Refusal as refusal:
        return (finding(job.source, refusal.problem, None, read.line, read.row + 1),)
    return ()


def _generate(job: Job, path: str, total: int, tally: Tally, answers: AnswerFile | None) -> None:
    """Answer the questions behind `tally.resumed`, in units that do not depend on it."""
    from posttrain_cli.cli.infer import warn_if_idle

    for session in job.sessions:
        warn_if_idle(session)
    questions = (q for q in read_questions(path, job.keys, job.system) if isinstance(q, Question))
    left = islice(questions, tally.resumed, None)
    start = time.monotonic()
    with console.progress("answering", total) as advance:
        advance(tally.resumed)
        while unit := list(islice(left, job.unit)):
            records = _answer_unit(job, unit, tally)
            if answers is not None:
                answers.append(records)
            else:
                sys.stdout.write(b"".join(encode(r) + b"\n" for r in records).decode())
                sys.stdout.flush()
            for record in records:
                tally.count(record)
            tally.seconds = time.monotonic() - start
            advance(len(unit))


def _answer_unit(job: Job, unit: list[Question], tally: Tally) -> list[dict[str, Any]]:
    """The finished records of one unit."""
    texts: list[list[list[str]]] = []
    for session in job.sessions:
        prompts = [(q.row, session.prompt_ids(q.messages)) for q in unit]
        rows = list(session.answer(prompts, job.sampling))
        texts.append([[session.text(one) for one in row] for row in rows])
        drawn = [one for row in rows for one in row]
        tally.tokens += sum(len(one.ids) for one in drawn)
        tally.unfinished += sum(one.finish == "length" for one in drawn)
    records = []
    for place, question in enumerate(unit):
        fields = answer_fields([found[place] for found in texts])
        if job.reward:
            fields |= _score(question, fields)
        records.append({**question.record, **fields})
    return records


def answer_fields(responses: list[list[str]]) -> dict[str, Any]:
    """The fields that answers add to a record.

    Args:
        responses: for each model (one, or two that are compared) its answers, at least one.
    """
    fields: dict[str, Any] = {}
    for prefix, given in zip(("", "compare_"), responses, strict=False):
        fields[f"{prefix}response"] = given[0]
        if len(given) > 1:
            fields[f"{prefix}responses"] = given
    return fields


def _score(question: Question, fields: dict[str, Any]) -> dict[str, Any]:
    """`reward` (mean over several answers) and, for several, `rewards`; None if unjudged."""
    scored: dict[str, Any] = {}
    for prefix in ("", "compare_"):
        if f"{prefix}response" not in fields:
            continue
        given = fields.get(f"{prefix}responses", [fields[f"{prefix}response"]])
        values = math_reward([""] * len(given), given, [question.reference] * len(given))
        known = [value for value in values if value is not None]
        scored[f"{prefix}reward"] = sum(known) / len(known) if known else None
        if len(given) > 1:
            scored[f"{prefix}rewards"] = values
    return scored


def _report(job: Job, tally: Tally, digest: str | None) -> None:
    """The summary: one JSON object with --json (records excepted), lines on stderr otherwise."""
    fresh = (tally.rows - tally.resumed) * job.sampling.n * len(job.sessions)
    speed = tally.tokens / tally.seconds if tally.seconds else 0.0
    summary: dict[str, Any] = {
        "rows": tally.rows,
        "resumed": tally.resumed,
        "tokens": tally.tokens,
        "tokens_per_second": round(speed, 1),
        "unfinished": round(tally.unfinished / fresh, 4) if fresh else 0.0,
        "out": job.out,
        "sha256": digest,
    }
    for name, rows in tally.scores.items():
        summary[name] = _interval(rows) | {"unscored": tally.unscored}
    if console.modes.json and job.out != "-":
        console.emit(summary)
        return
    console.say(
        f"{tally.rows:,} answers, {tally.tokens:,} tokens at {speed:,.0f} tokens/s, "
        f"{100 * summary['unfinished']:.1f} % cut at --max-new-tokens"
        + (f" → {job.out}" if job.out != "-" else "")
    )
    for name in tally.scores:
        found, which = summary[name], job.sessions[name != "reward"].source.path
        console.say(
            f"{job.reward}: {100 * found['mean']:.1f} % right "
            f"(95 % interval {100 * found['low']:.1f} to {100 * found['high']:.1f}; "
            f"{found['rows']:,} questions, {found['unscored']:,} without a reference) {which}"
        )
    if job.reward and not tally.scores:
        console.warn("no record has an `answer`, `response` or `reference` to score against")


def _interval(rows: list[list[float]]) -> dict[str, Any]:
    """Mean score and its interval: Wilson's for one answer a question."""
    means = [sum(row) / len(row) for row in rows]
    if all(len(row) == 1 for row in rows):
        low, high = share_interval(int(sum(means)), len(means))
    else:
        low, high = mean_interval(means)
    return {"mean": sum(means) / len(means), "low": low, "high": high, "rows": len(rows)}


def _plan(job: Job, path: str) -> dict[str, Any]:
    """All that decides the answers; an attempt with another plan is not continued."""
    return {
        "version": posttrain_cli.__version__,
        "input_sha256": storage.sha256(path),
        "sessions": [session.identity() for session in job.sessions],
        "sampling": asdict(job.sampling),
        "keys": asdict(job.keys),
        "system": job.system,
        "reward": job.reward,
        "unit": job.unit,
    }


def _target(out: str) -> Path:
    target = Path(out)
    if target.suffix not in (".jsonl", ".json", ".ndjson"):
        raise UsageError(
            f"cannot write `--out {out}`: answers are JSON lines", hint="end the name in .jsonl"
        )
    return target


@contextmanager
def _local(source: str) -> Iterator[str]:
    """The one input file; stdin is kept in a temporary file, since it is read twice."""
    if source != "-":
        files = storage.expand([source])
        if len(files) != 1:
            raise UsageError(
                f"`--input {source}` means {len(files)} files, expected one",
                hint="`ptc preprocess` joins files",
            )
        yield files[0]
        return
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as copy:
        copy.write(sys.stdin.buffer.read())
        copy.flush()
        yield copy.name
