"""What the data commands cost, as ratios from one run.

    python benchmarks/data.py --size 200MB --out data.json
    python benchmarks/data.py --size 1GB --only validate,preprocess --out data.json
    python benchmarks/data.py --only near --datasketch --out data.json

Compared programs run in turn, `--repeat` times each; CPU seconds are those of all their
processes, from start to end, and the medians are compared. Every program's counts are checked
against what was planted in the rows. Prints a table and writes it with all costs to `--out`.
Exit 0 when all figures were taken, whether or not they reach the bars; 1 when a count is wrong.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data_measure import MB, ROOT, Cost, alternate, job, machine, ptc, run

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
LIMIT = 2048  # tokens


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table; `bar` is the least (or, with `most`, the most) it should be."""

    piece: str
    what: str
    value: float
    unit: str = "×"
    bar: float | None = None
    most: bool = False

    @property
    def met(self) -> bool | None:
        if self.bar is None:
            return None
        return self.value <= self.bar if self.most else self.value >= self.bar


@dataclass
class Bench:
    """What all pieces share; `costs` collects the medians."""

    options: argparse.Namespace
    work: Path
    rows: dict[str, int] = field(default_factory=dict)
    costs: dict[str, Any] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        """The rows; written when first asked for."""
        path = self.work / "rows.jsonl"
        if not self.rows:
            self.rows = self.write(path, self.options.size)
        return path

    def write(self, path: Path, size: int) -> dict[str, int]:
        return run(job("write_rows", path, size, self.options.seed))[1]

    def compare(
        self, piece: str, commands: dict[str, list[str]]
    ) -> tuple[dict[str, Cost], dict[str, dict[str, Any]]]:
        costs, printed = alternate(commands, self.options.repeat)
        self.costs[piece] = {name: asdict(cost) for name, cost in costs.items()}
        return costs, printed


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    bench, figures = Bench(options, options.work), []
    before = machine()
    for name in options.only:
        figures += PIECES[name](bench)
        shown = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
        result = {
            "options": shown,
            "machine": {**before, "load_after": machine()["load"]},
            "rows": bench.rows,
            "figures": [{**asdict(figure), "met": figure.met} for figure in figures],
            "costs": bench.costs,
        }
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(options.work)
    print(table(figures))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="JSON file for the results")
    add("--size", type=size, default="200MB", help="bytes of preference rows, such as 1GB")
    add("--only", type=pieces, default=",".join(PIECES), help=f"of {','.join(PIECES)}")
    add("--repeat", type=int, default=3, help="runs of each program")
    add("--seed", type=int, default=7)
    add("--work", type=Path, default=Path("runs/data-benchmark"), help="folder for files; emptied")
    add("--tokenizer", default="", help="folder of a tokenizer; default: the tiny one")
    add("--token-rows", type=int, default=20000, help="rows of the token verdict")
    add("--near-rows", type=int, default=20000, help="rows for near duplicates")
    add("--index-rows", type=int, default=500_000, help="rows for the index; also 2 and 8 times")
    add("--lengths", type=int, default=1_000_000, help="that the packing plan is made for")
    add("--datasketch", action="store_true", help="install datasketch apart, to compare with it")
    options = parser.parse_args(argv)
    options.work, options.out = options.work.absolute(), options.out.absolute()
    return options


def size(text: str) -> int:
    """Bytes, from such as `200MB`."""
    number, unit = text[:-2], text[-2:].upper()
    if unit not in UNITS or not number.isdigit():
        raise argparse.ArgumentTypeError(f"`{text}` is no size, expected such as 200MB or 1GB")
    return int(number) * UNITS[unit]


def pieces(text: str) -> list[str]:
    """Names of pieces, from a list with commas."""
    names = text.split(",")
    unknown = [name for name in names if name not in PIECES]
    if unknown:
        known = ", ".join(PIECES)
        raise argparse.ArgumentTypeError(f"`{unknown[0]}` is no piece, expected some of {known}")
    return names


