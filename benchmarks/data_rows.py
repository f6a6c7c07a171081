"""Preference rows for the data benchmarks: English, Chinese and code, some of them faulty.

Texts are put together from the standard library's docstrings and functions and from made-up
Chinese sentences, so the same seed gives the same bytes on the same Python. One answer with its
prompt has more than 2,048 bytes in about 13 % of the rows. One row in `EVERY` is faulty, in a way
that the article's script survives, one repeats an earlier one and one has a very long answer.
"""

from __future__ import annotations

import json
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EVERY = 777
QUESTIONS = ("Explain the following in plain words: ", "Summarise this passage: ", "")
CODE_QUESTIONS = ("What does this function do?\n\n", 'Explain "why" and\tgive an example:\n\n')
ZH_QUESTIONS = ("请解释下面这段话：", "请把下面的内容改写得更简洁：", "总结要点：")
ZH_WHO = ("老师", "学生们", "这位工程师", "我的邻居", "那家公司", "研究人员", "孩子", "火车站")
ZH_WHEN = ("昨天下午", "每个周末", "在雨季之前", "去年冬天", "为了节省时间", "根据报告")
ZH_DOES = ("仔细检查了", "重新安排了", "终于找到了", "不得不放弃", "愿意分享", "正在比较", "忘记了")
ZH_WHAT = ("那本旧书", "所有的数据", "新的训练方法", "一台安静的机器", "回家的路", "这份计划")
ZH_END = (
    "，大家都觉得很满意。",
    "，但是价格有点贵。",
    "；原因还不清楚。",
    "，值得再试一次！",
    "，你怎么看？",
)


class Texts:
    """Draws paragraphs of three kinds."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._english: list[str] = []
        self._code: list[str] = []
        root = Path(sysconfig.get_path("stdlib"))
        folders = (root, root / "asyncio", root / "email", root / "json", root / "unittest")
        for path in (file for folder in folders for file in sorted(folder.glob("*.py"))):
            source = path.read_text(encoding="utf-8", errors="ignore")
            for docstring in re.findall(r'"""(.*?)"""', source, re.DOTALL):
                paragraphs = (p.strip() for p in re.split(r"\n\s*\n", docstring))
                self._english += [p for p in paragraphs if 60 <= len(p) <= 900]
            functions = re.findall(r"(?m)^( {0,4}def .*\n(?:(?: {4,}.*)?\n)+)", source)
            bodies = (f.rstrip() for f in functions)
            self._code += [f"```python\n{b}\n```" for b in bodies if 80 <= len(b) <= 1500]

    def english(self, low: int, high: int) -> str:
        """Paragraphs of at least `low` bytes."""
        return self._join(self._english, "\n\n", self.rng.randint(low, high))

    def code(self, low: int, high: int) -> str:
        """Functions of at least `low` bytes."""
        return self._join(self._code, "\n\n", self.rng.randint(low, high))

    def chinese(self, low: int, high: int) -> str:
        """Sentences of at least `low` bytes."""
        wanted, choice, found, size = self.rng.randint(low, high), self.rng.choice, [], 0
        while size < wanted:
            words = (choice(ZH_WHEN), choice(ZH_WHO), choice(ZH_DOES), choice(ZH_WHAT))
            found.append("".join(words) + choice(ZH_END))
            size += 3 * len(found[-1])
        return "\n".join(found)

    def _join(self, pool: list[str], between: str, wanted: int) -> str:
        found, size = [], 0
        while size < wanted:
            found.append(pool[int(self.rng.random() * len(pool))])
            size += len(found[-1]) + len(between)
        return between.join(found)

    def row(self) -> dict[str, str]:
        """One good row."""
        share, choice = self.rng.random(), self.rng.choice
        if share < 0.5:
            prompt = choice(QUESTIONS) + self.english(100, 500)
            return pair(prompt, self.english(300, 1280), self.english(200, 900))
        if share < 0.82:
            prompt = choice(ZH_QUESTIONS) + self.chinese(90, 500)
            return pair(prompt, self.chinese(300, 1430), self.chinese(200, 900))
        prompt = choice(CODE_QUESTIONS) + self.code(150, 500)
        chosen = self.english(150, 400) + "\n\n" + self.code(200, 600)
        return pair(prompt, chosen, self.code(200, 700))

    def line(self) -> bytes:
        """A good row as JSON: as usual, compact or escaped."""
        share, row = self.rng.random(), self.row()
        if share < 0.6:
            return json.dumps(row, ensure_ascii=False).encode()
        if share < 0.8:
            return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode()
        return json.dumps(row).encode()

    def edited(self, text: str) -> str:
        """The text with 2 % of its words changed; without blanks, two characters are a word."""
        blanks = text.count(" ") > 20
        words = re.findall(r"\s+|\S+" if blanks else r"(?s).{1,2}", text)
        places = [at for at, word in enumerate(words) if not word.isspace()]
        for at in self.rng.sample(places, max(1, len(places) // 50)):
            words[at] = "really" if blanks else "真的"
        return "".join(words)


def pair(prompt: str, chosen: str, rejected: str) -> dict[str, str]:
    """A row; two answers that came out the same are told apart."""
    if chosen == rejected:
        rejected += " No."
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def faulty(line: bytes, kind: int) -> bytes:
    """The line with one of eight faults, each an error by the contract."""
    row: dict[str, Any] = json.loads(line)
    good = json.dumps(row, ensure_ascii=False).encode()
    if kind % 8 < 4:
        other = good.replace(b'"chosen"', b'"best"', 1)
        cut = good[:-40].decode("utf-8", "ignore").encode()
        return (cut, good[:-1] + b",}", good + b' {"x": 1}', other)[kind % 8]
    row["chosen"] = ("", " \n\u3000", 12345, [row["chosen"]])[kind % 8 - 4]
    return json.dumps(row, ensure_ascii=False).encode()


def lines(seed: int) -> Iterator[bytes]:
    """Lines without end: good, faulty and repeated ones."""
    texts = Texts(seed)
    number, kept = 0, texts.line()
    while True:
        line = texts.line()
        if number % EVERY == 100:
            yield faulty(line, number // EVERY)
        elif number % EVERY == 200:
            yield kept
        elif number % EVERY == 300:
            yield json.dumps(
                pair(texts.english(100, 500), texts.english(9000, 16000), "No.")
            ).encode()
        else:
            kept = line if number % EVERY == 0 else kept
            yield line
        number += 1


def write(path: Path, size: int, seed: int) -> dict[str, int]:
    """Write `size` bytes of lines, or a little more; what is in them."""
    rows = written = 0
    with open(path, "wb", buffering=1 << 20) as out:
        for line in lines(seed):
            out.write(line + b"\n")
            rows += 1
            written += len(line) + 1
            if written >= size:
                break
    bad = len(range(100, rows, EVERY))
    return {"bytes": written, "rows": rows, "bad": bad, "repeated": len(range(200, rows, EVERY))}
