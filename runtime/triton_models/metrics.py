"""The engine's statistics on the server's metrics page, under the names of the wire table.

Invariant: one model instance publishes an engine's numbers, and a counter or histogram on the page never goes back, not
when the engine process restarts either. Importable in the python backend's stub only.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from gptoss_trt.client.protocol import METRICS, MetricFamily
from gptoss_trt.runtime.engine.client import EngineUnavailableError
from gptoss_trt.runtime.triton_models.readings import HISTOGRAM_SOURCES, Readings, observations, readings

log = logging.getLogger(__name__)

PERIOD_S = 1.0


class MetricsPublisher:
    """Asks `stats` once a second in a thread of its own and sets the families of the table."""

    def __init__(self, stats: Callable[[], dict[str, Any]], model: str, version: str) -> None:
        self._stats = stats
        self._labels = {"model": model, "version": version}
        self._families = {name: _family(family) for name, family in METRICS.items()}
        self._series = {name: self._make_series(family) for name, family in METRICS.items()}
        self._published: Mapping[tuple[str, str], float] = {}
        self._last: Mapping[str, Any] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(5.0)

    def _make_series(self, family: MetricFamily) -> dict[str, Any]:
        made = {}
        for value in family.values or ("",):
            labels = {**self._labels, **({family.label: value} if family.label else {})}
            extra = {"buckets": list(family.buckets)} if family.buckets else {}
            made[value] = self._families[family.name].Metric(labels=labels, **extra)
        return made

    def _run(self) -> None:
        while True:
            try:
                self._publish(self._stats())
            except EngineUnavailableError as error:
                log.debug("no statistics: %s", error)  # the engine restarts; the page keeps its last values
            if self._closing.wait(PERIOD_S):
                return

    def _publish(self, stats: Mapping[str, Any]) -> None:
        current: Readings = readings(stats)
        for (name, value), number in current.items():
            series = self._series[name][value]
            if METRICS[name].kind == "gauge":
                series.set(number)
                continue
            before = self._published.get((name, value), 0.0)
            series.increment(number - before if number >= before else number)  # less than before: a new engine process
        self._published = current
        for name, source in HISTOGRAM_SOURCES.items():
            (series,) = self._series[name].values()
            for number in observations(self._last.get(source), stats["histograms"][source]):
                series.observe(number)
        self._last = stats["histograms"]


def _family(family: MetricFamily) -> Any:
    return pb_utils.MetricFamily(
        name=family.name, description=family.description, kind=getattr(pb_utils.MetricFamily, family.kind.upper())
    )
