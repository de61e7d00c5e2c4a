"""Counters and histograms of an engine, in the form a metrics page wants: cumulative buckets, sums and counts.

Invariant: counters only grow. Must not know requests' contents or the scheduler's levels (the core adds those).

The dictionary that `EngineClient.stats()` returns:
- `requests`: active, max, scheduled, context, waiting (levels)
- `kv`: `full` and `window`, each max, free, used, tokens_per, reused (blocks; `reused` counts), fraction (used / max)
- `inflight`: total_context_tokens (prompt tokens of the last step), generation_requests, paused_requests
- `iteration_counter`, `timestamp_ns`, `micro_batch_id`, `memory` (cpu, gpu, pinned, in bytes)
- `counters`: submitted, finished by reason, failed by code, prompt_tokens (at arrival), cached_tokens and
  uncached_tokens (of prompts that began), generated_tokens, preemptions, draft_tokens, accepted_draft_tokens
- `histograms`: time_to_first_token_s, time_between_tokens_s, queue_time_s, input_tokens, output_tokens; each
  `buckets` ([upper bound, cumulative count] ...), `sum`, `count`
"""

from __future__ import annotations

import bisect
import os
import time
from pathlib import Path
from typing import Any

from gptoss_trt.runtime.engine.messages import Usage

LENGTH_BOUNDS = (10.0, 50.0, 100.0, 500.0, 1000.0)  # upstream's buckets of nv_llm_*_token_len
SECONDS_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Histogram:
    """Counts values below fixed upper bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def as_dict(self) -> dict[str, Any]:
        """Cumulative buckets, without the last one of +Inf, whose count is `count`."""
        buckets, total = [], 0
        for bound, count in zip(self._bounds, self._counts, strict=False):
            total += count
            buckets.append([bound, total])
        return {"buckets": buckets, "sum": self._sum, "count": total + self._counts[-1]}


class Statistics:
    """What an engine counts over its life. Times in seconds."""

    def __init__(self) -> None:
        self.iterations = 0
        self.generated_tokens = 0
        self.preemptions = 0
        self._submitted = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._uncached_tokens = 0
        self._draft_tokens = 0
        self._accepted_draft_tokens = 0
        self._finished = {"stop": 0, "length": 0, "cancelled": 0}
        self._failed: dict[str, int] = {}
        self._first_token = Histogram(SECONDS_BOUNDS)
        self._between = Histogram(SECONDS_BOUNDS)
        self._queue = Histogram(SECONDS_BOUNDS)
        self._input = Histogram(LENGTH_BOUNDS)
        self._output = Histogram(LENGTH_BOUNDS)

    def submitted(self, prompt_tokens: int) -> None:
        self._submitted += 1
        self._prompt_tokens += prompt_tokens
        self._input.add(prompt_tokens)

    def scheduled(self, waited_s: float, prompt_tokens: int, cached_tokens: int = 0) -> None:
        """A request's first sequence begins, `cached_tokens` of its prompt being known."""
        self._queue.add(waited_s)
        self._cached_tokens += cached_tokens
        self._uncached_tokens += prompt_tokens - cached_tokens

    def first_token(self, since_arrival_s: float) -> None:
        self._first_token.add(since_arrival_s)

    def finished(self, reason: str, usage: Usage) -> None:
        """One sequence has ended."""
        self._finished[reason] += 1
        self._draft_tokens += usage.draft_tokens
        self._accepted_draft_tokens += usage.accepted_draft_tokens
        self._output.add(usage.completion_tokens)
        if usage.completion_tokens > 1:
            self._between.add((usage.last_token_ns - usage.first_token_ns) / 1e9 / (usage.completion_tokens - 1))

    def failed(self, code: str) -> None:
        self._failed[code] = self._failed.get(code, 0) + 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "iteration_counter": self.iterations,
            "timestamp_ns": time.time_ns(),
            "micro_batch_id": 0,
            "memory": {"cpu": _resident_bytes(), "gpu": 0, "pinned": 0},
            "counters": {
                "submitted": self._submitted,
                "finished": dict(self._finished),
                "failed": dict(self._failed),
                "prompt_tokens": self._prompt_tokens,
                "cached_tokens": self._cached_tokens,
                "uncached_tokens": self._uncached_tokens,
                "generated_tokens": self.generated_tokens,
                "preemptions": self.preemptions,
                "draft_tokens": self._draft_tokens,
                "accepted_draft_tokens": self._accepted_draft_tokens,
            },
            "histograms": {
                "time_to_first_token_s": self._first_token.as_dict(),
                "time_between_tokens_s": self._between.as_dict(),
                "queue_time_s": self._queue.as_dict(),
                "input_tokens": self._input.as_dict(),
                "output_tokens": self._output.as_dict(),
            },
        }


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
