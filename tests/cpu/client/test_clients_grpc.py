"""The gRPC clients against a scripted server: what is sent, what is read, and every way in which a stream can end."""

import asyncio
import threading
import time

import grpc
import numpy as np
import pytest

from gptoss_trt.client.aio import AsyncGrpcClient
from gptoss_trt.client.errors import ServerError
from gptoss_trt.client.grpc_client import GrpcClient
from gptoss_trt.client.requests import Sampling


@pytest.fixture
def client(triton):
    with GrpcClient(triton.target) as opened:
        yield opened


def text_script(*texts, reason="stop"):
    def script(_inputs):
        for number, text in enumerate(texts, 1):
            yield {"text_output": [text], "sequence_length": [[1]], "num_output_tokens": [[number]]}
        yield {"text_output": [""], "finish_reason": [reason], "num_input_tokens": [[7]]}

    return script


def test_text_sends_the_wire_names_with_a_batch_axis(triton, client):
    triton.scripts["ensemble"] = text_script("Hel", "lo")
    sampling = Sampling(temperature=0.5, top_k=3, top_p=0.9, seed=2**63, min_tokens=1)
    pieces = list(client.stream_text("Hi é", 5, sampling, stop_words=["a", "bc"], request_id="r1"))
    assert "".join(piece.text for piece in pieces) == "Hello"
    assert (pieces[-1].finish_reason, pieces[-1].input_tokens) == ("stop", 7)
    request, inputs, metadata = triton.seen[0]
    assert request.id == "r1"
    assert metadata["triton_grpc_error"] == "true"
    assert inputs["text_input"][1].tolist() == [["Hi é".encode()]]
    assert inputs["stop_words"][1].tolist() == [[b"a", b"bc"]]
    assert (inputs["seed"][0], inputs["seed"][1].tolist()) == ("UINT64", [[2**63]])
    assert (inputs["max_tokens"][0], inputs["max_tokens"][1].shape) == ("INT32", (1, 1))
    assert inputs["temperature"][0] == "FP32"
    assert inputs["stream"][1].tolist() == [[True]]
    assert "end_id" not in inputs


def test_tokens_use_the_engines_names_and_word_lists(triton, client):
    triton.scripts["tensorrt_llm"] = lambda _inputs: iter(
        [
            {"output_ids": [[[5, 6, -1]]], "sequence_length": [[2]], "sequence_index": [[1]]},
            {"output_ids": [[[7]]], "sequence_length": [[1]], "finish_reason": ["length"]},
        ]
    )
    pieces = list(
        client.stream_tokens([1, 2, 3], 3, Sampling(top_k=1), stop_sequences=[[4], [5, 6]], bad_sequences=[[9]])
    )
    assert [piece.ids for piece in pieces] == [(5, 6), (7,)]
    assert (pieces[0].sequence_index, pieces[1].finish_reason) == (1, "length")
    inputs = triton.seen[0][1]
    assert inputs["input_ids"][1].tolist() == [[1, 2, 3]]
    assert inputs["input_lengths"][1].tolist() == [[3]]
    assert inputs["runtime_top_k"][1].tolist() == [[1]]
    assert inputs["stop_words_list"][1].tolist() == [[[4, 5, 6], [1, 3, -1]]]
    assert inputs["bad_words_list"][1].tolist() == [[[9], [1]]]


def test_chat_has_no_batch_axis_and_splits_responses_into_chunks(triton, client):
    first, second = '{"choices": [{"delta": {"content": "a"}}]}', '{"choices": [], "usage": {"completion_tokens": 2}}'
    triton.scripts["chat"] = lambda _inputs: iter([{"response": [first, second]}])
    chunks = list(client.stream_chat({"messages": [{"role": "user", "content": "é"}]}))
    assert chunks[0]["choices"][0]["delta"]["content"] == "a"
    assert chunks[1]["usage"]["completion_tokens"] == 2
    inputs = triton.seen[0][1]
    assert inputs["request"][1].shape == (1,)
    assert "é".encode() in inputs["request"][1][0]
    assert inputs["stream"][1].tolist() == [True]


