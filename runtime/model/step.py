"""What all layers of one step share: the batch's tensors as ops want them, and where each pool's new keys go.

Invariant: derived once a step, from shapes and device tensors alone on a GPU. Must not know weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gptoss_trt.ops import ops
from gptoss_trt.runtime.model.batch import StepBatch


@dataclass(frozen=True)
class Pool:
    """One pool's tables in a step: block_table [S, B], first_block [S] or None, slots [T] of the new tokens."""

    block_table: torch.Tensor
    first_block: torch.Tensor | None
    slots: torch.Tensor


@dataclass(frozen=True)
class Step:
    """A step: positions [T], query_start [S + 1], context_lens [S], token_count [1]; `single` when every sequence has
    one new token, which is decode."""

    positions: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    token_count: torch.Tensor
    single: bool
    full: Pool
    window: Pool

    @property
    def tokens(self) -> int:
        return len(self.positions)

    @classmethod
    def of(cls, batch: StepBatch, block_tokens: int) -> Step:
        """Raises ValueError (on a CPU, where looking costs nothing) for a token without a KV block."""
        tokens, sequences = len(batch.token_ids), len(batch.context_lens)
        return cls(
            positions=batch.positions,
            query_start=batch.query_start,
            context_lens=batch.context_lens,
            token_count=batch.query_start[-1:],
            single=tokens == sequences and tokens > 0 and _one_each(batch),
            full=_pool(batch, batch.full_blocks, None, block_tokens),
            window=_pool(batch, batch.window_blocks, batch.window_first_block, block_tokens),
        )


@dataclass(frozen=True)
class Ends:
    """The last token of each sequence: its row int64 [S], the number of sequences that have one int32 [1], and which of
    them each row of logits is, int64 [R]."""

    rows: torch.Tensor
    count: torch.Tensor
    wanted: torch.Tensor

    @classmethod
    def of(cls, batch: StepBatch) -> Ends:
        """For a batch whose rows of logits all are last tokens (or padding, where there are no tokens), and whose empty
        sequences stand at its end."""
        begins, ends = batch.query_start[:-1], batch.query_start[1:]
        return cls(
            rows=(ends - 1).clamp_(min=0).long(),
            count=(ends > begins).sum(dtype=torch.int32).reshape(1),
            wanted=torch.searchsorted(ends, batch.logits_rows, right=True).clamp_(max=len(ends) - 1),
        )


def _one_each(batch: StepBatch) -> bool:
    """As many tokens as sequences means one each, unless a sequence came without a token, which only a CPU batch may
    (a captured graph's padding sequences have a padding token each)."""
    starts = batch.query_start
    return starts.device.type != "cpu" or bool((starts.diff() == 1).all())


def _pool(batch: StepBatch, table: torch.Tensor, first_block: torch.Tensor | None, block_tokens: int) -> Pool:
    slots = torch.empty_like(batch.positions)
    ops.kv_slots(batch.positions, batch.query_start, table, first_block, block_tokens, slots)
    return Pool(table, first_block, slots)
