"""Text <-> token ids of gpt-oss: tiktoken's encoder on the shipped vocabulary.

Owns the one encoder of a process. Invariant: no network is touched, whatever the environment says. Must not know
channels, messages or requests. openai-harmony holds the same encoder in an older form whose time is quadratic in the
length of one piece: 200,000 letters in a row take it 26 s and tiktoken 0.07 s, so a request could hold a server up.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from gptoss_trt.build_engine import vocabulary

if TYPE_CHECKING:
    import tiktoken

_load_lock = threading.Lock()


class Tokenizer:
    """The o200k_harmony encoding. Use `Tokenizer.load()`: one instance serves a whole process and all its threads."""

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self._encoding = encoding
        ordinary: tuple[bytes | None, ...] = vocabulary.token_bytes()
        self.pieces: tuple[bytes | None, ...] = ordinary + (None,) * len(vocabulary.SPECIAL_TOKENS)
        """id -> bytes, None for a special token: what hot loops index without a call."""
        self.special_tokens: dict[str, int] = vocabulary.SPECIAL_TOKENS
        self.special_ids: frozenset[int] = frozenset(vocabulary.SPECIAL_TOKENS.values())
        self.special_texts: dict[int, str] = {number: text for text, number in vocabulary.SPECIAL_TOKENS.items()}

    @classmethod
    def load(cls) -> Tokenizer:
        """The process's tokenizer, made on the first call (about 0.6 s). Raises VocabularyError or ImportError."""
        with _load_lock:
            return _load()

    def encode_ordinary(self, text: str) -> list[int]:
        """Ids of `text`, in which the text of a special token is text like any other: no special id ever comes out."""
        return self._encoding.encode_ordinary(text)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, in which the text of a special token becomes that token."""
        return self._encoding.encode(text, allowed_special="all")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, a special token's text for its id. Raises ValueError outside the vocabulary."""
        self.check_id(token_id)
        piece = self.pieces[token_id]
        return piece if piece is not None else self.special_texts[token_id].encode()

    def check_id(self, token_id: int) -> None:
        """Raises ValueError when `token_id` is not in the vocabulary."""
        if not 0 <= token_id < len(self.pieces):
            raise ValueError(f"token id {token_id} is outside the vocabulary (0 to {len(self.pieces) - 1})")

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `token_ids`; U+FFFD for bytes that are no character."""
        from gptoss_trt.runtime.harmony.text_stream import TextStream

        stream = TextStream(skip_special_tokens=skip_special_tokens, tokenizer=self)
        return stream.push(token_ids) + stream.finish()


@functools.lru_cache(maxsize=1)
def _load() -> Tokenizer:
    import tiktoken

    encoding = tiktoken.Encoding(
        "o200k_harmony",
        pat_str=vocabulary.SPLIT_PATTERN,
        mergeable_ranks=vocabulary.load_ranks(),
        special_tokens=vocabulary.SPECIAL_TOKENS,
        explicit_n_vocab=vocabulary.VOCABULARY_SIZE,
    )
    return Tokenizer(encoding)
