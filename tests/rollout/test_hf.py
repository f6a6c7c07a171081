from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain_cli.errors import RunError
from posttrain_cli.rollout.hf import HFEngine, cut_answer, pad_left
from posttrain_cli.rollout.protocol import Completion, Request, RolloutEngine, Sampling

END = 3
GREEDY = Sampling(max_new_tokens=12, temperature=0.0, top_p=1.0, top_k=0, n=1, seed=42)
WARM = Sampling(max_new_tokens=12, temperature=0.9, top_p=0.95, top_k=200, n=3, seed=42)
REQUESTS = [Request(row, list(range(10 + row, 13 + row + row * 5 % 17))) for row in range(10)]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(tiny_factory: Callable[..., Path], request: pytest.FixtureRequest) -> Any:
    from transformers import AutoModelForCausalLM

    folder = tiny_factory(architecture=request.param, tied=False, seed=3)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def engine(model: Any, batch_size: int = 8, stop_ids: tuple[int, ...] = (END,)) -> HFEngine:
    return HFEngine(model, frozenset(stop_ids), pad_id=0, batch_size=batch_size)


def first_row(answers: Iterator[list[Completion]]) -> list[Completion]:
    return next(iter(answers))


def ids(answers: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[answer.ids for answer in row] for row in answers]


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_answers_do_not_depend_on_batch_or_order(model: Any, sampling: Sampling) -> None:
    alone = list(engine(model, 1).generate(REQUESTS, sampling))
    for size in (4, 64):
        batched = list(engine(model, size).generate(REQUESTS, sampling))
        assert ids(batched) == ids(alone)
        for row, other in zip(batched, alone, strict=True):
            for answer, expected in zip(row, other, strict=True):
                assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    turned = list(engine(model, 4).generate(REQUESTS[::-1], sampling))[::-1]
    assert ids(turned) == ids(alone)


def test_greedy_is_the_argmax_of_whole_forward_passes(model: Any) -> None:
    answers = list(engine(model).generate(REQUESTS[:3], GREEDY))
    for request, (answer,) in zip(REQUESTS[:3], answers, strict=True):
        context = [*request.prompt_ids]
        for token, logprob in zip(answer.ids, answer.logprobs, strict=True):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([context])).logits[0, -1]
            assert token == int(logits.argmax())
            assert logprob == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-5)
            context.append(token)


def test_answers_of_one_prompt_differ_and_follow_the_seed(model: Any) -> None:
    first = ids(list(engine(model).generate(REQUESTS, WARM)))
    assert all(len(set(row)) == 3 for row in first)
    assert ids(list(engine(model).generate(REQUESTS, WARM))) == first
    other = ids(list(engine(model).generate(REQUESTS, replace(WARM, seed=43))))
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_answers_end_at_the_first_stop_id_and_not_before(model: Any) -> None:
    free = list(engine(model, stop_ids=()).generate(REQUESTS, WARM))
    assert {answer.finish for row in free for answer in row} == {"length"}
    target = free[0][0].ids[4]
    stopped = list(engine(model, stop_ids=(target,)).generate(REQUESTS, WARM))
    for row, other in zip(free, stopped, strict=True):
        for answer, cut in zip(row, other, strict=True):
            if target in answer.ids:
                assert cut.ids == answer.ids[: answer.ids.index(target) + 1]
                assert cut.finish == "stop"
            else:
                assert (cut.ids, cut.finish) == (answer.ids, "length")
            assert len(cut.logprobs) == len(cut.ids)


def test_nothing_of_the_models_own_generation_config_gets_in(model: Any) -> None:
    from transformers import GenerationConfig

    plain = ids(list(engine(model).generate(REQUESTS, WARM)))
    own = GenerationConfig(
        do_sample=True,
        temperature=0.01,
        top_k=1,
        repetition_penalty=9.0,
        min_new_tokens=11,
        suppress_tokens=[token for row in plain for answer in row for token in answer[:2]],
        no_repeat_ngram_size=1,
        max_length=5,
        num_beams=3,
    )
    before, model.generation_config = model.generation_config, own
    model.train()
    try:
        assert ids(list(engine(model).generate(REQUESTS, WARM))) == plain
        assert model.generation_config is own
        assert model.training
    finally:
        model.generation_config = before
        model.eval()


def test_a_row_stops_at_the_end_of_the_context(tiny_factory: Callable[..., Path]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_factory(), dtype=torch.float32)
    model.config.max_position_embeddings = 20
    requests = [Request(0, range(5, 22)), Request(1, range(5, 10))]
    (long,), (short,) = engine(model, stop_ids=()).generate(requests, GREEDY)
    assert (len(long.ids), long.finish) == (3, "length")
    assert (len(short.ids), short.finish) == (12, "length")
    with pytest.raises(AssertionError, match="row 7: 20 of 20 tokens"):
        list(engine(model).generate([Request(7, range(20))], GREEDY))


def test_streaming_gives_the_same_ids_and_stops_when_closed(model: Any) -> None:
    for sampling in (GREEDY, replace(WARM, n=1)):
        (whole,) = first_row(engine(model, stop_ids=()).generate(REQUESTS[2:3], sampling))
        assert tuple(engine(model, stop_ids=()).stream(REQUESTS[2], sampling)) == whole.ids
    stream = engine(model, stop_ids=()).stream(
        REQUESTS[2], replace(GREEDY, max_new_tokens=1_000_000)
    )
    (first,) = first_row(engine(model).generate(REQUESTS[2:3], GREEDY))
    assert next(stream) == first.ids[0]
    stream.close()


def test_a_failure_while_streaming_reaches_the_reader(model: Any) -> None:
    with pytest.raises(IndexError):
        list(engine(model).stream(Request(0, [1_000_000]), GREEDY))


def test_out_of_memory_says_what_to_lower(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(**_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model, "generate", exhausted)
    with pytest.raises(
        RunError, match="out of memory with 2 sequences of up to 20 tokens"
    ) as caught:
        list(engine(model, 2).generate(REQUESTS[:2], GREEDY))
    assert caught.value.hint == "lower --batch-size or --max-new-tokens"


def test_engine_keeps_to_the_protocol(model: Any) -> None:
    kept: RolloutEngine = engine(model)
    assert next(iter(kept.generate(REQUESTS[:1], GREEDY)))


def test_padding_goes_to_the_left() -> None:
    padded, mask = pad_left([[7, 8, 9], [5]], pad_id=1)
    assert padded.tolist() == [[7, 8, 9], [1, 1, 5]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_cut_answer_keeps_the_end_token_within_the_budget() -> None:
    stops = frozenset({9})
    values = [0.0, -1.0, -2.0, -3.0]
    assert cut_answer([4, 9, 9, 5], values, 4, stops) == Completion((4, 9), (0.0, -1.0), "stop")
    assert cut_answer([4, 5, 9, 5], values, 2, stops) == Completion((4, 5), (0.0, -1.0), "length")
