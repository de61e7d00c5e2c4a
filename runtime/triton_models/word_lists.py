"""Word lists and biases between their wire form and token sequences.

Invariant: `unpack(pack(words)) == words`. A word list is INT32 [2, n]: row 0 the ids of all words one after another,
row 1 each word's end in it; zeros and -1 fill what is left. Must not know models or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gptoss_trt.client.protocol import WORD_OFFSET_PADDING
from gptoss_trt.runtime.triton_models.inputs import RefusalError

Words = Sequence[Sequence[int]]


def pack(batch: Sequence[Words]) -> NDArray[np.int32]:
    """INT32 [B, 2, n] of each row's words; n is the longest row's, 0 when no row has a word."""
    flat = [[token for word in words for token in word] for words in batch]
    length = max((max(len(ids), len(words)) for ids, words in zip(flat, batch, strict=True)), default=0)
    packed = np.zeros((len(batch), 2, length), dtype=np.int32)
    packed[:, 1] = WORD_OFFSET_PADDING
    for row, (ids, words) in enumerate(zip(flat, batch, strict=True)):
        packed[row, 0, : len(ids)] = ids
        packed[row, 1, : len(words)] = np.cumsum([len(word) for word in words], dtype=np.int32)
    return packed


def unpack(name: str, packed: NDArray[Any]) -> tuple[tuple[int, ...], ...]:
    """The words of one row [2, n]. Raises RefusalError when the offsets are no word ends inside the ids."""
    ids, offsets = packed[0].tolist(), packed[1].tolist()
    words: list[tuple[int, ...]] = []
    start = 0
    for end in offsets:
        if end == WORD_OFFSET_PADDING:
            break
        if not start < end <= len(ids):
            raise RefusalError(
                f"{name}: word {len(words)} ends at {end}; it must lie after {start} and within the {len(ids)} ids"
            )
        words.append(tuple(ids[start:end]))
        start = end
    return tuple(words)


def dense_bias(words: Words, weights: Sequence[float], vocab_size: int) -> NDArray[np.float32]:
    """FP32 [vocab_size]: each id of a word gets the word's weight added. Raises RefusalError for unequal lengths."""
    if len(words) != len(weights):
        raise RefusalError(f"{len(words)} embedding bias words came with {len(weights)} weights; they must be as many")
    bias = np.zeros(vocab_size, dtype=np.float32)
    for word, weight in zip(words, weights, strict=True):
        np.add.at(bias, np.asarray(word, dtype=np.int64), np.float32(weight))
    return bias


def sparse_bias(name: str, dense: NDArray[Any], vocab_size: int) -> tuple[tuple[int, float], ...]:
    """(id, bias) of the ids whose bias is not 0; an empty tensor asks for nothing.

    Raises RefusalError when the tensor is not one value an id or holds NaN or an infinity.
    """
    if dense.size == 0:
        return ()
    if dense.size != vocab_size:
        raise RefusalError(f"{name} has {dense.size} values; it must have one for each of the {vocab_size} ids")
    if not np.isfinite(dense).all():
        raise RefusalError(f"{name} holds a value that is not finite")
    ids = np.flatnonzero(dense)
    return tuple(zip(ids.tolist(), dense[ids].tolist(), strict=True))
