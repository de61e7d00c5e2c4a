"""The Python clients against a real server: the same calls over gRPC and HTTP, sync and asyncio, and how they fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gptoss_trt.client.api import AsyncClient, Client
from gptoss_trt.client.connect import connect, connect_async
from gptoss_trt.client.errors import ServerError
from gptoss_trt.client.requests import Sampling

TEXT = "straße, naïve café, 日本語 and 🙂👍🏽 emoji"
TRANSPORTS = ("grpc", "http")
EOS = 200002


def url_of(triton: Any, transport: str) -> str:
    return str(triton.server.http_url if transport == "http" else f"grpc://{triton.server.grpc_url}")


@pytest.fixture(params=TRANSPORTS)
def client(request: pytest.FixtureRequest, triton: Any) -> Any:
    with connect(url_of(triton, request.param)) as opened:
        yield opened


@pytest.fixture(params=TRANSPORTS)
def run(request: pytest.FixtureRequest, triton: Any) -> Callable[..., Any]:
    """Runs an asynchronous function with an asyncio client of either transport."""

    def runner(use: Callable[[AsyncClient], Any]) -> Any:
        async def inner() -> Any:
            async with connect_async(url_of(triton, request.param)) as opened:
                return await use(opened)

        return asyncio.run(inner())

    return runner


def test_readiness(client: Client) -> None:
    client.wait_ready(["ensemble", "tensorrt_llm"], timeout_s=30)
    with pytest.raises(ServerError, match="DEADLINE_EXCEEDED: models nonsense not ready"):
        client.wait_ready(["nonsense"], timeout_s=0.2)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_text(client: Client, model: str) -> None:
    pieces = list(client.stream_text(TEXT, 64, model=model))
    assert "".join(piece.text for piece in pieces) == TEXT
    assert len([piece for piece in pieces if piece.text]) > 3
    assert pieces[-1].finish_reason == "stop"
    assert (pieces[-1].input_tokens or 0) + 1 == pieces[-1].output_tokens
    assert client.generate_text(TEXT, 64, model=model) == TEXT


def test_tokens(client: Client, words: Any) -> None:
    pieces = list(client.stream_tokens(words.LONG, 12))
    assert [token for piece in pieces for token in piece.ids] == [words.CYCLE[i % 8] for i in range(12)]
    assert (pieces[-1].finish_reason, pieces[-1].output_tokens, pieces[-1].input_tokens) == ("length", 12, 4)
    assert client.generate_tokens([40, 41], 8) == [40, 41, EOS]


def test_options_reach_the_engine(client: Client) -> None:
    assert client.generate_text("one two three", 64, stop_words=[" three"]) == "one two"
    assert client.generate_tokens([40, 41], 8, Sampling(end_id=41)) == [40, 41]
    pieces = list(client.stream_tokens([40, 41], 8, Sampling(num_return_sequences=2, seed=2**40, top_k=3)))
    for sequence in (0, 1):
        mine = [token for piece in pieces if piece.sequence_index == sequence for token in piece.ids]
        assert mine == [40, 41, EOS]


def test_word_lists_over_grpc(triton: Any, words: Any) -> None:
    with connect(url_of(triton, "grpc")) as client:
        assert client.generate_tokens(words.LONG, 20, stop_sequences=[[13, 14], [99]]) == [11, 12, 13, 14]


def test_batches_over_grpc(triton: Any) -> None:
    batch = np.array([[21, 22], [31, 32]], dtype=np.int32)
    extra = {"input_ids": batch, "input_lengths": np.array([[2], [2]]), "request_output_len": np.array([[8], [8]])}
    extra |= {name: np.array([[value], [value]]) for name, value in (("streaming", False), ("stop", False))}
    flags = {name: np.ones((2, 1), dtype=bool) for name in ("return_num_input_tokens", "return_num_output_tokens")}
    with connect(url_of(triton, "grpc")) as client:
        pieces = list(
            client.stream_tokens(
                [0], 8, extra={**extra, **flags, "exclude_input_in_output": np.ones((2, 1), dtype=bool)}, stream=False
            )
        )
    assert {piece.batch_index: piece.ids for piece in pieces} == {0: (21, 22, EOS), 1: (31, 32, EOS)}


def test_a_refusal_has_its_status_and_the_request_s_id(client: Client) -> None:
    with pytest.raises(ServerError) as caught:
        client.generate_text("x", 0, request_id="refused-1")
    assert (caught.value.status, caught.value.request_id) == ("INVALID_ARGUMENT", "refused-1")
    assert "max_tokens" in caught.value.message


def test_an_unknown_model(client: Client) -> None:
    with pytest.raises(ServerError, match="nonsense"):
        client.generate_text("x", 1, model="nonsense")


def test_an_error_in_the_middle_keeps_what_came_before(client: Client, words: Any) -> None:
    ids: list[int] = []
    with pytest.raises(ServerError, match="it broke"):
        for piece in client.stream_tokens(words.FAILS, 50):
            ids += piece.ids
    assert ids == [11, 12, 13]


def test_closing_a_stream_frees_its_blocks(client: Client, triton: Any, words: Any) -> None:
    before = triton.used_blocks()
    with client.stream_tokens((*words.LONG, *range(300, 500)), 3000) as stream:
        next(stream)
        assert triton.used_blocks() > before
    words.wait_until(lambda: triton.used_blocks() == before, timeout_s=2.0)
    assert list(stream) == []


def test_a_timeout_frees_its_blocks(client: Client, triton: Any, words: Any) -> None:
    before = triton.used_blocks()
    with pytest.raises(ServerError, match="DEADLINE_EXCEEDED"):
        list(client.stream_tokens(words.LONG, 3000, timeout_s=0.5))
    words.wait_until(lambda: triton.used_blocks() == before, timeout_s=2.0)


def test_async_answers(run: Callable[..., Any], words: Any) -> None:
    async def use(client: AsyncClient) -> Any:
        await client.wait_ready(["ensemble"], timeout_s=30)
        pieces = [piece async for piece in client.stream_text(TEXT, 64)]
        many = await asyncio.gather(*(client.generate_tokens((*words.LONG, n), 20) for n in range(16)))
        return pieces, await client.generate_text(TEXT, 64), many

    pieces, whole, many = run(use)
    assert "".join(piece.text for piece in pieces) == whole == TEXT
    assert many == [[words.CYCLE[i % 8] for i in range(20)]] * 16


def test_async_errors(run: Callable[..., Any], words: Any) -> None:
    async def use(client: AsyncClient) -> list[int]:
        ids: list[int] = []
        with pytest.raises(ServerError, match="it broke"):
            async for piece in client.stream_tokens(words.FAILS, 50):
                ids += piece.ids
        with pytest.raises(ServerError, match="INVALID_ARGUMENT"):
            await client.generate_text("x", -1)
        return ids

    assert run(use) == [11, 12, 13]


def test_a_cancelled_task_frees_its_blocks(run: Callable[..., Any], triton: Any, words: Any) -> None:
    before = triton.used_blocks()

    async def use(client: AsyncClient) -> None:
        async def read() -> None:
            async for _piece in client.stream_tokens((*words.LONG, *range(300, 500)), 3000):
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.4)
        assert triton.used_blocks() > before
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.05)

    run(use)
    words.wait_until(lambda: triton.used_blocks() == before, timeout_s=2.0)
