"""The scheduler's rules one by one: order, fairness, reuse of prefixes, budgets, refusals, distrust after a failure."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from gptoss_trt.runtime.engine.kv_cache import KvCache
from gptoss_trt.runtime.engine.messages import IDS, Error, Finished, Guide, Sampling, Submit, Tokens
from gptoss_trt.runtime.engine.metrics import Statistics
from gptoss_trt.runtime.engine.scheduler import (
    PROMPT_LOGPROB_ROWS,
    PROMPT_LOGPROB_STEP_ROWS,
    Scheduler,
    SchedulerLimits,
)
from gptoss_trt.runtime.engine.step_plan import Outcome, StepPlan
from gptoss_trt.runtime.engine.validation import Limits, refusal
from gptoss_trt.runtime.engine.waiting import AGING_NS

SECOND = 1_000_000_000


class Bench:
    """A scheduler whose model always answers 1."""

    def __init__(
        self, *, blocks: int = 100, batch: int = 4, step_tokens: int = 32, queue: int = 50, cache: bool = True
    ):
        self.cache = KvCache(blocks, blocks, 4, 8)
        self.scheduler = Scheduler(SchedulerLimits(batch, step_tokens, queue, cache), self.cache, Statistics())
        self.events: list[Any] = []
        self.now = 0

    def submit(
        self, name: str, prompt: int | tuple[int, ...] = 4, max_tokens: int = 3, client: int = 1, **fields: Any
    ) -> None:
        ids = tuple(range(10, 10 + prompt)) if isinstance(prompt, int) else prompt
        self.scheduler.submit((client, name), Submit(name, ids, max_tokens, **fields), self.now, seed=0)

    def step(self, failing: str = "") -> dict[str, int]:
        """Tokens computed for each request in one step."""
        plan = self.scheduler.plan(self.now)
        outcomes = [self._outcome(work, failing) for work in plan.work]
        names = {self._name(work): work.count for work in plan.work}
        self.scheduler.commit(plan, outcomes, self.now)
        self.events += [event for _, event in self.scheduler.take_events()]
        self.cache.full.check()
        self.cache.window.check()
        return names

    def finish(self) -> list[str]:
        """Runs to the end; the requests in the order of their ends."""
        for _ in range(2000):
            if not self.scheduler.has_work:
                return [event.request_id for event in self.events if not isinstance(event, Tokens)]
            self.step()
        raise AssertionError("requests are left")

    def _outcome(self, work: Any, failing: str) -> Outcome:
        if self._name(work) == failing:
            return Outcome(failure="bad")
        return Outcome(1 if work.samples else None)

    @staticmethod
    def _name(work: Any) -> str:
        return str(work.sequence.request.submit.request_id)


def test_prompts_are_cut_to_the_budget_that_decoding_leaves() -> None:
    bench = Bench(step_tokens=8)
    bench.submit("a", 4, max_tokens=20)
    bench.step()
    bench.submit("b", tuple(range(50, 70)))
    assert [bench.step() for _ in range(4)] == [
        {"a": 1, "b": 7},
        {"a": 1, "b": 7},
        {"a": 1, "b": 6},
        {"a": 1, "b": 1},
    ]


def test_a_long_prompt_leaves_half_of_the_budget_to_others() -> None:
    bench = Bench(step_tokens=16)
    bench.submit("long", 200)
    assert bench.step() == {"long": 16}, "alone it takes all"
    bench.submit("short", tuple(range(500, 506)), max_tokens=2)
    bench.submit("other", tuple(range(600, 612)), max_tokens=2)
    assert bench.step() == {"short": 6, "other": 2, "long": 8}, "what others leave comes on top of its half"
    assert bench.step() == {"short": 1, "other": 8, "long": 7}
    assert bench.step() == {"other": 2, "long": 14}
    assert bench.finish() == ["short", "other", "long"]


def test_long_prompts_do_not_wait_for_each_other() -> None:
    bench = Bench(step_tokens=16)
    bench.submit("first", 100)
    bench.submit("second", tuple(range(300, 400)))
    assert bench.step() == {"first": 16}
    assert bench.step() == {"second": 8, "first": 8}
    assert bench.finish() == ["first", "second"]


def test_a_long_prompt_without_blocks_for_others_goes_on() -> None:
    """Those that wait do not fit beside it: the budget that they cannot use is its."""
    bench = Bench(step_tokens=16, blocks=30)
    bench.submit("long", 100, max_tokens=2)
    bench.submit("waits", tuple(range(300, 360)), max_tokens=2)
    assert bench.step() == {"long": 16}
    assert bench.step() == {"long": 16}
    assert bench.finish() == ["long", "waits"]


def test_lower_priority_numbers_go_first_and_age_promotes() -> None:
    bench = Bench(batch=1)
    for name, priority in (("low", 2), ("high", -1), ("usual", 0)):
        bench.submit(name, priority=priority)
    assert bench.finish() == ["high", "usual", "low"]
    bench = Bench(batch=1)
    bench.submit("old", priority=2)
    bench.now = 3 * AGING_NS
    bench.submit("young", priority=0)
    assert bench.finish() == ["old", "young"]


def test_a_flood_of_one_client_does_not_delay_another() -> None:
    bench = Bench(batch=1)
    for number in range(10):
        bench.submit(f"flood{number}")
    bench.submit("guest", client=2)
    assert bench.finish().index("guest") <= 1


def test_large_requests_are_not_overtaken_for_ever() -> None:
    bench = Bench(blocks=30, batch=8)
    for number in range(6):
        bench.submit(f"small{number}", 8, max_tokens=4 * (number + 1))
    bench.step()
    bench.submit("large", 100, max_tokens=10)
    for number in range(20):
        bench.submit(f"late{number}", 8, max_tokens=4)
    started: list[str] = []
    while bench.scheduler.has_work:
        started += [name for name in bench.step() if name not in started]
    assert all(started.index("large") < started.index(f"late{number}") for number in range(20))


def test_a_full_queue_refuses_with_its_limit() -> None:
    bench = Bench(queue=2)
    for name in "abc":
        bench.submit(name)
    bench.finish()
    refused = [event for event in bench.events if isinstance(event, Error)]
    assert [(error.request_id, error.code) for error in refused] == [("c", "RESOURCE_EXHAUSTED")]
    assert "limit is 2" in refused[0].message


def test_deadlines_end_waiting_and_running_requests() -> None:
    bench = Bench(batch=1)
    bench.submit("running", max_tokens=50, deadline_ms=1000)
    bench.submit("waiting", max_tokens=50, deadline_ms=1000)
    bench.step()
    bench.now = SECOND
    bench.step()
    errors = [event for event in bench.events if isinstance(event, Error)]
    assert {error.request_id: error.code for error in errors} == {
        "running": "DEADLINE_EXCEEDED",
        "waiting": "DEADLINE_EXCEEDED",
    }
    assert "1000 ms" in errors[0].message and bench.cache.full.used == 0


def test_a_known_prefix_is_not_computed_again() -> None:
    bench = Bench()
    bench.submit("first", 21)
    bench.finish()
    bench.submit("again", 21)
    assert bench.step() == {"again": 1}
    for tenant in ("x", "y" + "long" * 40, "z" + "long" * 40):
        bench.submit(tenant, 21, cache_salt=tenant)
        assert bench.step()[tenant] == 21
    bench.finish()
    usage = next(e.usage for e in bench.events if isinstance(e, Finished) and e.request_id == "again")
    assert (usage.cached_tokens, usage.kv_reused_blocks, usage.kv_total_blocks) == (20, 5, 6)


def test_the_next_turn_reuses_the_answer_too() -> None:
    bench = Bench()
    bench.submit("turn 1", 8, max_tokens=9)
    bench.finish()
    bench.submit("turn 2", tuple(range(10, 18)) + (1,) * 9 + (5, 5))
    assert bench.step() == {"turn 2": 3}  # 16 of 19 tokens are known: the last answer token was never computed


def test_without_prefix_cache_only_a_request_shares_with_itself() -> None:
    bench = Bench(cache=False)
    bench.submit("first", 21)
    bench.finish()
    bench.submit("again", 21, n=2)
    assert bench.step() == {"again": 21}
    assert bench.step() == {"again": 1}
    assert bench.cache.full.reused == 5


def test_several_sequences_share_the_prompt() -> None:
    bench = Bench()
    bench.submit("r", 20, n=3)
    bench.step()
    before = bench.cache.full.used
    bench.step()
    assert (
        bench.cache.full.used == before + 1 + 2
    )  # a block for the first's output, each other's own last block of the prompt
    bench.finish()
    ends = [event for event in bench.events if isinstance(event, Finished)]
    assert sorted(end.sequence for end in ends) == [0, 1, 2] and [end.remaining for end in ends] == [2, 1, 0]


def test_a_failure_ends_its_request_and_its_blocks_are_not_known() -> None:
    bench = Bench()
    bench.submit("good", 21, max_tokens=40)
    bench.submit("bad", tuple(range(50, 80)), max_tokens=40)
    for _ in range(6):
        bench.step()
    sequence = next(s for s in bench.scheduler.running if s.request.submit.request_id == "bad")
    contents = sequence.table.hashes
    assert len(contents) >= 8 and sequence.table.window_first > 0  # some have slid out of the window
    assert all(pool.find(c) is not None for pool in (bench.cache.full, bench.cache.window) for c in contents)
    bench.step(failing="bad")
    assert all(pool.find(c) is None for pool in (bench.cache.full, bench.cache.window) for c in contents)
    bench.finish()
    ends = {event.request_id: event for event in bench.events if not isinstance(event, Tokens)}
    assert isinstance(ends["bad"], Error) and ends["bad"].code == "INTERNAL"
    assert isinstance(ends["good"], Finished) and ends["good"].usage.completion_tokens == 40


def test_hashes_are_made_when_they_are_needed() -> None:
    """At admission up to the first block that nobody has, the others while the step runs; the same ones either way."""
    chains = []
    for prepared in (False, True):
        bench = Bench(step_tokens=64)
        bench.submit("a", 40)
        plan = bench.scheduler.plan(0)
        (work,) = plan.work
        table = work.sequence.table
        assert len(table.hashes) == 1
        if prepared:
            bench.scheduler.prepare_commit(plan)
            assert len(table.hashes) == 10
        bench.scheduler.commit(plan, [Outcome(1)], 0)
        bench.cache.settle()
        assert len(set(table.hashes)) == 10 and bench.cache.full.known_contents() == set(table.hashes)
        chains.append(table.hashes)
        bench.submit("b", (*range(10, 34), *range(60, 76)))
        plan = bench.scheduler.plan(0)
        assert [(work.start, work.count) for work in plan.work] == [(40, 1), (24, 16)]
        assert plan.work[1].sequence.table.hashes[:6] == table.hashes[:6]
        assert len(plan.work[1].sequence.table.hashes) == 7
    assert chains[0] == chains[1]


def test_a_token_does_not_wait_for_what_the_cache_learns_of_its_prompt() -> None:
    """Blocks are published and given back behind the events: by settle, or where a pool is asked for anything."""

    class Listener:
        def stored(self, content: bytes, parent: bytes | None, tokens: Any) -> None:
            told.append(content)

        def removed(self, content: bytes) -> None: ...

    told: list[bytes] = []
    for settles in (True, False):
        bench = Bench(step_tokens=64)
        bench.cache = KvCache(20, 20, 4, 8, Listener())
        bench.scheduler = Scheduler(SchedulerLimits(4, 64, 50, True), bench.cache, Statistics())
        told.clear()
        bench.submit("a", 40, 1)
        plan = bench.scheduler.plan(0)
        bench.scheduler.commit(plan, [Outcome(1)], 0)
        tokens, end = (event for _, event in bench.scheduler.take_events())
        assert isinstance(tokens, Tokens) and isinstance(end, Finished) and not bench.scheduler.has_work
        assert not told
        if settles:
            bench.cache.settle()
            assert len(told) == 10
        assert (bench.cache.full.used, bench.cache.window.used) == (0, 0) and len(set(told)) == 10
        bench.cache.full.check()
        bench.submit("b", 44)
        (work,) = bench.scheduler.plan(0).work
        assert (work.start, work.count) == (40, 4)


def test_no_block_is_hashed_before_its_tokens_are_known() -> None:
    bench = Bench(step_tokens=64)
    bench.submit("a", 38)
    (work,) = bench.scheduler.plan(0).work
    bench.cache.hash_ahead(work.sequence, 41)
    before = list(work.sequence.table.hashes)
    assert len(before) == 9
    work.sequence.tokens.extend((1, 2))
    bench.cache.hash_ahead(work.sequence, 41)
    assert work.sequence.table.hashes[:9] == before and len(work.sequence.table.hashes) == 10


def test_a_pause_keeps_the_tokens_and_ends_as_without() -> None:
    bench = Bench(blocks=10, batch=4)
    bench.submit("a", 8, max_tokens=24)
    bench.submit("b", tuple(range(50, 58)), max_tokens=24)
    counts = []
    while bench.scheduler.has_work:
        counts.append(bench.step())
    assert bench.scheduler._statistics.preemptions >= 1
    for name in "ab":
        assert sum(isinstance(e, Tokens) and e.request_id == name for e in bench.events) == 24
    ends = [event for event in bench.events if isinstance(event, Finished)]
    assert [end.request_id for end in ends] == ["a", "b"]  # the one that came later was paused


def test_stops_are_counted_from_min_tokens_on() -> None:
    bench = Bench()
    bench.submit("id", stop_ids=(1,), max_tokens=9)
    bench.submit("sequence", stop_sequences=((1, 1, 1),), max_tokens=9)
    bench.submit("late", stop_sequences=((1,),), min_tokens=5, max_tokens=9)
    bench.finish()
    lengths = {e.request_id: (e.reason, e.usage.completion_tokens) for e in bench.events if isinstance(e, Finished)}
    assert lengths == {"id": ("stop", 1), "sequence": ("stop", 3), "late": ("stop", 5)}


def test_log_probabilities_of_prompts_share_the_rows_of_a_step() -> None:
    bench = Bench(blocks=1000, batch=20, step_tokens=4000)
    for name in "abcdefghijkl":
        bench.submit(name, 100, prompt_logprobs=0)
    first = bench.step()
    assert set(first.values()) == {PROMPT_LOGPROB_ROWS} and sum(first.values()) == PROMPT_LOGPROB_STEP_ROWS
    assert len(bench.finish()) == 12


def test_a_long_prompt_has_its_rows_ahead_of_those_behind_it() -> None:
    bench = Bench(blocks=4000, batch=40, step_tokens=1024)
    bench.submit("long", 3000, prompt_logprobs=0)
    for turn in range(8):
        for name in "abcde":
            bench.submit(f"{name}{turn}", 100, prompt_logprobs=0)
        assert bench.step()["long"] == PROMPT_LOGPROB_ROWS


def test_an_empty_plan_without_requests() -> None:
    bench = Bench()
    assert bench.scheduler.plan(0) == StepPlan() and not bench.scheduler.has_work


LIMITS = Limits(vocab_size=100, max_context=64, kv_tokens=48)


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({"token_ids": ()}, ("empty",)),
        ({"max_tokens": 0}, ("max_tokens is 0",)),
        ({"max_tokens": -5}, ("max_tokens is -5",)),
        ({"max_tokens": 62}, ("3 tokens", "62", "65", "64")),
        ({"max_tokens": 50}, ("3 tokens", "53", "48", "KV cache")),
        ({"token_ids": (1, 100)}, ("100", "0..99")),
        ({"token_ids": (1, -1)}, ("-1", "0..99")),
        ({"stop_ids": (200,)}, ("stop_ids", "200")),
        ({"stop_sequences": ((),)}, ("stop_sequences[0] is empty",)),
        ({"bad_sequences": ((1, 999),)}, ("bad_sequences[0]", "999")),
        ({"logit_bias": ((100, 1.0),)}, ("logit_bias", "100")),
        ({"logit_bias": ((1, float("nan")),)}, ("logit_bias", "nan")),
        ({"min_tokens": 6}, ("min_tokens is 6", "5")),
        ({"n": 0}, ("n is 0", "1..128")),
        ({"n": 129}, ("n is 129", "1..128")),
        ({"logprobs": 101}, ("logprobs is 101", "0..100")),
        ({"deadline_ms": 0}, ("deadline_ms is 0",)),
        ({"sampling": Sampling(temperature=float("nan"))}, ("temperature is nan",)),
        ({"sampling": Sampling(temperature=-1.0)}, ("temperature is -1.0",)),
        ({"sampling": Sampling(top_p=1.5)}, ("top_p is 1.5",)),
        ({"sampling": Sampling(top_k=-1)}, ("top_k is -1",)),
        ({"sampling": Sampling(repetition_penalty=0.0)}, ("repetition_penalty is 0.0",)),
        ({"sampling": Sampling(seed=-1)}, ("seed is -1",)),
        ({"guides": (Guide("regex", "a+"),)}, ("guide", "regex")),
    ],
)
def test_refusals_name_the_value_and_the_limit(fields: dict[str, Any], numbers: tuple[str, ...]) -> None:
    values = {"token_ids": (1, 2, 3), "max_tokens": 5, **fields}
    refused = refusal(Submit("r", **values), LIMITS)
    assert refused is not None
    code, message = refused
    assert code == "INVALID_ARGUMENT"
    assert all(number in message for number in numbers), message
    as_array = {**values, "token_ids": array(IDS, values["token_ids"])}
    assert refusal(Submit("r", **as_array), LIMITS) == refused


def test_a_valid_request_is_not_refused() -> None:
    assert refusal(Submit("r", (1, 2, 3), 45, stop_ids=(99,), n=64), LIMITS) is None
    assert refusal(Submit("r", array(IDS, (0, 99)), 45), LIMITS) is None


def test_an_array_that_is_no_prompt_is_looked_at_id_by_id() -> None:
    """As 32-bit words all of these would be known ids."""
    refused = refusal(Submit("r", array("q", (5, 1 << 32)), 5), LIMITS)
    assert refused is not None and str(1 << 32) in refused[1]
