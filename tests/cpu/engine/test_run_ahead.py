"""Running ahead on a CPU, where the same code runs without capture: what comes out is the same token for token as in
series, whatever ends, fails, waits or is not plain."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from gptoss_trt.build_engine.spec import ModelConfig
from gptoss_trt.runtime.engine.messages import Error, Event, Finished, Sampling, Submit, Tokens
from gptoss_trt.runtime.engine.model_core import ModelCore
from gptoss_trt.runtime.engine.options import EngineOptions
from gptoss_trt.runtime.model import GptOssModel, GraphedModel, StepBatch
from gptoss_trt.runtime.model.cuda_graph import Launched
from gptoss_trt.runtime.model.draw import Draws

VOCABULARY, WINDOW = 300, 12
POISONS, RAISES = 290, 291
OPTIONS = EngineOptions(block_tokens=4, max_batch=8, step_tokens=24, max_queue=64)


class PagedModel:
    """Logits are a fixed pseudo-random function of all tokens, read back from the cache, row by row: no rounding."""

    config = ModelConfig(2, 8, 8, 2, 1, 1, 1, 8, VOCABULARY, ("sliding_attention", "full_attention"), WINDOW, 200)
    device = torch.device("cpu")
    tap = None

    def __init__(self) -> None:
        self.table = torch.randn((997, VOCABULARY), generator=torch.Generator().manual_seed(3)) * 4
        self.table[:, POISONS:] = -60.0  # never chosen

    def kv_block_bytes(self, block_tokens: int) -> tuple[int, int]:
        return 8 * block_tokens, 8 * block_tokens

    def allocate_kv(self, full_blocks: int, window_blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.full = torch.full((full_blocks, block_tokens), -1)
        self.window = torch.full((window_blocks, block_tokens), -1)

    def forward(self, batch: StepBatch, *, ends_only: bool = False) -> torch.Tensor:
        real = int(batch.query_start[-1])
        if RAISES in batch.token_ids[:real]:
            raise ValueError("this token breaks the step")
        out = torch.zeros((len(batch.token_ids), VOCABULARY))
        for s in range(len(batch.context_lens)):
            tokens = range(int(batch.query_start[s]), int(batch.query_start[s + 1]))
            for t in tokens:
                block, offset = divmod(int(batch.positions[t]), self.block_tokens)
                near = block - int(batch.window_first_block[s])
                self.full[batch.full_blocks[s, block], offset] = batch.token_ids[t]
                self.window[batch.window_blocks[s, near], offset] = batch.token_ids[t]
            for t in tokens:
                out[t] = self._row(batch, s, int(batch.positions[t]))
        return out[batch.logits_rows.long()]

    def _row(self, batch: StepBatch, s: int, position: int) -> torch.Tensor:
        seen = self._read(self.full, batch.full_blocks[s], 0, range(position + 1))
        near = range(max(0, position - WINDOW + 1), position + 1)
        first = int(batch.window_first_block[s])
        assert seen[near.start :] == self._read(self.window, batch.window_blocks[s], first, near)
        if POISONS in seen:
            return torch.full((VOCABULARY,), math.nan)
        number = 7
        for token in seen:
            number = (number * 31 + token + 1) % 997
        return self.table[number]

    def _read(self, pool: torch.Tensor, table: torch.Tensor, first: int, positions: range) -> list[int]:
        blocks = [int(table[p // self.block_tokens - first]) for p in positions]
        assert min(blocks) >= 0
        return [int(pool[block, p % self.block_tokens]) for block, p in zip(blocks, positions, strict=True)]


class WatchedModel(GraphedModel):
    """Counts launches that take tokens of the step before, and how many steps are under way."""

    def __init__(self) -> None:
        super().__init__(cast(GptOssModel, PagedModel()))
        self.fed = self.under_way = self.most = 0
        self.when_asked: Callable[[], None] = lambda: None

    def launch(self, batch: StepBatch, draws: Draws) -> Launched:
        launched = super().launch(batch, draws)
        self.fed += draws.source is not None
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        taken = launched.tokens

        def tokens() -> list[int]:
            self.under_way -= 1
            self.when_asked()
            return taken()

        launched.tokens = tokens  # type: ignore[method-assign]
        return launched


class Bench:
    """A core whose clock ticks 1 ms a step, and the events of each request."""

    def __init__(self, ahead: bool, kv_bytes: int = 20_000, **options: Any) -> None:
        self.model = WatchedModel()
        self.now_ms = 1
        fields = {**vars(OPTIONS), "run_ahead": ahead, **options}
        self.core = ModelCore(
            self.model, EngineOptions(**fields), kv_bytes=kv_bytes, clock_ns=lambda: self.now_ms * 1_000_000
        )
        self.ids: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], Finished | Error] = {}

    def submit(self, name: str, prompt: tuple[int, ...], max_tokens: int = 12, **fields: Any) -> None:
        fields.setdefault("sampling", Sampling(temperature=0.0))
        self.core.submit((1, name), Submit(name, prompt, max_tokens, **fields), self.now_ms * 1_000_000)

    def step(self) -> None:
        self.now_ms += 1
        if self.now_ms % 2:
            self.core.begin()  # it changes nothing
        for (_, name), event in self.core.step():
            self._take(name, event)

    def _take(self, name: str, event: Event) -> None:
        if isinstance(event, Tokens):
            assert (name, event.sequence) not in self.ends, "a token after the end"
            self.ids.setdefault((name, event.sequence), []).extend(event.token_ids)
            return
        place = (name, event.sequence) if isinstance(event, Finished) else (name, -1)
        assert place not in self.ends
        self.ends[place] = event

    def run(self) -> Bench:
        for _ in range(3000):
            if not self.core.has_work():
                break
            self.step()
        assert not self.core.has_work() and self.model.under_way == 0
        used = self.core.stats()["kv"]
        assert used["full"]["used"] == used["window"]["used"] == 0
        return self

    def answers(self) -> tuple[dict[tuple[str, int], list[int]], dict[tuple[str, int], str], dict[str, object]]:
        """Tokens and ends of all sequences, log-probabilities of the prompts."""
        words = {place: end.reason if isinstance(end, Finished) else end.code for place, end in self.ends.items()}
        ends = {name: end for (name, _), end in self.ends.items() if isinstance(end, Finished)}
        return self.ids, words, {name: end.prompt_logprobs for name, end in ends.items() if end.prompt_logprobs}


def both(load: Any, **fields: Any) -> tuple[Bench, Bench]:
    """The same load in series and ahead; the answers must be the same."""
    serial, ahead = Bench(False, **fields), Bench(True, **fields)
    for bench in (serial, ahead):
        load(bench)
        bench.run()
    assert ahead.answers() == serial.answers()
    assert serial.model.most == 1 and serial.model.fed == 0
    return serial, ahead


@pytest.mark.parametrize("ahead", [False, True])
def test_a_begun_step_is_launched_and_the_next_ends_it(ahead: bool) -> None:
    bench = Bench(ahead)
    bench.submit("r", (1, 2, 3))
    for _ in range(2):
        bench.core.begin()
        assert bench.model.under_way == 1
    bench.step()
    assert len(bench.ids["r", 0]) == 1
    bench.run()


@pytest.mark.parametrize("ahead", [False, True])
def test_hashes_of_a_prompt_are_made_while_its_step_runs(ahead: bool) -> None:
    bench = Bench(ahead)
    counts: list[int] = []
    bench.model.when_asked = lambda: counts.append(len(bench.core._scheduler.running[0].table.hashes))
    bench.submit("r", tuple(range(45)))
    bench.step()
    bench.step()
    assert counts == [6, 11]  # of 24 and 45 tokens in blocks of 4
    bench.model.when_asked = lambda: None
    bench.run()


def prompt(rng: random.Random, most: int = 50) -> tuple[int, ...]:
    stem = [rng.randrange(2)] * rng.randrange(most // 2)  # shared beginnings: the prefix cache is hit
    return tuple(stem + [rng.randrange(280) for _ in range(rng.randrange(1, most // 2))])


def various(bench: Bench, *, plain: bool) -> None:
    """Requests of all kinds, not `plain`: some of which the model cannot draw; they come while others run."""
    rng = random.Random(11)
    for number in range(40):
        temperature = rng.choice((0.0, 0.7, 1.5))
        extra = (
            {}
            if plain
            else rng.choice(
                ({}, {}, {}, {}, {}, {}, {"logprobs": 1}, {"bad_sequences": ((5,),)}, {"prompt_logprobs": 1})
            )
        )
        top_p = 1.0 if plain else rng.choice((1.0,) * 9 + (0.9,))
        bench.submit(
            f"r{number}", prompt(rng), rng.randrange(1, 40), n=rng.choice((1, 1, 3)), cache_salt=rng.choice("ab"),
            sampling=Sampling(temperature=temperature, top_p=top_p, seed=rng.randrange(99)),
            stop_ids=tuple(rng.sample(range(280), 15)), min_tokens=rng.choice((0, 0, 1)), priority=rng.choice((0, 1)),
            **extra,
        )  # fmt: skip
        for _ in range(rng.randrange(3)):
            bench.step()


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "mixed"])
@pytest.mark.parametrize(("kv_bytes", "prefix_cache"), [(20_000, True), (20_000, False), (3_200, True)])
def test_the_same_tokens_as_in_series(plain: bool, kv_bytes: int, prefix_cache: bool) -> None:
    serial, ahead = both(lambda bench: various(bench, plain=plain), kv_bytes=kv_bytes, prefix_cache=prefix_cache)
    assert ahead.model.most == 2 and ahead.model.fed > (60 if plain else 5)
    reasons = set(ahead.answers()[1].values())
    assert reasons == {"stop", "length"}
    assert plain or ahead.answers()[2]  # prompts' log-probabilities were compared too
    if kv_bytes < 5_000:
        assert ahead.core.stats()["counters"]["preemptions"] > 0
        assert serial.core.stats()["counters"]["preemptions"] > 0


@pytest.mark.parametrize("bad", [POISONS, RAISES])
def test_a_bad_row_fails_its_request_only(bad: int) -> None:
    def load(bench: Bench) -> None:
        rng = random.Random(2)
        for number in range(6):
            bench.submit(f"r{number}", prompt(rng), 20)
        for _ in range(5):
            bench.step()
        bench.submit("bad", (1, 2, 3, bad), 20)
        bench.step()
        bench.submit("late", prompt(rng), 20)

    _, ahead = both(load)
    assert ahead.answers()[1]["bad", -1] == "INTERNAL" and ahead.model.fed > 10
    assert sum(isinstance(end, Finished) for end in ahead.ends.values()) == 7


def test_a_row_that_turns_bad_is_not_taken_further() -> None:
    """The step ahead is under way with a row whose token does not exist."""
    bench = Bench(True)
    bench.submit("good", (1, 2, 3), 30)
    bench.submit("bad", (4, 5, 6), 30)
    for _ in range(4):
        bench.step()
    model = cast(PagedModel, bench.model.model)
    for pool in (model.full, model.window):
        pool[(pool == 6).nonzero()[0, 0]] = POISONS
    bench.run()
    end = bench.ends["bad", -1]
    assert isinstance(end, Error) and "not finite" in end.message
    assert 4 <= len(bench.ids["bad", 0]) <= 6
    single = Bench(False)
    single.submit("good", (1, 2, 3), 30)
    assert bench.ids["good", 0] == single.run().ids["good", 0]


def test_a_cancelled_request_ends_at_once_and_frees_its_blocks_with_that_step() -> None:
    bench = Bench(True)
    bench.submit("kept", (1, 2), 60)
    bench.submit("cancelled", tuple(range(40)), 100)
    for _ in range(6):
        bench.step()
    used = bench.core.stats()["kv"]["full"]["used"]
    bench.core.cancel((1, "cancelled"))
    bench.step()
    end = bench.ends["cancelled", 0]
    assert isinstance(end, Finished) and end.reason == "cancelled"
    assert end.usage.completion_tokens == len(bench.ids["cancelled", 0])
    assert bench.core.stats()["kv"]["full"]["used"] <= used - 10
    bench.run()


def test_a_deadline_ends_a_request_under_way() -> None:
    bench = Bench(True)
    bench.submit("late", (1, 2), 100, deadline_ms=10)
    bench.submit("kept", (3, 4), 30)
    bench.run()
    assert bench.answers()[1] == {("late", -1): "DEADLINE_EXCEEDED", ("kept", 0): "length"}
    assert 5 <= len(bench.ids["late", 0]) <= 10


def test_a_step_is_not_launched_for_a_sequence_that_is_known_to_end() -> None:
    bench = Bench(True)
    bench.submit("r", (1, 2, 3), 5)
    steps = 0
    while bench.core.has_work():
        bench.step()
        steps += 1
    assert steps == 5 and len(bench.ids["r", 0]) == 5


def test_a_stop_leaves_one_row_that_nobody_takes() -> None:
    free = Bench(False)
    free.submit("r", (1, 2, 3), 9)
    tokens = free.run().ids["r", 0]
    at = next(i for i in range(2, 9) if tokens[i] not in tokens[:i])
    bench = Bench(True)
    bench.submit("r", (1, 2, 3), 9, stop_ids=(tokens[at],))
    while not bench.ends:
        bench.step()
    assert bench.ids["r", 0] == tokens[: at + 1]
    assert bench.core.has_work() and bench.core.stats()["kv"]["full"]["used"] > 0  # the row ahead still writes there
    bench.step()
    assert not bench.core.has_work() and bench.core.stats()["kv"]["full"]["used"] == 0


def test_a_broken_device_ends_the_engine() -> None:
    bench = Bench(True)
    bench.submit("r", (1,))
    bench.step()

    def fail(*_: object) -> Launched:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    bench.model.launch = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="CUDA error"):
        bench.run()
