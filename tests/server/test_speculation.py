"""Speculation through the server: the same tokens, what was accepted in the answer and on the metrics page."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gptoss_trt.build_engine.builder import BuildOptions, build_engine
from gptoss_trt.build_engine.synthetic import small_config, write_checkpoint
from gptoss_trt.runtime.engine.options import EngineOptions

PROMPT = (5, 17, 101, 44, 250, 9)
TOKENS = 40


@pytest.fixture(scope="module")
def speculating(launch: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("speculating")
    write_checkpoint(folder / "checkpoint", small_config())
    build_engine(folder / "checkpoint", folder / "engine", BuildOptions())
    options = EngineOptions(threads=1, kv_bytes=8 << 20, max_batch=8, device="cpu", speculation="ngram")
    return launch(engine_dir=folder / "engine", models=("tensorrt_llm",), engine=options)


def test_a_repetitive_answer_is_drafted_and_says_so(speculating: Any, words: Any) -> None:
    bias = np.zeros((1, 320), dtype=np.float32)
    bias[0, 123] = 80.0
    more = {"max_tokens": TOKENS, "end_id": -1, "embedding_bias": bias, "return_perf_metrics": True}
    (answer,) = speculating.ask("tensorrt_llm", words.token_tensors(PROMPT, exclude_input_in_output=True, **more))
    assert answer["output_ids"][0, 0].tolist() == [123] * TOKENS
    drafted, accepted = answer["total_draft_tokens"][0, 0], answer["total_accepted_draft_tokens"][0, 0]
    assert 10 < accepted <= drafted
    assert answer["acceptance_rate"][0, 0] == pytest.approx(accepted / drafted)
    streamed = speculating.ask("tensorrt_llm", words.token_tensors(PROMPT, streaming=True, **more))
    assert words.tokens_of(streamed) == [123] * TOKENS and len(streamed) < TOKENS
    wanted = {"drafted": 2.0 * drafted, "accepted": 2.0 * accepted}
    words.wait_until(lambda: on_the_page(speculating) == wanted, timeout_s=10.0, period_s=0.2)


def on_the_page(server: Any) -> dict[str, float]:
    """gptoss_trt_speculative_tokens by outcome."""
    with urllib.request.urlopen(server.server.metrics_url, timeout=5) as answer:
        page = answer.read().decode()
    lines = re.findall(r'^gptoss_trt_speculative_tokens\{[^}]*outcome="(\w+)"[^}]*\} (\S+)$', page, re.MULTILINE)
    return {outcome: float(value) for outcome, value in lines}
