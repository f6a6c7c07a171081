from __future__ import annotations

import numpy as np
import pytest

from posttrain_cli.data.split import group_hash, validation_rows
from posttrain_cli.errors import DataError


def groups(*names: str) -> np.ndarray:
    return np.array([group_hash(name) for name in names], np.uint64)


def test_rows_of_one_prompt_stay_together_and_the_number_is_exact() -> None:
    names = [f"prompt {i % 70}" for i in range(100)]  # 30 groups of two rows, 40 of one
    chosen = validation_rows(groups(*names), 17, seed=1)
    assert chosen.sum() == 17
    left = {name for name, here in zip(names, chosen, strict=True) if here}
    right = {name for name, here in zip(names, chosen, strict=True) if not here}
    assert not left & right


def test_the_choice_depends_on_the_seed_and_not_on_the_order() -> None:
    names = [f"prompt {i}" for i in range(200)]
    one = validation_rows(groups(*names), 20, seed=1)
    again = validation_rows(groups(*names[::-1]), 20, seed=1)
    other = validation_rows(groups(*names), 20, seed=2)
    assert (one == again[::-1]).all()
    assert (one != other).any()


def test_case_and_white_space_do_not_part_prompts() -> None:
    assert group_hash("What  is\n2 + 2?") == group_hash(" what is 2 + 2? ")
    assert group_hash("a") != group_hash("b")


@pytest.mark.parametrize(("names", "wanted"), [(["a", "a", "a"], 1), (["a"], 1), (["a", "b"], 2)])
def test_a_split_with_an_empty_side_is_refused(names: list[str], wanted: int) -> None:
    with pytest.raises(DataError, match="cannot be split into") as caught:
        validation_rows(groups(*names), wanted, seed=0)
    assert "same prompt stay on one side" in caught.value.hint
