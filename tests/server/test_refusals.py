"""What cannot be run is refused at once, with the value, the limit and the right status; the server goes on."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from gptoss_trt.client import protocol


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"request_output_len": 0}, "request_output_len is 0; it must be at least 1"),
        ({"request_output_len": -5}, "request_output_len is -5; it must be at least 1"),
        ({"request_output_len": 4096}, "4 tokens + max_tokens 4096 = 4100; the context is 4096"),
        ({"input_lengths": 0}, "the prompt is empty"),
        ({"input_lengths": 9}, "input_lengths is 9; it must lie in 0..4"),
        ({"input_lengths": -1}, "input_lengths is -1; it must lie in 0..4"),
        ({"temperature": -0.5}, "temperature is -0.5; it must be at least 0"),
        ({"temperature": float("nan"), "runtime_top_k": 5}, "temperature is nan; it must be finite"),
        ({"runtime_top_k": -1}, "runtime_top_k is -1; it must be at least 0"),
        ({"runtime_top_p": 1.5}, "runtime_top_p is 1.5; it must be at most 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"presence_penalty": 1e9}, "presence_penalty is 1000000000.0"),
        ({"min_tokens": -1}, "min_tokens is -1; it must be at least 0"),
        ({"min_tokens": 9}, "min_tokens is 9; it must lie in 0..max_tokens"),
        ({"min_tokens": 2, "min_length": 3}, "min_tokens is 2 and min_length 3"),
        ({"num_return_sequences": 0}, "num_return_sequences is 0; it must lie in 1..128"),
        ({"num_return_sequences": 2**31 - 1}, "num_return_sequences is 2147483647; it must lie in 1..128"),
        ({"end_id": 500000}, "stop_ids holds the id 500000"),
        ({"guided_decoding_guide_type": "poem"}, "guided_decoding_guide_type is 'poem'; allowed: json"),
        ({"guided_decoding_guide_type": "regex"}, "'regex' needs guided_decoding_guide"),
        ({"guided_decoding_guide": "a+"}, "without guided_decoding_guide_type"),
    ],
)
def test_values_out_of_range(triton: Any, words: Any, changes: dict[str, Any], text: str) -> None:
    tensors = words.token_tensors((21, 22, 23, 24))
    error = triton.refusal("tensorrt_llm", {**tensors, **words.scalars(1, **changes)})
    assert text in error.message()


@pytest.mark.parametrize("token", [-1, 201088, 2**31 - 1])
def test_ids_out_of_range(triton: Any, words: Any, token: int) -> None:
    error = triton.refusal("tensorrt_llm", words.token_tensors((21, token)))
    assert f"the id {token}; ids lie in 0..201087" in error.message()


def test_an_oversized_prompt(triton: Any, words: Any) -> None:
    error = triton.refusal("tensorrt_llm", words.token_tensors((7,) * 5000, max_tokens=1))
    assert "prompt of 5000 tokens + max_tokens 1 = 5001; the context is 4096" in error.message()
    error = triton.refusal("ensemble", words.text_tensors("word " * 6000, max_tokens=1))
    assert "the context is 4096" in error.message()


def refused_inputs() -> list[tuple[str, str]]:
    return [
        (name, tensor.name)
        for name in ("tensorrt_llm", "ensemble", "tensorrt_llm_bls")
        for tensor in protocol.model(name).inputs
        if tensor.refuse
    ]


@pytest.mark.parametrize(("model", "name"), refused_inputs())
def test_what_cannot_be_honoured_is_refused(triton: Any, words: Any, model: str, name: str) -> None:
    tensor = protocol.model(model).input(name)
    base = words.token_tensors((21, 22)) if model == "tensorrt_llm" else words.text_tensors("hello")
    shape = [1, *(2 if dim == -1 else dim for dim in tensor.dims)]
    dtype = protocol.NUMPY_NAMES[tensor.dtype]
    value = np.full(shape, b"x" if dtype == "object" else True if dtype == "bool" else 3, dtype=dtype)
    error = triton.refusal(model, {**base, name: value})
    assert f"{name} is" in error.message()
    assert tensor.refuse in error.message()


def test_neutral_values_of_them_are_accepted(triton: Any, words: Any) -> None:
    neutral = {
        "beam_width": 1, "len_penalty": 1.0, "early_stopping": False, "return_context_logits": False,
        "return_generation_logits": False, "draft_input_ids": np.zeros((1, 0), dtype=np.int32),
        "lora_task_id": np.zeros((1, 1), dtype=np.uint64), "runtime_top_p_decay": 1.0, "runtime_top_p_min": 1e-6,
    }  # fmt: skip
    assert len(triton.ask("tensorrt_llm", words.token_tensors((21, 22), **neutral))) == 1


def test_missing_and_unknown_inputs(triton: Any, words: Any) -> None:
    tensors = words.token_tensors((21, 22))
    for name in ("input_ids", "input_lengths", "request_output_len"):
        rest = {key: value for key, value in tensors.items() if key != name}
        assert name in triton.refusal("tensorrt_llm", rest).message()
    assert "temprature" in triton.refusal("tensorrt_llm", {**tensors, **words.scalars(1, temprature=1.0)}).message()
    assert "text_input" in triton.refusal("ensemble", words.scalars(1, max_tokens=3)).message()


@pytest.mark.parametrize(
    "wrong",
    [
        {"input_ids": np.array([[21, 22]], dtype=np.int64)},
        {"input_ids": np.array([21, 22], dtype=np.int32)},
        {"input_ids": np.array([[[21, 22]]], dtype=np.int32)},
        {"temperature": np.array([[1.0]], dtype=np.float64)},
        {"temperature": np.array([[1.0, 2.0]], dtype=np.float32)},
        {"streaming": np.array([[1]], dtype=np.int32)},
        {"stop_words_list": np.zeros((1, 3, 2), dtype=np.int32)},
        {"stop_words_list": np.array([[[1, 2], [5, -1]]], dtype=np.int32)},
        {"embedding_bias": np.ones((1, 7), dtype=np.float32)},
        {"embedding_bias": np.full((1, 201088), np.nan, dtype=np.float32)},
        {"input_lengths": np.array([[2], [2]], dtype=np.int32)},
    ],
    ids=lambda wrong: "-".join(f"{name}{list(array.shape)}{array.dtype}" for name, array in wrong.items()),
)
def test_wrong_types_and_shapes(triton: Any, words: Any, wrong: dict[str, np.ndarray]) -> None:
    error = triton.refusal("tensorrt_llm", {**words.token_tensors((21, 22)), **wrong})
    assert next(iter(wrong)) in error.message()
    assert triton.ask("tensorrt_llm", words.token_tensors((21, 22))), "the model goes on"


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_text_prompts(triton: Any, words: Any, model: str) -> None:
    assert "text_input is empty" in triton.refusal(model, words.text_tensors("")).message()
    broken = words.text_tensors("x")
    broken["text_input"] = np.array([[b"caf\xe9"]], dtype=np.object_)
    assert "text_input is not UTF-8: byte 3 is 0xe9" in triton.refusal(model, broken).message()
    assert "max_tokens is 0" in triton.refusal(model, words.text_tensors("x", max_tokens=0)).message()
    assert "top_p is 2.0" in triton.refusal(model, words.text_tensors("x", top_p=2.0)).message()
    unequal = words.text_tensors("x", embedding_bias_words=["a", "b"], embedding_bias_weights=[1.0])
    assert "2 words and embedding_bias_weights 1" in triton.refusal(model, unequal).message()


def token_body(ids: tuple[int, ...], **more: Any) -> dict[str, Any]:
    return {"input_ids": list(ids), "input_lengths": len(ids), "request_output_len": 5, **more}


def test_http_errors_carry_the_text(triton: Any, words: Any) -> None:
    """tritonserver 2.51 gives 400 to every error of /generate, newer ones the error's own status."""
    requests = {
        "max_tokens is 0; it must be at least 1": ("ensemble/generate", {"text_input": "x", "max_tokens": 0}),
        "full": ("tensorrt_llm/generate", token_body(words.REFUSED)),
        "it broke": ("tensorrt_llm/generate", token_body(words.FAILS)),
    }
    for text, request in requests.items():
        status, answer = triton.post(*request)
        assert status >= 400
        assert json.loads(answer)["error"] == text


