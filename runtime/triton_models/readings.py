"""From the engine's statistics to numbers of the metrics page. Pure functions, tested without a server.

Invariant: `observations` gives values whose buckets, count and sum are those that the engine counted between two looks.
Must not know Triton's Python module.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from gptoss_trt.client.protocol import METRICS

Readings = dict[tuple[str, str], float]  # (family, value of its label) -> number

HISTOGRAM_SOURCES: Mapping[str, str] = {  # family -> the engine's histogram, whose bounds include the family's
    "nv_llm_input_token_len": "input_tokens",
    "nv_llm_output_token_len": "output_tokens",
    "gptoss_trt_time_to_first_token_seconds": "time_to_first_token_s",
    "gptoss_trt_time_between_tokens_seconds": "time_between_tokens_s",
    "gptoss_trt_queue_time_seconds": "queue_time_s",
}


def readings(stats: Mapping[str, Any]) -> Readings:
    """Gauges and counters of the table from one `EngineClient.stats()`."""
    counters, requests, inflight = stats["counters"], stats["requests"], stats["inflight"]
    groups: dict[str, Mapping[str, float]] = {
        "nv_trt_llm_request_metrics": requests,
        "nv_trt_llm_runtime_memory_metrics": stats["memory"],
        "nv_trt_llm_kv_cache_block_metrics": stats["kv"]["full"],
        "nv_trt_llm_inflight_batcher_metrics": {**inflight, "micro_batch_id": stats["micro_batch_id"]},
        "nv_trt_llm_general_metrics": {
            "timestamp": stats["timestamp_ns"] / 1e9,
            "iteration_counter": stats["iteration_counter"],
        },
        "nv_trt_llm_disaggregated_serving_metrics": {"kv_cache_transfer_ms": 0, "request_count": 0},
        "gptoss_trt_prefix_cache_tokens": {
            "cached": counters["cached_tokens"],
            "computed": counters["uncached_tokens"],
        },
        "gptoss_trt_speculative_tokens": {
            "drafted": counters["draft_tokens"],
            "accepted": counters["accepted_draft_tokens"],
        },
        "gptoss_trt_generated_tokens": {"": counters["generated_tokens"]},
        "gptoss_trt_window_cache_blocks": {name: stats["kv"]["window"][name] for name in ("max", "free", "used")},
        "gptoss_trt_preemptions": {"": counters["preemptions"]},
        "gptoss_trt_errors": {code: counters["failed"].get(code, 0) for code in METRICS["gptoss_trt_errors"].values},
        "gptoss_trt_cancellations": {"": counters["finished"]["cancelled"]},
    }
    return {(family, value): float(number) for family, group in groups.items() for value, number in group.items()}


def observations(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> list[float]:
    """Values to observe so that a histogram moves from `before` to `after` (cumulative buckets, sum and count).

    A page's histogram takes single values only. The values are spread over each bucket so that their sum is right,
    which it can be because the engine's own values were in those buckets. `before` None, or a larger count than
    `after`'s (another engine process), means from zero.
    """
    if before is None or before["count"] > after["count"]:
        before = {"buckets": [[bound, 0] for bound, _ in after["buckets"]], "sum": 0.0, "count": 0}
    ranges = list(_new_in_buckets(before, after))
    values = [low for low, _, count in ranges for _ in range(count)]
    rooms = [high - low for low, high, count in ranges for _ in range(count)]
    missing = after["sum"] - before["sum"] - sum(values)
    for index, room in enumerate(rooms):
        if missing <= 0:
            break
        step = min(room, missing)
        values[index] += step
        missing -= step
    return values


def _new_in_buckets(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[float, float, int]]:
    """(lowest value, highest value, new observations) of each bucket that grew; bounds are inclusive above."""
    low, seen = 0.0, 0
    for (bound, total), (_, old_total) in zip(after["buckets"], before["buckets"], strict=True):
        fresh = total - old_total - seen
        if fresh:
            yield low, bound, fresh
        seen += fresh
        low = math.nextafter(bound, math.inf)
    rest = after["count"] - before["count"] - seen
    if rest:
        yield low, math.inf, rest
