"""What `top` shows, worked out from looks at a server's metrics page.

Invariant: every metric read here is in client/protocol.py's table or Triton's own nv_inference_request_*; a figure that
the page cannot give is None, never 0. Must not know how it is shown.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from gptoss_trt.client.protocol import METRICS
from gptoss_trt.client.top.page import Page

REQUESTS = "nv_trt_llm_request_metrics"
KV_BLOCKS = "nv_trt_llm_kv_cache_block_metrics"
BATCHER = "nv_trt_llm_inflight_batcher_metrics"
GENERAL = "nv_trt_llm_general_metrics"
MEMORY = "nv_trt_llm_runtime_memory_metrics"
INPUT = "nv_llm_input_token_len"
OUTPUT = "nv_llm_output_token_len"
GENERATED = "gptoss_trt_generated_tokens"  # as they come; OUTPUT counts a request when it ends
ARRIVED = INPUT + "_count"
PREFIX = "gptoss_trt_prefix_cache_tokens"
SPECULATIVE = "gptoss_trt_speculative_tokens"
CANCELLED = "gptoss_trt_cancellations"
LATENCIES = {
    "ttft": "gptoss_trt_time_to_first_token_seconds",
    "between_tokens": "gptoss_trt_time_between_tokens_seconds",
    "queue": "gptoss_trt_queue_time_seconds",
}
SUCCEEDED = "nv_inference_request_success"  # Triton's own, of all models
FAILED = "nv_inference_request_failure"
PERCENTILES = (50, 95, 99)
WINDOW_S = 60.0


@dataclass(frozen=True)
class Figures:
    """One screenful. Rates are of the time between the last two looks, percentiles of the last minute (or of the
    server's life, when `whole_life`)."""

    model: str
    requests: dict[str, float | None]  # active, scheduled, context, waiting, max, paused
    kv_blocks: dict[str, float | None]  # used, free, max, tokens_per, reused, fraction
    memory_bytes: dict[str, float | None]
    steps_per_s: float | None
    input_tokens_per_s: float | None
    output_tokens_per_s: float | None
    finished_per_s: float | None
    latency_s: dict[str, dict[str, float | None]]  # name -> p50, p95, p99
    whole_life: bool
    prefix_cache_hit_rate: float | None
    draft_acceptance: float | None
    cancelled: float | None
    succeeded: float | None
    failed: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class History:
    """The looks of the last minute, newest last."""

    def __init__(self, model: str | None = None) -> None:
        self._model = model
        self._looks: deque[tuple[float, Page]] = deque()

    def add(self, moment_s: float, page: Page) -> None:
        """A look at `moment_s` (any clock that only grows). A server that began anew starts a new history."""
        if self._looks and (page.total(ARRIVED) or 0.0) < (self._looks[-1][1].total(ARRIVED) or 0.0):
            self._looks.clear()
        self._looks.append((moment_s, page))
        while len(self._looks) > 2 and moment_s - self._looks[0][0] > WINDOW_S:
            self._looks.popleft()

    def figures(self, *, whole_life: bool = False) -> Figures:
        """Figures of the newest look. Raises LookupError when no model of the page publishes an engine's metrics."""
        moment, page = self._looks[-1]
        models = page.label_values(REQUESTS, "model")
        if not models:
            raise LookupError(f"the page has no {REQUESTS}: it is not of this server, or no engine has started")
        model = self._model or models[0]
        if model not in models:
            raise LookupError(f"no model {model!r} publishes metrics; those that do: {', '.join(models)}")
        before_s, before = self._looks[-2] if len(self._looks) > 1 else (moment, None)
        oldest = None if whole_life or len(self._looks) < 2 else self._looks[0][1]

        def group(family: str) -> dict[str, float | None]:
            label = METRICS[family].label
            return {value: page.value(family, model=model, **{label: value}) for value in METRICS[family].values}

        def rate(name: str, **labels: str) -> float | None:
            now = page.value(name, model=model, **labels)
            then = before.value(name, model=model, **labels) if before is not None else None
            return None if now is None or then is None or moment <= before_s else (now - then) / (moment - before_s)

        return Figures(
            model=model,
            requests={**group(REQUESTS), "paused": group(BATCHER)["paused_requests"]},
            kv_blocks=group(KV_BLOCKS),
            memory_bytes=group(MEMORY),
            steps_per_s=rate(GENERAL, general_type="iteration_counter"),
            input_tokens_per_s=rate(INPUT + "_sum"),
            output_tokens_per_s=rate(OUTPUT + "_sum" if page.value(GENERATED, model=model) is None else GENERATED),
            finished_per_s=rate(OUTPUT + "_count"),
            latency_s={
                name: {f"p{rank}": percentile(page, oldest, family, model, rank) for rank in PERCENTILES}
                for name, family in LATENCIES.items()
            },
            whole_life=oldest is None,
            prefix_cache_hit_rate=_share(group(PREFIX), "cached", ("cached", "computed")),
            draft_acceptance=_share(group(SPECULATIVE), "accepted", ("drafted",)),
            cancelled=page.value(CANCELLED, model=model),
            succeeded=page.total(SUCCEEDED),
            failed=page.total(FAILED),
        )


def percentile(page: Page, before: Page | None, family: str, model: str, rank: float) -> float | None:
    """The `rank`-th percentile of what a histogram counted between two looks (from zero without `before`).

    Linear inside a bucket; a rank in the last, unbounded bucket gives its lower bound. None without observations.
    """
    after = page.buckets(family, model=model)
    earlier = dict(before.buckets(family, model=model)) if before is not None else {}
    counts = [(bound, total - earlier.get(bound, 0.0)) for bound, total in after]
    if not counts or counts[-1][1] <= 0:
        return None
    wanted = counts[-1][1] * rank / 100
    low = below = 0.0
    for bound, total in counts:
        if total >= wanted and total > below:
            return low if math.isinf(bound) else low + (bound - low) * (wanted - below) / (total - below)
        low, below = bound, total
    return low


def _share(values: dict[str, float | None], part: str, whole: tuple[str, ...]) -> float | None:
    parts = [values[name] for name in whole]
    top = values[part]
    total = sum(value for value in parts if value is not None)
    return None if top is None or None in parts or total == 0 else top / total
