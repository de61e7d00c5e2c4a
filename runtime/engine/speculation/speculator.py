"""Drafts for the decoding sequences of a step, and what is learned from their verification.

Invariant: a draft never makes a sequence overrun its max_tokens and pauses nobody, and which tokens come never depends
on it. Must not know queues or logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from gptoss_trt.runtime.engine.kv_cache import KvCache
from gptoss_trt.runtime.engine.sequence import Sequence
from gptoss_trt.runtime.engine.speculation.drafter import Drafter
from gptoss_trt.runtime.engine.speculation.length import Acceptance, StepCost, draft_lengths

if TYPE_CHECKING:
    from gptoss_trt.runtime.engine.step_plan import StepPlan

# Times of a step by rows on one H200 (20b, context 1k, running ahead; a verification takes 1.1 to 1.4 times as long,
# tests/perf/NOTES.md), and of the demo on a CPU.
CUDA_COST = StepCost(((1, 1.0), (2, 1.5), (4, 1.5), (8, 1.8), (32, 2.6), (64, 3.2), (128, 4.2)), drafting=1.2)
CPU_COST = StepCost(((1, 1.0), (8, 1.3), (16, 2.1), (32, 3.8), (64, 6.5)))


class Speculator:
    """Asks `drafter` for at most `most` tokens a sequence and step; `cost` says what verifying them takes, `pass_cost`
    what drafting one does (of all sequences together, in times of a step of one row)."""

    def __init__(self, drafter: Drafter, most: int, cost: StepCost, pass_cost: float = 0.0) -> None:
        if most < 1:
            raise ValueError(f"most is {most}; a draft has at least 1 token")
        self._drafter = drafter
        self._most = most
        self._cost = cost
        self.pass_cost = pass_cost
        self._acceptance: WeakKeyDictionary[Sequence, Acceptance] = WeakKeyDictionary()

    def wants(self, sequences: Items[Sequence], room: int) -> bool:
        """Whether drafts would pay in the step behind the one that is planned, of these decoding sequences and with
        `room` for more tokens."""
        if room < 1:
            return False
        places = [sequence.output_tokens + sequence.awaited for sequence in sequences]
        return any(self._lengths(sequences, places, len(sequences)))

    def drafts(self, sequences: Items[Sequence], rows: int, room: int) -> Mapping[Sequence, tuple[int, ...]]:
        """Drafts for some of the decoding `sequences` of a step that has `rows` tokens without them and room for
        `room` more."""
        lengths = self._lengths(sequences, [sequence.output_tokens for sequence in sequences], rows)
        wanted = []
        for sequence, length in zip(sequences, lengths, strict=True):
            count = min(length, room)
            if count > 0:
                wanted.append((sequence, count))
                room -= count
        found: dict[Sequence, tuple[int, ...]] = {}
        for (sequence, count), draft in zip(wanted, self._drafter.draft(wanted) if wanted else (), strict=True):
            self._known(sequence).found(bool(draft), sequence.output_tokens)
            if draft:
                found[sequence] = tuple(draft[:count])
        return found

    def add_drafts(self, plan: StepPlan, cache: KvCache, step_tokens: int, *, spare_blocks: int) -> None:
        """Adds drafts to the decoding works of a plan of at most `step_tokens` tokens, while more than `spare_blocks`
        blocks are left in either pool of `cache`."""
        works = {
            work.sequence: work
            for work in plan.work
            if work.count == work.logits == 1 and work.samples and work.sequence.output_tokens
        }
        drafts = self.drafts(list(works), plan.tokens, step_tokens - plan.tokens)
        for sequence, draft in drafts.items():
            if min(cache.full.available, cache.window.available) <= spare_blocks:
                return
            count = cache.longest_extension(sequence, len(draft))
            if count and cache.extend(sequence, count):
                work = works[sequence]
                work.count, work.logits, work.draft = 1 + count, 1 + count, draft[:count]
                plan.tokens += count
                sequence.planned += count

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """`accepted` of `drafted` tokens came true; the sequence has its new tokens."""
        sequence.draft_tokens += drafted
        sequence.accepted_draft_tokens += accepted
        self._known(sequence).add(drafted, accepted, sequence.output_tokens)

    def _lengths(self, sequences: Items[Sequence], places: Items[int], rows: int) -> list[int]:
        """Draft tokens for each sequence when it has as many output tokens as `places` says."""
        if rows >= self._cost.most_rows:
            return [0] * len(sequences)
        known = [self._known(sequence) for sequence in sequences]
        limits = [
            min(self._most, sequence.request.submit.max_tokens - place - 1) if each.is_awake(place) else 0
            for sequence, each, place in zip(sequences, known, places, strict=True)
        ]
        rates = [each.hope(place) for each, place in zip(known, places, strict=True)]
        return draft_lengths(rates, limits, rows, self._cost, self.pass_cost)

    def _known(self, sequence: Sequence) -> Acceptance:
        return self._acceptance.setdefault(sequence, Acceptance())
