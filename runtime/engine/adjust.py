"""What a request does to its logits before a token is chosen: penalties, bias, masks.

Invariant: a row depends on its own sequence only, and each change touches as many entries as it names ids, never the
whole vocabulary. Order: repetition penalty, presence and frequency penalties, bias, then masks (min_tokens, bad
sequences, guide). Must not know how a token is chosen or what the batch is.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from gptoss_trt.runtime.engine.guides import GuideMatcher
from gptoss_trt.runtime.engine.messages import IdArray
from gptoss_trt.runtime.engine.sequence import Sequence


@dataclass
class _Memory:
    """What is known of a sequence from earlier steps: counts of its output, distinct ids of its prompt, its guide."""

    prompt_ids: frozenset[int]
    guide: GuideMatcher | None
    output: Counter[int] = field(default_factory=Counter)
    counted: int = 0

    def update(self, sequence: Sequence) -> None:
        start = sequence.prompt_tokens + self.counted
        self.output.update(sequence.tokens[start:])
        self.counted = sequence.output_tokens


class LogitAdjuster:
    """Changes rows of logits in place. `guide_for` makes a sequence's matcher, or None without guides."""

    def __init__(self, guide_for: Callable[[Sequence], GuideMatcher | None]) -> None:
        self._guide_for = guide_for
        self._memories: weakref.WeakKeyDictionary[Sequence, _Memory] = weakref.WeakKeyDictionary()

    def apply(self, row: torch.Tensor, sequence: Sequence) -> bool:
        """Adjusts `row` ([vocabulary], fp32) for `sequence`'s next token; whether anything was masked."""
        submit = sequence.request.submit
        sampling = submit.sampling
        if sampling.repetition_penalty != 1.0:
            _repetition_penalty(row, self._memory(sequence), sampling.repetition_penalty)
        if sampling.presence_penalty or sampling.frequency_penalty:
            output = self._memory(sequence).output
            _add(row, {i: -sampling.presence_penalty - sampling.frequency_penalty * n for i, n in output.items()})
        if submit.logit_bias:
            _add(row, _summed(submit.logit_bias))
        return self._mask(row, sequence)

    def guide_failure(self, sequence: Sequence) -> str:
        """Why the sequence's guide cannot go on; empty where it can or there is none."""
        memory = self._memories.get(sequence)
        return "" if memory is None or memory.guide is None else memory.guide.failure

    def accept(self, sequence: Sequence, token: int) -> None:
        """Tells the sequence's guide of the chosen token."""
        if sequence.request.submit.guides:
            guide = self._memory(sequence).guide
            assert guide is not None
            guide.accept(token)

    def _mask(self, row: torch.Tensor, sequence: Sequence) -> bool:
        submit = sequence.request.submit
        banned = list(submit.stop_ids) if sequence.output_tokens < submit.min_tokens else []
        banned += [bad[-1] for bad in submit.bad_sequences if _ends_with(sequence.tokens, bad[:-1])]
        if banned:
            row[torch.tensor(banned, device=row.device)] = -torch.inf
        if submit.guides:
            guide = self._memory(sequence).guide
            assert guide is not None
            guide.mask(row)
        return bool(banned or submit.guides)

    def _memory(self, sequence: Sequence) -> _Memory:
        memory = self._memories.get(sequence)
        if memory is None:
            memory = _Memory(frozenset(sequence.request.submit.token_ids), self._guide_for(sequence))
            self._memories[sequence] = memory
        memory.update(sequence)
        return memory


def _repetition_penalty(row: torch.Tensor, memory: _Memory, penalty: float) -> None:
    """Divides positive and multiplies negative logits of every id of prompt and output by `penalty`."""
    ids = torch.tensor(sorted(memory.prompt_ids.union(memory.output)), device=row.device)
    values = row[ids]
    row[ids] = torch.where(values > 0, values / penalty, values * penalty)


def _add(row: torch.Tensor, amounts: dict[int, float]) -> None:
    if amounts:
        ids = torch.tensor(list(amounts), device=row.device)
        row[ids] += torch.tensor(list(amounts.values()), dtype=row.dtype, device=row.device)


def _summed(bias: tuple[tuple[int, float], ...]) -> dict[int, float]:
    total: dict[int, float] = {}
    for token, amount in bias:
        total[token] = total.get(token, 0.0) + amount
    return total


def _ends_with(tokens: IdArray, part: tuple[int, ...]) -> bool:
    return not part or tuple(tokens[-len(part) :]) == part
