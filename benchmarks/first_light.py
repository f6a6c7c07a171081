"""One fine-tuning job through the public command line, measured from its own metrics.jsonl.

    python benchmarks/first_light.py --model models/smollm2 --out result.json
    python benchmarks/first_light.py --model tiny --device cpu --out result.json

For LoRA and for all parameters:

    speed      the job as a user runs it
    unbroken   the same with --deterministic, and for LoRA with dropout
    killed     unbroken again, SIGKILL to every process past the middle, then `ptc resume`:
               losses, gradient norms, weights and moments must equal `unbroken` bit for bit

and, where two devices are there (`--devices 2`; on a CPU: two processes), each of them on two,
and the loss curves on two against one; the last pair in float32. What is measured is in the
JSON file after every job, so a run that is cut short loses only what was not started.
Exit 0 if every job ran and every comparison held, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain_cli.devices import visible_gpus
from posttrain_cli.engine.tiny import make_tiny_model
from posttrain_cli.files import sha256_file

ROOT = Path(__file__).resolve().parent.parent
GSM8K = ROOT / "examples" / "gsm8k"
PTC = [sys.executable, "-m", "posttrain_cli"]
MEASURED = {"train/tokens_per_second", "train/memory_gb", "train/mfu"}  # differ by nature
MODES = {"lora": ["--lora-rank", "16"], "full": []}
DROPOUT = ["--lora-dropout", "0.05"]  # where bits are compared: it must come back as well
SHAPES = {  # steps, packs a step, packs a forward pass, tokens a pack
    "gpu": (60, 16, 8, 2048),
    "cpu": (16, 4, 1, 512),
}


@dataclass(frozen=True)
class Job:
    """One training run: what is trained, on how many devices, and how."""

    mode: str
    kind: str  # speed, unbroken, killed or float32
    devices: int

    @property
    def name(self) -> str:
        return f"{self.mode}-{self.kind}-{self.devices}"


@dataclass
class Bench:
    """What all jobs share."""

    options: argparse.Namespace
    model: Path
    deadline: float
    environment: dict[str, Any]

    def folder(self, job: Job) -> Path:
        return Path(self.options.work) / job.name

    def command(self, job: Job) -> list[str]:
        """The `ptc sft` that runs `job`."""
        o = self.options
        place = ["--gpus", str(job.devices)]
        if o.device == "cpu":
            place = ["--gpus", "0", "--processes", str(job.devices)]
        if job.kind == "float32":
            how = ["--dtype", "float32", "--max-steps", str(o.float32_steps)]
        else:
            how = ["--dtype", o.dtype, "--max-steps", str(o.steps)]
        if job.kind != "speed":
            how += ["--deterministic", *(DROPOUT if job.mode == "lora" else [])]
        return [
            *(*PTC, "sft", "--model", str(self.model), "--train", o.train, "--val", o.val),
            *("--output-dir", str(self.folder(job)), "--batch-size", str(o.batch_size)),
            *("--micro-batch-size", str(o.micro_batch_size), "--max-length", str(o.max_length)),
            *("--save-interval", str(max(1, o.steps // 4)), "--logger", "jsonl"),
            *(*place, *how, *MODES[job.mode], *shlex.split(o.extra)),
        ]


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    shutil.rmtree(options.work, ignore_errors=True)
    Path(options.work).mkdir(parents=True)
    bench = Bench(
        options,
        model_folder(options),
        time.monotonic() + (options.time_limit or float("inf")),
        {"OMP_NUM_THREADS": "1"} if options.device == "cpu" else {},
    )
    shown = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    result: dict[str, Any] = {"options": shown, "machine": {}, "jobs": {}, "comparisons": []}
    for job in jobs(options):
        if time.monotonic() > bench.deadline:
            result["jobs"][job.name] = {"error": "not started: the time limit was reached"}
        else:
            result["jobs"][job.name] = measure(bench, job, result)
            result["comparisons"] += comparisons(bench, job, result)
        write(options.out, result)
        print(job.name, json.dumps(result["jobs"][job.name]), file=sys.stderr, flush=True)
    failed = [name for name, found in result["jobs"].items() if "error" in found]
    result["ok"] = not failed and all(each["ok"] for each in result["comparisons"])
    write(options.out, result)
    print(table(result))
    return 0 if result["ok"] else 1


def write(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="JSON file for the results")
    add("--model", default="models/smollm2", help="Hugging Face folder, or `tiny`")
    add("--train", default=str(GSM8K / "train.jsonl"), help="sft rows, or raw GSM8K rows")
    add("--val", default=str(GSM8K / "test.jsonl"))
    add("--work", default="runs/first-light", help="folder of the runs; emptied first")
    add("--device", choices=("gpu", "cpu"), default="gpu")
    add("--devices", default="", help="counts, such as 1,2; default: 1, and 2 where two are there")
    add("--modes", default="lora,full")
    add("--kinds", default="speed,unbroken,killed,float32")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    add("--steps", type=int)
    add("--batch-size", type=int, help="packs a step")
    add("--micro-batch-size", type=int, help="packs a forward pass")
    add("--max-length", type=int, help="tokens a pack")
    add("--warm-up", type=int, default=5, help="steps left out of the median tokens/s")
    add("--float32-steps", type=int, default=8)
    add("--extra", default="", help="more flags for every `ptc sft`, in one text")
    add("--time-limit", type=float, default=0, help="seconds after which no job is started")
    options = parser.parse_args(argv)
    names = ("steps", "batch_size", "micro_batch_size", "max_length")
    for name, default in zip(names, SHAPES[options.device], strict=True):
        if getattr(options, name) is None:
            setattr(options, name, default)
    if not options.devices:
        several = options.device == "cpu" or len(visible_gpus()) > 1
        options.devices = "1,2" if several else "1"
    if options.steps <= options.warm_up or options.steps < 8:
        parser.error("--steps must be at least 8 and more than --warm-up")
    return options


def model_folder(options: argparse.Namespace) -> Path:
    if options.model != "tiny":
        return Path(options.model)
    folder = Path(options.work) / "tiny"
    make_tiny_model(folder)
    return folder


def jobs(options: argparse.Namespace) -> list[Job]:
    """All jobs, those first that matter most when time runs out."""
    kinds, modes = options.kinds.split(","), options.modes.split(",")
    counts = [int(count) for count in options.devices.split(",")]
    one, several = counts[0], counts[1:]
    plain = [kind for kind in ("speed", "unbroken", "killed") if kind in kinds]
    order = [Job(mode, kind, one) for mode in modes for kind in plain]
    order += [Job(mode, kind, n) for n in several for kind in plain for mode in modes]
    if "float32" in kinds:
        order += [Job(modes[-1], "float32", n) for n in counts]
    return order


def measure(bench: Bench, job: Job, result: dict[str, Any]) -> dict[str, Any]:
    """Run `job` and read its metrics; an `error` where it did not end well."""
    started = time.monotonic()
    try:
        found: dict[str, Any] = {}
        if job.kind == "killed":
            found = kill_and_resume(bench, job)
        else:
            run(bench, bench.command(job), job)
        found |= {"seconds": round(time.monotonic() - started, 1)} | summary(bench, job)
        result["machine"] = result["machine"] or machine(bench.folder(job))
    except Exception as error:  # the other jobs still count
        return {"error": f"{type(error).__name__}: {error}"}
    return found


def run(bench: Bench, command: list[str], job: Job) -> None:
    """Run one `ptc` command to its end; its words go to a file beside the run."""
    with start(bench, command, job) as process:
        code = process.wait()
    if code:
        tail = "\n".join(log(bench, job).read_text(errors="replace").splitlines()[-15:])
        raise RuntimeError(f"`{' '.join(command[2:])}` ended with {code}:\n{tail}")


def start(bench: Bench, command: list[str], job: Job) -> subprocess.Popen[bytes]:
    with log(bench, job).open("ab") as stream:
        stream.write(f"$ {' '.join(command)}\n".encode())
        stream.flush()
        environment = os.environ | bench.environment
        return subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)


def log(bench: Bench, job: Job) -> Path:
    return Path(bench.options.work) / f"{job.name}.log"


def kill_and_resume(bench: Bench, job: Job) -> dict[str, Any]:
    """SIGKILL everything once past the middle, between two checkpoints; then resume."""
    folder, aim = bench.folder(job), bench.options.steps * 5 // 8
    with start(bench, bench.command(job), job) as process:
        while process.poll() is None and lines_written(folder) < aim:
            time.sleep(0.002)
        if process.poll() is not None:
            raise RuntimeError(f"ended with {process.returncode} before it could be killed")
        for pid in [process.pid, *descendants(process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        code = process.wait()
    before = lines_written(folder)
    began = time.monotonic()
    run(bench, [*PTC, "resume", str(folder)], job)
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return {
        "exit_of_killed": code,
        "killed_after_step": before,
        "resumed_after_step": record["resumed"][-1]["after_step"],
        "resume_seconds": round(time.monotonic() - began, 1),
    }


def lines_written(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`, from /proc."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    below = parents.get(pid, [])
    return below + [each for child in below for each in descendants(child)]


def metrics(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def summary(bench: Bench, job: Job) -> dict[str, Any]:
    """What the metrics of a finished run say."""
    folder, steps = bench.folder(job), metrics(bench.folder(job))
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    warm = steps[bench.options.warm_up :] or steps
    speeds = {
        key: statistics.median(line[f"train/{key}"] for line in warm)
        for key in ("tokens_per_second", "mfu")
    }
    return {
        "steps": len(steps),
        **speeds,
        "memory_gb": max(line["train/memory_gb"] for line in steps),
        "loss_first": steps[0]["train/loss"],
        "loss_last": steps[-1]["train/loss"],
        "val_loss_before": record["before_training"]["val/loss"],
        "val_loss_after": steps[-1]["val/loss"],
    }


def machine(folder: Path) -> dict[str, Any]:
    """Where it ran and with what, as the run's own record says."""
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    names = ("host", "devices", "packages", "code", "threads", "samples")
    return {name: record.get(name) for name in names}


