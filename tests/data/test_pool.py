from __future__ import annotations

import operator
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from posttrain_cli.data.pool import in_order
from posttrain_cli.errors import RunError


def adder(number: int) -> Callable[[Any], Any]:
    return partial(operator.add, number)


def killer() -> Callable[[Any], Any]:
    return partial(os.kill, os.getpid())


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_the_order_of_the_items(workers: int) -> None:
    assert list(in_order(partial(adder, 10), range(30), workers)) == list(range(10, 40))


def test_items_are_taken_as_they_are_needed() -> None:
    taken: list[int] = []

    def items() -> Any:
        for number in range(100):
            taken.append(number)
            yield number

    results = in_order(partial(adder, 0), items(), 2)
    assert next(results) == 0
    assert len(taken) <= 4
    results.close()  # type: ignore[attr-defined]


def test_a_killed_worker_is_told_with_its_likely_cause() -> None:
    with pytest.raises(RunError, match="a worker process was killed") as caught:
        list(in_order(killer, [signal.SIGKILL] * 3, 2))
    assert "--workers 1" in caught.value.hint


def test_a_mistake_in_the_set_up_shows_at_once() -> None:
    with pytest.raises(ZeroDivisionError):
        list(in_order(partial(operator.truediv, 1, 0), [1], 2))
