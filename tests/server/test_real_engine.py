"""The models over a built engine with random weights: what the scripted engine cannot show."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gptoss_trt.build_engine.builder import BuildOptions, build_engine
from gptoss_trt.build_engine.synthetic import small_config, write_checkpoint
from gptoss_trt.runtime.engine.options import EngineOptions

PROMPT = (5, 17, 101, 44, 250, 9)
VOCABULARY = 320


@pytest.fixture(scope="module")
def real(launch: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("real")
    write_checkpoint(folder / "checkpoint", small_config())
    build_engine(folder / "checkpoint", folder / "engine", BuildOptions())
    options = EngineOptions(threads=1, kv_bytes=8 << 20, max_batch=8, device="cpu")
    return launch(engine_dir=folder / "engine", models=("tensorrt_llm",), engine=options)


def answer(real: Any, words: Any, **more: Any) -> dict[str, np.ndarray]:
    tensors = words.token_tensors(PROMPT, max_tokens=12, end_id=-1, exclude_input_in_output=True, **more)
    (response,) = real.ask("tensorrt_llm", tensors)
    return response


def ids(response: dict[str, np.ndarray]) -> list[int]:
    return response["output_ids"][0, 0].tolist()


def test_greedy_by_default_and_the_same_streamed(real: Any, words: Any) -> None:
    first = ids(answer(real, words, temperature=5.0))
    assert first == ids(answer(real, words, runtime_top_k=1, runtime_top_p=0.0))
    streamed = real.ask("tensorrt_llm", words.token_tensors(PROMPT, max_tokens=12, end_id=-1, streaming=True))
    assert words.tokens_of(streamed) == first
    assert len(first) == 12


def test_a_seed_decides_what_is_sampled(real: Any, words: Any) -> None:
    hot = {"temperature": 3.0, "runtime_top_p": 1.0}
    assert ids(answer(real, words, seed=5, **hot)) == ids(answer(real, words, seed=5, **hot))
    assert len({tuple(ids(answer(real, words, seed=seed, **hot))) for seed in range(4)}) > 1


def test_log_probabilities(real: Any, words: Any) -> None:
    response = answer(real, words, return_log_probs=True)
    each = response["output_log_probs"][0, 0]
    assert each.shape == (12,)
    assert (each <= 0).all()
    assert response["cum_log_probs"][0, 0] == pytest.approx(each.sum(), rel=1e-4)


def test_bias_bad_words_and_stop_words(real: Any, words: Any) -> None:
    plain = ids(answer(real, words))
    bias = np.zeros((1, VOCABULARY), dtype=np.float32)
    bias[0, 123] = 80.0
    assert ids(answer(real, words, embedding_bias=bias)) == [123] * 12
    bad = np.array([[[plain[0]], [1]]], dtype=np.int32)
    assert plain[0] not in ids(answer(real, words, bad_words_list=bad))
    stop = np.array([[plain[2:4], [2, -1]]], dtype=np.int32)
    assert ids(answer(real, words, stop_words_list=stop)) == plain[:4]


def test_min_tokens_holds_the_end_back(real: Any, words: Any) -> None:
    plain = ids(answer(real, words))
    tensors = words.token_tensors(PROMPT, max_tokens=12, end_id=plain[0], exclude_input_in_output=True)
    (short,) = real.ask("tensorrt_llm", tensors)
    assert ids(short) == plain[:1]
    (longer,) = real.ask("tensorrt_llm", {**tensors, **words.scalars(1, min_length=5)})
    assert len(ids(longer)) >= 5


def test_ids_and_biases_are_checked_against_this_vocabulary(real: Any, words: Any) -> None:
    assert (
        f"ids lie in 0..{VOCABULARY - 1}"
        in real.refusal("tensorrt_llm", words.token_tensors((5, VOCABULARY))).message()
    )
    wrong = words.token_tensors(PROMPT, embedding_bias=np.ones((1, 201088), dtype=np.float32))
    assert f"each of the {VOCABULARY} ids" in real.refusal("tensorrt_llm", wrong).message()


def test_a_prefix_is_reused(real: Any, words: Any) -> None:
    prompt = tuple(np.random.default_rng(1).integers(0, 290, 100).tolist())
    for _ in range(2):
        tensors = words.token_tensors(prompt, max_tokens=4, end_id=-1, return_perf_metrics=True)
        (response,) = real.ask("tensorrt_llm", tensors)
    assert response["kv_cache_reused_blocks"][0, 0] > 0
    total = response["kv_cache_alloc_total_blocks"][0, 0]
    assert total >= response["kv_cache_alloc_new_blocks"][0, 0] > 0


def test_generate_over_http(real: Any, words: Any) -> None:
    body = {"input_ids": list(PROMPT), "input_lengths": len(PROMPT), "request_output_len": 12, "end_id": -1}
    status, text = real.post("tensorrt_llm/generate", body)
    assert status == 200
    assert json.loads(text)["output_ids"] == [*PROMPT, *ids(answer(real, words))]
