"""The typed surface of every client: text, tokens and chat, streamed or whole, sync and asyncio.

Invariant: both surfaces offer the same methods with the same arguments. Must not know a transport: subclasses open
record sources and answer health questions.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from gptoss_trt.client.answers import (
    Chunk,
    TextPiece,
    TokenPiece,
    chat_chunks,
    chat_message,
    text_pieces,
    token_pieces,
)
from gptoss_trt.client.errors import ServerError
from gptoss_trt.client.requests import GREEDY, Call, Sampling, Values, chat_values, text_values, token_values
from gptoss_trt.client.streams import AsyncRecordSource, AsyncStream, RecordSource, Stream

READY_POLL_S = 0.1


def new_call(model: str, values: Values, request_id: str | None, timeout_s: float | None) -> Call:
    """A call with the caller's request id, or a random one."""
    return (
        Call(model, values, timeout_s=timeout_s) if request_id is None else Call(model, values, request_id, timeout_s)
    )


def _not_ready(models: Sequence[str], timeout_s: float, last: ServerError | None) -> ServerError:
    what = f"models {', '.join(models)}" if models else "the server"
    cause = f"; last answer: {last.status}: {last.message}" if last else ""
    return ServerError("DEADLINE_EXCEEDED", f"{what} not ready after {timeout_s:g} s{cause}")


