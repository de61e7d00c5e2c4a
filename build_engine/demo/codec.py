"""Text to token ids for the demo's training data, with the shipped vocabulary and tiktoken's BPE.

Invariant: special tokens come only from pieces marked special; text never becomes one. A piece's ids depend on the
piece alone, so they are cached. Knows no conversations' meaning.
"""

from __future__ import annotations

from functools import lru_cache

import tiktoken

from gptoss_trt.build_engine.vocabulary import SPLIT_PATTERN, load_ranks

SPECIAL_IDS = {
    "startoftext": 199998,
    "endoftext": 199999,
    "return": 200002,
    "constrain": 200003,
    "channel": 200005,
    "start": 200006,
    "end": 200007,
    "message": 200008,
    "call": 200012,
}


class Codec:
    """Encodes pieces of text to o200k_harmony ids."""

    def __init__(self) -> None:
        ranks = load_ranks()
        self._encoding = tiktoken.Encoding(
            "o200k_harmony", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={}
        )
        self._bytes = {rank: token for token, rank in ranks.items()}
        self.encode = lru_cache(maxsize=200_000)(self._encode)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._encoding.encode_ordinary(text))

    def pieces(self, text: str) -> list[str]:
        """The text of each token; only for text whose tokens are whole characters."""
        return [self._bytes[token].decode("utf-8") for token in self.encode(text)]

    def decode(self, ids: list[int]) -> str:
        names = {number: f"<|{name}|>" for name, number in SPECIAL_IDS.items()}
        return b"".join(self._bytes.get(i) or names.get(i, f"<|{i}|>").encode() for i in ids).decode("utf-8", "replace")
