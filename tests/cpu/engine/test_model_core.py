"""The real engine over a tiny model that reads everything back from its paged KV cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gptoss_trt.build_engine.spec import ModelConfig
from gptoss_trt.runtime.engine.core import EngineLoadError
from gptoss_trt.runtime.engine.guides import GuideError
from gptoss_trt.runtime.engine.messages import Error, Finished, Guide, Sampling, Submit, Tokens
from gptoss_trt.runtime.engine.model_core import ModelCore, load_core
from gptoss_trt.runtime.engine.options import EngineOptions
from gptoss_trt.runtime.model.batch import StepBatch

VOCABULARY, WINDOW = 300, 12
RAISES, POISONS = 290, 291
OPTIONS = EngineOptions(block_tokens=4, max_batch=8, step_tokens=16, max_queue=64)


class RecallModel:
    """Logits are a fixed pseudo-random function of the tokens in the cache: all of them, and those in the window."""

    config = ModelConfig(2, 8, 8, 2, 1, 1, 1, 8, VOCABULARY, ("sliding_attention", "full_attention"), WINDOW, 200)

    def __init__(self) -> None:
        self.steps: list[int] = []
        generator = torch.Generator().manual_seed(3)
        self.table = torch.randn((997, VOCABULARY), generator=generator) * 4
        self.table[:, RAISES:] = -60.0  # never chosen

    def kv_block_bytes(self, block_tokens: int) -> tuple[int, int]:
        return 8 * block_tokens, 8 * block_tokens

    def allocate_kv(self, full_blocks: int, window_blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.full = torch.full((full_blocks, block_tokens), -1)
        self.window = torch.full((window_blocks, block_tokens), -1)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        self.steps.append(len(batch.context_lens))
        if RAISES in batch.token_ids:
            raise ValueError("this token breaks the step")
        rows = {}
        for s in range(len(batch.context_lens)):
            first, end = int(batch.query_start[s]), int(batch.query_start[s + 1])
            for t in range(first, end):
                block, offset = divmod(int(batch.positions[t]), self.block_tokens)
                self.full[batch.full_blocks[s, block], offset] = batch.token_ids[t]
                self.window[batch.window_blocks[s, block - int(batch.window_first_block[s])], offset] = batch.token_ids[
                    t
                ]
            for t in range(first, end):
                rows[t] = self._row(batch, s, int(batch.positions[t]))
        return (
            torch.stack([rows[int(t)] for t in batch.logits_rows])
            if len(batch.logits_rows)
            else torch.empty(0, VOCABULARY)
        )

    def _row(self, batch: StepBatch, s: int, position: int) -> torch.Tensor:
        seen = [self._read(self.full, batch.full_blocks[s], 0, p) for p in range(position + 1)]
        first = int(batch.window_first_block[s])
        near = range(max(0, position - WINDOW + 1), position + 1)
        assert seen[near.start :] == [self._read(self.window, batch.window_blocks[s], first, p) for p in near]
        if POISONS in seen:
            return torch.full((VOCABULARY,), math.nan)
        number = 7
        for token in seen:
            number = (number * 31 + token + 1) % 997
        return self.table[number].clone()

    def _read(self, pool: torch.Tensor, table: torch.Tensor, first: int, position: int) -> int:
        block = int(table[position // self.block_tokens - first])
        assert block >= 0
        return int(pool[block, position % self.block_tokens])


class Bench:
    def __init__(self, options: EngineOptions = OPTIONS, kv_bytes: int = 20_000, **fields: Any) -> None:
        self.model = RecallModel()
        self.core = ModelCore(self.model, options, kv_bytes=kv_bytes, **fields)
        self.ids: dict[tuple[str, int], list[int]] = {}
        self.logprobs: dict[str, list[Any]] = {}
        self.ends: dict[str, Finished | Error] = {}

    def submit(self, name: str, prompt: tuple[int, ...], max_tokens: int = 12, **fields: Any) -> None:
        fields.setdefault("sampling", Sampling(temperature=0.0))
        self.core.submit((1, name), Submit(name, prompt, max_tokens, **fields), 1)

    def run(self, steps: int = 1000) -> None:
        for _ in range(steps):
            if not self.core.has_work():
                return
            for (_, name), event in self.core.step():
                if isinstance(event, Tokens):
                    self.ids.setdefault((name, event.sequence), []).extend(event.token_ids)
                    self.logprobs.setdefault(name, []).extend(event.logprobs or ())
                elif isinstance(event, Error) or event.remaining == 0:
                    self.ends[name] = event


def prompts(count: int) -> dict[str, tuple[int, ...]]:
    generator = torch.Generator().manual_seed(9)
    lengths = torch.randint(1, 60, (count,), generator=generator).tolist()
    return {f"p{i}": tuple(torch.randint(0, 280, (n,), generator=generator).tolist()) for i, n in enumerate(lengths)}


def alone(prompt: tuple[int, ...], **fields: Any) -> list[int]:
    bench = Bench()
    bench.submit("r", prompt, **fields)
    bench.run()
    return bench.ids["r", 0]


@pytest.mark.parametrize("kv_bytes", [20_000, 2_800])
def test_greedy_tokens_are_the_same_alone_and_among_others(kv_bytes: int) -> None:
    bench = Bench(kv_bytes=kv_bytes)
    for name, prompt in prompts(24).items():
        bench.submit(name, prompt)
    bench.run()
    assert max(bench.model.steps) > 4
    if kv_bytes < 3_000:
        assert bench.core.stats()["counters"]["preemptions"] > 0
    for name, prompt in prompts(24).items():
        assert bench.ids[name, 0] == alone(prompt), name


def test_seeded_sampling_is_the_same_alone_and_among_others() -> None:
    sampling = Sampling(temperature=1.5, top_p=0.95, seed=77)
    bench = Bench()
    for name, prompt in prompts(12).items():
        bench.submit(name, prompt, sampling=sampling, n=2)
    bench.run()
    for name, prompt in prompts(12).items():
        single = Bench()
        single.submit("r", prompt, sampling=sampling, n=2)
        single.run()
        assert [bench.ids[name, i] for i in range(2)] == [single.ids["r", i] for i in range(2)]
        assert bench.ids[name, 0] != bench.ids[name, 1]


def test_unseeded_requests_differ() -> None:
    bench = Bench()
    for name in "ab":
        bench.submit(name, (1, 2), sampling=Sampling(temperature=5.0))
    bench.run()
    assert bench.ids["a", 0] != bench.ids["b", 0]


@pytest.mark.parametrize(("token", "text"), [(RAISES, "breaks the step"), (POISONS, "not finite")])
def test_a_bad_step_fails_the_requests_concerned_only(token: int, text: str) -> None:
    bench = Bench()
    for name, prompt in prompts(6).items():
        bench.submit(name, prompt)
    bench.submit("bad", (1, 2, 3, token))
    bench.run()
    bad = bench.ends.pop("bad")
    assert isinstance(bad, Error) and bad.code == "INTERNAL" and text in bad.message
    assert all(isinstance(end, Finished) for end in bench.ends.values()) and len(bench.ends) == 6
    for name, prompt in prompts(6).items():
        assert bench.ids[name, 0] == alone(prompt)
    assert bench.core.stats()["kv"]["full"]["used"] == 0


def test_a_broken_device_ends_the_engine() -> None:
    bench = Bench()
    bench.submit("r", (1,))

    def fail(_: StepBatch) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    bench.model.forward = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="CUDA error"):
        bench.run()


def test_prompt_logprobs_cover_the_prompt() -> None:
    prompt = prompts(24)["p5"] + (5,) * 30
    bench = Bench(EngineOptions(block_tokens=4, max_batch=2, step_tokens=7))
    for name in ("first", "again"):  # the second finds the prompt in the cache and must not use it
        bench.submit(name, prompt, prompt_logprobs=2, logprobs=1)
        bench.run()
        end = bench.ends[name]
        assert isinstance(end, Finished) and end.prompt_logprobs is not None
        assert len(end.prompt_logprobs) == len(prompt) and end.prompt_logprobs[0] is None
        number = 7
        for position, entry in enumerate(end.prompt_logprobs[1:]):
            number = (number * 31 + prompt[position] + 1) % 997
            expected = bench.model.table[number].log_softmax(0)
            assert entry is not None and entry.logprob == pytest.approx(float(expected[prompt[position + 1]]), abs=1e-5)
            assert entry.top[0][1] == pytest.approx(float(expected.max()), abs=1e-5)
    assert len(bench.logprobs["first"]) == 12 and bench.ids["first", 0] == bench.ids["again", 0] == alone(prompt)


def test_cancelling_frees_blocks_at_the_next_step() -> None:
    bench = Bench()
    bench.submit("r", (1, 2, 3), max_tokens=100)
    bench.run(5)
    assert bench.core.stats()["kv"]["full"]["used"] > 0
    bench.core.cancel((1, "r"))
    bench.run(1)
    end = bench.ends["r"]
    assert isinstance(end, Finished) and end.reason == "cancelled" and end.usage.completion_tokens == 5
    assert bench.core.stats()["kv"]["full"]["used"] == 0


def test_statistics_say_what_the_metrics_page_needs() -> None:
    bench = Bench()
    bench.submit("a", tuple(range(40)), max_tokens=30)
    bench.submit("b", (1,), max_tokens=30)
    bench.run(1)
    now = bench.core.stats()
    assert now["requests"] == {"active": 2, "max": 8, "scheduled": 1, "context": 1, "waiting": 1}
    assert now["inflight"] == {"total_context_tokens": 16, "generation_requests": 0, "paused_requests": 0}
    assert (now["counters"]["prompt_tokens"], now["counters"]["uncached_tokens"]) == (41, 40)  # "b" waits
    full = now["kv"]["full"]
    assert full["used"] + full["free"] == full["max"] and full["tokens_per"] == 4 and full["used"] == 10
    assert full["fraction"] == pytest.approx(10 / full["max"]) and now["memory"]["cpu"] > 1 << 20
    bench.run()
    bench.submit("c", tuple(range(40)), max_tokens=1)
    bench.run()
    after = bench.core.stats()
    assert after["kv"]["full"]["reused"] == 9 and after["counters"]["cached_tokens"] == 36
    assert after["counters"]["generated_tokens"] == 61 and after["counters"]["prompt_tokens"] == 81
    assert after["counters"]["uncached_tokens"] == 81 - 36
    lengths = after["histograms"]["output_tokens"]
    assert lengths["count"] == 3 and lengths["sum"] == 61 and lengths["buckets"][:2] == [[10.0, 1], [50.0, 3]]
    assert after["histograms"]["time_to_first_token_s"]["count"] == 3
    assert after["histograms"]["time_between_tokens_s"]["count"] == 2


def test_limits_come_from_context_and_cache() -> None:
    bench = Bench()
    bench.submit("context", (1,) * 150, max_tokens=51)
    bench.run()
    end = bench.ends["context"]
    assert isinstance(end, Error) and all(number in end.message for number in ("150", "51", "201", "200"))
    small = Bench(kv_bytes=2_800)
    small.submit("cache", (1,) * 150, max_tokens=40)
    small.run()
    end = small.ends["cache"]
    assert isinstance(end, Error) and "KV cache" in end.message and "190" in end.message
    with pytest.raises(EngineLoadError, match="kv_bytes 100 is too small"):
        Bench(kv_bytes=100)
    with pytest.raises(EngineLoadError, match="max_context is 201; the model's context is 200"):
        Bench(options=replace(OPTIONS, max_context=201))


def test_cuda_without_a_gpu_is_told_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineLoadError, match="option device is 'cuda'"):
        load_core(tmp_path, EngineOptions(device="cuda"))


class OnlyEven:
    failure = ""

    def mask(self, logits: torch.Tensor) -> None:
        logits[1::2] = -math.inf

    def accept(self, token: int) -> None:
        assert token % 2 == 0


class EvenCompiler:
    def compile(self, guides: tuple[Guide, ...]) -> OnlyEven:
        if guides[0].grammar != "even":
            raise GuideError(f"{guides[0].kind} {guides[0].grammar!r} is unknown")
        return OnlyEven()


def test_guides_go_through_the_compiler() -> None:
    bench = Bench(guide_compiler=EvenCompiler())
    bench.submit("good", (1, 2), guides=(Guide("regex", "even"),))
    bench.submit("bad", (1, 2), guides=(Guide("regex", "odd"),))
    bench.submit("free", (1, 2))
    bench.run()
    assert all(token % 2 == 0 for token in bench.ids["good", 0]) and any(t % 2 for t in bench.ids["free", 0])
    bad = bench.ends["bad"]
    assert isinstance(bad, Error) and bad.code == "INVALID_ARGUMENT" and "odd" in bad.message


@pytest.mark.parametrize(
    "make",
    [
        lambda: EngineOptions(block_tokens=65),
        lambda: EngineOptions(device="tpu"),
        lambda: EngineOptions(max_batch=9, step_tokens=8),
    ],
)
def test_impossible_options_are_errors(make: Callable[[], EngineOptions]) -> None:
    with pytest.raises(EngineLoadError, match="engine option"):
        make()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_engine_chooses_what_is_left_open(device: str) -> None:
    for given in (EngineOptions(), EngineOptions(max_batch=4000), EngineOptions(step_tokens=5)):
        chosen = given.resolved(device)
        assert 1 <= chosen.max_batch <= chosen.step_tokens and 1 <= chosen.block_tokens <= 64
        assert given.max_batch in (0, chosen.max_batch) and given.step_tokens in (0, chosen.step_tokens)


def test_an_options_file_round_trips_and_unknown_keys_are_named(tmp_path: Any) -> None:
    path = tmp_path / "options.json"
    OPTIONS.write(path)
    assert EngineOptions.read(path) == OPTIONS
    wrong = (b'{"max_bacth": 3}', "did you mean max_batch"), (b"[3]", "not an object"), (b"3", "not an object")
    for text, reason in (*wrong, (b"{", "options.json"), (b"\xff", "options.json")):
        path.write_bytes(text)
        with pytest.raises(EngineLoadError, match=reason):
            EngineOptions.read(path)