def test_whole_answers(triton, client):
    triton.scripts["ensemble"] = text_script("whole")
    triton.scripts["tensorrt_llm"] = lambda _inputs: iter([{"output_ids": [[[5, 6]]], "sequence_length": [[2]]}])
    triton.scripts["chat"] = lambda _inputs: iter(
        [{"response": ['{"choices": [{"message": {"role": "assistant", "content": "ok"}}]}']}]
    )
    assert client.generate_text("x", 3) == "whole"
    assert client.generate_tokens([1], 2) == [5, 6]
    assert client.chat({"messages": []})["content"] == "ok"
    assert [seen[1]["stream"][1].all() for seen in (triton.seen[0], triton.seen[2])] == [False, False]


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE])
def test_a_status_in_the_middle_of_a_stream_keeps_what_came_before(triton, client, code):
    triton.scripts["ensemble"] = lambda _inputs: iter([{"text_output": ["a"]}, ("status", code, "it broke")])
    stream = client.stream_text("x", 5, request_id="r9")
    assert next(stream).text == "a"
    with pytest.raises(ServerError) as caught:
        next(stream)
    assert (caught.value.status, caught.value.message, caught.value.request_id) == (code.name, "it broke", "r9")
    assert next(stream, None) is None


def test_an_error_text_without_a_status_is_an_error_too(triton, client):
    triton.scripts["ensemble"] = lambda _inputs: iter([{"text_output": ["a"]}, ("error", "old server")])
    stream = client.stream_text("x", 5)
    next(stream)
    with pytest.raises(ServerError, match="UNKNOWN: old server"):
        next(stream)


def test_a_stream_cut_before_its_final_response_is_data_loss(triton, client):
    triton.scripts["ensemble"] = lambda _inputs: iter([{"text_output": ["a"]}, ("cut",)])
    stream = client.stream_text("x", 5)
    next(stream)
    with pytest.raises(ServerError, match="DATA_LOSS: the stream ended after 1 responses"):
        next(stream)


def test_a_server_without_final_marks_ends_cleanly(triton, client):
    triton.final_marks = False
    triton.scripts["ensemble"] = text_script("a")
    assert client.generate_text("x", 5) == "a"


def test_a_chat_error_after_chunks_comes_after_them(triton, client):
    error = '{"error": {"message": "engine died", "type": "server_error", "code": 503}}'
    triton.scripts["chat"] = lambda _inputs: iter([{"response": ['{"choices": []}', error]}])
    stream = client.stream_chat({"messages": []})
    assert next(stream) == {"choices": []}
    with pytest.raises(ServerError, match="UNAVAILABLE: engine died"):
        next(stream)


def endless(_inputs):
    while True:
        yield {"text_output": ["a"]}
        yield 0.005


def test_closing_a_stream_cancels_the_request(triton, client, until):
    triton.scripts["ensemble"] = endless
    with client.stream_text("x", 5, request_id="closed") as stream:
        next(stream)
    until(lambda: "closed" in triton.cancelled)
    assert list(stream) == []


def test_leaving_a_stream_behind_cancels_the_request(triton, client, until):
    triton.scripts["ensemble"] = endless
    stream = client.stream_text("x", 5, request_id="left")
    next(stream)
    del stream
    until(lambda: "left" in triton.cancelled)


def test_closing_from_another_thread_ends_a_waiting_reader(triton, client):
    triton.scripts["ensemble"] = lambda _inputs: iter([20.0])
    stream = client.stream_text("x", 5)
    timer = threading.Timer(0.2, stream.close)
    timer.start()
    started = time.monotonic()
    assert list(stream) == []
    assert time.monotonic() - started < 5
    timer.join()


def test_a_timeout_is_deadline_exceeded_and_cancels(triton, client, until):
    triton.scripts["ensemble"] = lambda _inputs: iter([{"text_output": ["a"]}, 20.0])
    stream = client.stream_text("x", 5, request_id="slow", timeout_s=0.5)
    next(stream)
    with pytest.raises(ServerError, match="DEADLINE_EXCEEDED"):
        next(stream)
    until(lambda: "slow" in triton.cancelled)


