"""What makes two rows the same: three digests a row, joined into one 128-bit key a row.

A preference row is (prompt, chosen, rejected); its key does not change when the two answers
swap places, and one bit of it says which way round they are. So equal keys are duplicates when
that bit agrees, and contradictions when it does not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from posttrain_cli.data.contract import Contract
from posttrain_cli.data.records import conversation, pair, prompt_messages

Keys128 = NDArray[np.uint64]  # (N, 2); the lowest bit of [:, 1] is the order of the answers

_ODD = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))
_BESIDE_PROMPT = frozenset({"metadata", "id"})

digest = xxhash.xxh3_128_digest
NOTHING = digest(b"")  # where there is no other answer


def row_digests(record: dict[str, Any], contract: Contract) -> tuple[bytes, bytes, bytes]:
    """Digests of the context and of one or two answers of a good record."""
    keys = contract.keys
    if contract.kind == "preference":
        prompt, chosen, rejected = (
            record.get(k) for k in (keys.prompt, keys.chosen, keys.rejected)
        )
        if isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str):
            return digest(prompt.encode()), digest(chosen.encode()), digest(rejected.encode())
        turns = pair(record, keys)
        return _of(turns.prompt), _of(turns.chosen), _of(turns.rejected)
    if contract.kind == "prompt":
        rest = {k: v for k, v in record.items() if k not in _BESIDE_PROMPT}
        rest.pop(keys.found("prompt", record), None)
        rest.pop(keys.found("messages", record), None)
        return _of(prompt_messages(record, keys)), _of(rest), NOTHING
    if record.get(keys.found("messages", record)) is not None:
        return _of(conversation(record, keys)), NOTHING, NOTHING
    texts = (record[keys.found("prompt", record)], record[keys.found("response", record)])
    if isinstance(texts[0], str):
        return digest(texts[0].encode()), digest(texts[1].encode()), NOTHING
    return _of(texts[0]), digest(texts[1].encode()), NOTHING


def row_texts(record: dict[str, Any], contract: Contract) -> list[str]:
    """The texts of a good record that a model sees or learns; none in a row of token ids."""
    keys = contract.keys
    if "input_ids" in record:
        return []
    if contract.kind == "preference":
        turns = pair(record, keys)
        messages = [*turns.prompt, *turns.chosen, *turns.rejected]
    elif contract.kind == "prompt":
        messages = prompt_messages(record, keys)
    else:
        messages = conversation(record, keys)
    return [message["content"] for message in messages]


def join(digests: list[bytes]) -> Keys128:
    """(N, 2) keys of N rows from their 3 N digests; a row of zero bytes has the key 0."""
    parts = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 3, 2)
    context, one, other = parts[:, 0], parts[:, 1], parts[:, 2]
    swapped = one[:, 0] < other[:, 0]
    answers: Keys128 = (one + other) * _ODD[0]  # the same for both orders
    keys: Keys128 = context * _ODD[1] + (answers ^ (answers >> np.uint64(29)))
    keys[:, 1] = (keys[:, 1] & ~np.uint64(1)) | swapped
    keys[~parts.any(axis=(1, 2))] = 0
    return keys


def _of(value: Any) -> bytes:
    """Digest of turns or of other fields, independent of the order of keys."""
    return digest(orjson.dumps(value, option=orjson.OPT_SORT_KEYS, default=str))