class Client(ABC):
    """A synchronous client; safe to use from several threads. Every method that asks raises ServerError."""

    @abstractmethod
    def open(self, call: Call) -> RecordSource:
        """Sends the call; its responses come from the source."""

    @abstractmethod
    def ready(self, model: str | None = None) -> bool:
        """Whether the server (or one model) takes requests now. Raises ServerError when it cannot be reached."""

    @abstractmethod
    def close(self) -> None:
        """Closes the connection; streams still open are cancelled."""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def wait_ready(self, models: Sequence[str] = (), timeout_s: float = 120.0) -> None:
        """Waits until server and models take requests. Raises ServerError (DEADLINE_EXCEEDED) with the cause."""
        deadline = time.monotonic() + timeout_s
        last: ServerError | None = None
        while True:
            try:
                if self.ready() and all(self.ready(model) for model in models):
                    return
            except ServerError as error:
                last = error
            if time.monotonic() >= deadline:
                raise _not_ready(models, timeout_s, last)
            time.sleep(READY_POLL_S)

    def stream_text(
        self,
        prompt: str,
        max_tokens: int,
        sampling: Sampling = GREEDY,
        *,
        model: str = "ensemble",
        stop_words: Sequence[str] = (),
        bad_words: Sequence[str] = (),
        extra: Mapping[str, Any] | None = None,
        stream: bool = True,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Stream[TextPiece]:
        """The continuation of a raw prompt, piece by piece; the prompt is not repeated. `extra` adds tensors."""
        values = text_values(
            prompt, max_tokens, sampling, stream=stream, stop_words=stop_words, bad_words=bad_words, extra=extra
        )
        call = new_call(model, values, request_id, timeout_s)
        return Stream(self.open(call), text_pieces, call.request_id)

    def stream_tokens(
        self,
        input_ids: Sequence[int],
        max_tokens: int,
        sampling: Sampling = GREEDY,
        *,
        model: str = "tensorrt_llm",
        stop_sequences: Sequence[Sequence[int]] = (),
        bad_sequences: Sequence[Sequence[int]] = (),
        extra: Mapping[str, Any] | None = None,
        stream: bool = True,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Stream[TokenPiece]:
        """The continuation of token ids, piece by piece (a piece holds one token or more). `extra` adds tensors."""
        values = token_values(
            input_ids,
            max_tokens,
            sampling,
            stream=stream,
            stop_sequences=stop_sequences,
            bad_sequences=bad_sequences,
            extra=extra,
        )
        call = new_call(model, values, request_id, timeout_s)
        return Stream(self.open(call), token_pieces, call.request_id)

    def stream_chat(
        self,
        body: Mapping[str, Any],
        *,
        model: str = "chat",
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Stream[Chunk]:
        """The chunks of a /v1/chat/completions body (or a /v1/completions body with model="completions")."""
        call = new_call(model, chat_values(body, stream=True), request_id, timeout_s)
        return Stream(self.open(call), chat_chunks, call.request_id)

    def generate_text(self, prompt: str, max_tokens: int, sampling: Sampling = GREEDY, **options: Any) -> str:
        """The whole continuation of a raw prompt; options as in stream_text."""
        with self.stream_text(prompt, max_tokens, sampling, stream=False, **options) as pieces:
            return "".join(piece.text for piece in pieces)

    def generate_tokens(
        self, input_ids: Sequence[int], max_tokens: int, sampling: Sampling = GREEDY, **options: Any
    ) -> list[int]:
        """All new token ids; options as in stream_tokens."""
        with self.stream_tokens(input_ids, max_tokens, sampling, stream=False, **options) as pieces:
            return [token for piece in pieces for token in piece.ids]

    def chat(self, body: Mapping[str, Any], *, request_id: str | None = None, timeout_s: float | None = None) -> Chunk:
        """The message (content, reasoning_content, tool_calls) of a body of /v1/chat/completions, not streamed."""
        call = new_call("chat", chat_values(body, stream=False), request_id, timeout_s)
        with Stream(self.open(call), chat_chunks, call.request_id) as chunks:
            return chat_message(_only(list(chunks)))


class AsyncClient(ABC):
    """The asyncio client; belongs to one event loop. Every method that asks raises ServerError."""

    @abstractmethod
    def open(self, call: Call) -> AsyncRecordSource:
        """Prepares the call, which is sent when its first response is asked for."""

    @abstractmethod
    async def ready(self, model: str | None = None) -> bool:
        """Whether the server (or one model) takes requests now. Raises ServerError when it cannot be reached."""

    @abstractmethod
    async def close(self) -> None:
        """Closes the connection; streams still open are cancelled."""

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.close()

    async def wait_ready(self, models: Sequence[str] = (), timeout_s: float = 120.0) -> None:
        """Waits until server and models take requests. Raises ServerError (DEADLINE_EXCEEDED) with the cause."""
        deadline = time.monotonic() + timeout_s
        last: ServerError | None = None
        while True:
            try:
                if await self.ready() and all([await self.ready(model) for model in models]):
                    return
            except ServerError as error:
                last = error
            if time.monotonic() >= deadline:
                raise _not_ready(models, timeout_s, last)
            await asyncio.sleep(READY_POLL_S)

    def stream_text(
        self,
        prompt: str,
        max_tokens: int,
        sampling: Sampling = GREEDY,
        *,
        model: str = "ensemble",
        stop_words: Sequence[str] = (),
        bad_words: Sequence[str] = (),
        extra: Mapping[str, Any] | None = None,
        stream: bool = True,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncStream[TextPiece]:
        """The continuation of a raw prompt, piece by piece; the prompt is not repeated. `extra` adds tensors."""
        values = text_values(
            prompt, max_tokens, sampling, stream=stream, stop_words=stop_words, bad_words=bad_words, extra=extra
        )
        call = new_call(model, values, request_id, timeout_s)
        return AsyncStream(self.open(call), text_pieces, call.request_id)

    def stream_tokens(
        self,
        input_ids: Sequence[int],
        max_tokens: int,
        sampling: Sampling = GREEDY,
        *,
        model: str = "tensorrt_llm",
        stop_sequences: Sequence[Sequence[int]] = (),
        bad_sequences: Sequence[Sequence[int]] = (),
        extra: Mapping[str, Any] | None = None,
        stream: bool = True,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncStream[TokenPiece]:
        """The continuation of token ids, piece by piece (a piece holds one token or more). `extra` adds tensors."""
        values = token_values(
            input_ids,
            max_tokens,
            sampling,
            stream=stream,
            stop_sequences=stop_sequences,
            bad_sequences=bad_sequences,
            extra=extra,
        )
        call = new_call(model, values, request_id, timeout_s)
        return AsyncStream(self.open(call), token_pieces, call.request_id)

    def stream_chat(
        self,
        body: Mapping[str, Any],
        *,
        model: str = "chat",
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncStream[Chunk]:
        """The chunks of a /v1/chat/completions body (or a /v1/completions body with model="completions")."""
        call = new_call(model, chat_values(body, stream=True), request_id, timeout_s)
        return AsyncStream(self.open(call), chat_chunks, call.request_id)

    async def generate_text(self, prompt: str, max_tokens: int, sampling: Sampling = GREEDY, **options: Any) -> str:
        """The whole continuation of a raw prompt; options as in stream_text."""
        async with self.stream_text(prompt, max_tokens, sampling, stream=False, **options) as pieces:
            return "".join([piece.text async for piece in pieces])

    async def generate_tokens(
        self, input_ids: Sequence[int], max_tokens: int, sampling: Sampling = GREEDY, **options: Any
    ) -> list[int]:
        """All new token ids; options as in stream_tokens."""
        async with self.stream_tokens(input_ids, max_tokens, sampling, stream=False, **options) as pieces:
            return [token async for piece in pieces for token in piece.ids]

    async def chat(
        self, body: Mapping[str, Any], *, request_id: str | None = None, timeout_s: float | None = None
    ) -> Chunk:
        """The message (content, reasoning_content, tool_calls) of a body of /v1/chat/completions, not streamed."""
        call = new_call("chat", chat_values(body, stream=False), request_id, timeout_s)
        async with AsyncStream(self.open(call), chat_chunks, call.request_id) as chunks:
            return chat_message(_only([chunk async for chunk in chunks]))


def _only(completions: list[Chunk]) -> Chunk:
    if len(completions) != 1:
        raise ServerError("INTERNAL", f"{len(completions)} completions to one request that was not streamed")
    return completions[0]
