"""Token ids to text, incrementally.

Owns the bytes of a character that is not complete yet. Invariant: the text that has come out is the same for any
chunking of the same ids. Must not know Harmony: a special token is only something to skip or to spell out.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from gptoss_trt.runtime.harmony.tokenizer import Tokenizer

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class TextStream:
    """Decodes one stream of ids. Whole characters only; U+FFFD once for each run of bytes that cannot become one.

    A special token ends a character that is still open: bytes on its two sides never join.
    """

    def __init__(self, skip_special_tokens: bool = True, tokenizer: Tokenizer | None = None) -> None:
        self._skip = skip_special_tokens
        self._tokenizer = tokenizer or Tokenizer.load()
        self._decoder = _utf8_decoder("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that `token_ids` complete. Raises ValueError for an id outside the vocabulary."""
        pieces = self._tokenizer.pieces
        texts: list[str] = []
        run: list[bytes] = []
        for token_id in token_ids:
            if not 0 <= token_id < len(pieces):
                self._tokenizer.check_id(token_id)
            piece = pieces[token_id]
            if piece is not None:
                run.append(piece)
                continue
            texts.append(self._decoder.decode(b"".join(run), final=True))
            run.clear()
            if not self._skip:
                texts.append(self._tokenizer.special_texts[token_id])
        if run:
            texts.append(self._decoder.decode(b"".join(run)))
        return "".join(texts)

    def finish(self) -> str:
        """What is left: U+FFFD for a character that never became whole, else nothing."""
        return self._decoder.decode(b"", final=True)