def table(figures: list[Figure]) -> str:
    """The figures in Markdown."""
    lines = ["| piece | figure | measured | bar | met |", "|---|---|---|---|---|"]
    words = {True: "yes", False: "no", None: ""}
    for each in figures:
        bar = "" if each.bar is None else f"{'≤' if each.most else '≥'} {each.bar:,.4g} {each.unit}"
        value = f"{each.value:,.4g} {each.unit}"
        lines.append(f"| {each.piece} | {each.what} | {value} | {bar} | {words[each.met]} |")
    return "\n".join(lines)


def expect(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise SystemExit(f"{what}: {found}, expected {wanted}")


# --- the pieces -------------------------------------------------------------------------------


def validate(bench: Bench) -> list[Figure]:
    """`ptc validate` against the article's script and against bare parsing; its memory."""
    path = str(bench.file)
    check = ptc("validate", "--kind", "preference", "--json", "-q", "--workers")
    commands = {
        "article": job("article", path),
        "orjson": job("bare_orjson", path),
        "ptc, 1 worker": [*check, "1", path],
        "ptc, 2 workers": [*check, "2", path],
    }
    costs, printed = bench.compare("validate", commands)
    expect("rows the article rejects", printed["article"]["bad"], bench.rows["bad"])
    for name in ("ptc, 1 worker", "ptc, 2 workers"):
        report = printed[name]
        expect(f"bad rows, {name}", report["files"][0]["bad_rows"], bench.rows["bad"])
        expect(f"repeated rows, {name}", report["counts"]["PTC303"], bench.rows["repeated"])
    small = bench.work / "quarter.jsonl"
    bench.write(small, bench.options.size // 4)
    quarter, _ = run([*check, "2", str(small)], (0, 1))
    one, two, old = costs["ptc, 1 worker"], costs["ptc, 2 workers"], costs["article"]
    bare, room = costs["orjson"], 64 + 40 * bench.rows["rows"] / MB
    return [
        Figure("validate", "article's CPU over ours, 1 worker", old.cpu / one.cpu, bar=5),
        Figure("validate", "article's CPU over ours, 2 workers", old.cpu / two.cpu, bar=5),
        Figure("validate", "article's wall time over ours, 2 workers", old.wall / two.wall, bar=8),
        Figure("validate", "bare orjson's CPU over ours", bare.cpu / one.cpu, bar=0.24),
        Figure("validate", "largest process, 1 worker", one.rss / MB, "MB", bar=room, most=True),
        Figure("validate", "largest process, 2 workers", two.rss / MB, "MB", bar=room, most=True),
        Figure("validate", "the same, a quarter of the rows", quarter.rss / MB, "MB"),
    ]


def preprocess(bench: Bench) -> list[Figure]:
    """`ptc preprocess` with exact dedup against the article's script with writing."""
    path, out = str(bench.file), str(bench.work / "out.jsonl")
    make = [*ptc("preprocess", path, "--kind", "preference", "--dedup", "exact", "--json")]
    make += ["--on-error", "skip", "--overwrite", "--out", out, "--workers", "1", "--clean"]
    commands = {
        "article": job("article", path, bench.work / "article.jsonl"),
        "ptc --clean article": [*make, "article"],
        "ptc --clean safe": [*make, "safe"],
    }
    costs, printed = bench.compare("preprocess", commands)
    lost = bench.rows["bad"] + bench.rows["repeated"]
    for name in ("ptc --clean article", "ptc --clean safe"):
        expect(f"rows kept, {name}", printed[name]["kept"], bench.rows["rows"] - lost)
    old = costs["article"]
    same, safe = costs["ptc --clean article"], costs["ptc --clean safe"]
    what = "article's CPU over ours, --clean"
    return [
        Figure("preprocess", f"{what} article", old.cpu / same.cpu, bar=3),
        Figure("preprocess", f"{what} safe", old.cpu / safe.cpu, bar=3),
        Figure("preprocess", "largest process", max(same.rss, safe.rss) / MB, "MB"),
    ]


def tokens(bench: Bench) -> list[Figure]:
    """The exact verdict `over 2048 tokens` against encoding every row."""
    folder = bench.options.tokenizer
    if not folder:
        folder = str(bench.work / "tiny")
        code = "import sys; from pathlib import Path; from posttrain_cli.engine.tiny import "
        code += "make_tiny_model; make_tiny_model(Path(sys.argv[1]))"
        subprocess.run([sys.executable, "-c", code, folder], check=True, cwd=ROOT)
    folder = str(Path(folder).absolute())
    place = (bench.file, bench.options.token_rows)
    commands = {
        "reading alone": job("no_verdicts", *place, folder, LIMIT),
        "encode every row": job("encode_all", *place, folder, LIMIT),
        "verdict": job("verdicts", *place, folder, LIMIT),
    }
    costs, printed = bench.compare("tokens", commands)
    read, every, ours = printed["reading alone"], printed["encode every row"], printed["verdict"]
    expect("answers over the limit", ours["over"], every["over"])
    base = costs["reading alone"].cpu
    whole, verdict = costs["encode every row"].cpu, costs["verdict"].cpu
    return [
        Figure("tokens", "encoding every row over the verdict, CPU", whole / verdict, bar=6),
        Figure("tokens", "the same without start and reading", (whole - base) / (verdict - base)),
        Figure("tokens", "answers passed unseen", 100 * read["unseen"] / read["sides"], "%"),
        Figure("tokens", "answers over the limit", ours["over"], "answers"),
    ]


def pack(bench: Bench) -> list[Figure]:
    """The packing plan of a million lengths."""
    found: list[Figure] = []
    for capacity in (2048, 4096, 8192):
        _, printed = bench.compare(
            f"pack {capacity}", {"plan": job("packing", bench.options.lengths, capacity)}
        )
        plan = printed["plan"]
        expect("bins", plan["bins"], plan["plain_bins"])
        over = 100 * (plan["bins"] / plan["bound"] - 1)
        name = f"pack to {capacity}"
        found += [
            Figure(
                name,
                f"{bench.options.lengths:,} lengths, CPU",
                plan["cpu"],
                "s",
                bar=0.3,
                most=True,
            ),
            Figure(name, "plain best-fit-decreasing over ours", plan["plain_cpu"] / plan["cpu"]),
            Figure(name, "fill (bins as plain best-fit-decreasing)", 100 * plan["fill"], "%"),
            Figure(name, "bins above the least possible", over, "%"),
        ]
    return found


def near(bench: Bench) -> list[Figure]:
    """Near duplicates, where asked against datasketch."""
    place = (bench.options.near_rows, bench.options.seed)
    commands = {"ptc": job("near_ours", *place)}
    if bench.options.datasketch:
        folder = bench.work / "datasketch"
        venv.create(folder, with_pip=True)
        python = str(folder / "bin" / "python")
        subprocess.run([python, "-m", "pip", "install", "-q", "datasketch"], check=True)
        commands["datasketch"] = job("near_datasketch", *place, python=python)
    _, printed = bench.compare("near", commands)
    ours = printed["ptc"]
    found = [
        Figure("near", "recall on 2 % of the words changed", ours["recall"], "", bar=0.98),
        Figure("near", "rows marked that were not planted", ours["others"], "rows"),
        Figure("near", "CPU a row", 1e6 * ours["cpu"] / bench.options.near_rows, "µs"),
    ]
    if bench.options.datasketch:
        other = printed["datasketch"]
        found += [
            Figure("near", "datasketch's CPU over ours", other["cpu"] / ours["cpu"], bar=8),
            Figure("near", "datasketch's recall", other["recall"], ""),
            Figure("near", "datasketch's marked and not planted", other["others"], "rows"),
        ]
    return found


def index(bench: Bench) -> list[Figure]:
    """Memory of the index of exact duplicates: what each further row takes; where it spills."""
    rows = bench.options.index_rows
    sizes = {f"{factor}x": job("index_bytes", rows * factor) for factor in (1, 2, 8)}
    _, printed = bench.compare("index", sizes)
    one, two, eight = (printed[name] for name in sizes)
    slope = (two["bytes"] - one["bytes"]) / (two["rows"] - one["rows"])
    found = [Figure("index", "bytes of each further row", slope, "B", bar=40, most=True)]
    for each in (one, two, eight):
        what = f"peak with {each['rows']:,} rows, to find the duplicates as well"
        found.append(Figure("index", what, each["bytes"] / MB, "MB"))
    return found


PIECES: dict[str, Callable[[Bench], list[Figure]]] = {
    piece.__name__: piece for piece in (validate, preprocess, tokens, pack, near, index)
}

if __name__ == "__main__":
    sys.exit(main())