def comparisons(bench: Bench, job: Job, result: dict[str, Any]) -> list[dict[str, Any]]:
    """What `job` is compared with: an unbroken run, and the same on one device."""

    def done(other: Job) -> bool:
        return "error" not in result["jobs"].get(other.name, {"error": "not run"})

    o = bench.options
    unbroken = Job(job.mode, "unbroken", job.devices)
    one = Job(job.mode, job.kind, int(o.devices.split(",")[0]))
    exact = "float32" in (job.kind, o.dtype) or (o.device, o.dtype) == ("cpu", "auto")
    try:
        if job.kind == "killed" and done(job) and done(unbroken):
            return [same_bits(job, unbroken, bench.folder(job), bench.folder(unbroken))]
        if job.kind in ("unbroken", "float32") and one != job and done(job) and done(one):
            return [distance(job, one, bench.folder(job), bench.folder(one), exact)]
    except Exception as error:  # the other jobs still count
        return [{"what": job.name, "ok": False, "error": f"{type(error).__name__}: {error}"}]
    return []


def same_bits(job: Job, reference: Job, folder: Path, other: Path) -> dict[str, Any]:
    """Whether every computed metric, weight and moment is the same in both runs."""
    mine, theirs = (
        [{k: v for k, v in line.items() if k not in MEASURED} for line in metrics(each)]
        for each in (folder, other)
    )
    different = [a["step"] for a, b in zip(mine, theirs, strict=False) if a != b]
    state, model = checkpoint_hashes(folder), file_hashes(folder / "model")
    assert state and model, f"{folder} has no checkpoint or no model"
    same = {
        "same_length": len(mine) == len(theirs),
        "same_checkpoint": state == checkpoint_hashes(other),
        "same_model": model == file_hashes(other / "model"),
    }
    return {
        "what": f"{job.name} = {reference.name}, bit for bit",
        "steps": len(mine),
        "different_steps": different,
        **same,
        "ok": not different and all(same.values()),
    }


