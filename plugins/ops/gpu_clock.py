"""Times work on a GPU by events: the device's own milliseconds, the host's left out.

Invariant: every span is of whole calls that ran after the ones before them. Must not know what the work is.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def median_ms(device: torch.device, work: Callable[[], object], times: int) -> float:
    """Median over `times` calls of `work`, one after the other on the current stream, after one that warms up."""
    spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(times + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        spans.append((begin, end))
    torch.cuda.synchronize(device)
    return statistics.median(float(begin.elapsed_time(end)) for begin, end in spans[1:])


def graph_seconds(device: torch.device, call: Callable[[int], object], copies: int, calls: int, times: int) -> float:
    """Median seconds of `call(i)`, i going round `copies` copies of weights, over `times` replays of a graph of `calls`
    calls, after one call outside of it."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            call(i % copies)
    return median_ms(device, graph.replay, times) / 1e3 / calls
