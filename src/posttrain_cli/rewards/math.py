"""Is the final number right? The check of GSM8K and of sums in general, by rules alone."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal

# 1,234 · 1234 · .5 · -3 · 72.00; a sign counts only where no digit or letter stands before it.
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])-?\.\d+")
_MARK = "####"


def final_number(text: str) -> Decimal | None:
    """The number that `text` gives as its result, or None.

    The first number after the last `####`, GSM8K's mark; without a mark the last number of
    the text. Thousands commas, currency signs and a closing full stop do not matter.
    """
    body, mark, result = text.replace("$", " ").replace("−", "-").rpartition(_MARK)
    if mark and (found := _NUMBER.search(result)):
        return Decimal(found[0].replace(",", ""))
    numbers = _NUMBER.findall(body if mark else result)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def math_reward(
    prompts: Sequence[str], completions: Sequence[str], references: Sequence[str]
) -> list[float | None]:
    """1.0 where the completion's final number equals the reference's, else 0.0.

    None where the reference holds no number: that sample cannot be judged.
    """
    assert len(prompts) == len(completions) == len(references)
    return [_judge(*pair) for pair in zip(completions, references, strict=True)]


def _judge(completion: str, reference: str) -> float | None:
    wanted = final_number(reference)
    return None if wanted is None else float(final_number(completion) == wanted)


def share_interval(right: int, count: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's interval of a share, 95 % by default: honest for few samples and near 0 or 1.

    Args:
        right: samples that count.
        count: all samples, at least 1.
        z: standard normal quantile of the confidence wanted.
    """
    assert 0 <= right <= count, (right, count)
    assert count > 0
    share = right / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    spread = share * (1 - share) / count + z * z / (4 * count * count)
    half = z * math.sqrt(spread) / (1 + z * z / count)
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(values: Sequence[float], z: float = 1.959964) -> tuple[float, float]:
    """Interval of a mean over rows, by the normal approximation.

    Args:
        values: one value a row (for several answers a row: their mean, since the answers to
            one prompt are not independent).
        z: standard normal quantile of the confidence wanted.
    """
    count = len(values)
    mean = sum(values) / count
    if count == 1:
        return -math.inf, math.inf
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    half = z * math.sqrt(variance / count)
    return mean - half, mean + half
