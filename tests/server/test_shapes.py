"""Shapes and types of every output, through gRPC and HTTP, as clients of the old repository read them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient

from gptoss_trt.client import protocol

COUNTERS = {
    "batch_index": np.int32,
    "sequence_index": np.int32,
    "kv_cache_alloc_new_blocks": np.int32,
    "kv_cache_reused_blocks": np.int32,
    "kv_cache_alloc_total_blocks": np.int32,
    "arrival_time_ns": np.int64,
    "first_scheduled_time_ns": np.int64,
    "first_token_time_ns": np.int64,
    "last_token_time_ns": np.int64,
    "acceptance_rate": np.float32,
    "total_accepted_draft_tokens": np.int32,
    "total_draft_tokens": np.int32,
    "num_input_tokens": np.int32,
    "num_output_tokens": np.int32,
}
EVERYTHING: dict[str, Any] = {
    "return_log_probs": True,
    "return_perf_metrics": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
}


def check_shared(response: dict[str, np.ndarray], length: int) -> None:
    for name, dtype in COUNTERS.items():
        assert (response[name].shape, response[name].dtype) == ((1, 1), np.dtype(dtype)), name
    assert (response["cum_log_probs"].shape, response["cum_log_probs"].dtype) == ((1, 1), np.float32)
    assert (response["output_log_probs"].shape, response["output_log_probs"].dtype) == ((1, 1, length), np.float32)


@pytest.mark.parametrize("streaming", [False, True])
def test_token_model(triton: Any, words: Any, streaming: bool) -> None:
    tensors = words.token_tensors(words.LONG, max_tokens=6, streaming=streaming, **EVERYTHING)
    responses = triton.ask("tensorrt_llm", tensors)
    assert len(responses) == 1 or streaming
    for response in responses:
        ids = response["output_ids"]
        assert ids.dtype == response["sequence_length"].dtype == np.int32
        assert ids.shape == (1, 1, response["sequence_length"][0, 0])
        assert response["sequence_length"].shape == (1, 1)
        check_shared(response, ids.shape[2] if streaming else 6)
    last = responses[-1]
    assert last["finish_reason"].tolist() == [b"length"]
    assert all("finish_reason" not in response for response in responses[:-1])
    assert (last["num_input_tokens"][0, 0], last["num_output_tokens"][0, 0]) == (4, 6)
    assert last["cum_log_probs"][0, 0] == pytest.approx(-3.0)
    times = [last[f"{name}_time_ns"][0, 0] for name in ("arrival", "first_scheduled", "first_token", "last_token")]
    assert times == sorted(times)
    assert times[0] > 0


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize("streaming", [False, True])
def test_text_models(triton: Any, words: Any, model: str, streaming: bool) -> None:
    responses = triton.ask(model, words.text_tensors("one two three four", stream=streaming, **EVERYTHING))
    assert len(responses) == 1 or streaming
    for response in responses:
        assert response["text_output"].shape == (1,)
        assert isinstance(response["text_output"][0], bytes)
        check_shared(response, response["output_log_probs"].shape[2])
    assert responses[-1]["finish_reason"].tolist() == [b"stop"]


def test_only_requested_outputs_come(triton: Any, words: Any) -> None:
    names = ["sequence_length", "output_ids"]
    for response in triton.ask("tensorrt_llm", words.token_tensors(words.LONG, streaming=True), outputs=names):
        assert sorted(response) == sorted(names)


def test_preprocessing(triton: Any) -> None:
    client = httpclient.InferenceServerClient(triton.server.http_url.removeprefix("http://"))
    inputs = {
        "QUERY": np.array([[b"one two"], ["drei vier fünf".encode()]], dtype=np.object_),
        "REQUEST_OUTPUT_LEN": np.array([[3], [4]], dtype=np.int32),
        "STOP_WORDS_DICT": np.array([[b"stop", b"end it"], [b"halt", b""]], dtype=np.object_),
        "END_ID": np.array([[7], [8]], dtype=np.int32),
    }
    tensors = []
    for name, array in inputs.items():
        tensor = httpclient.InferInput(name, array.shape, "BYTES" if array.dtype == np.object_ else "INT32")
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    result = client.infer("preprocessing", tensors)
    model = protocol.model("preprocessing")
    shapes = {}
    for output in result.get_response()["outputs"]:
        array = result.as_numpy(output["name"])
        shapes[output["name"]] = array.shape
        assert array.dtype == np.dtype(protocol.NUMPY_NAMES[model.output(output["name"]).dtype])
    longest = int(result.as_numpy("REQUEST_INPUT_LEN").max())
    assert shapes["INPUT_ID"] == (2, longest)
    assert shapes["REQUEST_INPUT_LEN"] == shapes["OUT_END_ID"] == shapes["OUT_PAD_ID"] == (2, 1)
    assert shapes["BAD_WORDS_IDS"] == (2, 2, 0), "no bad words"
    assert shapes["STOP_WORDS_IDS"][:2] == (2, 2)
    assert result.as_numpy("OUT_END_ID").tolist() == [[7], [8]]
    first, second = result.as_numpy("STOP_WORDS_IDS")
    assert first[1][first[1] >= 0].size == 2, "two words in the first row"
    assert second[1][second[1] >= 0].size == 1, "one word in the second, padded with -1"
    assert set(second[1][1:].tolist()) <= {-1}


def test_postprocessing_undoes_preprocessing(triton: Any, words: Any) -> None:
    text = "Grüße, 你好 🙂"
    query = {
        "QUERY": np.array([[text.encode()]], dtype=np.object_),
        "REQUEST_OUTPUT_LEN": np.array([[1]], dtype=np.int32),
    }
    client = httpclient.InferenceServerClient(triton.server.http_url.removeprefix("http://"))

    def infer(model: str, arrays: dict[str, np.ndarray]) -> Any:
        tensors = []
        for name, array in arrays.items():
            tensor = httpclient.InferInput(name, array.shape, "BYTES" if array.dtype == np.object_ else "INT32")
            tensor.set_data_from_numpy(array)
            tensors.append(tensor)
        return client.infer(model, tensors)

    encoded = infer("preprocessing", query)
    ids = encoded.as_numpy("INPUT_ID")[:, None, :]
    output = infer("postprocessing", {"TOKENS_BATCH": ids, "SEQUENCE_LENGTH": encoded.as_numpy("REQUEST_INPUT_LEN")})
    assert output.as_numpy("OUTPUT").tolist() == [text.encode()]
    nothing = {"TOKENS_BATCH": np.zeros((1, 2, 0), dtype=np.int32), "SEQUENCE_LENGTH": np.zeros((1, 2), dtype=np.int32)}
    assert infer("postprocessing", nothing).as_numpy("OUTPUT").tolist() == [b"", b""]
