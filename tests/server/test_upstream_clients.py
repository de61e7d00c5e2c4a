"""What the two gRPC clients of triton-inference-server/tensorrtllm_backend send, tensor for tensor, and what they read.

Both were read in their last form; the tensors, their order, their types and the outputs asked for are theirs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

PERF_OUTPUTS = (
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "acceptance_rate",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
)
TRUE = np.array([[True]], dtype=bool)


def end_to_end_inputs(prompt: str, output_len: int, streaming: bool, **options: Any) -> dict[str, np.ndarray]:
    """One prompt of end_to_end_grpc_client. num_return_sequences is sent when it is not None, 1 included."""
    inputs = {
        "text_input": np.array([[prompt]]).astype(object),
        "max_tokens": np.ones_like([[prompt]]).astype(np.int32) * output_len,
        "stream": np.array([[streaming]], dtype=bool),
        "beam_width": np.array([[1]], dtype=np.int32),
        "temperature": np.array([[1.0]], dtype=np.float32),
    }
    for name in ("num_return_sequences", "end_id", "pad_id"):
        if options.get(name) is not None:
            inputs[name] = np.array([[options[name]]], dtype=np.int32)
    for name in ("bad_words", "stop_words", "embedding_bias_words"):
        if options.get(name):
            inputs[name] = np.array([options[name]], dtype=object)
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "embedding_bias_weights"):
        if options.get(name) is not None:
            inputs[name] = np.array(options[name], dtype=np.float32).reshape(1, -1)
    for name in ("return_log_probs", "return_perf_metrics", "exclude_input_in_output"):
        if options.get(name):  # the client sends these only when its flag is given
            inputs[name] = TRUE
    return inputs


def end_to_end_outputs(batch: bool, **options: Any) -> list[str]:
    names = ["text_output"]
    if options.get("return_log_probs"):
        names += ["cum_log_probs", "output_log_probs"]
    if (options.get("num_return_sequences") or 1) > 1:
        names.append("sequence_index")
    if batch:
        names.append("batch_index")
    return names + (list(PERF_OUTPUTS) if options.get("return_perf_metrics") else [])


def end_to_end(triton: Any, model: str, prompts: list[str], streaming: bool, batch: bool, **options: Any) -> list[str]:
    """Runs the client's exchange for each request and collects the texts as it does."""
    singles = [end_to_end_inputs(prompt, 30, streaming, **options) for prompt in prompts]
    requests = [{k: np.concatenate([s[k] for s in singles], axis=0) for k in singles[0]}] if batch else singles
    generations = options.get("num_return_sequences") or 1
    texts = []
    for request in requests:
        rows = request["text_input"].shape[0]
        collected = [[""] * generations for _ in range(rows)]
        for result in triton.ask(model, request, outputs=end_to_end_outputs(batch, **options)):
            output = result["text_output"]
            row = result["batch_index"][0][0] if "batch_index" in result else 0
            sequence = result["sequence_index"][0][0] if "sequence_index" in result else 0
            text = output[0].decode("utf-8")
            collected[row][sequence] = collected[row][sequence] + text if streaming else text
            if options.get("return_perf_metrics"):
                assert all(result[name][0][0] >= 0 for name in PERF_OUTPUTS)
            if options.get("return_log_probs"):
                assert result["output_log_probs"].ndim == 3
        for row_texts in collected:
            texts += row_texts
    return texts


PROMPTS = ["Born in north-east France,", "Soyer trained as a"]


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize("options", [{}, {"num_return_sequences": 2}, {"exclude_input_in_output": True}])
def test_end_to_end_client(triton: Any, model: str, streaming: bool, batch: bool, options: dict[str, Any]) -> None:
    texts = end_to_end(triton, model, PROMPTS, streaming, batch, **options)
    repeats = not streaming and not options.get("exclude_input_in_output")
    generations = options.get("num_return_sequences", 1)
    assert texts == [(prompt if repeats else "") + prompt for prompt in PROMPTS for _ in range(generations)]


@pytest.mark.parametrize("streaming", [True, False])
def test_end_to_end_client_with_every_flag(triton: Any, streaming: bool) -> None:
    options: dict[str, Any] = {
        "num_return_sequences": 1, "end_id": 200002, "pad_id": 50256, "bad_words": ["never"], "stop_words": ["France"],
        "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.25, "return_log_probs": True,
        "return_perf_metrics": True, "exclude_input_in_output": True, "embedding_bias_words": ["north", " east"],
        "embedding_bias_weights": [1.5, -2.0],
    }  # fmt: skip
    assert end_to_end(triton, "ensemble", PROMPTS[:1], streaming, False, **options) == ["Born in north-east "]


