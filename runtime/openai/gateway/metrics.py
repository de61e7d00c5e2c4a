"""The gateway's own metrics in Prometheus' text format.

Invariant: label values come from fixed sets, so the number of series is bounded. Must not know requests. Each worker
counts for itself and says which it is.
"""

from __future__ import annotations

import bisect
import os
from collections import Counter

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Counts of seconds in cumulative buckets."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(SECONDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str, labels: str) -> list[str]:
        total, lines = 0, []
        for bound, count in zip((*map(str, SECONDS), "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {total}')
        return [*lines, f"{name}_sum{{{labels}}} {self._sum:.6f}", f"{name}_count{{{labels}}} {total}"]


class Metrics:
    """What one worker has seen."""

    def __init__(self) -> None:
        self._worker = f'worker="{os.getpid()}"'
        self.in_flight = 0
        self._requests: Counter[tuple[str, int]] = Counter()
        self._counts: Counter[str] = Counter()
        self._durations: dict[str, Histogram] = {}
        self.first_chunk = Histogram()

    def count(self, name: str, amount: int = 1) -> None:
        """Adds to gptoss_gateway_<name>_total."""
        self._counts[name] += amount

    def request_ended(self, route: str, status: int, seconds: float) -> None:
        self._requests[route, status] += 1
        self._durations.setdefault(route, Histogram()).add(seconds)

    def text(self) -> str:
        """All series."""
        lines = [
            "# TYPE gptoss_gateway_in_flight gauge",
            f"gptoss_gateway_in_flight{{{self._worker}}} {self.in_flight}",
        ]
        lines.append("# TYPE gptoss_gateway_requests_total counter")
        for (route, status), count in sorted(self._requests.items()):
            labels = f'{self._worker},route="{route}",status="{status}"'
            lines.append(f"gptoss_gateway_requests_total{{{labels}}} {count}")
        for name, count in sorted(self._counts.items()):
            lines.append(f"# TYPE gptoss_gateway_{name}_total counter")
            lines.append(f"gptoss_gateway_{name}_total{{{self._worker}}} {count}")
        lines.append("# TYPE gptoss_gateway_request_seconds histogram")
        for route, histogram in sorted(self._durations.items()):
            lines += histogram.lines("gptoss_gateway_request_seconds", f'{self._worker},route="{route}"')
        lines.append("# TYPE gptoss_gateway_first_chunk_seconds histogram")
        lines += self.first_chunk.lines("gptoss_gateway_first_chunk_seconds", self._worker)
        return "\n".join(lines) + "\n"
