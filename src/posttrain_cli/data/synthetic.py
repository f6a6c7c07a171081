"""Rows made from recipes, without a model: same seed, same bytes.

Kinds:
    sft: `prompt` and `response` (`messages` for the dialogue recipe).
    preference: `prompt`, `chosen` (right) and `rejected` (a known corruption).
    prompt: `prompt` and `answer`, for a reward to check.
The metadata of each row holds `synthetic`, `recipe`, `answer` and `check` (how to compare), and
`corruption` in preference rows. The sft rows of `capitals` are those of the second article's
script, field for field: `question`, `answer`, and metadata that says `synthetic` only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from posttrain_cli.data import recipes
from posttrain_cli.data.recipes import Draw, Recipe, Task
from posttrain_cli.data.transcript import transcript
from posttrain_cli.data.writer import Outputs, check_outputs, output_format, write_records

Kind = Literal["sft", "preference", "prompt"]
_MIX = (recipes.arithmetic, recipes.format_task, recipes.extraction, recipes.capitals)
_SINGLE = {
    "capitals": recipes.capitals,
    "arithmetic": recipes.arithmetic,
    "format": recipes.format_task,
    "extraction": recipes.extraction,
    "dialogue": recipes.dialogue,
}


@dataclass(frozen=True, slots=True)
class SyntheticOptions:
    """What to make: `rows` rows of `kind` by `recipe`, from `seed`."""

    kind: Kind = "sft"
    recipe: Recipe = "mixed"
    rows: int = 100
    seed: int = 42


def generate(options: SyntheticOptions, target: Path, *, overwrite: bool) -> dict[str, Any]:
    """Write the rows to `target`, whole or not at all, and describe the file.

    Raises:
        UsageError: the target exists, or its suffix says no format.
    """
    output_format(target)
    check_outputs(target, overwrite=overwrite)
    with Outputs() as outputs:
        sink = outputs.open(target)
        rows = write_records(sink, target, lambda: make_rows(options))
    return {
        "path": str(target),
        "rows": rows,
        "bytes": sink.size,
        "sha256": sink.sha256(),
        "options": asdict(options),
    }


def make_rows(options: SyntheticOptions) -> Iterator[dict[str, Any]]:
    """The rows of `options`, in order; row i depends on (seed, i) only."""
    for index in range(options.rows):
        yield make_row(options, index)


def make_row(options: SyntheticOptions, index: int) -> dict[str, Any]:
    """Row `index` (from 0) of `options`."""
    task = _task(options.recipe, options.seed, index)
    if options.recipe == "capitals" and options.kind == "sft":
        return {
            "question": task.turns[0],
            "answer": task.response,
            "metadata": {"synthetic": True},
        }
    metadata = {
        "synthetic": True,
        "recipe": task.recipe,
        "answer": task.answer,
        "check": task.check,
    }
    match options.kind:
        case "sft":
            return {**_question_and_answer(task), "metadata": metadata}
        case "preference":
            return {
                "prompt": transcript(_messages(task)),
                "chosen": task.response,
                "rejected": task.corrupted,
                "metadata": {**metadata, "corruption": task.corruption},
            }
        case "prompt":
            question = transcript(_messages(task))
            return {"prompt": question, "answer": task.answer, "metadata": metadata}


def _task(recipe: Recipe, seed: int, index: int) -> Task:
    if recipe == "mixed":
        make = _MIX[Draw(seed, "mixed", index).below(len(_MIX))]
    else:
        make = _SINGLE[recipe]
    return make(Draw(seed, make.__name__, index), index)


def _messages(task: Task) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[place % 2], "content": text} for place, text in enumerate(task.turns)]


def _question_and_answer(task: Task) -> dict[str, Any]:
    if len(task.turns) == 1:
        return {"prompt": task.turns[0], "response": task.response}
    return {"messages": [*_messages(task), {"role": "assistant", "content": task.response}]}
