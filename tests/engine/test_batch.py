from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from posttrain_cli.engine.batch import Batch, make_batch

IDS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14]]
MASKS = [[0, 1, 1], [1, 1], [0, 0, 0, 0], [1]]


class Memory:
    """Samples in memory, read only as the mapped ones are."""

    def ids(self, sample: int) -> NDArray[np.int32]:
        array = np.array(IDS[sample], np.int32)
        array.flags.writeable = False
        return array

    def mask(self, sample: int) -> NDArray[np.bool_]:
        array = np.array(MASKS[sample], np.bool_)
        array.flags.writeable = False
        return array


def make(*bins: list[int], **options: Any) -> Batch:
    defaults: dict[str, Any] = {"seed": 42, "step": 3, "device": torch.device("cpu")}
    arrays = [np.array(samples, np.int64) for samples in bins]
    return make_batch(arrays, Memory(), **{**defaults, **options})


def test_samples_lie_end_to_end_without_padding() -> None:
    batch = make([0, 1], [2])
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 10, 11, 12, 13]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 9]
    assert batch.max_seqlen == 4
    assert batch.tokens == 9
    assert batch.cu_seqlens.dtype == batch.keys.dtype == torch.int32
    assert batch.input_ids.dtype == batch.position_ids.dtype == batch.labels.dtype == torch.int64


def test_labels_are_trained_tokens_and_positions_the_places_before_them() -> None:
    batch = make([0, 1], [2])
    assert batch.labels.tolist() == [6, 7, 9]  # 8 begins a sample: nothing predicts it
    assert batch.positions.tolist() == [0, 1, 3]
    assert torch.equal(batch.input_ids[0, batch.positions + 1], batch.labels)


def test_no_label_is_predicted_from_another_sample() -> None:
    batch = make([1, 1, 3, 0])
    edges = batch.cu_seqlens.tolist()
    assert not {edge - 1 for edge in edges} & set(batch.positions.tolist())
    assert batch.labels.tolist() == [9, 9, 6, 7]


def test_bins_and_rows_do_not_change_what_a_sample_is_given() -> None:
    together, apart = make([0, 1, 2]), [make([n]) for n in range(3)]
    for name in ("input_ids", "position_ids", "labels", "keys"):
        parts = [getattr(batch, name).flatten() for batch in apart]
        assert getattr(together, name).flatten().tolist() == torch.cat(parts).tolist()
    assert make([2, 0]).keys.tolist() == torch.cat([apart[2].keys, apart[0].keys]).tolist()
    assert make([0], step=4).keys.tolist() != apart[0].keys.tolist()
    assert make([0], seed=43).keys.tolist() != apart[0].keys.tolist()


@pytest.mark.parametrize("bins", [[], [[2]]])
def test_a_batch_may_have_no_trained_token(bins: list[list[int]]) -> None:
    batch = make(*bins)
    assert batch.labels.tolist() == batch.positions.tolist() == []
    assert batch.tokens == (4 if bins else 0)  # a stand-in counts for nothing


def test_a_stand_in_is_a_sound_row() -> None:
    batch = make()
    assert batch.input_ids.shape == batch.position_ids.shape == (1, 2)
    assert batch.cu_seqlens.tolist() == [0, 2]
    assert batch.keys.shape == (2,)
    assert batch.max_seqlen == 2
