"""Which tokens of which sequences the next step computes: continuous batching, chunked prompts, preemption.

Invariant: every request ends exactly once, blocks are held by running sequences only, and the sequence that ranks first
always advances, so nothing starves. Pure: time comes as an argument; no tensors, sockets, threads.

A step: (1) cancelled and late requests end; (2) running sequences that decode get one token each, best rank first, and
take blocks from the worst ranked when the pool is empty (that one is paused and later recomputed); (3) running prompts
get chunks of the tokens left in the budget; (4) waiting sequences are admitted while their blocks fit, in the queue's
order and without overtaking. While others are there, the first prompt that would take all of that budget is sure of
half of it and gets what the others leave, so a long prompt does not keep short ones from their first tokens. (5) What
budget and blocks are left go to drafts of what the decoding sequences may say next. All full-attention blocks of a
prompt are taken at its admission, so half-read prompts never fight.

A step may be planned ahead, while the one before it runs: its sequences count as if that step had ended, with a token
that is awaited. What then holds: (a) a sequence whose awaited token is its last by max_tokens is left out; one that
ends otherwise (stop, cancel, deadline, failure) has a row in the step ahead whose outcome nobody takes. (b) The blocks
of a sequence that ended go back when the last step that was planned with it is committed, so none of them has another
owner while a step writes it, and no block is known by its content before its step is committed. (c) Nobody is paused
ahead: where blocks lack, the step ahead is given up, and the next is planned when the one that runs is committed. So
it is where a draft would pay, for drafts follow known tokens.
"""

from __future__ import annotations

import bisect
import hashlib
import operator
from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from gptoss_trt.runtime.engine.core import RequestKey
from gptoss_trt.runtime.engine.kv_cache import KvCache
from gptoss_trt.runtime.engine.messages import (
    IDS,
    Error,
    ErrorCode,
    Event,
    Finished,
    FinishReason,
    Submit,
    TokenLogprobs,
    Tokens,
)
from gptoss_trt.runtime.engine.metrics import Statistics
from gptoss_trt.runtime.engine.sequence import Request, Sequence, end_reason
from gptoss_trt.runtime.engine.speculation.speculator import Speculator
from gptoss_trt.runtime.engine.step_plan import Outcome, StepPlan, Work
from gptoss_trt.runtime.engine.waiting import WaitingQueue

PROMPT_LOGPROB_STEP_ROWS = 256  # of all chunks of a step
PROMPT_LOGPROB_ROWS = 64  # rows of logits that one prompt chunk may ask for: 64 x 201,088 fp32 are 51 MB


@dataclass(frozen=True)
class SchedulerLimits:
    """Counts: sequences in one step, tokens in one step, requests that may wait."""

    max_batch: int
    step_tokens: int
    max_queue: int
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.max_batch <= self.step_tokens:
            raise ValueError(f"max_batch is {self.max_batch}; it must lie in 1..step_tokens ({self.step_tokens})")


