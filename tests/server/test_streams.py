"""Tokens arrive whole, in order and where they belong, for one stream and for many."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


def expected(words: Any, count: int) -> list[int]:
    return [words.CYCLE[i % len(words.CYCLE)] for i in range(count)]


def test_a_stream_carries_the_new_tokens_only(triton: Any, words: Any) -> None:
    responses = triton.ask("tensorrt_llm", words.token_tensors(words.LONG, max_tokens=50, streaming=True))
    assert words.tokens_of(responses) == expected(words, 50)
    assert len(responses) > 5, "tokens of 50 steps came in a handful of responses: that is not streaming"


@pytest.mark.parametrize("exclude", [False, True, None])
def test_one_response_begins_with_the_prompt_unless_excluded(triton: Any, words: Any, exclude: bool | None) -> None:
    more = {} if exclude is None else {"exclude_input_in_output": exclude}
    (response,) = triton.ask("tensorrt_llm", words.token_tensors(words.LONG, max_tokens=7, **more))
    prompt = [] if exclude else list(words.LONG)
    assert response["output_ids"][0, 0].tolist() == prompt + expected(words, 7)
    assert response["sequence_length"][0, 0] == len(prompt) + 7


def test_chunks_of_any_size_are_put_together(triton: Any, words: Any) -> None:
    responses = triton.ask("tensorrt_llm", words.token_tensors(words.CHUNKS, max_tokens=100, streaming=True))
    assert words.tokens_of(responses) == expected(words, 100)


def test_64_streams_lose_and_swap_nothing(triton: Any, words: Any) -> None:
    calls = []
    for index in range(64):
        prompt = (*words.LONG, 1000 + index)
        calls.append(triton.open("tensorrt_llm", words.token_tensors(prompt, max_tokens=150, streaming=True)))
    for call in calls:
        responses = call.rest(60.0)
        assert words.tokens_of(responses) == expected(words, 150)
        assert [("finish_reason" in response) for response in responses] == [False] * (len(responses) - 1) + [True]
        call.close()


def test_64_echoes_come_back_to_their_own_streams(triton: Any, words: Any) -> None:
    prompts = [tuple(range(5000 + 40 * index, 5000 + 40 * index + 30)) for index in range(64)]
    calls = [triton.open("tensorrt_llm", words.token_tensors(p, max_tokens=30, streaming=True)) for p in prompts]
    for call, prompt in zip(calls, prompts, strict=True):
        assert words.tokens_of(call.rest(60.0)) == list(prompt)
        call.close()


def test_a_batch_gives_one_final_response_a_prompt(triton: Any, words: Any) -> None:
    prompts = ((21, 22, 23), (31, 32, 33), (41, 42, 43))
    responses = triton.ask("tensorrt_llm", words.token_tensors(*prompts, exclude_input_in_output=True))
    assert sorted(response["batch_index"][0, 0] for response in responses) == [0, 1, 2]
    for index, prompt in enumerate(prompts):
        assert words.tokens_of(responses, batch=index) == [*prompt, 200002]


def test_prompts_of_a_batch_may_have_their_own_lengths(triton: Any, words: Any) -> None:
    tensors = words.token_tensors((21, 22, 0, 0), (31, 32, 33, 34), streaming=True)
    tensors["input_lengths"] = np.array([[2], [4]], dtype=np.int32)
    responses = triton.ask("tensorrt_llm", tensors)
    assert words.tokens_of(responses, batch=0) == [21, 22, 200002]
    assert words.tokens_of(responses, batch=1) == [31, 32, 33, 34, 200002]


@pytest.mark.parametrize("streaming", [False, True])
def test_several_sequences_of_a_prompt(triton: Any, words: Any, streaming: bool) -> None:
    tensors = words.token_tensors(
        (21, 22, 23), num_return_sequences=3, streaming=streaming, exclude_input_in_output=True
    )
    responses = triton.ask("tensorrt_llm", tensors)
    for sequence in range(3):
        assert words.tokens_of(responses, sequence=sequence) == [21, 22, 23, 200002]
    finals = [r["sequence_index"][0, 0] for r in responses if "finish_reason" in r]
    assert sorted(finals) == [0, 1, 2]


def test_end_ids(triton: Any, words: Any) -> None:
    def answer(**more: Any) -> list[int]:
        (response,) = triton.ask(
            "tensorrt_llm", words.token_tensors(words.LONG, max_tokens=12, exclude_input_in_output=True, **more)
        )
        return response["output_ids"][0, 0].tolist()

    assert answer() == expected(words, 12)
    assert answer(end_id=13, pad_id=50256) == [11, 12, 13]
    (response,) = triton.ask(
        "tensorrt_llm", words.token_tensors((200002, 21), max_tokens=4, end_id=-1, streaming=False)
    )
    assert response["output_ids"][0, 0].tolist() == [200002, 21, 200002, 21, 200002], "-1 never stops"


def test_stop_and_bad_word_lists(triton: Any, words: Any) -> None:
    stop = np.array([[[13, 14, 16], [2, 3, -1]]], dtype=np.int32)
    tensors = words.token_tensors(words.LONG, max_tokens=12, exclude_input_in_output=True, stop_words_list=stop)
    (response,) = triton.ask("tensorrt_llm", tensors)
    assert response["output_ids"][0, 0].tolist() == [11, 12, 13, 14]
    assert response["finish_reason"].tolist() == [b"stop"]
