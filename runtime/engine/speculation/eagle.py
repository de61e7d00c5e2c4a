"""The EAGLE-3 drafter: a chain of tokens from the target's hidden states.

Invariant: the head's keys lie in the blocks of the target's full pool, so they are reused, shared and dropped with the
target's own; a position's key is written once the token behind it is known. (The last position of a reused block has
the key of the sequence that computed it, whose next token may have been another: that costs acceptance, never
exactness.) Must not know the queue or the target's weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from gptoss_trt.ops import ops
from gptoss_trt.runtime.engine.sampler import is_greedy, uniform
from gptoss_trt.runtime.engine.sequence import Sequence
from gptoss_trt.runtime.engine.speculation.drafter import Wanted
from gptoss_trt.runtime.engine.speculation.eagle_head import EagleHead
from gptoss_trt.runtime.engine.step_plan import Work
from gptoss_trt.runtime.model.taps import FeatureTap


class _Seen(NamedTuple):
    """Features of a sequence's positions from `start` on, bf16 [n, H]; the last of them may be of rejected drafts."""

    start: int
    features: torch.Tensor


class _Chunk(NamedTuple):
    """Positions [start, start + len(tokens)) of a sequence for the head, with the token behind each."""

    sequence: Sequence
    start: int
    tokens: list[int]
    features: torch.Tensor


class EagleDrafter:
    """A Drafter. The target's steps must be shown to it: `seen` after each, before the next writes the tap."""

    def __init__(self, head: EagleHead, tap: FeatureTap, block_tokens: int) -> None:
        self._head = head
        self._tap = tap
        self._block_tokens = block_tokens
        self._seen: WeakKeyDictionary[Sequence, _Seen] = WeakKeyDictionary()

    @torch.inference_mode()
    def seen(self, works: Items[Work]) -> None:
        """A step of the target has computed `works`, whose hidden states lie in the tap in their order."""
        self._catch_up(work.sequence for work in works)
        counts = [work.count for work in works]
        parts = torch.split(self._head.fused(self._tap.features[: sum(counts)]), counts)
        for work, features in zip(works, parts, strict=True):
            self._seen[work.sequence] = _Seen(work.start, features)

    @torch.inference_mode()
    def draft(self, wanted: Wanted) -> list[list[int]]:
        hidden = self._catch_up(sequence for sequence, _ in wanted)
        most = {sequence: min(count, self._room(sequence)) for sequence, count in wanted if sequence in hidden}
        chains: dict[Sequence, list[int]] = {sequence: [] for sequence in most}
        active = list(most)
        while active:
            for sequence, token in zip(active, self._next(active, chains, hidden), strict=True):
                chains[sequence].append(token)
            active = [sequence for sequence in active if len(chains[sequence]) < most[sequence]]
            hidden = self._run(
                [_Chunk(s, s.computed + len(chains[s]) - 1, chains[s][-1:], hidden[s][None]) for s in active]
            )
        return [chains.get(sequence, []) for sequence, _ in wanted]

    def _room(self, sequence: Sequence) -> int:
        """Tokens of a chain whose keys find a place: the first has its key by `_catch_up`."""
        return 1 + len(sequence.table.full) * self._block_tokens - sequence.computed

    def _catch_up(self, sequences: Iterable[Sequence]) -> Mapping[Sequence, torch.Tensor]:
        """Computes what is known and not computed yet; the head's output at each one's last position, [H]."""
        chunks = []
        for sequence in sequences:
            seen = self._seen.pop(sequence, None)
            count = 0 if seen is None else min(len(seen.features), sequence.computed - seen.start)
            if seen is not None and count > 0:
                tokens = sequence.tokens[seen.start + 1 : seen.start + 1 + count].tolist()
                chunks.append(_Chunk(sequence, seen.start, tokens, seen.features[: len(tokens)]))
        return self._run(chunks)

    def _run(self, chunks: list[_Chunk]) -> Mapping[Sequence, torch.Tensor]:
        """The head over some positions of some sequences; its output at the last of each."""
        if not chunks:
            return {}
        counts = np.array([len(chunk.tokens) for chunk in chunks])
        starts = np.array([chunk.start for chunk in chunks])
        contexts = starts + counts
        blocks = -(-contexts // self._block_tokens)
        table = np.full((len(chunks), int(blocks.max())), -1)
        for row, (chunk, count) in enumerate(zip(chunks, blocks.tolist(), strict=True)):
            table[row, :count] = chunk.sequence.table.full[:count]
        ends = np.cumsum(counts)
        positions = np.arange(ends[-1]) + np.repeat(starts - ends + counts, counts)
        out = self._head.forward(
            self._ints([token for chunk in chunks for token in chunk.tokens]),
            torch.cat([chunk.features for chunk in chunks]),
            self._ints(positions),
            self._ints(np.concatenate(([0], ends))),
            self._ints(contexts),
            self._ints(table),
        )
        return {chunk.sequence: out[end - 1] for chunk, end in zip(chunks, ends.tolist(), strict=True)}

    def _next(
        self, active: list[Sequence], chains: Mapping[Sequence, list[int]], hidden: Mapping[Sequence, torch.Tensor]
    ) -> list[int]:
        """The next token of each chain, drawn with the target's random number of that position."""
        logits = self._head.logits(torch.stack([hidden[sequence] for sequence in active]))
        temperatures, shares = [], []
        for sequence in active:
            request = sequence.request
            sampling = request.submit.sampling
            place = sequence.output_tokens + len(chains[sequence])
            temperatures.append(0.0 if is_greedy(sampling) else sampling.temperature)
            shares.append(uniform(request.seed, sequence.index, place))
        how = (torch.tensor(values, dtype=torch.float32).to(logits.device) for values in (temperatures, shares))
        drawn, usable = torch.empty((2, len(active)), dtype=torch.int32, device=logits.device)
        ops.sample(logits, *how, None, drawn[None], usable)
        tokens: list[int] = self._head.target_ids(usable).tolist()
        return tokens

    def _ints(self, values: object) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int32)).to(self._head.device)
