"""The text models: whole characters, stop words, special tokens, /generate and /generate_stream, the pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

MODELS = ("ensemble", "tensorrt_llm_bls")
HARD_TEXT = "naïve 👩‍👩‍👧‍👦 Zoë, 日本語のテキスト, \u1e9e, emoji 🏳️‍🌈🙂, العربية, end."


@pytest.mark.parametrize("model", MODELS)
def test_streamed_pieces_are_whole_characters(triton: Any, words: Any, model: str) -> None:
    responses = triton.ask(model, words.text_tensors(HARD_TEXT, max_tokens=200, stream=True))
    pieces = [response["text_output"][0].decode("utf-8") for response in responses]
    assert "".join(pieces) == HARD_TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) > 5


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(
    ("stop_words", "visible"),
    [
        (["ipsum"], "Lorem "),
        (["m ips"], "Lore"),  # within two tokens
        (["sit amet, con"], "Lorem ipsum dolor "),  # over several
        (["nowhere", "dolor"], "Lorem ipsum "),
        (["elitist"], "Lorem ipsum dolor sit amet, consectetur elit"),  # only ever begun
    ],
)
def test_stop_words_never_show(
    triton: Any, words: Any, model: str, streaming: bool, stop_words: list[str], visible: str
) -> None:
    text = "Lorem ipsum dolor sit amet, consectetur elit"
    tensors = words.text_tensors(text, stream=streaming, exclude_input_in_output=True, stop_words=stop_words)
    responses = triton.ask(model, tensors)
    assert words.text_of(responses) == visible
    assert responses[-1]["finish_reason"].tolist() == [b"stop"]
    assert triton.used_blocks() == 0, "the engine was told"


def test_special_tokens_are_left_out(triton: Any, words: Any) -> None:
    prompt = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
    tensors = words.text_tensors(prompt, stream=True, return_num_input_tokens=True)
    responses = triton.ask("ensemble", tensors)
    assert responses[-1]["num_input_tokens"][0, 0] == 7, "special-token text became special ids"
    assert words.text_of(responses) == "userHiassistant"


@pytest.mark.parametrize("model", [*MODELS, "pipeline"])
def test_one_response_repeats_the_prompt_unless_excluded(triton: Any, words: Any, model: str) -> None:
    assert words.text_of(triton.ask(model, words.text_tensors("Ça va ?"))) == "Ça va ?Ça va ?"
    excluded = words.text_tensors("Ça va ?", exclude_input_in_output=True)
    assert words.text_of(triton.ask(model, excluded)) == "Ça va ?"


def test_sequences_and_batches_of_texts(triton: Any, words: Any) -> None:
    tensors = words.text_tensors("first", "the second", num_return_sequences=2, exclude_input_in_output=True)
    responses = triton.ask("ensemble", tensors)
    places = {(int(r["batch_index"][0, 0]), int(r["sequence_index"][0, 0])): words.text_of([r]) for r in responses}
    assert places == {(0, 0): "first", (0, 1): "first", (1, 0): "the second", (1, 1): "the second"}


@pytest.mark.parametrize("model", [*MODELS, "pipeline"])
def test_generate_answers_once(triton: Any, model: str) -> None:
    body = {
        "text_input": "What is it?",
        "max_tokens": 20,
        "exclude_input_in_output": True,
        "bad_words": "",
        "stop_words": "",
    }
    status, text = triton.post(f"{model}/generate", body)
    assert status == 200, text
    assert json.loads(text)["text_output"] == "What is it?"


def test_generate_on_tokens(triton: Any) -> None:
    body = {"input_ids": [21, 22, 23], "input_lengths": 3, "request_output_len": 8, "exclude_input_in_output": True}
    status, text = triton.post("tensorrt_llm/generate", body)
    assert status == 200, text
    assert json.loads(text)["output_ids"] == [21, 22, 23, 200002]


@pytest.mark.parametrize("model", [*MODELS, "pipeline"])
def test_generate_stream_sends_events(triton: Any, model: str) -> None:
    text = "Tell me a long story, please, and tell it well."
    status, answer = triton.post(f"{model}/generate_stream", {"text_input": text, "max_tokens": 50, "stream": True})
    assert status == 200
    events = [json.loads(line.removeprefix("data: ")) for line in answer.splitlines() if line.startswith("data: ")]
    assert "".join(event["text_output"] for event in events) == text
    assert len(events) > 3
    assert [event.get("finish_reason") for event in events][-1] == "stop"


def test_generate_stream_carries_an_error_as_an_event(triton: Any, words: Any) -> None:
    body = {"input_ids": list(words.FAILS), "input_lengths": 4, "request_output_len": 50, "streaming": True}
    status, answer = triton.post("tensorrt_llm/generate_stream", body)
    assert status == 200, "the status was sent with the first token"
    assert "it broke" in answer.splitlines()[-2] + answer.splitlines()[-1]


def test_pipeline_streams_what_the_fused_model_does(triton: Any, words: Any) -> None:
    tensors = words.text_tensors("plain words only, one by one", stream=True, return_log_probs=True)
    assert words.text_of(triton.ask("pipeline", tensors)) == words.text_of(triton.ask("ensemble", tensors))


def test_special_tokens_show_when_the_parameter_says_so(launch: Callable[..., Any], words: Any) -> None:
    triton = launch(
        models=("ensemble",), parameters={"skip_special_tokens": "false", "exclude_input_in_output": "true"}
    )
    prompt = "<|start|>user<|message|>Hi<|end|>"
    assert words.text_of(triton.ask("ensemble", words.text_tensors(prompt, stream=True))) == prompt
    assert words.text_of(triton.ask("ensemble", words.text_tensors(prompt))) == prompt, "the default is to exclude it"


@pytest.mark.parametrize("model", [*MODELS, "pipeline"])
def test_without_end_id_a_tool_call_ends_the_answer(triton: Any, words: Any, model: str) -> None:
    tensors = words.text_tensors(f"{words.CALLS_TOOL} today", max_tokens=60, exclude_input_in_output=True)
    (response,) = triton.ask(model, tensors)
    assert response["finish_reason"].tolist() == [b"stop"]
    assert words.text_of([response]).endswith(words.ARGUMENTS)
