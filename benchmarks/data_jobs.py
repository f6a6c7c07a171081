"""The programs that the data benchmark starts: what it compares with, and single functions.

    python benchmarks/data_jobs.py NAME [ARGUMENT...]

Each prints one JSON object. The article's script is written down as it stands in the article,
with its gaps filled: rows come from JSON lines, one at a time, and are written one at a time.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

Found = dict[str, Any]
FIELDS = ("prompt", "chosen", "rejected")
BATCH = 256


def write_rows(path: str, size: str, seed: str) -> Found:
    """Write the benchmark's rows."""
    import data_rows

    return data_rows.write(Path(path), int(size), int(seed))


# --- the article's script ---------------------------------------------------------------------


def clean_text(text: str) -> str:
    text = re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", "", text)
    return re.sub(r"\s+", " ", text.strip())


def validate_sample(sample: Found) -> bool:
    if not all(k in sample for k in FIELDS):
        return False
    if not all(isinstance(sample[k], str) for k in FIELDS):
        return False
    return all(len(sample[k].strip()) > 0 for k in FIELDS)


def article(path: str, out: str = "") -> Found:
    """Clean, validate and, with `out`, write."""
    good = bad = 0
    with ExitStack() as stack:
        source = stack.enter_context(open(path, encoding="utf-8"))
        target = stack.enter_context(open(out, "w", encoding="utf-8")) if out else None
        for line in source:
            try:
                row = json.loads(line)
                sample = {k: clean_text(row[k]) for k in FIELDS}
                if not validate_sample(sample):
                    bad += 1
                    continue
            except Exception:
                bad += 1
                continue
            good += 1
            if target:
                target.write(json.dumps(sample, ensure_ascii=False) + "\n")
    return {"good": good, "bad": bad}


def bare_orjson(path: str) -> Found:
    """Nothing but `orjson.loads` of every line."""
    import orjson

    good = bad = 0
    with open(path, "rb") as source:
        for line in source:
            try:
                orjson.loads(line)
                good += 1
            except orjson.JSONDecodeError:
                bad += 1
    return {"good": good, "bad": bad}


# --- tokens -----------------------------------------------------------------------------------


def batches(path: str, rows: int) -> Iterator[list[Found]]:
    """Good rows in batches, as `ptc validate` hands them on."""
    import orjson

    from posttrain_cli.data.contract import Contract, check_record

    contract, found = Contract("preference"), []
    with open(path, "rb") as source:
        for line in islice(source, rows):
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if isinstance(row, dict) and not check_record(row, contract):
                found.append(row)
            if len(found) == BATCH:
                yield found
                found = []
    yield found


def turns(row: Found, answer: str) -> list[dict[str, str]]:
    user = {"role": "user", "content": row["prompt"]}
    return [user, {"role": "assistant", "content": row[answer]}]


def encode_all(path: str, rows: str, folder: str, limit: str) -> Found:
    """Encode both answers of every row with its prompt; how many exceed the limit."""
    from posttrain_cli.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder)
    sides = over = 0
    for batch in batches(path, int(rows)):
        pairs = [turns(row, answer) for row in batch for answer in FIELDS[1:]]
        texts = [tokenizer.render(pair, generation_prompt=False) for pair in pairs]
        encoded = tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False)
        over += sum(len(found.ids) > int(limit) for found in encoded)
        sides += len(encoded)
    return {"sides": sides, "over": over}


def verdicts(path: str, rows: str, folder: str, limit: str) -> Found:
    """The same by `check_tokens`."""
    from posttrain_cli.data.contract import Contract
    from posttrain_cli.data.tokencheck import TokenChecks, check_tokens

    checks, contract = TokenChecks(folder, max_tokens=int(limit)), Contract("preference")
    sides = over = 0
    for batch in batches(path, int(rows)):
        for problems in check_tokens(batch, contract, checks):
            over += sum(problem.code == "PTC401" for problem in problems)
        sides += 2 * len(batch)
    return {"sides": sides, "over": over}


def no_verdicts(path: str, rows: str, folder: str, limit: str) -> Found:
    """What both of them do before: read the tokenizer and the rows, check the contract.

    Beside that how many answers a verdict needs no encoding for, by a look at every tenth batch.
    """
    from posttrain_cli.data.tokencheck import TokenChecks

    checks = TokenChecks(folder, max_tokens=int(limit))
    assert checks.tokenizer
    sides = unseen = 0
    for number, batch in enumerate(batches(path, int(rows))):
        if number % 10 == 0:
            bounds = [checks.bound(turns(row, answer)) for row in batch for answer in FIELDS[1:]]
            unseen += sum(bound is not None and bound <= int(limit) for bound in bounds)
            sides += len(bounds)
    return {"sides": sides, "unseen": unseen}


# --- packing ----------------------------------------------------------------------------------


