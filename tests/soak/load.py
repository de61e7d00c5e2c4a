"""The clients of a soak: each asks one thing after another, checks what it gets, and counts how it ended.

Invariant: every request started is counted under exactly one outcome. Must not know how the server is run or disturbed;
`Windows` says what may be excused.
"""

from __future__ import annotations

import asyncio
import collections
import random
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import bad_requests
import grpc
import httpx
from questions import Question, Source
from tritonclient.grpc import service_pb2_grpc
from windows import Windows

from gptoss_trt.client.aio import AsyncGrpcSource, AsyncHttpSource
from gptoss_trt.client.answers import Record, chat_chunks, text_pieces, token_pieces
from gptoss_trt.client.errors import ServerError
from gptoss_trt.client.requests import Call
from gptoss_trt.client.streams import AsyncRecordSource
from gptoss_trt.client.tensors import encode_request

CHANNELS = 4
PAUSE_AFTER_ERROR_S = 0.2  # a closed loop against a server that refuses would spin
OUTCOMES = ("answered", "mixed", "lost", "cancelled", "refused", "interrupted")


@dataclass
class Tally:
    """How requests ended, examples of what was wrong, and how long answers took (seconds)."""

    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    errors: collections.Counter[str] = field(default_factory=collections.Counter)
    examples: list[str] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)

    def wrong(self, outcome: str, text: str) -> str:
        if len(self.examples) < 20:
            self.examples.append(f"{outcome}: {text[:400]}")
        return outcome

    def error(self, message: str) -> None:
        self.errors[re.sub(r"\d+", "#", message)[:160]] += 1

    @property
    def requests(self) -> int:
        return sum(self.outcomes.values())


class Seen:
    """What a client has received of one answer."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._parts: dict[str, list[str]] = {"reasoning_content": [], "content": []}
        self._ids: list[int] = []
        self.finished = False
        self.records = 0

    def take(self, record: Record) -> None:
        self.records += 1
        if self._question.kind == "tokens":
            for tokens in token_pieces(record):
                self._ids += tokens.ids
                self.finished = self.finished or tokens.finish_reason is not None
        elif self._question.kind == "text":
            for text in text_pieces(record):
                self._parts["content"].append(text.text)
                self.finished = self.finished or text.finish_reason is not None
        else:
            for chunk in chat_chunks(record):
                self._take_chunk(chunk)

    def _take_chunk(self, chunk: dict[str, object]) -> None:
        for choice in chunk.get("choices") or ():  # type: ignore[attr-defined]
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            for name, parts in self._parts.items():
                parts.append(said.get(name) or "")
            self.finished = self.finished or choice.get("finish_reason") is not None

    @property
    def answer(self) -> str | tuple[int, ...]:
        if self._question.kind == "tokens":
            return tuple(self._ids)
        reasoning, content = ("".join(parts) for parts in self._parts.values())
        return f"{reasoning}|{content}" if self._question.kind == "chat" else content

    def begins_right(self) -> bool:
        """Whether what came so far is the beginning of the answer. A chat's parts are compared one by one."""
        right, seen = self._question.answer, self.answer
        if self._question.kind == "chat":
            pairs = zip(str(seen).split("|", 1), str(right).split("|", 1), strict=True)
            return all(whole.startswith(part) for part, whole in pairs)
        return right[: len(seen)] == seen


class Clients:
    """Opens requests over gRPC and HTTP.

    The gRPC calls leave out the header triton_grpc_error: with it, tritonserver 2.51 dies of signal 11 when a client
    cancels while its error is on the way.
    """

    def __init__(self, grpc_target: str, http_url: str, http_share: float) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        self._channels = [grpc.aio.insecure_channel(grpc_target, options=options) for _ in range(CHANNELS)]
        self._stubs = [service_pb2_grpc.GRPCInferenceServiceStub(channel) for channel in self._channels]
        self._http_share = http_share
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self.http = httpx.AsyncClient(base_url=http_url, limits=limits)

    def open(self, call: Call, generator: random.Random) -> AsyncRecordSource:
        if generator.random() < self._http_share:
            return AsyncHttpSource(self.http, call)
        return self.grpc(call, generator.randrange(CHANNELS))

    def grpc(self, call: Call, channel: int = 0) -> AsyncGrpcSource:
        return AsyncGrpcSource(
            self._stubs[channel].ModelStreamInfer(iter([encode_request(call)]), timeout=call.timeout_s)
        )

    async def close(self) -> None:
        await self.http.aclose()
        for channel in self._channels:
            await channel.close()


