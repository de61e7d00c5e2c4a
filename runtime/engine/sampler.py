"""Chooses tokens from logits: greedy or sampled, for a batch at once, with log-probabilities.

Invariant: a row's token depends on its own logits, sampling and seed only, never on its neighbours: the random number
of a token is a hash of (seed, sequence, position), so it is the same after a pause and in any batch. Filters:
temperature, top_k, top_p over what top_k left (renormalised), min_p relative to the best. Must not know blocks, the
queue or sockets.

Cost: no sort of the vocabulary. One pass finds the maximum of each row (and NaN); rows with top_k or top_p take the
best TOP_P_CANDIDATES first, and only a row whose nucleus is wider is sorted.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable

import torch

from gptoss_trt.runtime.engine.adjust import LogitAdjuster
from gptoss_trt.runtime.engine.guides import GuideMatcher
from gptoss_trt.runtime.engine.messages import Sampling, TokenLogprobs
from gptoss_trt.runtime.engine.sequence import Sequence
from gptoss_trt.runtime.engine.step_plan import Outcome

TOP_P_CANDIDATES = 256
DRAW_BLOCK = 256
COLDEST = 1e-5  # a temperature below this is greedy: dividing by it says nothing more

_Way = Callable[[torch.Tensor, list[Sequence]], list[int]]

NOT_FINITE = "the logits of this request are not finite (NaN or infinity came out of the model)"
NOTHING_ALLOWED = "no token is allowed next: min_tokens, bad sequences and guide together mask the whole vocabulary"


def is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < COLDEST or sampling.top_k == 1


def uniform(seed: int, sequence: int, position: int) -> float:
    """The random number in [0, 1) of one output token."""
    digest = hashlib.blake2b(struct.pack("<QII", seed, sequence, position), digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)


class Sampler:
    """Chooses the next token of each row. `guide_for` makes a sequence's grammar matcher, or None."""

    def __init__(self, guide_for: Callable[[Sequence], GuideMatcher | None] = lambda _: None) -> None:
        self._adjuster = LogitAdjuster(guide_for)

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[Outcome]:
        """Outcomes, one a row of `logits` ([rows, vocabulary], fp32; changed in place). A bad row fails alone."""
        failures = {row: Outcome(failure=NOT_FINITE) for row in _not_finite_rows(logits)}
        reports = self._raw_logits(logits, sequences)
        masked = [row for row, sequence in enumerate(sequences) if self._adjuster.apply(logits[row], sequence)]
        if masked:
            for index in _not_finite_rows(logits[masked]):
                reason = self._adjuster.guide_failure(sequences[masked[index]]) or NOTHING_ALLOWED
                failures.setdefault(masked[index], Outcome(failure=reason, code="INVALID_ARGUMENT"))
        logits[list(failures)] = 0.0  # any numbers: the rows' tokens are not used
        tokens = _choose(logits, sequences)
        outcomes = []
        for row, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
            if row in failures:
                outcomes.append(failures[row])
                continue
            self._adjuster.accept(sequence, token)
            best = sequence.request.submit.logprobs
            report = None if best is None else logprobs_of(reports[row][None], [token], best)[0]
            outcomes.append(Outcome(token, report))
        return outcomes

    @staticmethod
    def _raw_logits(logits: torch.Tensor, sequences: list[Sequence]) -> dict[int, torch.Tensor]:
        """Copies of the rows whose log-probabilities are wanted: those are the model's own, before any adjustment."""
        return {
            row: logits[row].clone()
            for row, sequence in enumerate(sequences)
            if sequence.request.submit.logprobs is not None
        }


def logprobs_of(logits: torch.Tensor, tokens: list[int], best: int) -> list[TokenLogprobs]:
    """log softmax of `logits` ([rows, vocabulary]) at each row's token, and the `best` highest with their ids."""
    total = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None]) - total
    if not best:
        return [TokenLogprobs(value) for value in chosen[:, 0].tolist()]
    top = logits.topk(best, dim=-1)
    values, ids = (top.values - total).tolist(), top.indices.tolist()
    return [
        TokenLogprobs(value, tuple(zip(row_ids, row_values, strict=True)))
        for value, row_ids, row_values in zip(chosen[:, 0].tolist(), ids, values, strict=True)
    ]


def _not_finite_rows(logits: torch.Tensor) -> list[int]:
    """Rows whose maximum is NaN or infinite: one pass, and NaN anywhere in a row reaches its maximum."""
    return (~torch.isfinite(logits.amax(-1))).nonzero()[:, 0].tolist()


