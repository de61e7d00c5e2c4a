"""64 streams through one connection of the engine process: every token arrives; the rate is printed, not asserted.

On 2 cores, alone: `python -m pytest -s tests/cpu/engine/test_throughput.py`.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gptoss_trt.runtime.engine.client import EngineClient
from gptoss_trt.runtime.engine.messages import Event, Submit, Tokens

STREAMS = 64


@pytest.mark.parametrize(("step_ms", "tokens"), [(0, 1000), (5, 200)])
def test_64_streams_through_one_connection(tmp_path: Path, step_ms: int, tokens: int) -> None:
    (tmp_path / "scripted.json").write_text(json.dumps({"step_ms": step_ms, "default": {"tokens": [5], "cycle": True}}))
    counts, firsts = [0] * STREAMS, [0.0] * STREAMS
    left = threading.Semaphore(0)

    def sink_for(stream: int) -> Callable[[Event], None]:
        def sink(event: Event) -> None:
            if isinstance(event, Tokens):
                firsts[stream] = firsts[stream] or time.monotonic()
                counts[stream] += len(event.token_ids)
            else:
                left.release()

        return sink

    with contextlib.closing(EngineClient(tmp_path, state_dir=tmp_path / "state", idle_timeout_s=0.2)) as client:
        client.wait_ready(20)
        began = time.monotonic()
        for stream in range(STREAMS):
            client.submit(Submit(f"s{stream}", (1,), tokens), sink_for(stream))
        for _ in range(STREAMS):
            assert left.acquire(timeout=60)
        took_s = time.monotonic() - began
    assert counts == [tokens] * STREAMS
    rate = STREAMS * tokens / took_s
    first_ms = statistics.median(first - began for first in firsts) * 1e3
    print(f"{STREAMS} streams, {step_ms} ms steps: {rate:,.0f} tokens/s, first token {first_ms:.1f} ms (median)")