class Load:
    """Runs `streams` clients against one server until a moment; `deadline_s` is how long an answer may take."""

    def __init__(
        self, clients: Clients, source: Source, windows: Windows, *, streams: int, deadline_s: float, seed: int
    ) -> None:
        self._clients = clients
        self._source = source
        self._windows = windows
        self._streams = streams
        self._deadline_s = deadline_s
        self._random = random.Random(seed)
        self.tally = Tally()

    async def run(self, until: float) -> None:
        """Returns when every client has ended its last request, at most the deadline after `until`."""
        await asyncio.gather(*(self._client(until) for _ in range(self._streams)))

    async def _client(self, until: float) -> None:
        actions: list[tuple[Callable[[], Awaitable[str]], int]] = [
            (self._ask, 76),
            (self._cancel, 16),
            (self._malformed, 6),
            (self._oversized, 2),
        ]
        while time.monotonic() < until:
            ((action, _),) = self._random.choices(actions, [weight for _, weight in actions])
            outcome = await action()
            self.tally.outcomes[outcome] += 1
            if outcome in ("interrupted", "lost"):
                await asyncio.sleep(PAUSE_AFTER_ERROR_S)

    async def _ask(self) -> str:
        question = self._source.ask()
        sent, seen = time.monotonic(), Seen(question)
        source = self._clients.open(question.call(self._deadline_s), self._random)
        try:
            error = await self._failure(question, source, sent, self._receive_all(source, seen))
        finally:
            await source.close()
        if error is not None:
            return error
        if not seen.finished:
            return self.tally.wrong("lost", self._story(question, source, sent, f"cut off after {seen.answer!r:.200}"))
        if seen.answer != question.answer:
            text = f"{seen.answer!r:.300} instead of {question.answer!r:.300}"
            return self.tally.wrong("mixed", self._story(question, source, sent, text))
        self.tally.latencies_s.append(time.monotonic() - sent)
        return "answered"

    async def _cancel(self) -> str:
        """Goes away after a few responses: a gRPC cancellation, or a closed connection over HTTP."""
        question = self._source.long()
        sent, seen = time.monotonic(), Seen(question)
        source = self._clients.open(question.call(self._deadline_s), self._random)
        records = self._random.randrange(6)
        try:
            error = await self._failure(question, source, sent, self._receive_all(source, seen, records))
        finally:
            await source.close()
        if error is not None:
            return error
        if not seen.begins_right():
            text = f"{seen.answer!r:.300} begins no {question.answer!r:.80}"
            return self.tally.wrong("mixed", self._story(question, source, sent, text))
        return "cancelled"

    async def _malformed(self) -> str:
        model, body = bad_requests.draw(self._random)
        sent = time.monotonic()
        path = f"/v2/models/{model}/generate"
        try:
            answer = await self._clients.http.post(path, content=body, timeout=self._deadline_s)
        except httpx.HTTPError as error:
            return self.tally.wrong("lost", f"{model} {body[:80]!r}: {type(error).__name__} {error}")
        if answer.status_code < 400:
            return self.tally.wrong("mixed", f"{model} {body[:80]!r} was answered with {answer.text}")
        if self._windows.excuse(model, sent, time.monotonic(), answer.text):
            return "interrupted"
        return "refused"

    async def _oversized(self) -> str:
        call, sent = self._source.oversized(), time.monotonic()
        source = self._clients.open(call, self._random)
        try:
            await asyncio.wait_for(source.receive(), self._deadline_s)
        except ServerError as error:
            if "context" in error.message:
                return "refused"
            return self._classify(call.model, sent, error)
        except asyncio.TimeoutError:
            return self.tally.wrong("lost", "an oversized request without an answer")
        finally:
            await source.close()
        return self.tally.wrong("mixed", "an oversized request was answered")

    async def _receive_all(self, source: AsyncRecordSource, seen: Seen, records: int | None = None) -> None:
        while records is None or seen.records < records:
            record = await source.receive()
            if record is None:
                return
            seen.take(record)

    def _story(self, question: Question, source: AsyncRecordSource, sent: float, what: str) -> str:
        """A failed request for people: what was asked how and when, and the disturbances it met."""
        how = f"{question.kind}, {type(source).__name__}, stream {question.streams}"
        return f"{how}, {self._windows.describe(sent, time.monotonic())}: {what}"

    async def _failure(
        self, question: Question, source: AsyncRecordSource, sent: float, receiving: Awaitable[None]
    ) -> str | None:
        """The outcome of a request that failed; None when it did not."""
        try:
            await asyncio.wait_for(receiving, self._deadline_s)
        except ServerError as error:
            return self._classify(question.model, sent, error)
        except asyncio.TimeoutError:
            return self.tally.wrong("lost", self._story(question, source, sent, "neither answer nor error in time"))
        return None

    def _classify(self, model: str, sent: float, error: ServerError) -> str:
        self.tally.error(f"{model}: {error.status}: {error.message}")
        if self._windows.excuse(model, sent, time.monotonic(), f"{error.status} {error.message}"):
            return "interrupted"
        span = self._windows.describe(sent, time.monotonic())
        return self.tally.wrong("lost", f"{model}, {span}: an error outside of any disturbance: {error}")
