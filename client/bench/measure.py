"""From what single requests saw to the figures of a level: latencies, throughput, goodput, errors.

Invariant: every request sent is in `requests` or in `errors`, and tokens are those that the server counted, whatever
the number of responses that carried them. Must not know how requests are sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass
class Record:
    """One request, times in seconds of one clock. `error` is a status name; then the other fields hold what came."""

    start_s: float
    first_s: float | None = None
    last_s: float | None = None
    input_tokens: int | None = None
    output_tokens: int = 0
    error: str | None = None
    message: str = ""
    finish_reason: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return None if self.first_s is None else self.first_s - self.start_s

    @property
    def e2e_s(self) -> float | None:
        """From sending to the last response."""
        return None if self.last_s is None else self.last_s - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Time between tokens: (last - first) / (tokens - 1). None below two tokens."""
        if self.first_s is None or self.last_s is None or self.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)


@dataclass(frozen=True)
class Slo:
    """Limits of a good request, in milliseconds; None does not limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def met(self, record: Record) -> bool:
        """Whether a request that succeeded kept to both. One token has no time between tokens to judge."""
        ttft, tpot = record.ttft_s, record.tpot_s
        slow_first = self.ttft_ms is not None and (ttft is None or 1000 * ttft > self.ttft_ms)
        slow_next = self.tpot_ms is not None and tpot is not None and 1000 * tpot > self.tpot_ms
        return not slow_first and not slow_next


@dataclass(frozen=True)
class Summary:
    """The figures of one level. Distributions: {"mean", "p50", "p90", "p99", "max"} in milliseconds, {} when empty."""

    requests: int
    errors: dict[str, int]
    duration_s: float
    input_tokens: int
    output_tokens: int
    input_tok_s: float
    output_tok_s: float
    requests_s: float
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    e2e_ms: dict[str, float]
    goodput_s: float | None = None
    first_error: str = ""
    finish_reasons: dict[str, int] = field(default_factory=dict)

    def line(self) -> dict[str, Any]:
        """The summary as plain values."""
        return {name: value for name, value in vars(self).items() if value not in (None, "")}


def distribution(values: Sequence[float | None]) -> dict[str, float]:
    """Mean, percentiles and maximum, in milliseconds, of values in seconds; None values do not count."""
    known = np.array([1000.0 * value for value in values if value is not None])
    if known.size == 0:
        return {}
    ranks = np.percentile(known, PERCENTILES)
    named = {f"p{rank}": round(float(value), 3) for rank, value in zip(PERCENTILES, ranks, strict=True)}
    return {"mean": round(float(known.mean()), 3), **named, "max": round(float(known.max()), 3)}


def summarize(records: Sequence[Record], duration_s: float, slo: Slo | None = None) -> Summary:
    """Figures over all records of a level that took `duration_s`; latencies over the requests that succeeded.

    Tokens of requests that failed are not counted as throughput.
    """
    good = [record for record in records if record.error is None]
    failed = [record for record in records if record.error is not None]
    inputs = sum(record.input_tokens or 0 for record in good)
    outputs = sum(record.output_tokens for record in good)
    span = duration_s if duration_s > 0 else float("nan")
    return Summary(
        requests=len(good),
        errors=dict(Counter(str(record.error) for record in failed)),
        duration_s=round(duration_s, 4),
        input_tokens=inputs,
        output_tokens=outputs,
        input_tok_s=round(inputs / span, 2),
        output_tok_s=round(outputs / span, 2),
        requests_s=round(len(good) / span, 3),
        ttft_ms=distribution([record.ttft_s for record in good]),
        tpot_ms=distribution([record.tpot_s for record in good]),
        e2e_ms=distribution([record.e2e_s for record in good]),
        goodput_s=None if slo is None else round(sum(slo.met(record) for record in good) / span, 3),
        first_error=f"{failed[0].error}: {failed[0].message}" if failed else "",
        finish_reasons=dict(Counter(record.finish_reason or "none" for record in good)),
    )