def _choose(logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    groups: dict[_Way, list[int]] = {}
    for row, sequence in enumerate(sequences):
        sampling = sequence.request.submit.sampling
        sampled: _Way = _from_best if sampling.top_k or sampling.top_p < 1.0 else _from_all
        way = _greedy if is_greedy(sampling) else sampled
        groups.setdefault(way, []).append(row)
    tokens = [0] * len(sequences)
    for way, rows in groups.items():
        part = logits if len(rows) == len(sequences) else logits[rows]
        for row, token in zip(rows, way(part, [sequences[row] for row in rows]), strict=True):
            tokens[row] = token
    return tokens


def _greedy(logits: torch.Tensor, _sequences: list[Sequence]) -> list[int]:
    return logits.max(-1).indices.tolist()


def _from_all(logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    """From softmax(logits / temperature) over the whole vocabulary, less what is under min_p of the best."""
    settings = [sequence.request.submit.sampling for sequence in sequences]
    weights = logits.sub_(logits.amax(-1, keepdim=True))  # in place: nobody needs these rows any more
    if any(s.temperature != 1.0 for s in settings):
        weights = weights.div_(_column([s.temperature for s in settings], logits))
    weights = weights.exp_()
    if any(s.min_p for s in settings):
        weights = weights.masked_fill_(weights < _column([s.min_p for s in settings], logits), 0.0)
    return _draw(weights, sequences)[:, 0].tolist()


def _from_best(logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    """From the best of softmax(logits / temperature): top_k, then top_p of what is left, then min_p."""
    vocabulary = logits.shape[1]
    settings = [sequence.request.submit.sampling for sequence in sequences]
    limits = [min(s.top_k, vocabulary) or vocabulary for s in settings]
    width = min(vocabulary, max(s.top_k or TOP_P_CANDIDATES for s in settings))
    scaled = logits.div_(_column([s.temperature for s in settings], logits))  # in place, as in _from_all
    values, ids = scaled.topk(width, dim=-1)
    ranks = torch.arange(width, device=logits.device)
    values = values.masked_fill(ranks >= _column(limits, logits), -torch.inf)
    # Without top_k the nucleus is a share of the whole vocabulary's mass, else of the best k's.
    total = values.logsumexp(-1, keepdim=True)
    unlimited = torch.tensor([not s.top_k for s in settings], device=logits.device)[:, None]
    if not all(s.top_k for s in settings):
        total = torch.where(unlimited, scaled.logsumexp(-1, keepdim=True), total)
    probabilities = (values - total).exp()
    wide = [
        row
        for row, mass in enumerate(probabilities.sum(-1).tolist())
        if settings[row].top_k == 0 and mass < settings[row].top_p and width < vocabulary
    ]
    tokens = ids.gather(1, _draw(_nucleus(probabilities, settings), sequences))[:, 0].tolist()
    for row in wide:
        ordered, order = scaled[row : row + 1].softmax(-1).sort(-1, descending=True)
        choice = _draw(_nucleus(ordered, settings[row : row + 1]), sequences[row : row + 1])
        tokens[row] = int(order[0, choice[0, 0]])
    return tokens


def _nucleus(probabilities: torch.Tensor, settings: list[Sampling]) -> torch.Tensor:
    """Keeps of descending `probabilities` those before which less than top_p lies, and at least min_p of the best."""
    before = probabilities.cumsum(-1) - probabilities
    outside = before >= _column([s.top_p for s in settings], probabilities)
    outside |= probabilities < probabilities[:, :1] * _column([s.min_p for s in settings], probabilities)
    outside[:, 0] = False
    return probabilities.masked_fill(outside, 0.0)


def _draw(weights: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """The column of each row where the running sum of `weights` passes its random share; [rows, 1], int64.

    In two levels, sums of DRAW_BLOCK columns first: a running sum over the vocabulary is the slowest pass of all.
    """
    width = weights.shape[1]
    whole = width // DRAW_BLOCK * DRAW_BLOCK
    sums = weights[:, :whole].view(len(weights), -1, DRAW_BLOCK).sum(-1) if whole else weights[:, :0]
    sums = torch.cat((sums, weights[:, whole:].sum(-1, keepdim=True)), dim=1)
    running = sums.cumsum(-1)
    share = _column([uniform(s.request.seed, s.index, s.output_tokens) for s in sequences], weights)
    target = share * running[:, -1:]
    block = _passes(running, target)
    columns = block * DRAW_BLOCK + torch.arange(DRAW_BLOCK, device=weights.device)
    inside = weights.gather(1, columns.clamp(max=width - 1)).masked_fill(columns >= width, 0.0)
    before = running.gather(1, block) - sums.gather(1, block)
    return block * DRAW_BLOCK + _passes(inside.cumsum(-1), target - before)


def _passes(running: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The first column of each row whose running sum is above `target`; never one that adds nothing."""
    choice = torch.searchsorted(running, target, right=True)
    last = torch.searchsorted(running, running[:, -1:].contiguous())  # rounding may put the target on the total
    return torch.minimum(choice, last)


def _column(values: list[float] | list[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
