"""What steps take of a GPU's memory: from the sizes of a model and of a step."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity

from gptoss_trt.build_engine.shapes import model_config
from gptoss_trt.runtime.engine.cache_size import CacheShape
from gptoss_trt.runtime.engine.messages import IDS, Sampling, Submit
from gptoss_trt.runtime.engine.options import EngineOptions
from gptoss_trt.runtime.engine.prefill_weights import copies_bytes
from gptoss_trt.runtime.engine.sampler import Sampler
from gptoss_trt.runtime.engine.scheduler import PROMPT_LOGPROB_STEP_ROWS
from gptoss_trt.runtime.engine.sequence import Request, Sequence
from gptoss_trt.runtime.engine.speculation.verify import choose_by_round
from gptoss_trt.runtime.engine.step_memory import (
    FIXED_BYTES,
    SAMPLER_COPIES,
    activation_bytes,
    least_cache_bytes,
    left_to_steps,
    parts_bytes,
    step_bytes,
    workspace_bytes,
)
from gptoss_trt.runtime.engine.step_plan import Work

GIB = 1 << 30
BIG = model_config("gpt-oss-120b")
LONG_STEPS = EngineOptions(max_batch=64, step_tokens=8192, prefix_cache=False).resolved("cuda")


def test_activations_are_those_of_a_layer_s_widest_part() -> None:
    residual, norm, read, out = 2 * 2880, 2 * 2880, 2880 + 4 * 2880, 4 * 2 * 2880
    assert activation_bytes(BIG, 8192) >= 8192 * (residual + norm + read + out)
    q, kv = 64 * 64, 8 * 64
    dense = replace(BIG, experts_per_token=1)
    assert activation_bytes(dense, 1) >= residual + norm + 2 * (q + 2 * kv) + 2 * 2 * q


@pytest.mark.parametrize(
    ("tokens", "mib"),  # of gate_up's and down's packed weights, gate_up's tiles, as the library says
    [(8192, 112.11 + 95.75 + 106.64), (2048, 38.8 + 26.09 + 35.3), (1, 0.1)],
)
def test_workspaces_hold_what_the_library_asks_for(tokens: int, mib: float) -> None:
    assert mib * (1 << 20) <= workspace_bytes(BIG, tokens) <= mib * (1 << 20) * 1.2 + (50 << 20)
    assert workspace_bytes(BIG, tokens) == workspace_bytes(BIG, 1 << (tokens - 1).bit_length())


@pytest.mark.parametrize("model", ["gpt-oss-20b", "gpt-oss-120b"])
@pytest.mark.parametrize(
    ("given", "low", "high"),
    [
        ({}, 1.6, 2.4),
        ({"max_batch": 64, "step_tokens": 8192}, 1.5, 1.8),
        ({"step_tokens": 32768}, 4.0, 4.5),
        ({"speculation": "ngram"}, 3.0, 4.0),
        ({"max_batch": 8, "step_tokens": 256}, 0.4, 0.8),
    ],
)
def test_what_steps_take_grows_with_them(model: str, given: dict[str, int], low: float, high: float) -> None:
    size = step_bytes(model_config(model), EngineOptions(**given).resolved("cuda"))  # type: ignore[arg-type]
    assert low * GIB < size < high * GIB


@pytest.mark.parametrize(("tokens", "context", "mib"), [(8192, 131072, 4224.0), (8192, 8256, 396.0), (2048, 2048, 0.0)])
def test_parts_of_deterministic_attention_are_as_the_library_says(tokens: int, context: int, mib: float) -> None:
    assert parts_bytes(BIG, tokens, context) == mib * (1 << 20)
    options = EngineOptions(deterministic=True, step_tokens=tokens, max_context=context).resolved("cuda")
    more = step_bytes(BIG, options) - step_bytes(BIG, replace(options, deterministic=False))
    logits = 4 * BIG.vocab_size * (256 + 256 + SAMPLER_COPIES * 256)
    assert more >= min(mib * (1 << 20), mib * (1 << 20) + activation_bytes(BIG, tokens) - logits)


def test_logits_of_every_row_fit() -> None:
    """Those of a step that verifies drafts and gives log-probabilities of prompts."""
    options = EngineOptions(speculation="ngram").resolved("cuda")
    rows = min(options.step_tokens, options.max_batch * 9) + PROMPT_LOGPROB_STEP_ROWS
    assert step_bytes(BIG, options) > 4 * rows * BIG.vocab_size + FIXED_BYTES


def test_the_sampler_takes_no_more_copies_than_are_counted() -> None:
    """With most of them: log-probabilities of all rows, one that is greedy, and rows of prompts among theirs."""
    vocabulary, batch = 50_000, 16
    settings = [Sampling(temperature=0.0), *[Sampling(temperature=0.7, top_p=0.9)] * (batch - 1)]
    sequences = []
    for number, sampling in enumerate(settings):
        submit = Submit(f"r{number}", (1, 2), 9, sampling=sampling, logprobs=5)
        request = Request((1, submit.request_id), submit, 0, number, number, b"")
        sequences.append(Sequence(request, 0, array(IDS, (1, 2))))
    logits = torch.randn(2 * batch, vocabulary, generator=torch.Generator().manual_seed(0))
    works = [Work(sequence, 1, 1, 1) for sequence in sequences]
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        choose_by_round(works, list(range(batch, 2 * batch)), logits, Sampler().sample)
    held, most = 0, 0
    for event in seen.profiler.kineto_results.events():
        held += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, held)
    copies = most / (4 * vocabulary * batch)
    assert SAMPLER_COPIES - 1 < copies <= SAMPLER_COPIES


def test_a_small_gpu_keeps_half_for_a_cache() -> None:
    assert left_to_steps(2 * GIB, 20 * GIB) == 2 * GIB
    assert left_to_steps(2 * GIB, 3 * GIB) == 3 * GIB // 2


def test_long_caches_fit_beside_copies_of_29_layers() -> None:
    """120b with dense FP8 on an H200, 80.55 GiB of which are free behind its weights: 64 sequences of 8,192 tokens that
    grow by 174, with copies of 29 layers' gate_up. The first to come have ended before the last have grown: 8,363
    blocks at most."""
    free, gate_up = int(80.549 * GIB), int(2.0382 * GIB)
    shape = CacheShape((18 << 17, 18 << 17), 64, 128, 64, 8192, 131072, keeps_prefixes=False)
    steps = step_bytes(BIG, LONG_STEPS)
    options = EngineOptions(prefill_weights="59.3")
    room = copies_bytes(options, free, steps + shape.one_context_bytes, 36 * gate_up)
    assert room // gate_up == 29
    left = free - 29 * gate_up
    full, _ = shape.pool_sizes(left - left_to_steps(steps, left))
    assert full >= 8363 + 64


@pytest.mark.parametrize("context_bytes", [GIB // 2, 9 * GIB])
@pytest.mark.parametrize("step_tokens", [8192, 32768])
def test_as_many_copies_as_fit_leave_steps_what_they_want(context_bytes: int, step_tokens: int) -> None:
    options = EngineOptions(step_tokens=step_tokens, prefill_weights="100").resolved("cuda")
    steps, free = step_bytes(BIG, options), 60 * GIB
    kept = steps + least_cache_bytes(steps, context_bytes)
    left = free - copies_bytes(options, free, kept, 108 * GIB)
    assert left_to_steps(steps, left) == steps and left - steps >= context_bytes