def test_http_bodies_that_are_no_request(triton: Any) -> None:
    bodies = [{"text_input": "x", "max_tokens": "many"}, {"text_input": "x", "max_tokens": 1.5}, b"{not json", b"", [1]]
    for body in bodies:
        status, text = triton.post("ensemble/generate", body)
        assert status >= 400, (body, text)
    status, _ = triton.post("ensembel/generate", {"text_input": "x", "max_tokens": 1})
    assert status >= 400
    assert triton.is_ready()


def test_the_engine_s_own_refusal_and_failure(triton: Any, words: Any) -> None:
    error = triton.refusal("tensorrt_llm", words.token_tensors(words.REFUSED))
    assert error.message() == "full"
    call = triton.open("tensorrt_llm", words.token_tensors(words.FAILS, max_tokens=20, streaming=True))
    responses = []
    with pytest.raises(Exception, match="it broke"):
        while True:
            responses.append(call.next()[0])
    assert words.tokens_of(responses) == list(words.CYCLE[:3]), "what came before the error arrived"
    call.close()
    assert triton.used_blocks() == 0


def test_one_bad_prompt_of_a_batch_refuses_the_request(triton: Any, words: Any) -> None:
    error = triton.refusal("tensorrt_llm", words.token_tensors((21, 22), (21, -7)))
    assert "the id -7" in error.message()
    words.wait_until(lambda: triton.used_blocks() == 0, timeout_s=1.0)


def test_a_misspelled_option_on_generate_is_named(triton: Any) -> None:
    """HTTP's /generate makes a request parameter of every key that is no input: it must not be dropped in silence."""
    status, text = triton.post("ensemble/generate", {"text_input": "Hi", "max_tokens": 4, "temprature": 0.5})
    assert status == 400
    assert "has no input 'temprature'; did you mean 'temperature'?" in text