def test_an_absent_server_is_unavailable():
    with GrpcClient("127.0.0.1:9") as client, pytest.raises(ServerError, match="UNAVAILABLE"):
        client.generate_text("x", 1)


def test_wait_ready_names_the_models_and_the_last_answer(triton, client):
    triton.ready_models = {"ensemble"}
    client.wait_ready(["ensemble"], timeout_s=5)
    with pytest.raises(ServerError, match=r"models chat not ready after 0\.2 s"):
        client.wait_ready(["chat"], timeout_s=0.2)
    with GrpcClient("127.0.0.1:9") as absent, pytest.raises(ServerError, match="last answer: UNAVAILABLE"):
        absent.wait_ready(timeout_s=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_tokens": 2**40}, "outside -2147483648..2147483647"),
        ({"max_tokens": "many"}, "is no INT32"),
        ({"max_tokens": 1.5}, "is no INT32"),
        ({"max_tokens": 1, "extra": {"tempratur": 1.0}}, "did you mean 'temperature'"),
        ({"max_tokens": 1, "extra": {"end_id": [[1]]}}, "has 2 axes"),
    ],
)
def test_values_that_do_not_fit_are_refused_before_sending(triton, client, arguments, message):
    with pytest.raises(ValueError, match=message):
        client.stream_text("x", **arguments)
    assert triton.seen == []


def test_an_empty_stop_sequence_is_refused(client):
    with pytest.raises(ValueError, match="empty token sequence"):
        client.stream_tokens([1], 1, stop_sequences=[[]])


def test_numpy_values_are_sent_as_they_are(triton, client):
    triton.scripts["tensorrt_llm"] = lambda _inputs: iter([])
    batch = np.array([[1, 2], [3, 4]])
    list(client.stream_tokens([1], 1, extra={"input_ids": batch}))
    datatype, sent = triton.seen[0][1]["input_ids"]
    assert (datatype, sent.tolist()) == ("INT32", batch.tolist())


def run(target, use):
    async def inner():
        async with AsyncGrpcClient(target) as client:
            return await use(client)

    return asyncio.run(inner())


def test_async_streams_whole_answers_and_readiness(triton):
    triton.scripts["ensemble"] = text_script("Hel", "lo")
    triton.ready_models = {"ensemble"}

    async def use(client):
        await client.wait_ready(["ensemble"], timeout_s=5)
        pieces = [piece.text async for piece in client.stream_text("x", 5)]
        return pieces, await client.generate_text("x", 5)

    assert run(triton.target, use) == (["Hel", "lo", ""], "Hello")


def test_async_errors_carry_status_and_id(triton):
    triton.scripts["ensemble"] = lambda _inputs: iter(
        [{"text_output": ["a"]}, ("status", grpc.StatusCode.RESOURCE_EXHAUSTED, "full")]
    )

    async def use(client):
        stream = client.stream_text("x", 5, request_id="r2")
        assert (await anext(stream)).text == "a"
        with pytest.raises(ServerError) as caught:
            await anext(stream)
        return caught.value.status, caught.value.request_id

    assert run(triton.target, use) == ("RESOURCE_EXHAUSTED", "r2")


def test_a_cancelled_task_cancels_its_request(triton, until):
    triton.scripts["ensemble"] = lambda _inputs: iter([{"text_output": ["a"]}, 20.0])

    async def use(client):
        async def read():
            async for _piece in client.stream_text("x", 5, request_id="task"):
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.1)

    run(triton.target, use)
    until(lambda: "task" in triton.cancelled)


def test_async_close_ends_the_stream_without_an_error(triton, until):
    triton.scripts["ensemble"] = endless

    async def use(client):
        async with client.stream_text("x", 5, request_id="aclosed") as stream:
            await anext(stream)
        return [piece async for piece in stream]

    assert run(triton.target, use) == []
    until(lambda: "aclosed" in triton.cancelled)


def test_async_many_streams_share_a_client(triton):
    triton.scripts["ensemble"] = text_script("a", "b", "c")

    async def use(client):
        return await asyncio.gather(*(client.generate_text("x", 5) for _ in range(12)))

    assert run(triton.target, use) == ["abc"] * 12
