"""Everything random that is not decided by coordinates: the seeds, and their saved states.

States are JSON (numbers and hexadecimal text), never pickles.
"""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch


def set_seeds(seed: int) -> None:
    """Seed Python, NumPy, torch and CUDA, and name the seed of Python's hashes.

    `PYTHONHASHSEED` only works on interpreters that are started with it, which the launcher
    does for its workers; here it reaches whatever they start in turn.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)
    os.environ["PYTHONHASHSEED"] = str(seed)


def make_deterministic() -> None:
    """Allow only kernels that give the same bits every time.

    Strict, because a warning-only mode leaves attention's backward nondeterministic. New tensors
    are not filled with NaN: that costs time and changes no result.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def rng_state(device: torch.device) -> dict[str, Any]:
    """The states of Python's, NumPy's, torch's and (on a GPU) CUDA's generators, for JSON."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": _hex(torch.get_rng_state()),
    }
    if device.type == "cuda":
        state["cuda"] = _hex(torch.cuda.get_rng_state(device))
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Put back what `rng_state` returned; a CUDA state is ignored on a CPU."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_tensor(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_tensor(state["cuda"]), device)


def _hex(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
