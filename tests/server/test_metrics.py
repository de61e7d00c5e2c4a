"""The engine's numbers on the server's own metrics page."""

from __future__ import annotations

import re
import urllib.request
from typing import Any

from gptoss_trt.client.protocol import METRICS

LINE = re.compile(r"^(?P<name>\w+)\{(?P<labels>[^}]*)\} (?P<value>\S+)$")


def page(triton: Any) -> dict[tuple[str, frozenset[str]], float]:
    """Series of the page: (name, labels) -> value."""
    with urllib.request.urlopen(triton.server.metrics_url, timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    series = {}
    for line in lines:
        if match := LINE.match(line):
            series[match["name"], frozenset(match["labels"].split(","))] = float(match["value"])
    return series


def own(triton: Any, name: str, **labels: str) -> float:
    wanted = frozenset(f'{key}="{value}"' for key, value in {"model": "tensorrt_llm", "version": "1", **labels}.items())
    return page(triton)[name, wanted]


def test_every_family_and_value_is_there(triton: Any) -> None:
    series = page(triton)
    for family in METRICS.values():
        suffix = "_count" if family.kind == "histogram" else ""
        for value in family.values or ("",):
            labels = {'model="tensorrt_llm"', 'version="1"'} | ({f'{family.label}="{value}"'} if value else set())
            assert (family.name + suffix, frozenset(labels)) in series, (family.name, value)
    models = {label for (name, labels), _ in series.items() if name in METRICS for label in labels if "model=" in label}
    assert models == {'model="tensorrt_llm"'}, "one model publishes one engine's numbers"


def test_levels_follow_the_engine(triton: Any, words: Any) -> None:
    call = triton.open("tensorrt_llm", words.token_tensors(words.LONG, max_tokens=1500, streaming=True))
    call.next()
    active = lambda: own(triton, "nv_trt_llm_request_metrics", request_type="active")  # noqa: E731
    used = lambda: own(triton, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="used")  # noqa: E731
    words.wait_until(lambda: active() == 1 and used() > 0, timeout_s=5.0, period_s=0.1)
    call.cancel()
    words.wait_until(lambda: active() == 0 and used() == 0, timeout_s=5.0, period_s=0.1)
    assert own(triton, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="tokens_per") == 64
    assert own(triton, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="max") == 8192


def test_histograms_and_counters_count(triton: Any, words: Any) -> None:
    def numbers() -> tuple[float, float, float, float]:
        output = {"response_metric_type": "total_output_tokens"}
        return (
            own(triton, "nv_llm_output_token_len_count", **output),
            own(triton, "nv_llm_output_token_len_sum", **output),
            own(triton, "nv_llm_output_token_len_bucket", le="50", **output),
            own(triton, "gptoss_trt_prefix_cache_tokens", source="computed"),
        )

    words.wait_until(lambda: numbers()[0] >= 0, timeout_s=5.0)
    count, total, bucket, computed = settled(words, numbers)
    for _ in range(3):
        triton.ask("tensorrt_llm", words.token_tensors(words.LONG, max_tokens=20))
    words.wait_until(lambda: numbers()[0] == count + 3, timeout_s=5.0, period_s=0.1)
    assert numbers() == (count + 3, total + 60, bucket + 3, computed + 12)


def settled(words: Any, numbers: Any) -> Any:
    """The numbers once two looks, more than a period of publishing apart, agree."""
    seen: list[Any] = [None]

    def same() -> bool:
        before, seen[0] = seen[0], numbers()
        return before == seen[0]

    words.wait_until(same, timeout_s=15.0, period_s=1.5)
    return seen[0]
