"""Load on a server: a fixed number of requests in flight, or arrivals at a rate, each measured.

Invariant: one record a request sent, also for one that failed. Must not know how figures are drawn from records.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gptoss_trt.client.answers import Chunk, TextPiece, TokenPiece
from gptoss_trt.client.api import AsyncClient
from gptoss_trt.client.bench.measure import Record
from gptoss_trt.client.bench.workload import Request
from gptoss_trt.client.errors import ServerError
from gptoss_trt.client.protocol import END_ID_NEVER
from gptoss_trt.client.requests import Sampling

EMPTY = "EMPTY_ANSWER"  # an answer without a single token, which no status names


@dataclass(frozen=True)
class Target:
    """Which model is asked and how. `ignore_eos` makes raw models write all tokens asked for; chat cannot."""

    model: str
    sampling: Sampling = field(default_factory=Sampling)
    ignore_eos: bool = True
    served_name: str = "gpt-oss"
    timeout_s: float | None = 600.0

    @property
    def raw_sampling(self) -> Sampling:
        if not self.ignore_eos:
            return self.sampling
        return Sampling(**{**vars(self.sampling), "end_id": END_ID_NEVER})


@dataclass
class Level:
    """The records of one level and how long it took, from the first request's start to the last one's end."""

    records: list[Record]
    duration_s: float


async def ask(client: AsyncClient, target: Target, request: Request) -> Record:
    """Sends one request and reads its stream to the end. Never raises for a request that fails."""
    record = Record(start_s=time.perf_counter())
    try:
        if target.model == "chat":
            await _ask_chat(client, target, request, record)
        else:
            await _ask_raw(client, target, request, record)
    except ServerError as error:
        record.error, record.message = error.status, error.message
    except ValueError as error:  # a value that no tensor carries: the request failed like any other
        record.error, record.message = "INVALID_ARGUMENT", str(error)
    if record.error is None and record.output_tokens == 0:
        record.error, record.message = EMPTY, f"no token; finish reason {record.finish_reason}"
    return record


async def _ask_raw(client: AsyncClient, target: Target, request: Request, record: Record) -> None:
    """Counts by num_output_tokens (which grows over a stream) or, where it is missing, by the ids themselves."""
    options: dict[str, Any] = {"model": target.model, "timeout_s": target.timeout_s}
    if target.model == "tensorrt_llm":
        tokens = client.stream_tokens(request.input_ids or (), request.max_tokens, target.raw_sampling, **options)
        async with tokens as pieces:
            async for piece in pieces:
                _take(record, piece, len(piece.ids))
    else:
        text = client.stream_text(request.prompt or "", request.max_tokens, target.raw_sampling, **options)
        async with text as fragments:
            async for fragment in fragments:
                _take(record, fragment, 0)


def _take(record: Record, piece: TextPiece | TokenPiece, ids: int) -> None:
    now = time.perf_counter()
    record.first_s = record.first_s or now
    record.last_s = now
    record.output_tokens = record.output_tokens + ids if piece.output_tokens is None else piece.output_tokens
    record.input_tokens = piece.input_tokens if piece.input_tokens is not None else record.input_tokens
    record.finish_reason = piece.finish_reason or record.finish_reason


async def _ask_chat(client: AsyncClient, target: Target, request: Request, record: Record) -> None:
    body: dict[str, Any] = {
        "model": target.served_name,
        "messages": list(request.messages or ()),
        "max_completion_tokens": request.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    for name in ("temperature", "top_p", "seed"):
        if getattr(target.sampling, name) is not None:
            body[name] = getattr(target.sampling, name)
    async with client.stream_chat(body, timeout_s=target.timeout_s) as chunks:
        async for chunk in chunks:
            _take_chunk(record, chunk)


def _take_chunk(record: Record, chunk: Chunk) -> None:
    now = time.perf_counter()
    for choice in chunk.get("choices") or []:
        record.finish_reason = choice.get("finish_reason") or record.finish_reason
        delta = choice.get("delta") or {}
        if any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls")):
            record.first_s = record.first_s or now
            record.last_s = now
    usage = chunk.get("usage")
    if usage:
        record.input_tokens, record.output_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens", 0)
        record.first_s, record.last_s = record.first_s or now, record.last_s or now


async def closed_loop(
    client: AsyncClient, target: Target, requests: Iterator[Request], *, count: int, concurrency: int
) -> Level:
    """`count` requests, `concurrency` of them in flight at any time."""
    records: list[Record] = []
    started = time.perf_counter()

    async def worker() -> None:
        while len(taken) < count:
            taken.append(None)
            records.append(await ask(client, target, next(requests)))

    taken: list[None] = []
    await asyncio.gather(*(worker() for _ in range(min(concurrency, count))))
    return Level(records, time.perf_counter() - started)


async def open_loop(
    client: AsyncClient, target: Target, requests: Iterator[Request], *, count: int, rate: float, seed: int = 0
) -> Level:
    """`count` requests that arrive at `rate` a second whatever the server does (exponential gaps: Poisson)."""
    started = time.perf_counter()
    tasks = []
    for due in arrival_times(count, rate, seed):
        await asyncio.sleep(max(0.0, started + due - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(client, target, next(requests))))
    records = list(await asyncio.gather(*tasks))
    return Level(records, time.perf_counter() - started)


def arrival_times(count: int, rate: float, seed: int) -> Sequence[float]:
    """Seconds after the start at which requests arrive; the first at 0."""
    source, due, times = random.Random(seed), 0.0, []
    for _ in range(count):
        times.append(due)
        due += source.expovariate(rate)
    return times
