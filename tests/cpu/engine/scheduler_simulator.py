"""Drives the scheduler through random workloads with a virtual clock and checks it after every step.

The simulator keeps, for every cell of both pools, which prefix was written there, and checks that each query of each
step would read exactly its own prefix: that is what makes prefix reuse, windows, pauses and shared prompts correct.
Running ahead, a step is computed when it is launched, with the tokens that the step before drew, and while it is under
way the blocks that it reads and writes must stay held, and those that it writes must be its sequence's own.
Speculating, drafts, some of them wrong, are computed behind the known tokens: keys of the rejected ones lie in cells
that no query may read until they are written over.
Longer runs: `python tests/cpu/engine/scheduler_simulator.py --steps 1000000 --seed 7`.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field, replace

from gptoss_trt.runtime.engine.core import RequestKey
from gptoss_trt.runtime.engine.kv_cache import KvCache
from gptoss_trt.runtime.engine.messages import Error, Finished, Sampling, Submit, TokenLogprobs, Tokens
from gptoss_trt.runtime.engine.metrics import Statistics
from gptoss_trt.runtime.engine.scheduler import Scheduler, SchedulerLimits
from gptoss_trt.runtime.engine.sequence import Sequence
from gptoss_trt.runtime.engine.speculation.drafter import Wanted
from gptoss_trt.runtime.engine.speculation.length import StepCost
from gptoss_trt.runtime.engine.speculation.speculator import Speculator
from gptoss_trt.runtime.engine.step_plan import Outcome, StepPlan, Work
from gptoss_trt.runtime.engine.validation import Limits, refusal

STEP_NS = 5_000_000
VOCABULARY = 50
POISON = -1
LONGEST_WAIT_STEPS = 6000  # steps of 5 ms from arrival to end; the loads below are finite, so a bound exists


@dataclass(frozen=True)
class Shape:
    """One configuration of the simulated engine and its load."""

    full_blocks: int = 40
    window_blocks: int = 40
    block_tokens: int = 4
    window: int = 8
    max_batch: int = 6
    step_tokens: int = 24
    max_queue: int = 12
    max_context: int = 120
    prefix_cache: bool = True
    arrivals: float = 0.25  # requests a step
    cancels: float = 0.02
    failures: float = 0.002
    ahead: bool = False  # run ahead
    refused: float = 0.05  # share of the steps ahead that are withdrawn
    drafts: float | None = None  # speculate, this share of the draft tokens being wrong


SHAPES = {
    "usual": Shape(),
    "tight full pool": Shape(full_blocks=31, arrivals=0.5),
    "tight window pool": Shape(window_blocks=12),
    "one token a step": Shape(max_batch=1, step_tokens=1, max_context=40, arrivals=0.02),
    "no prefix cache": Shape(prefix_cache=False),
    "blocks of one token": Shape(block_tokens=1, full_blocks=130, window_blocks=60, window=3),
    "window inside a block": Shape(block_tokens=16, window=5, full_blocks=10, window_blocks=20),
    "flooded": Shape(arrivals=1.5, cancels=0.2),
}


@dataclass
class Flight:
    """A step that was computed and not committed: its outcomes, and the blocks that it reads and writes."""

    plan: StepPlan
    outcomes: dict[Sequence, Outcome] = field(default_factory=dict)
    reads: tuple[set[int], set[int]] = field(default_factory=lambda: (set(), set()))
    writes: tuple[Counter[int], Counter[int]] = field(default_factory=lambda: (Counter(), Counter()))


# Drafts pay in small batches only, so that large ones run ahead in the same simulation.
COST = StepCost(((1, 1.0), (6, 1.2), (24, 20.0)))
MOST_DRAFTED = 5


class Simulator:
    """Drives a Scheduler and checks it after every step."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self.random = random.Random(seed)
        self.cache = KvCache(shape.full_blocks, shape.window_blocks, shape.block_tokens, shape.window)
        limits = SchedulerLimits(shape.max_batch, shape.step_tokens, shape.max_queue, shape.prefix_cache)
        self.statistics = Statistics()
        speculator = None if shape.drafts is None else Speculator(self, MOST_DRAFTED, COST)
        self.scheduler = Scheduler(limits, self.cache, self.statistics, speculator)
        self.limits = Limits(VOCABULARY, shape.max_context, self.cache.capacity_tokens)
        self.now_ns = 1_000_000_000
        self.submitted: dict[RequestKey, Submit] = {}
        self.arrived: dict[RequestKey, int] = {}
        self.outputs: dict[tuple[RequestKey, int], list[int]] = {}
        self.ended: Counter[RequestKey] = Counter()
        self.answers: dict[tuple[tuple[int, ...], int, str], list[int]] = {}
        self.full_cells: dict[tuple[int, int], int] = {}
        self.window_cells: dict[tuple[int, int], int] = {}
        self.prefixes: dict[Sequence, list[int]] = {}
        self.flight: Flight | None = None
        self.longest_wait = 0
        self.seen: Counter[str] = Counter()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.random.random() < self.shape.arrivals:
                self.arrive()
            self.step()
        for _ in range(20_000):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, f"{len(self.scheduler.requests)} requests never end"
        assert set(self.ended) == set(self.submitted) and set(self.ended.values()) <= {1}
        assert self.cache.full.used == self.cache.window.used == 0

    def arrive(self) -> None:
        shape, rnd = self.shape, self.random
        key = (rnd.randrange(3), f"r{len(self.submitted)}")
        # Prompts share beginnings, so that the prefix cache is hit.
        stem = [rnd.randrange(2)] * rnd.randrange(1, shape.max_context // 2)
        prompt = tuple(stem + [rnd.randrange(VOCABULARY) for _ in range(rnd.randrange(1, 8))])
        submit = Submit(
            key[1],
            prompt,
            max_tokens=max(1, min(rnd.randrange(1, 40), shape.max_context - len(prompt))),
            sampling=Sampling(seed=0),
            stop_ids=(3,),
            n=rnd.choice((1, 1, 1, 2, 3)),
            priority=rnd.choice((0, 0, 0, 1, -1)),
            deadline_ms=rnd.choice((None,) * 9 + (200,)),
            cache_salt=rnd.choice(("", "", "tenant")),
            prompt_logprobs=rnd.choice((None,) * 9 + (0,)),
        )
        assert refusal(submit, self.limits) is None
        self.submitted[key], self.arrived[key] = submit, self.now_ns
        self.scheduler.submit(key, submit, self.now_ns, seed=0)

    def step(self) -> None:
        if self.random.random() < self.shape.cancels and self.scheduler.requests:
            self.scheduler.cancel(self.random.choice(list(self.scheduler.requests)))
        if self.flight is None:
            self.flight = self.launch(self.scheduler.plan(self.now_ns))
        flight, self.flight = self.flight, self.launch_ahead() if self.shape.ahead else None
        self.now_ns += STEP_NS
        if flight.plan.work:
            self.check_flight(flight)
            self.scheduler.commit(flight.plan, [flight.outcomes[w.sequence] for w in flight.plan.work], self.now_ns)
        events = self.scheduler.take_events()
        assert flight.plan.work or events or not self.scheduler.has_work, "a step without progress"
        for key, event in events:
            self.take(key, event)
        if self.now_ns // STEP_NS % 3:  # what waits for `KvCache.settle` is seen here, or else by the next plan
            self.check_blocks()

    def launch(self, plan: StepPlan) -> Flight:
        self.check_plan(plan)
        flight = Flight(plan)
        for work in plan.work:
            flight.outcomes[work.sequence] = self.compute(work)
            table, size = work.sequence.table, self.shape.block_tokens
            end = -(-(work.start + work.count) // size)
            seen = self.cache.first_visible_block(work.start) - table.window_first
            flight.reads[0].update(table.full[:end])
            flight.reads[1].update(table.window[seen : end - table.window_first])
            first = work.start // size
            flight.writes[0].update(table.full[first:end])
            flight.writes[1].update(table.window[first - table.window_first : end - table.window_first])
        return flight

    def launch_ahead(self) -> Flight | None:
        """The step behind the one under way; now and then it is withdrawn, as the engine does when it cannot run it."""
        plan = self.scheduler.plan_ahead(self.now_ns)
        if plan is None or not plan.work:
            self.seen["given up"] += plan is None
            return None
        if self.random.random() < self.shape.refused:
            self.scheduler.withdraw(plan)
            self.seen["withdrawn"] += 1
            return None
        self.seen["ahead"] += 1
        return self.launch(plan)

    def check_flight(self, flight: Flight) -> None:
        """Its blocks are held, and nobody else holds those that it writes."""
        for pool, reads, writes in zip((self.cache.full, self.cache.window), flight.reads, flight.writes, strict=True):
            held = pool.held_counts()
            assert reads <= set(held), "a block under way is free"
            assert all(held[block] == count == 1 for block, count in writes.items()), "a written block is shared"

    def check_plan(self, plan: StepPlan) -> None:
        assert plan.tokens <= self.shape.step_tokens
        sequences = [work.sequence for work in plan.work]
        assert len(set(sequences)) == len(sequences) <= self.shape.max_batch
        for work in plan.work:
            before = work.sequence.planned - work.count  # in the step under way
            assert work.count > 0 and work.start == work.sequence.computed + before
            assert not before or self.flight is not None
            most = work.sequence.prompt_tokens + work.sequence.request.submit.max_tokens - 1
            assert work.start + work.count <= most, "keys that no token needs"
            assert not work.draft or (work.count == work.logits == 1 + len(work.draft) and not before)
            assert work.sequence in self.scheduler.running

    def compute(self, work: Work) -> Outcome:
        """Writes the work's cells, checks what its queries read, and answers with a token fixed by the prefix.

        Now and then it writes poison (NaN, on a real device): seen only when a token is sampled from it or from what
        was computed on top of it; then the request fails.
        """
        sequence = work.sequence
        prefixes = self.prefixes.setdefault(sequence, [])
        self.extend(prefixes, sequence, self.tokens_of(work)[len(prefixes) :])
        if work.draft:
            prefixes = list(prefixes)
            self.extend(prefixes, sequence, list(work.draft))
        end = work.start + work.count
        poisoned = self.random.random() < self.shape.failures
        poisoned |= self.reads_poison(sequence, 0, work.start, work.start, prefixes)
        for position in range(work.start, end):
            full, window = self.cells(sequence, position)
            self.full_cells[full] = self.window_cells[window] = POISON if poisoned else prefixes[position]
        assert poisoned == self.reads_poison(sequence, 0, end, work.start, prefixes)
        if poisoned and work.samples:
            self.seen["poisoned"] += 1
            return Outcome(failure="planned")
        return self.answer(work, prefixes)

    @staticmethod
    def extend(prefixes: list[int], sequence: Sequence, tokens: list[int]) -> None:
        for token in tokens:
            prefixes.append(hash((prefixes[-1] if prefixes else len(sequence.request.submit.cache_salt), token)))

    def draft(self, wanted: Wanted) -> list[list[int]]:
        """The simulator drafts, too: the tokens that it will answer, now and then wrong ones, fewer, or none."""
        return [self.guess(sequence, self.random.choice((count, count, 1, 0))) for sequence, count in wanted]

    def guess(self, sequence: Sequence, count: int) -> list[int]:
        prefixes: list[int] = []
        self.extend(prefixes, sequence, sequence.tokens)
        drafted: list[int] = []
        for _ in range(count):
            right = hash((prefixes[-1], sequence.index)) % VOCABULARY
            wrong = self.random.random() < (self.shape.drafts or 0.0)
            drafted.append(self.random.randrange(VOCABULARY) if wrong else right)
            self.extend(prefixes, sequence, drafted[-1:])
        return drafted

    def tokens_of(self, work: Work) -> list[int]:
        """The sequence's tokens with the one that the step under way drew; any for one that failed there."""
        sequence = work.sequence
        if work.start < len(sequence.tokens):
            return sequence.tokens
        assert self.flight is not None and work.start == len(sequence.tokens)
        drawn = self.flight.outcomes[sequence].token
        self.seen["awaited"] += 1
        return [*sequence.tokens, 0 if drawn is None else drawn]

    def cells(self, sequence: Sequence, position: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The cells of both pools for a position that a windowed layer still sees."""
        block, offset = divmod(position, self.shape.block_tokens)
        table = sequence.table
        index = block - table.window_first
        assert index >= 0
        return (table.full[block], offset), (table.window[index], offset)

    def reads_poison(self, sequence: Sequence, start: int, end: int, query: int, prefixes: list[int]) -> bool:
        """Checks the keys of start..end - 1 that queries from `query` on see; whether poison is among them."""
        poisoned = False
        for position in range(start, end):
            block, offset = divmod(position, self.shape.block_tokens)
            keys = [self.full_cells[sequence.table.full[block], offset]]
            if position > query - self.shape.window:
                keys.append(self.window_cells[self.cells(sequence, position)[1]])
            assert set(keys) <= {prefixes[position], POISON}, "a key is wrong"
            poisoned |= POISON in keys
        return poisoned

    def answer(self, work: Work, prefixes: list[int]) -> Outcome:
        sequence = work.sequence
        prompt: tuple[TokenLogprobs, ...] = ()
        if work.logits and sequence.lacks_prompt_logprobs:
            last = min(work.start + work.count, sequence.prompt_tokens - 1)
            prompt = tuple(TokenLogprobs(float(sequence.tokens[p + 1])) for p in range(work.start, last))
        if not work.samples:
            return Outcome(prompt_logprobs=prompt)
        assert work.logits >= 1
        last = work.start + work.count - 1 - len(work.draft)
        tokens = [hash((prefix, sequence.index)) % VOCABULARY for prefix in prefixes[last:]]
        most = sequence.request.submit.max_tokens - sequence.output_tokens
        came = 1
        while came <= len(work.draft) and tokens[came - 1] == work.draft[came - 1] and came < most:
            if tokens[came - 1] in sequence.request.submit.stop_ids:
                break
            came += 1
        self.seen["accepted"] += came - 1
        self.seen["rejected"] += 1 + len(work.draft) - came
        return Outcome(tokens[0], None, prompt, following=tuple(Outcome(token) for token in tokens[1:came]))

    def take(self, key: RequestKey, event: Tokens | Finished | Error) -> None:
        assert not self.ended[key], "an event after the end"
        submit = self.submitted[key]
        if isinstance(event, Tokens):
            self.outputs.setdefault((key, event.sequence), []).extend(event.token_ids)
            return
        wait = (self.now_ns - self.arrived[key]) // STEP_NS
        self.longest_wait = max(self.longest_wait, wait)
        if isinstance(event, Error):
            self.seen[event.code] += 1
            self.ended[key] += 1
            return
        self.seen[event.reason] += 1
        self.ended[key] += event.remaining == 0
        output = self.outputs.get((key, event.sequence), [])
        assert event.usage.completion_tokens == len(output)
        assert 0 <= event.usage.accepted_draft_tokens <= event.usage.draft_tokens
        if event.reason == "cancelled":
            return
        assert (len(output) == submit.max_tokens) == (event.reason == "length") or output[-1] == 3
        # The same prompt gives the same tokens, whatever was cached, paused or shared.
        expected = self.answers.setdefault((submit.token_ids, event.sequence, submit.cache_salt), output)
        shared = min(len(expected), len(output))
        assert output[:shared] == expected[:shared]
        if event.prompt_logprobs is not None:
            assert [e.logprob if e else None for e in event.prompt_logprobs] == [
                None,
                *map(float, submit.token_ids[1:]),
            ]

    def check_blocks(self) -> None:
        self.cache.full.check()
        self.cache.window.check()
        running = (*self.scheduler.running, *self.scheduler.leaving)
        full = Counter(block for sequence in running for block in sequence.table.full)
        window = Counter(block for sequence in running for block in sequence.table.window)
        assert self.cache.full.held_counts() == full, "blocks of the full pool leak"
        assert self.cache.window.held_counts() == window, "blocks of the window pool leak"
        chunk = self.shape.step_tokens * (2 if self.shape.ahead else 1)
        most = self.cache.least_window_blocks + -(-chunk // self.shape.block_tokens) + self.shape.ahead
        assert all(len(sequence.table.window) <= most for sequence in running)
        assert self.scheduler.waiting.requests <= self.shape.max_queue + self.shape.max_batch


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    for number, (shape_name, shape) in enumerate(SHAPES.items()):
        for runs_ahead, wrong in itertools.product((False, True), (None, 0.3)):
            run = Simulator(replace(shape, ahead=runs_ahead, drafts=wrong), chosen.seed + number)
            run.run(chosen.steps // len(SHAPES) // 4)
            found = f"preemptions {run.statistics.preemptions}, longest {run.longest_wait} steps"
            print(shape_name, "ahead" if runs_ahead else "serial", f"drafts {wrong}", dict(run.seen), found)
