"""The embedding: a row of a table for each token id."""

from __future__ import annotations

import torch


def embedding(token_ids: torch.Tensor, weight: torch.Tensor, first_row: int = 0) -> torch.Tensor:
    """weight[token_ids - first_row]; zeros for ids outside this rank's rows, so that a sum over ranks is the lookup.

    token_ids int [T]; weight [V, H]; returns [T, H] in weight's dtype.
    """
    local = token_ids.long() - first_row
    outside = (local < 0) | (local >= weight.shape[0])
    rows = weight[local.masked_fill(outside, 0)]
    return rows.masked_fill(outside.unsqueeze(-1), 0)
