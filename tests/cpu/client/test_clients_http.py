"""The HTTP clients against a scripted server: routes, events in odd pieces, errors before and inside a stream."""

import asyncio
import json
import time

import pytest

from gptoss_trt.client.aio import AsyncHttpClient
from gptoss_trt.client.errors import ServerError
from gptoss_trt.client.http_client import HttpClient
from gptoss_trt.client.requests import Sampling
from gptoss_trt.client.sse import EventReader

STREAM, JSON = "text/event-stream", "application/json"


def read_text(url, **options):
    """The text and the ServerError (or None) of a stream, by the synchronous client and by the asyncio one."""

    async def with_async():
        texts, failure = [], None
        async with AsyncHttpClient(url) as client:
            try:
                async for piece in client.stream_text("x", 5, **options):
                    texts.append(piece.text)
            except ServerError as error:
                failure = error
        return texts, failure

    texts, failure = [], None
    with HttpClient(url) as client:
        try:
            texts.extend(piece.text for piece in client.stream_text("x", 5, **options))
        except ServerError as error:
            failure = error
    other_texts, other = asyncio.run(with_async())
    assert [str(failure), failure and failure.status] == [str(other), other and other.status]
    return texts, other_texts, failure


def test_stream_posts_flat_values_and_reads_events(web, sse):
    web.script = lambda _path, _body: (200, STREAM, [sse(text_output="Hé"), sse(text_output="llo", batch_index=0)])
    with HttpClient(web.url, headers={"x-key": "k"}) as client:
        pieces = list(client.stream_text("Hi", 5, Sampling(top_k=2), stop_words=["a"], request_id="r1"))
    assert [piece.text for piece in pieces] == ["Hé", "llo"]
    path, body, headers = web.seen[0]
    assert path == "/v2/models/ensemble/generate_stream"
    assert headers["x-key"] == "k"
    assert (body["id"], body["text_input"], body["top_k"], body["stop_words"]) == ("r1", "Hi", 2, ["a"])
    assert body["stream"] is True


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 64])
def test_events_do_not_depend_on_how_they_are_cut(web, sse, cut):
    text = sse(text_output="a\u2028b 🙂") + b": comment\r\n\r\n" + b'data: {"text_output": \r\ndata: "c"}\r\n\r\n'
    pieces = [text[start : start + cut] for start in range(0, len(text), cut)]
    web.script = lambda _path, _body: (200, STREAM, pieces)
    with HttpClient(web.url) as client:
        assert [piece.text for piece in client.stream_text("x", 5)] == ["a\u2028b 🙂", "c"]


def test_an_event_without_an_empty_line_at_the_end_counts(sse):
    reader = EventReader()
    assert reader.push(b"data: 1") == []
    assert reader.finish() == ["1"]
    assert reader.finish() == []


def test_whole_answers_use_generate(web):
    answer = {"text_output": "whole", "num_output_tokens": 1, "sequence_length": [1]}
    web.script = lambda _path, _body: (200, JSON, [json.dumps(answer).encode()])
    with HttpClient(web.url) as client:
        assert client.generate_text("x", 5) == "whole"
    assert web.seen[0][0] == "/v2/models/ensemble/generate"

    async def whole():
        async with AsyncHttpClient(web.url) as client:
            return await client.generate_text("x", 5)

    assert asyncio.run(whole()) == "whole"


@pytest.mark.parametrize(
    ("status", "body", "name", "message"),
    [
        (400, b'{"error": "max_tokens is 0"}', "INVALID_ARGUMENT", "max_tokens is 0"),
        (503, b"not json", "UNAVAILABLE", "not json"),
        (429, b'{"error": {"message": "full", "type": "x"}}', "RESOURCE_EXHAUSTED", "full"),
        (500, b"", "INTERNAL", "HTTP status 500"),
        (418, b"[1]", "UNKNOWN", "[1]"),
    ],
)
def test_statuses_become_status_names(web, status, body, name, message):
    web.script = lambda _path, _body: (status, JSON, [body] if body else [])
    texts, other_texts, failure = read_text(web.url, request_id="r3")
    assert (texts, other_texts) == ([], [])
    assert (failure.status, failure.message, failure.request_id) == (name, message, "r3")


def test_an_error_event_comes_after_what_was_read(web, sse):
    web.script = lambda _path, _body: (200, STREAM, [sse(text_output="a"), sse(error="engine died")])
    texts, other_texts, failure = read_text(web.url, request_id="r")
    assert (texts, other_texts, failure.status, failure.message) == (["a"], ["a"], "UNKNOWN", "engine died")


def test_a_dropped_connection_is_unavailable(web, sse):
    web.script = lambda _path, _body: (200, STREAM, [sse(text_output="a"), "drop"])
    texts, other_texts, failure = read_text(web.url, request_id="r")
    assert (texts, other_texts, failure.status) == (["a"], ["a"], "UNAVAILABLE")


def test_a_stream_that_goes_silent_ends_at_the_timeout(web, sse):
    web.script = lambda _path, _body: (200, STREAM, [sse(text_output="a"), 3.0, sse(text_output="b")])
    with HttpClient(web.url) as client:
        stream = client.stream_text("x", 5, timeout_s=0.3)
        next(stream)
        with pytest.raises(ServerError, match="DEADLINE_EXCEEDED"):
            next(stream)

    async def silent():
        async with AsyncHttpClient(web.url) as client:
            return [piece.text async for piece in client.stream_text("x", 5, timeout_s=0.3)]

    with pytest.raises(ServerError, match="DEADLINE_EXCEEDED"):
        asyncio.run(silent())


def test_a_stream_that_trickles_ends_at_the_timeout_too(web, sse):
    web.script = lambda _path, _body: (200, STREAM, [step for _ in range(30) for step in (sse(text_output="a"), 0.05)])
    started = time.monotonic()
    with HttpClient(web.url) as client, pytest.raises(ServerError, match="DEADLINE_EXCEEDED"):
        list(client.stream_text("x", 5, timeout_s=0.3))
    assert time.monotonic() - started < 1.2


def test_closing_a_stream_closes_its_connection(web, sse, until):
    web.script = lambda _path, _body: (200, STREAM, (step for _ in range(300) for step in (sse(text_output="a"), 0.01)))
    with HttpClient(web.url) as client:
        with client.stream_text("x", 5) as stream:
            next(stream)
        until(lambda: web.broken_pipes == 1)
        assert list(stream) == []


def test_a_cancelled_task_closes_its_connection(web, sse, until):
    web.script = lambda _path, _body: (200, STREAM, (step for _ in range(300) for step in (sse(text_output="a"), 0.01)))

    async def use():
        async with AsyncHttpClient(web.url) as client:

            async def read():
                async for _piece in client.stream_text("x", 5):
                    pass

            task = asyncio.create_task(read())
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(use())
    until(lambda: web.broken_pipes == 1)


def test_a_matrix_is_refused_with_the_way_out(web):
    with HttpClient(web.url) as client, pytest.raises(ValueError, match=r"stop_words_list has 2 axes.*gRPC"):
        client.stream_tokens([1], 1, stop_sequences=[[2]])


def test_readiness(web):
    web.script = lambda path, _body: (200 if path in ("/v2/health/ready", "/v2/models/chat/ready") else 400, JSON, [])
    with HttpClient(web.url) as client:
        client.wait_ready(["chat"], timeout_s=2)
        assert not client.ready("other")
    with HttpClient("http://127.0.0.1:9") as absent, pytest.raises(ServerError, match="last answer: UNAVAILABLE"):
        absent.wait_ready(timeout_s=0.1)
