"""Which shapes of step have graphs, and which of them serves a batch: pure functions of counts.

Invariant: a step that decodes has as many tokens as sequences, a step of prompts (with decoding sequences or without)
more, so that a shape says which it is. Must not know memory or devices.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gptoss_trt.runtime.model.batch import StepBatch

SMALL_BATCHES = (1, 2, 4, 8)
BATCH_STEP = 8  # from 8 rows on
MAX_ROWS = 256
MIN_WIDTH = 32  # blocks of the narrowest table: parts without keys cost little, another graph a stall

# Steps of prompts: a step of few tokens reads nearly all weights, so 128 cost what 16 do, and up to MOST_PADDED a step
# of the published models may take the device less time than it takes the host to launch its kernels. Larger ones gain
# less than padding costs, unless they are nearly full, as pieces of long prompts are.
MOST_PADDED, MOST_PROMPT_TOKENS = 4096, 8192
TOKEN_STEPS = ((1024, 128), (MOST_PADDED, 256), (MOST_PROMPT_TOKENS, 4096))  # (up to, in steps of)
LARGE_PADDING = 128  # tokens, the most of a step of over MOST_PADDED
# Sequences of a step of prompts: empty ones cost a few blocks of threads that leave at once, and rows of the lm head.
PROMPT_SEQUENCES = (8, 64, MAX_ROWS)


@dataclass(frozen=True)
class GraphShape:
    """Tokens and sequences of a step with its padding, and the width of its full block table."""

    tokens: int
    sequences: int
    width: int

    @property
    def decodes(self) -> bool:
        return self.tokens == self.sequences


def padded_rows(rows: int) -> int:
    """The batch size of the graph that serves `rows` decoding sequences: 1, 2, 4, 8, then steps of 8."""
    return next((size for size in SMALL_BATCHES if rows <= size), -(-rows // BATCH_STEP) * BATCH_STEP)


def padded_width(blocks: int) -> int:
    """The width of the block table of the graph that serves `blocks` blocks a sequence: a power of two."""
    return max(MIN_WIDTH, 1 << (blocks - 1).bit_length())


def graph_sizes(most: int) -> list[int]:
    """Every batch size that has a graph of its own, up to the one that serves `most` decoding sequences."""
    return sorted({padded_rows(rows) for rows in range(1, min(most, MAX_ROWS) + 1)})


def padded_tokens(tokens: int) -> int:
    """The tokens of the graph that serves a step of prompts of `tokens` tokens, at most MOST_PROMPT_TOKENS."""
    step = next(step for most, step in TOKEN_STEPS if tokens <= most)
    return -(-tokens // step) * step


def prompt_size(tokens: int, sequences: int) -> tuple[int, int] | None:
    """Tokens and sequences of the graph that serves a step of prompts; None for a step that has none."""
    if not 0 < sequences <= MAX_ROWS or not sequences <= tokens <= MOST_PROMPT_TOKENS:
        return None
    rows = next(most for most in PROMPT_SEQUENCES if sequences <= most)
    padded = padded_tokens(max(tokens, rows + 1))
    return None if padded > MOST_PADDED and padded - tokens > LARGE_PADDING else (padded, rows)


def prompt_sizes(most_tokens: int, most_sequences: int) -> list[tuple[int, int]]:
    """The sizes that serve steps of prompts of up to `most_tokens` tokens and `most_sequences` sequences, largest
    first."""
    counts = {min(most, most_sequences) for most in PROMPT_SEQUENCES}
    most = min(most_tokens, MOST_PROMPT_TOKENS)
    sizes = {prompt_size(tokens, count) for count in counts for tokens in range(count, most + 1)}
    return sorted((size for size in sizes if size is not None), reverse=True)


def is_decode(batch: StepBatch) -> bool:
    """Whether a batch in host memory is what a decode graph can run: one new token a sequence, a row of logits for
    each."""
    sequences = batch.context_lens.numel()
    return (
        0 < sequences <= MAX_ROWS
        and batch.token_ids.numel() == batch.logits_rows.numel() == sequences
        and _one_each(batch.query_start.numpy())
    )


def is_ends_only(batch: StepBatch) -> bool:
    """Whether the rows of logits of a batch in host memory all are the last tokens of their sequences, each of which
    has one."""
    if batch.context_lens.numel() == batch.logits_rows.numel() == 1:  # a prompt alone, ahead of whose work nothing runs
        return int(batch.logits_rows) + 1 == batch.token_ids.numel()
    starts = batch.query_start.numpy().tolist()
    ends = starts[1:]
    lasts = all(map(operator.lt, starts, ends))
    return lasts and {end - 1 for end in ends}.issuperset(batch.logits_rows.numpy().tolist())


def _one_each(starts: np.ndarray[Any, np.dtype[np.int32]]) -> bool:
    return bool((starts[1:] - starts[:-1] == 1).all())
