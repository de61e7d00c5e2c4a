"""The draft-model drafter: a second, smaller model runs ahead of the target with a KV cache of its own.

Invariant: every key in its cache that counts belongs to a token of the target's sequence; what it drafted beyond is
written over unless it came true. Its drafts are drawn as the target draws, with the same random numbers, so that two
models that agree give the same token under sampling too. Must not know the target's model, blocks or queue.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from gptoss_trt.runtime.engine.kv_cache import KvCache
from gptoss_trt.runtime.engine.messages import Submit
from gptoss_trt.runtime.engine.sequence import Request, Sequence
from gptoss_trt.runtime.engine.speculation.drafter import Wanted
from gptoss_trt.runtime.engine.step_plan import Outcome, StepPlan, Work


class Runner(Protocol):
    """What runs the draft model's steps: a StepRunner."""

    def run(self, plan: StepPlan) -> list[Outcome]: ...


@dataclass
class _Mirror:
    """A target sequence as the draft model has it: `sequence.tokens` are the target's first `accepted` tokens and what
    was drafted behind them, of which `ahead` tokens have keys in the cache beyond `sequence.computed`."""

    sequence: Sequence
    accepted: int
    ahead: int = 0


class ModelDrafter:
    """A Drafter over `runner`, whose model's blocks `cache` accounts for. A step of it computes at most `step_tokens`
    tokens, so a long prompt is read over several drafts; sequences beyond `max_context` are not drafted for.

    `single_passes`: for a model whose steps of one token a sequence are much cheaper than others (graphs), one token
    more is drafted than wanted, so that the last wanted one has its key and a draft that came true whole leaves one
    token to catch up with, not two."""

    def __init__(
        self, runner: Runner, cache: KvCache, step_tokens: int, max_context: int, *, single_passes: bool = False
    ) -> None:
        self._runner = runner
        self._cache = cache
        self._step_tokens = step_tokens
        self._max_context = max_context
        self._more = int(single_passes)
        self._mirrors: dict[Sequence, _Mirror] = {}

    def draft(self, wanted: Wanted) -> list[list[int]]:
        self._forget_ended()
        targets = {sequence for sequence, _ in wanted}
        ready = self._catch_up(wanted, targets)
        for place in range(1, max(ready.values(), default=0)):
            active = [target for target, count in ready.items() if count > place and target in self._mirrors]
            self._run([self._next_work(target) for target in active], active)
        return [self._drafted(sequence)[:most] if sequence in ready else [] for sequence, most in wanted]

    def _catch_up(self, wanted: Wanted, targets: set[Sequence]) -> dict[Sequence, int]:
        """Computes the tokens that the target has got since; the sequences that have a first draft token now, and how
        many tokens each may get."""
        left, works, active = self._step_tokens, [], []
        ready: dict[Sequence, int] = {}
        for target, most in wanted:
            count = min(most + self._more, self._max_context - len(target.tokens))
            mirror = self._synced(target, targets) if count > 0 and left > 0 else None
            if mirror is None or not mirror.sequence.pending:
                continue  # no blocks, or no token since the last draft
            chunk = min(mirror.sequence.pending, left)
            complete = chunk == mirror.sequence.pending
            if not self._extended(mirror, chunk + (count - 1 if complete else 0), targets):
                continue
            works.append(Work(mirror.sequence, mirror.sequence.computed, chunk, int(complete)))
            active.append(target)
            left -= chunk
            if complete:
                ready[target] = count
        self._run(works, active)
        return {target: count for target, count in ready.items() if target in self._mirrors}

    def _next_work(self, target: Sequence) -> Work:
        """The last drafted token, whose successor is wanted."""
        sequence = self._mirrors[target].sequence
        return Work(sequence, len(sequence.tokens) - 1, 1, 1)

    def _run(self, works: list[Work], targets: list[Sequence]) -> None:
        """Runs works and takes their tokens. A sequence whose step fails is forgotten: the target may well go on."""
        if not works:
            return
        for work, target, outcome in zip(works, targets, self._runner.run(StepPlan(works)), strict=True):
            mirror = self._mirrors[target]
            if outcome.failure is not None:
                self._forget(target, trusted=False)
                continue
            known = min(work.count, mirror.accepted - work.start)  # the others are drafted
            if known > 0:
                self._cache.advance(mirror.sequence, known)
            else:
                mirror.ahead += work.count
            if outcome.token is not None:
                mirror.sequence.tokens.append(outcome.token)

    def _drafted(self, target: Sequence) -> list[int]:
        mirror = self._mirrors.get(target)
        return [] if mirror is None else mirror.sequence.tokens[mirror.accepted :].tolist()

    def _synced(self, target: Sequence, targets: set[Sequence]) -> _Mirror | None:
        """The target's mirror with exactly its tokens; None when no blocks are left for it."""
        mirror = self._mirrors.get(target)
        if mirror is None:
            mirror = _mirror_of(target)
            if not self._admitted(mirror) and not (self._freed(targets) and self._admitted(mirror)):
                return None
            self._mirrors[target] = mirror
            return mirror
        sequence = mirror.sequence
        guessed, came = sequence.tokens[mirror.accepted :], target.tokens[mirror.accepted :]
        same = next((i for i, (a, b) in enumerate(zip(guessed, came, strict=False)) if a != b), None)
        right = min(len(guessed), len(came)) if same is None else same
        sequence.tokens[mirror.accepted + right :] = came[right:]
        valid = min(sequence.computed + mirror.ahead, mirror.accepted + right)
        mirror.accepted, mirror.ahead = len(target.tokens), 0
        if valid > sequence.computed:
            # A sequence whose tokens are all computed still needs a query, which writes its last key again.
            self._cache.advance(sequence, min(valid, len(sequence.tokens) - 1) - sequence.computed)
        return mirror

    def _admitted(self, mirror: _Mirror) -> bool:
        return self._cache.admit(mirror.sequence, reuse=True, spare_blocks=0)

    def _extended(self, mirror: _Mirror, count: int, targets: set[Sequence]) -> bool:
        return self._cache.extend(mirror.sequence, count) or (
            self._freed(targets) and self._cache.extend(mirror.sequence, count)
        )

    def _freed(self, targets: set[Sequence]) -> bool:
        """Gives back the blocks of sequences that are not drafted for now; whether there were any."""
        idle = [target for target in self._mirrors if target not in targets]
        for target in idle:
            self._forget(target)
        return bool(idle)

    def _forget_ended(self) -> None:
        for target in [target for target in self._mirrors if target.finished]:
            self._forget(target)

    def _forget(self, target: Sequence, *, trusted: bool = True) -> None:
        sequence = self._mirrors.pop(target).sequence
        if not trusted:
            self._cache.distrust(sequence)
        self._cache.release(sequence)


def _mirror_of(target: Sequence) -> _Mirror:
    """The target's sequence under a request that asks for tokens only: no penalties, masks, guides or
    log-probabilities, which would only make drafts dearer."""
    request = target.request
    wanted = request.submit.sampling
    sampling = replace(wanted, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
    submit = Submit(request.submit.request_id, request.submit.token_ids, request.submit.max_tokens, sampling=sampling)
    same = Request(request.key, submit, request.arrival_ns, request.order, request.seed, request.salt)
    return _Mirror(Sequence(same, target.index, target.tokens[:]), len(target.tokens))