def inflight_inputs(ids: list[int], output_len: int, streaming: bool, **options: Any) -> dict[str, np.ndarray]:
    """inflight_batcher_llm_client, with its defaults: end_id -1, pad_id 50256, top_k 1, top_p 0."""
    inputs = {
        "input_ids": np.array([ids], dtype=np.int32),
        "input_lengths": np.array([[len(ids)]], dtype=np.int32),
        "request_output_len": np.array([[output_len]], dtype=np.int32),
        "beam_width": np.array([[1]], dtype=np.int32),
        "temperature": np.array([[1.0]], dtype=np.float32),
        "streaming": np.array([[streaming]], dtype=bool),
        "end_id": np.array([[options.get("end_id", -1)]], dtype=np.int32),
        "pad_id": np.array([[50256]], dtype=np.int32),
        "runtime_top_k": np.array([[1]], dtype=np.int32),
        "runtime_top_p": np.array([[0.0]], dtype=np.float32),
    }
    for name in ("return_num_input_tokens", "return_num_output_tokens", "return_log_probs", "return_perf_metrics",
                 "exclude_input_in_output"):  # fmt: skip
        if options.get(name):
            inputs[name] = TRUE
    if options.get("num_return_sequences"):
        inputs["num_return_sequences"] = np.array([[options["num_return_sequences"]]], dtype=np.int32)
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        if name in options:
            inputs[name] = np.array([[options[name]]], dtype=np.float32)
    return inputs


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("sequences", [None, 1, 3])
@pytest.mark.parametrize("exclude", [False, True])
def test_inflight_client(triton: Any, words: Any, streaming: bool, sequences: int | None, exclude: bool) -> None:
    ids, count = list(words.LONG), 16
    options = {
        "num_return_sequences": sequences, "exclude_input_in_output": exclude, "return_log_probs": True,
        "return_perf_metrics": True, "return_num_input_tokens": True, "return_num_output_tokens": True,
        "repetition_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.1,
    }  # fmt: skip
    generations = sequences or 1
    actual = [list(ids) if streaming and not exclude else [] for _ in range(generations)]
    counted = {}
    for result in triton.ask("tensorrt_llm", inflight_inputs(ids, count, streaming, **options)):
        sequence = result["sequence_index"][0][0]
        assert result["cum_log_probs"][0].shape == (1,)
        assert result["output_log_probs"][0].ndim == 2
        if result["sequence_length"][0][0] > 0:
            actual[sequence] += list(result["output_ids"][0][0])
        counted[sequence] = (result["num_input_tokens"][0, 0], result["num_output_tokens"][0, 0])
    generated = [words.CYCLE[i % len(words.CYCLE)] for i in range(count)]
    assert actual == [([] if exclude else ids) + generated] * generations
    assert counted == {sequence: (len(ids), count) for sequence in range(generations)}


@pytest.mark.parametrize("names", [["output_ids", "sequence_length"], ["output_ids", "sequence_length", "cum_log_probs",
                                   "output_log_probs", "num_output_tokens"]])  # fmt: skip
def test_inflight_client_with_requested_outputs(triton: Any, words: Any, names: list[str]) -> None:
    options = {"return_log_probs": True, "return_num_output_tokens": True}
    for result in triton.ask("tensorrt_llm", inflight_inputs(list(words.LONG), 8, True, **options), outputs=names):
        assert set(result) == set(names), "the client raises when the outputs are not exactly those it asked for"


def test_inflight_client_stops_early(triton: Any, words: Any) -> None:
    """--stop-after-ms on the same stream, with the parameter that it adds to the stop request."""
    stop = {
        "input_ids": np.empty([1, 1], dtype=np.int32),
        "input_lengths": np.zeros([1, 1], dtype=np.int32),
        "request_output_len": np.array([[0]], dtype=np.int32),
        "stop": np.array([[True]], dtype="bool"),
    }
    call = triton.open("tensorrt_llm", inflight_inputs(list(words.LONG), 2000, True), "12345")
    call.next()
    call.client.async_stream_infer(
        "tensorrt_llm", words.infer_inputs(stop), request_id="12345", parameters={"Streaming": True}
    )
    tokens = 0
    finished = False
    while not finished:
        result, _ = call.next()
        tokens += int(result["sequence_length"][0][0])
        finished = "finish_reason" in result
    call.close()
    assert 0 < tokens < 2000


def test_inflight_client_cancels(triton: Any, words: Any) -> None:
    call = triton.open("tensorrt_llm", inflight_inputs(list(words.LONG), 2000, True), "cancelled")
    call.next()
    call.cancel()
    words.wait_until(lambda: triton.used_blocks() == 0, timeout_s=1.0)
