from __future__ import annotations

import random

import numpy as np

from posttrain_cli.data.dedup import SLOTS, first_near, signature

WORDS = [f"word{i}" for i in range(3000)]


def document(random_: random.Random, words: int = 120) -> list[str]:
    return random_.choices(WORDS, k=words)


def test_edits_of_two_percent_are_near_and_others_are_not() -> None:
    chosen = random.Random(3)
    texts: list[str] = []
    source: list[int] = []
    for _ in range(600):
        words = document(chosen)
        texts.append(" ".join(words))
        source.append(len(texts) - 1)
        if chosen.random() < 0.5:
            for place in chosen.sample(range(120), 2):
                words[place] = chosen.choice(WORDS)
            texts.append(" ".join(words))
            source.append(len(texts) - 2)
    first = first_near(np.stack([signature(text) for text in texts])).tolist()
    planted = [i for i in range(len(texts)) if source[i] != i]
    found = sum(first[i] == source[i] for i in planted)
    assert found / len(planted) >= 0.98
    assert all(first[i] == i for i in range(len(texts)) if source[i] == i)


def test_white_space_does_not_make_rows_differ() -> None:
    one = signature("The quick brown fox\n\njumps over the lazy dog, again and again.")
    other = signature("  The quick brown fox jumps over  the lazy dog, again and again.\n")
    assert (one == other).all()
    assert one.shape == (SLOTS,)


def test_short_texts_are_near_only_when_equal() -> None:
    texts = ["", "yes", "no", "yes", "yes please", "日本語", "日本語"]
    first = first_near(np.stack([signature(text) for text in texts])).tolist()
    assert first == [0, 1, 2, 1, 4, 5, 5]


def test_chains_of_near_rows_are_one_group_led_by_the_first() -> None:
    chosen = random.Random(5)
    words = document(chosen, 200)
    texts = []
    for step in range(6):
        texts.append(" ".join(words))
        words[step * 30] = "changed"
    first = first_near(np.stack([signature(text) for text in texts])).tolist()
    assert first == [0] * 6
