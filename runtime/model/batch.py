"""What one step of the model works on: the only thing that the scheduler and the forward pass share.

Invariant: all tensors of a batch are int32 on the model's device and describe S sequences with T new tokens in all.
Must not know requests, sampling or sockets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class StepBatch:
    """T new tokens of S sequences, in sequence order.

    Logical block b of a sequence holds positions [b * block_tokens, (b + 1) * block_tokens). In the full pool it is
    `full_blocks[s, b]`; in the window pool `window_blocks[s, b - window_first_block[s]]`. The window pool holds the
    blocks that this step's queries can see and those it writes; the scheduler frees the rest after the step.
    Unused entries are -1.
    """

    token_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    query_start: torch.Tensor  # [S + 1], prefix sums of new tokens
    context_lens: torch.Tensor  # [S], keys of each sequence once this step's are written
    full_blocks: torch.Tensor  # [S, max full blocks]
    window_blocks: torch.Tensor  # [S, max window blocks]
    window_first_block: torch.Tensor  # [S]
    logits_rows: torch.Tensor  # [R], ascending: rows of [T] whose logits are wanted