def checkpoint_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of the tensor files of the last checkpoint, from its manifest."""
    last = max((folder / "checkpoints").glob("step_*"))
    files = json.loads((last / "MANIFEST.json").read_text(encoding="utf-8"))["files"]
    return {name: entry["sha256"] for name, entry in files.items() if name.endswith(".distcp")}


def file_hashes(folder: Path) -> dict[str, str]:
    return {path.name: sha256_file(path) for path in sorted(folder.glob("*.safetensors"))}


def distance(job: Job, one: Job, folder: Path, other: Path, exact: bool) -> dict[str, Any]:
    """Largest relative difference of the curves; float32 must be within rounding."""
    mine, theirs = metrics(folder), metrics(other)
    apart = {
        name: max(
            abs(a[name] - b[name]) / abs(b[name])
            for a, b in zip(mine, theirs, strict=True)
            if name in b
        )
        for name in ("train/loss", "train/grad_norm", "val/loss")
    }
    limit = 1e-5 if exact else 1e-2  # bfloat16 keeps 8 bits
    same_batches = [a["train/tokens"] for a in mine] == [b["train/tokens"] for b in theirs]
    return {
        "what": f"{job.name} against {one.name}",
        "largest_relative_difference": apart,
        "first_step": abs(mine[0]["train/loss"] - theirs[0]["train/loss"])
        / theirs[0]["train/loss"],
        "same_batches": same_batches,
        "limit": limit,
        "ok": same_batches and apart["train/loss"] <= limit,
    }


def table(result: dict[str, Any]) -> str:
    """The results as Markdown."""
    columns = {"tokens/s": "tokens_per_second", "MFU": "mfu", "GB": "memory_gb"}
    columns |= {"loss first": "loss_first", "last": "loss_last", "val before": "val_loss_before"}
    columns |= {"after": "val_loss_after", "s": "seconds"}
    rows = [
        [name, *(number(found.get(key)) for key in columns.values())]
        for name, found in result["jobs"].items()
        if "error" not in found
    ]
    lines = [["job", *columns], ["---"] * (len(columns) + 1), *rows]
    text = "\n".join(f"| {' | '.join(row)} |" for row in lines)
    for name, found in result["jobs"].items():
        text += f"\nNOT {name}: {found['error'].splitlines()[0]}" if "error" in found else ""
    for each in result["comparisons"]:
        details = {k: v for k, v in each.items() if k not in ("what", "ok")}
        text += f"\n{'ok ' if each['ok'] else 'NOT'} {each['what']}: {json.dumps(details)}"
    return text


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
