"""Text <-> token ids of gpt-oss, on openai-harmony's encoder and the shipped vocabulary.

Owns the one encoder of a process. Invariant: no network is touched, whatever the environment says. Must not know
channels, messages or requests. openai-harmony was chosen over tiktoken: the serving environment has it anyway, it loads
in about 0.4 s and encodes as fast.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from gptoss_trt.build_engine import vocabulary

_load_lock = threading.Lock()


@contextmanager
def _encodings_base(folder: str) -> Iterator[None]:
    """Points openai-harmony at `folder` for the duration of the load, and leaves the environment as it was."""
    name = vocabulary.TIKTOKEN_VARIABLE
    before = os.environ.get(name)
    os.environ[name] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class Tokenizer:
    """The o200k_harmony encoding. Use `Tokenizer.load()`: one instance serves a whole process and all its threads."""

    def __init__(self, encoding: Any) -> None:
        self._encoding = encoding
        ordinary: tuple[bytes | None, ...] = vocabulary.token_bytes()
        self.pieces: tuple[bytes | None, ...] = ordinary + (None,) * (
            vocabulary.VOCABULARY_SIZE - vocabulary.ORDINARY_TOKENS
        )
        """id -> bytes, None for a special token: what hot loops index without a call."""
        self.special_tokens: dict[str, int] = vocabulary.SPECIAL_TOKENS
        self.special_ids: frozenset[int] = frozenset(vocabulary.SPECIAL_TOKENS.values())
        self.special_texts: dict[int, str] = {number: text for text, number in vocabulary.SPECIAL_TOKENS.items()}
        self._special_names = frozenset(vocabulary.SPECIAL_TOKENS)

    @classmethod
    def load(cls) -> Tokenizer:
        """The process's tokenizer, made on the first call (about 0.7 s). Raises VocabularyError or ImportError."""
        with _load_lock:
            return _load()

    @property
    def vocabulary_size(self) -> int:
        return len(self.pieces)

    def encode_ordinary(self, text: str) -> list[int]:
        """Ids of `text`, in which the text of a special token is text like any other: no special id ever comes out."""
        ids: list[int] = self._encoding.encode(text, disallowed_special=())
        return ids

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, in which the text of a special token becomes that token."""
        ids: list[int] = self._encoding.encode(text, allowed_special=self._special_names, disallowed_special=())
        return ids

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

        stream = TextStream(skip_special_tokens=skip_special_tokens)
        return stream.push(token_ids) + stream.finish()


@functools.lru_cache(maxsize=1)
def _load() -> Tokenizer:
    import openai_harmony

    folder = vocabulary.ensure_tiktoken_dir()
    with _encodings_base(str(folder)):
        encoding = openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    return Tokenizer(encoding)
