"""What servers answer, typed: pieces of text and of tokens, and the chunks of a chat.

Invariant: a piece holds exactly what one response said; nothing is merged or inferred. Must not know a transport: a
`Record` is a response's outputs by name, flattened to Python lists.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gptoss_trt.client.errors import ServerError, error_of_body

Record = dict[str, list[Any]]


@dataclass(frozen=True)
class TextPiece:
    """Text of one response for one (prompt, sequence), and the counts it carried (None: not in this response)."""

    text: str
    sequence_index: int = 0
    batch_index: int = 0
    finish_reason: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True)
class TokenPiece:
    """Token ids of one response for one (prompt, sequence), and the counts it carried (None: not in this response)."""

    ids: tuple[int, ...]
    sequence_index: int = 0
    batch_index: int = 0
    finish_reason: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


Chunk = dict[str, Any]


def _first(record: Record, name: str) -> Any:
    values = record.get(name)
    return values[0] if values else None


def _index(record: Record, name: str) -> int:
    return int(_first(record, name) or 0)


def text_pieces(record: Record) -> list[TextPiece]:
    """The text of a response: none when it has no `text_output` (the empty final response), else one a sequence."""
    texts = record.get("text_output", [])
    return [
        TextPiece(
            text=text,
            sequence_index=_index(record, "sequence_index") + offset,
            batch_index=_index(record, "batch_index"),
            finish_reason=_first(record, "finish_reason") or None,
            input_tokens=_first(record, "num_input_tokens"),
            output_tokens=_first(record, "num_output_tokens"),
        )
        for offset, text in enumerate(texts)
    ]


def token_pieces(record: Record) -> list[TokenPiece]:
    """The tokens of a response: none when it has no `output_ids`, else one a sequence, cut to `sequence_length`."""
    if "output_ids" not in record:
        return []
    ids, lengths = record["output_ids"], record.get("sequence_length", [len(record["output_ids"])])
    row = len(ids) // max(1, len(lengths))
    return [
        TokenPiece(
            ids=tuple(ids[offset * row : offset * row + length]),
            sequence_index=_index(record, "sequence_index") + offset,
            batch_index=_index(record, "batch_index"),
            finish_reason=_first(record, "finish_reason") or None,
            input_tokens=_first(record, "num_input_tokens"),
            output_tokens=_first(record, "num_output_tokens"),
        )
        for offset, length in enumerate(lengths)
    ]


def chat_chunks(record: Record) -> Iterator[Chunk]:
    """The chunks (or the one completion) of a response of `chat`; raises ServerError where one is an error."""
    for text in record.get("response", []):
        chunk = json.loads(text)
        if "error" in chunk:
            raise error_of_body(chunk)
        yield chunk


def chat_message(completion: Chunk) -> Chunk:
    """The message of a non-streamed completion's first choice. Raises ServerError when it has none."""
    choices = completion.get("choices") or []
    if not choices or "message" not in choices[0]:
        raise ServerError("INTERNAL", f"a completion without a message: {json.dumps(completion)[:200]}")
    message: Chunk = choices[0]["message"]
    return message
