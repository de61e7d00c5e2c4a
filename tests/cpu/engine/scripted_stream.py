"""A scripted engine's answers and faults, and what tests ask of its process."""

from __future__ import annotations

import queue
import time
from pathlib import Path
from typing import Any

from gptoss_trt.runtime.engine.client import EngineClient
from gptoss_trt.runtime.engine.messages import Error, Event, Finished, Submit, Tokens

ENDLESS, CRASHING, HANGING, FAILING, NAN, REFUSED, CHUNKED = range(9001, 9008)
SCRIPTS = {
    "step_ms": 5,
    "max_context": 100_000,
    "block_tokens": 16,
    "full_blocks": 4096,
    "default": {"echo": True},
    "scripts": [
        {"match": [ENDLESS], "tokens": [5, 6, 7], "cycle": True},
        {"match": [CRASHING], "tokens": [5], "cycle": True, "fault": {"kind": "crash", "after": 3}},
        {"match": [HANGING], "tokens": [5], "cycle": True, "fault": {"kind": "hang", "after": 1}},
        {
            "match": [FAILING],
            "tokens": [5],
            "cycle": True,
            "fault": {"kind": "error", "after": 2, "message": "planned"},
        },
        {"match": [NAN], "tokens": [5], "cycle": True, "fault": {"kind": "nan", "after": 1}},
        {"match": [REFUSED], "fault": {"kind": "refuse", "code": "RESOURCE_EXHAUSTED", "message": "full"}},
        {"match": [CHUNKED], "tokens": [1, 2, 3, 4, 5, 6], "chunk": [2, 3]},
    ],
}


class Stream:
    """Collects one request's events and waits for its end."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.seen: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.put(event)

    def next(self, timeout_s: float = 10.0) -> Event:
        event = self.events.get(timeout=timeout_s)
        self.seen.append(event)
        return event

    def end(self, timeout_s: float = 10.0) -> Finished | Error:
        until = time.monotonic() + timeout_s
        while True:
            event = self.next(max(0.01, until - time.monotonic()))
            if isinstance(event, Error) or (isinstance(event, Finished) and event.remaining == 0):
                return event

    @property
    def ids(self) -> list[int]:
        return [token for event in self.seen if isinstance(event, Tokens) for token in event.token_ids]


def start(client: EngineClient, prompt: int, request_id: str = "r", **fields: Any) -> Stream:
    stream = Stream()
    client.submit(Submit(request_id, (prompt,), fields.pop("max_tokens", 5000), **fields), stream)
    return stream


def engine_pid(client: EngineClient) -> int:
    return int(client.health()["pid"])


def wait_until(condition: Any, timeout_s: float, what: str) -> float:
    """Seconds until `condition()` holds; fails after `timeout_s`."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.005)
    return time.monotonic() - began


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
