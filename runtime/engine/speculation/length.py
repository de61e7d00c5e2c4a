"""How many draft tokens each sequence gets: what makes the step yield most tokens per time.

Invariant: a pure function of what was accepted so far and of the batch; a step without drafts is always among the
choices. Must not know tokens, models or clocks.

Of a sequence whose drafts are accepted with probability p each, the k-th draft token yields p^k tokens. A step of R
rows takes StepCost(R), and drafting a pass of the drafter for each token of the longest draft. Rows are given out in
order of their yield while tokens per time grow.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

MEMORY = 0.8  # weight of what was known before a verification
PRIOR = (2.0, 3.0)  # accepted of tried, before anything is known: 2 of 3 pays for a try at a small batch
FIRST_PROBE = 16  # tokens without drafts before one is tried again, doubled each time that it fails
LAST_PROBE = 256
MISSES_A_TOKEN = 4  # so many times without a draft let one more token pass before the drafter is asked again
LONGEST_SLEEP = 6  # tokens


@dataclass(frozen=True)
class StepCost:
    """Time of a step by its rows, in times of a step of one row: straight lines through `points` (rows, cost), none
    beyond the last: more rows than that are never worth a draft. A step with drafts takes `drafting` times as long
    besides: it cannot be launched before the tokens of the step before are known."""

    points: tuple[tuple[int, float], ...]
    drafting: float = 1.0

    @property
    def most_rows(self) -> int:
        return self.points[-1][0]

    @cached_property
    def of_rows(self) -> NDArray[np.float64]:
        """The cost of 1, 2, ... most_rows rows."""
        return np.array([self(rows) for rows in range(1, self.most_rows + 1)])

    def __call__(self, rows: int) -> float:
        if rows > self.most_rows:
            return math.inf
        place = bisect.bisect_left(self.points, (rows, 0.0))
        right, above = self.points[place]
        if right == rows:
            return above
        left, below = self.points[place - 1]
        return below + (above - below) * (rows - left) / (right - left)


class Acceptance:
    """What one sequence's drafts have come to."""

    def __init__(self) -> None:
        self._accepted, self._tried = PRIOR
        self._pause = FIRST_PROBE
        self._misses = 0
        self._awake_at = 0
        self._probe_at = 0  # output tokens from which on a draft is tried although few were accepted

    @property
    def rate(self) -> float:
        """Probability that a draft token is accepted when those before it were."""
        return self._accepted / self._tried

    def add(self, drafted: int, accepted: int, output_tokens: int) -> None:
        """A verification: `accepted` of `drafted` tokens, of a sequence that now has `output_tokens`."""
        tried = min(accepted + 1, drafted)  # nothing was learned of those behind the first wrong one
        self._accepted = self._accepted * MEMORY + accepted
        self._tried = self._tried * MEMORY + tried
        self._pause = FIRST_PROBE if accepted else min(2 * self._pause, LAST_PROBE)
        self._probe_at = output_tokens + self._pause

    def found(self, anything: bool, output_tokens: int) -> None:
        """The drafter was asked and had a draft, or had not: where it seldom has, steps need not wait for it."""
        self._misses = 0 if anything else self._misses + 1
        asleep = 0 if anything else 1 + min(self._misses // MISSES_A_TOKEN, LONGEST_SLEEP)
        self._awake_at = output_tokens + asleep

    def is_awake(self, output_tokens: int) -> bool:
        """Whether the drafter is to be asked."""
        return output_tokens >= self._awake_at

    def hope(self, output_tokens: int) -> float:
        """The rate to plan with: from time to time that of a sequence of which nothing is known, for texts change."""
        return max(self.rate, PRIOR[0] / PRIOR[1]) if output_tokens >= self._probe_at else self.rate


def draft_lengths(
    rates: Items[float], limits: Items[int], rows: int, cost: StepCost, pass_cost: float = 0.0
) -> list[int]:
    """Draft tokens for each sequence with the acceptance `rates`, at most `limits` (none where that is negative), in a
    step that has `rows` rows without them and yields a token for each. `pass_cost`: a pass of the drafter, in times of
    a step of one row."""
    room, bounds = cost.most_rows - rows, np.maximum(limits, 0)
    most, total = int(bounds.max(initial=0)), int(bounds.sum())
    if room <= 0 or not most:
        return [0] * len(rates)
    places = np.arange(1, most + 1)
    yields = np.asarray(rates)[:, None] ** places * (places <= bounds[:, None])
    order = np.argsort(-yields, axis=None, kind="stable")[: min(room, total)]  # yields of 0 stand last
    passes = np.maximum.accumulate(order % most + 1)
    times = cost.of_rows[rows : rows + len(order)] * cost.drafting + passes * pass_cost
    speeds = (len(rates) + yields.ravel()[order].cumsum()) / times
    best = int(speeds.argmax())
    chosen = best + 1 if speeds[best] > len(rates) / cost(rows) else 0
    lengths: list[int] = np.bincount(order[:chosen] // most, minlength=len(rates)).tolist()
    return lengths