class Scheduler:
    """Owns the requests and the block accounting. Use: submit / cancel, then plan, run the plan, commit, take_events.

    A plan is committed or withdrawn, in the order of planning; `plan_ahead` makes one while one is not committed.
    """

    def __init__(
        self, limits: SchedulerLimits, cache: KvCache, statistics: Statistics, speculator: Speculator | None = None
    ) -> None:
        self._limits = limits
        self._speculator = speculator
        self._cache = cache
        self._statistics = statistics
        self._requests: dict[RequestKey, Request] = {}
        self._running: list[Sequence] = []  # by rank
        self._waiting = WaitingQueue(limits.max_queue)
        self._deadlines: dict[RequestKey, int] = {}
        self._cancelled: set[RequestKey] = set()
        self._leaving: set[Sequence] = set()  # ended, with blocks that a planned step writes
        self._events: list[tuple[RequestKey, Event]] = []
        self._orders = 0
        self.last_prompt_tokens = 0  # prompt tokens of the last step

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._events or self._leaving)

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    @property
    def leaving(self) -> tuple[Sequence, ...]:
        """Sequences that ended and hold their blocks until the last step that is planned with them is committed."""
        return tuple(self._leaving)

    @property
    def waiting(self) -> WaitingQueue:
        return self._waiting

    @property
    def requests(self) -> Mapping[RequestKey, Request]:
        return self._requests

    def submit(self, key: RequestKey, submit: Submit, arrival_ns: int, seed: int) -> None:
        """Queues a request that was found valid, or refuses it when the queue is full."""
        if self._waiting.is_full:
            limit = self._waiting.limit
            self.refuse(key, submit, "RESOURCE_EXHAUSTED", f"{limit} requests wait already; the limit is {limit}")
            return
        self._orders += 1
        # Without a shared cache a salt of its own lets only the sequences of one request share blocks.
        salt = f"shared:{submit.cache_salt}" if self._limits.prefix_cache else f"own:{self._orders}"
        request = Request(key, submit, arrival_ns, self._orders, seed, hashlib.blake2b(salt.encode()).digest())
        request.sequences = [Sequence(request, index, array(IDS, submit.token_ids)) for index in range(submit.n)]
        self._requests[key] = request
        if request.deadline_ns is not None:
            self._deadlines[key] = request.deadline_ns
        self._waiting.add(request.sequences[0])
        self._statistics.submitted(len(submit.token_ids))

    def refuse(self, key: RequestKey, submit: Submit, code: ErrorCode, message: str) -> None:
        self._events.append((key, Error(submit.request_id, code, message)))
        self._statistics.failed(code)

    def cancel(self, key: RequestKey) -> None:
        if key in self._requests:
            self._cancelled.add(key)

    def take_events(self) -> list[tuple[RequestKey, Event]]:
        events, self._events = self._events, []
        return events

    # -- planning -----------------------------------------------------------------------------------------------------

    def plan(self, now_ns: int) -> StepPlan:
        """Ends what is to end and chooses the next step's work. Every plan before must be committed."""
        self._end_cancelled_and_late(now_ns)
        plan = StepPlan()
        for sequence in [s for s in self._running if s.decoding]:
            while not sequence.paused and not self._cache.extend(sequence, 1):
                self._pause(self._running[-1])  # planned ones rank better, so it is this one or one not planned yet
            if not sequence.paused:
                self._add(plan, sequence, 1, 1)
        prompts = [s for s in self._running if not s.decoding]
        long = self._reserve(plan, prompts)
        for sequence in prompts:
            while sequence is not long and not sequence.paused and not self._add_chunk(plan, sequence):
                if plan.work or long is not None or self._running[-1] is sequence:
                    break
                self._pause(self._running[-1])  # nobody advances: the first in rank must
        self._admit(plan, now_ns)
        self._add_reserved(plan, long)
        if self._speculator is not None:
            self._speculator.add_drafts(plan, self._cache, self._limits.step_tokens, spare_blocks=len(self._running))
        return plan

    def plan_ahead(self, now_ns: int) -> StepPlan | None:
        """The step behind one that is planned and not committed; None when that one's outcome must be seen first."""
        self._end_cancelled_and_late(now_ns)
        if self._speculator is not None:
            decoding = [s for s in self._running if s.decoding]
            if self._speculator.wants(decoding, self._limits.step_tokens - len(decoding)):
                return None
        plan = StepPlan()
        prompts = []
        for sequence in self._running:
            known = len(sequence.tokens) + sequence.awaited
            if known - sequence.planned - sequence.computed != 1 or known == sequence.prompt_tokens:
                prompts.append(sequence)  # it is not decoding
            elif known - sequence.prompt_tokens < sequence.request.submit.max_tokens:
                if not self._cache.extend(sequence, 1):
                    self.withdraw(plan)
                    return None
                self._add(plan, sequence, 1, 1)
        long = self._reserve(plan, prompts)
        for sequence in prompts:
            if sequence is not long:
                self._add_chunk(plan, sequence)
        self._admit(plan, now_ns)
        self._add_reserved(plan, long)
        return plan

    def withdraw(self, plan: StepPlan) -> None:
        """Takes the latest plan back: nothing of it is run. Blocks that it gave to running sequences stay theirs."""
        for work in plan.work:
            self._land(work)

    def _end_cancelled_and_late(self, now_ns: int) -> None:
        cancelled, self._cancelled = self._cancelled, set()
        for key in cancelled:
            request = self._requests.get(key)  # it may have ended with a step that ran when the cancel came
            for sequence in () if request is None else request.sequences:
                if not sequence.finished:
                    self._finish(sequence, "cancelled")
        for key in [key for key, deadline_ns in self._deadlines.items() if now_ns >= deadline_ns]:
            request = self._requests[key]
            message = f"not finished within its deadline of {request.submit.deadline_ms} ms"
            self._fail(request, "DEADLINE_EXCEEDED", message)

    @staticmethod
    def _add(plan: StepPlan, sequence: Sequence, count: int, logits: int) -> None:
        """Plans `count` more tokens of a sequence that has blocks for them."""
        work = Work(sequence, sequence.computed + sequence.planned, count, logits)
        plan.work.append(work)
        plan.tokens += count
        sequence.planned += count
        sequence.awaited += work.samples

    def _land(self, work: Work) -> None:
        """A planned work is no longer under way. The last one of a sequence that has ended gives its blocks back."""
        sequence = work.sequence
        sequence.planned -= work.count
        sequence.awaited -= work.samples
        if sequence.finished and not sequence.planned:
            self._leaving.remove(sequence)
            self._cache.release(sequence)

    def _left(self, plan: StepPlan) -> int:
        """Tokens that the plan may still take."""
        return self._limits.step_tokens - plan.tokens - plan.reserved

    def _reserve(self, plan: StepPlan, prompts: list[Sequence]) -> Sequence | None:
        """The first of the running `prompts` that would take all that is left of the budget while others are there:
        half of it is kept for that one, and it has blocks for that."""
        left = self._left(plan)
        long = next((sequence for sequence in prompts if self._most_tokens(sequence) > left), None)
        if long is None or left < 2 or (len(prompts) == 1 and not len(self._waiting)):
            return None
        count = self._cache.longest_extension(long, left // 2)
        if count <= 0 or not self._cache.extend(long, count):
            return None
        plan.reserved = count
        return long

    def _add_reserved(self, plan: StepPlan, long: Sequence | None) -> None:
        plan.reserved = 0
        if long is not None:
            self._add_chunk(plan, long)

    @staticmethod
    def _most_tokens(sequence: Sequence) -> int:
        """Tokens of a prompt that one chunk may take."""
        return min(sequence.pending, PROMPT_LOGPROB_ROWS) if sequence.lacks_prompt_logprobs else sequence.pending

    def _add_chunk(self, plan: StepPlan, sequence: Sequence) -> bool:
        """Adds what fits of a prompt: the budget, the blocks, and the rows of logits it asks for."""
        count = min(self._most_tokens(sequence), self._left(plan))
        wants_rows = sequence.lacks_prompt_logprobs
        if wants_rows:
            count = min(count, PROMPT_LOGPROB_STEP_ROWS - plan.logprob_rows)
        count = self._cache.longest_extension(sequence, count)
        if count <= 0 or not self._cache.extend(sequence, count):
            return False
        complete = count == sequence.pending
        self._add(plan, sequence, count, count if wants_rows else int(complete))
        plan.prompt_tokens += count
        plan.logprob_rows += count if wants_rows else 0
        return True

    def _admit(self, plan: StepPlan, now_ns: int) -> None:
        while self._left(plan) > 0 and len(self._running) < self._limits.max_batch:
            sequence = self._waiting.first(now_ns)
            if sequence is None:
                return
            # Each running sequence may soon need a block: leaving one for each avoids pausing what was just admitted.
            reuse = not sequence.lacks_prompt_logprobs  # those need every row of the prompt
            if not self._cache.admit(sequence, reuse=reuse, spare_blocks=len(self._running)):
                return
            self._start(sequence, now_ns)
            self._add_chunk(plan, sequence)

    def _start(self, sequence: Sequence, now_ns: int) -> None:
        request = sequence.request
        self._waiting.remove(sequence, served=True)
        if not sequence.first_scheduled_ns:
            sequence.first_scheduled_ns = now_ns
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
            if sequence.index == 0:
                waited_s = (now_ns - request.arrival_ns) / 1e9
                self._statistics.scheduled(waited_s, sequence.prompt_tokens, sequence.cached_tokens)
        sequence.paused = False
        sequence.rank = (self._waiting.effective_priority(request, now_ns), request.order, sequence.index)
        bisect.insort(self._running, sequence, key=lambda other: other.rank)

    def _pause(self, sequence: Sequence) -> None:
        """Takes a sequence's blocks away; it will be computed again from its tokens."""
        self._running.remove(sequence)
        self._cache.release(sequence)
        if sequence.lacks_prompt_logprobs:
            sequence.request.prompt_logprobs = [None]
        sequence.paused = True
        self._waiting.add_paused(sequence)
        self._statistics.preemptions += 1

    # -- after a step -------------------------------------------------------------------------------------------------

    def prepare_commit(self, plan: StepPlan) -> None:
        """What commit needs of a plan's prompts and is known before its step ends: the hashes of whole blocks. To be
        called while the device runs that step; commit does without."""
        for work in plan.work if plan.prompt_tokens else ():
            if work.count > 1:
                self._cache.hash_ahead(work.sequence, work.start + work.count)

    def commit(self, plan: StepPlan, outcomes: list[Outcome], now_ns: int) -> None:
        """Takes the outcomes of a plan's work, in its order. `now_ns`: when the step ended."""
        self._statistics.iterations += 1
        self.last_prompt_tokens = plan.prompt_tokens
        for work, outcome in zip(plan.work, outcomes, strict=True):
            sequence = work.sequence
            if sequence.finished:  # it was cancelled, or another sequence of its request failed, while the step ran
                self._land(work)
                continue
            sequence.planned -= work.count
            sequence.awaited -= work.samples
            if outcome.failure is not None:
                self._fail(sequence.request, outcome.code, outcome.failure, trusted=False)
                continue
            if work.draft:
                self._take_drafted(sequence, work.draft, outcome, now_ns)
                continue
            self._cache.advance(sequence, work.count)
            if outcome.prompt_logprobs:
                sequence.request.prompt_logprobs.extend(outcome.prompt_logprobs)
            if outcome.token is not None:
                sequence.tokens.append(outcome.token)
                entries = None if outcome.logprobs is None else (outcome.logprobs,)
                self._tell(sequence, (outcome.token,), entries, now_ns)

    def _take_drafted(self, sequence: Sequence, draft: tuple[int, ...], outcome: Outcome, now_ns: int) -> None:
        """Several tokens of one step. Keys of the rejected rest lie beyond what is computed: the next step writes over
        them, and no block is known by a hash of them."""
        chosen = (outcome, *outcome.following)
        tokens = tuple(each.token for each in chosen if each.token is not None)
        sequence.tokens.extend(tokens)
        self._cache.advance(sequence, len(tokens))
        if self._speculator is not None:
            self._speculator.learn(sequence, len(draft), sum(map(operator.eq, tokens, draft)))
        entries = tuple(each.logprobs for each in chosen if each.logprobs is not None)
        self._tell(sequence, tokens, entries or None, now_ns)

    def _tell(
        self, sequence: Sequence, tokens: tuple[int, ...], entries: tuple[TokenLogprobs, ...] | None, now_ns: int
    ) -> None:
        """Sends the latest tokens of a sequence, and ends it when they were its last."""
        request = sequence.request
        if sequence.output_tokens == 1:
            sequence.first_token_ns = now_ns
            if sequence.index == 0:
                self._statistics.first_token((now_ns - request.arrival_ns) / 1e9)
                for sibling in request.sequences[1:]:
                    self._waiting.add(sibling)  # the prompt's blocks are known now
        sequence.last_token_ns = now_ns
        self._statistics.generated_tokens += len(tokens)
        self._events.append((request.key, Tokens(request.submit.request_id, sequence.index, tokens, entries)))
        reason = end_reason(sequence)
        if reason is not None:
            self._finish(sequence, reason)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._leave(sequence, trusted=True)
        request, usage = sequence.request, sequence.usage()
        wanted = sequence.wants_prompt_logprobs
        prompt_logprobs = tuple(request.prompt_logprobs) if wanted else None
        end = Finished(request.submit.request_id, sequence.index, reason, usage, request.remaining, prompt_logprobs)
        self._events.append((request.key, end))
        self._statistics.finished(reason, usage)
        if not request.remaining:
            self._forget(request)

    def _fail(self, request: Request, code: ErrorCode, message: str, *, trusted: bool = True) -> None:
        for sequence in request.sequences:
            if not sequence.finished:
                self._leave(sequence, trusted=trusted)
        self._events.append((request.key, Error(request.submit.request_id, code, message)))
        self._statistics.failed(code)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        del self._requests[request.key]
        self._deadlines.pop(request.key, None)

    def _leave(self, sequence: Sequence, *, trusted: bool) -> None:
        """Ends a sequence wherever it is and gives its blocks back, or leaves that to the last step it is planned in.
        Not `trusted`: what it computed is not reused."""
        sequence.finished = True
        if sequence in self._running:
            self._running.remove(sequence)
            if not trusted:
                self._cache.distrust(sequence)
            if sequence.planned:
                self._leaving.add(sequence)
            else:
                self._cache.release(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence, served=False)