def plain_bfd(lengths: Iterable[int], capacity: int) -> int:
    """Bins that best-fit-decreasing needs, one item after the other."""
    bins, with_space, spaces = 0, [0] * (capacity + 1), 0  # bit s: there is a bin with s free
    for length in sorted(lengths, reverse=True):
        fitting = spaces >> length
        if fitting:
            space = (fitting & -fitting).bit_length() - 1 + length
            with_space[space] -= 1
            if not with_space[space]:
                spaces &= ~(1 << space)
        else:
            space, bins = capacity, bins + 1
        with_space[space - length] += 1
        if space > length:
            spaces |= 1 << (space - length)
    return bins


def packing(count: str, capacity: str) -> Found:
    """CPU seconds and fill of a plan for `count` log-normal lengths, beside plain BFD."""
    import numpy as np

    from posttrain_cli.data.pack import pack

    drawn = np.exp(np.random.default_rng(0).normal(6.0, 0.9, int(count))).astype(np.int64) + 16
    lengths = np.minimum(drawn, int(capacity))
    start = time.process_time()
    assignment, bins = pack(lengths, int(capacity))
    seconds = time.process_time() - start
    loads = np.bincount(assignment, weights=lengths, minlength=bins)
    assert len(loads) == bins and loads.max() <= int(capacity)
    start = time.process_time()
    plain = plain_bfd(lengths.tolist(), int(capacity))
    return {
        "cpu": seconds,
        "plain_cpu": time.process_time() - start,
        "bins": bins,
        "plain_bins": plain,
        "bound": int(-(-lengths.sum() // int(capacity))),
        "fill": float(lengths.sum() / (bins * int(capacity))),
    }


# --- duplicates -------------------------------------------------------------------------------


def planted(rows: int, seed: int) -> tuple[list[str], dict[int, int]]:
    """Texts of rows, a tenth of them edited copies of others; copy → original."""
    import data_rows

    texts, random_ = data_rows.Texts(seed), random.Random(seed)
    found = ["\n".join(texts.row().values()) for _ in range(rows - rows // 10)]
    originals = random_.sample(range(len(found)), rows // 10)
    copies = {len(found) + n: original for n, original in enumerate(originals)}
    return found + [texts.edited(found[original]) for original in originals], copies


def near_ours(rows: str, seed: str) -> Found:
    """Near duplicates by `ptc`: CPU seconds, recall, rows marked that are no planted copy."""
    import numpy as np

    from posttrain_cli.data.dedup import first_near, signature

    texts, copies = planted(int(rows), int(seed))
    start = time.process_time()
    groups = first_near(np.array([signature(text) for text in texts]))
    seconds = time.process_time() - start
    hit = sum(groups[copy] == groups[original] for copy, original in copies.items())
    marked = set(np.flatnonzero(groups != np.arange(len(texts))).tolist())
    return {"cpu": seconds, "recall": hit / len(copies), "others": len(marked - set(copies))}


def near_datasketch(rows: str, seed: str) -> Found:
    """The same by datasketch: 128 permutations of word trigrams, threshold 0.7."""
    from datasketch import MinHash, MinHashLSH  # type: ignore[import-not-found]

    texts, copies = planted(int(rows), int(seed))
    start = time.process_time()
    lsh, near = MinHashLSH(threshold=0.7, num_perm=128), []
    for number, text in enumerate(texts):
        blanks = text.count(" ") > 20
        words, size = (text.split(), 3) if blanks else (text, 5)
        grams = (words[at : at + size] for at in range(max(1, len(words) - size + 1)))
        sketch = MinHash(num_perm=128)
        sketch.update_batch([(" ".join(g) if blanks else str(g)).encode() for g in grams])
        near.append(lsh.query(sketch))
        lsh.insert(number, sketch)
    seconds = time.process_time() - start
    hit = sum(original in near[copy] for copy, original in copies.items())
    others = sum(bool(found) for number, found in enumerate(near) if number not in copies)
    return {"cpu": seconds, "recall": hit / len(copies), "others": others}


def index_bytes(rows: str) -> Found:
    """Memory at the peak of the index of exact duplicates, in bytes a row."""
    import numpy as np

    from posttrain_cli.data.index import RowIndex

    def use() -> tuple[int, int]:
        index, draw = RowIndex(), np.random.default_rng(0)
        for _ in range(int(rows) // 1000):
            index.add(draw.integers(1, 1 << 63, (1000, 2), np.uint64))
        return index.rows, sum(1 for _ in index.matches())

    warm = RowIndex()
    warm.add(np.ones((10, 2), np.uint64))
    assert sum(1 for _ in warm.matches()) == 9
    before = peak_bytes()
    held, matches = use()
    grown = peak_bytes() - before
    return {"rows": held, "matches": matches, "bytes": grown, "bytes_a_row": grown / held}


def peak_bytes() -> int:
    """Most resident memory of this process so far (Linux)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


JOBS: dict[str, Callable[..., Found]] = {
    job.__name__: job
    for job in (
        *(write_rows, article, bare_orjson, encode_all, verdicts, no_verdicts),
        *(packing, near_ours, near_datasketch, index_bytes),
    )
}

if __name__ == "__main__":
    print(json.dumps(JOBS[sys.argv[1]](*sys.argv[2:])))
