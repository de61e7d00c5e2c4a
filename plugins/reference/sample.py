"""One token from each row of logits, greedy or by temperature, and how the next step takes it.

Shapes alone decide which operations run, and a row's token depends on its own logits, temperature and share only.
"""

from __future__ import annotations

import torch

DRAW_BLOCK = 256
NOT_FINITE = -1


def sample(logits: torch.Tensor, temperature: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """int32 [R]: the best token (the lowest of equals) where temperature is 0, else the first whose cumulated
    softmax(logits / temperature) passes `share`; NOT_FINITE where a row holds NaN or its maximum is infinite.

    logits fp32 [R, vocabulary], not changed; temperature and share fp32 [R], share in [0, 1).
    """
    best = logits.max(-1)
    greedy = temperature == 0
    scale = temperature.masked_fill(greedy, 1.0)
    weights = (logits - best.values[:, None]).div_(scale[:, None]).exp_()
    drawn = columns(weights, share[:, None])[:, 0]
    tokens = torch.where(greedy, best.indices, drawn)
    return tokens.masked_fill(~torch.isfinite(best.values), NOT_FINITE).to(torch.int32)


def feed(given: torch.Tensor, source: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """int32 [R]: drawn[source] where that is an index, `given` where it is negative; all int32 [R], drawn [C]."""
    return torch.where(source >= 0, drawn[source.clamp(min=0).long()], given)


def columns(weights: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """int64 [R, 1]: the column of each row of `weights` [R, N] where the running sum passes `share` [R, 1] of the sum.

    In two levels, sums of DRAW_BLOCK columns first: a running sum over the vocabulary is the slowest pass of all.
    """
    width = weights.shape[1]
    whole = width // DRAW_BLOCK * DRAW_BLOCK
    sums = (
        weights[:, :whole].reshape(len(weights), whole // DRAW_BLOCK, DRAW_BLOCK).sum(-1) if whole else weights[:, :0]
    )
    sums = torch.cat((sums, weights[:, whole:].sum(-1, keepdim=True)), dim=1)
    running = sums.cumsum(-1)
    target = share * running[:, -1:]
    block = _passes(running, target)
    inside = block * DRAW_BLOCK + torch.arange(DRAW_BLOCK, device=weights.device)
    values = weights.gather(1, inside.clamp(max=width - 1)).masked_fill(inside >= width, 0.0)
    before = running.gather(1, block) - sums.gather(1, block)
    return (block * DRAW_BLOCK + _passes(values.cumsum(-1), target - before)).clamp(max=width - 1)


def _passes(running: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The first column of each row whose running sum is above `target`; never one that adds nothing, and one that
    exists where the sums are NaN."""
    choice = torch.searchsorted(running, target, right=True)
    last = torch.searchsorted(running, running[:, -1:].contiguous())  # rounding may put the target on the total
    return torch.minimum(choice, last).clamp(max=running.shape[1] - 1)
