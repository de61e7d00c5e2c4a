"""The Grafana dashboard can be imported, and asks for metrics that server and gateway publish, with their labels."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gptoss_trt.client.protocol import METRICS
from gptoss_trt.runtime.openai.gateway.metrics import Metrics

ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "docker"
DASHBOARD = json.loads((DOCKER / "grafana/dashboards/gptoss-trt.json").read_text(encoding="utf-8"))
TRITON_COUNTERS = {"nv_inference_request_success": set(), "nv_inference_request_failure": {"reason"}}
GROWING_GAUGES = {'general_type="iteration_counter"', 'kv_cache_block_type="reused"'}  # upstream's names of counts
VARIABLE = re.compile(r"\$\{?(\w+)")
SELECTOR = re.compile(r"\b((?:nv|gptoss)_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)="([^"]*)"')
LABELS = re.compile(r'(\w+)(?:=|!=|=~|!~)"')


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def gateway_series() -> dict[str, set[str]]:
    """Series of the gateway's own page -> their labels, once everything that it counts has happened."""
    metrics = Metrics()
    metrics.request_ended("/v1/models", 200, 0.1)
    for path in (ROOT / "runtime" / "openai" / "gateway").glob("*.py"):
        for name in re.findall(r'metrics\.count\("(\w+)"', path.read_text(encoding="utf-8")):
            metrics.count(name)
    lines = [line for line in metrics.text().splitlines() if not line.startswith("#")]
    return {line.partition("{")[0]: set(LABELS.findall(line)) for line in lines}


def problem(expression: str) -> str | None:
    """What a server would not know of an expression."""
    gateway = gateway_series()
    for name, matchers in SELECTOR.findall(expression):
        if name in TRITON_COUNTERS:
            continue
        if name in gateway and set(LABELS.findall(matchers)) <= gateway[name]:
            continue
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        family = METRICS.get(base) or METRICS.get(name)
        if family is None or (family.kind == "histogram") != (family.name != name):
            return f"{name} is not published"
        for label, value in MATCHER.findall(matchers):
            if label != "model" and (label != family.label or value not in family.values):
                return f"{name} has no {label}={value}"
        if not re.search(r'\bmodel="\$model"', matchers):
            return f"{name} is not asked of one model"
    return None


@pytest.mark.parametrize("expression", expressions())
def test_every_expression_is_of_published_metrics(expression: str) -> None:
    assert SELECTOR.search(expression)
    assert problem(expression) is None


@pytest.mark.parametrize(
    "wrong",
    [
        'nv_trt_llm_request_metric{model="$model"}',
        'nv_trt_llm_request_metrics{model="$model", request_type="running"}',
        'nv_trt_llm_request_metrics{model="$model", kind="active"}',
        'rate(gptoss_trt_queue_time_seconds{model="$model"}[1m])',
        'gptoss_trt_cancellations_sum{model="$model"}',
        "gptoss_trt_cancellations",
        "gptoss_gateway_requests",
        'gptoss_gateway_requests_total{model="$model"}',
    ],
)
def test_a_wrong_name_is_seen(wrong: str) -> None:
    assert problem(wrong) is not None


def test_what_an_operator_looks_for_is_there() -> None:
    text = " ".join(expressions())
    unused = [family.name for family in METRICS.values() if family.name not in text]
    assert unused == ["nv_trt_llm_disaggregated_serving_metrics"]  # always zero: there is no such serving here


def test_panels_fill_the_grid_without_overlap() -> None:
    cells: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        grid: dict[str, Any] = panel["gridPos"]
        assert grid["x"] >= 0 and grid["x"] + grid["w"] <= 24
        for x in range(grid["x"], grid["x"] + grid["w"]):
            for y in range(grid["y"], grid["y"] + grid["h"]):
                assert cells.setdefault((x, y), panel["title"]) == panel["title"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_every_panel_asks_the_chosen_data_source() -> None:
    names = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert names == {"datasource", "model"}
    for panel in DASHBOARD["panels"]:
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}


def test_the_importer_finds_what_it_needs() -> None:
    """A dashboard of the classic schema that needs no answers: a variable chooses the data source, not an input."""
    assert isinstance(DASHBOARD["schemaVersion"], int) and DASHBOARD["schemaVersion"] >= 36  # data sources by uid
    assert re.fullmatch(r"[\w-]{1,40}", DASHBOARD["uid"]) and DASHBOARD["title"]
    assert DASHBOARD.get("id") is None  # a number would ask for a dashboard of the importing Grafana
    assert not {"__inputs", "__elements", "dashboard"} & set(DASHBOARD)
    source, model = DASHBOARD["templating"]["list"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    assert (model["type"], model["query"]["query"]) == ("query", "label_values(nv_trt_llm_request_metrics, model)")
    assert "nv_trt_llm_request_metrics" in METRICS
    known = {source["name"], model["name"], "__rate_interval"}
    assert set(VARIABLE.findall(json.dumps(DASHBOARD["panels"]))) <= known
    for panel in DASHBOARD["panels"]:
        assert panel["title"] and panel["type"] in ("stat", "timeseries") and panel["options"]
        assert {"defaults", "overrides"} <= set(panel["fieldConfig"])
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        refs = [target["refId"] for target in panel["targets"]]
        assert refs and len(set(refs)) == len(refs)


@pytest.mark.parametrize("expression", expressions())
def test_rates_are_of_counts_and_quantiles_of_buckets(expression: str) -> None:
    """Levels are summed over servers and never rated; counts are rated before they are summed."""
    for name, matchers in SELECTOR.findall(expression):
        family = METRICS.get(re.sub(r"_(bucket|sum|count)$", "", name))
        counts = name in TRITON_COUNTERS or name.endswith("_total") or (family is not None and family.kind != "gauge")
        counts = counts or name.endswith("_bucket") or any(value in matchers for value in GROWING_GAUGES)
        assert (f"rate({name}" in expression) == counts
    if "_bucket" in expression:
        assert re.fullmatch(r"histogram_quantile\(0\.\d+, sum by \(le\) \(rate\([^()]*_bucket.*\)\)\)", expression)
    assert re.match(r"(sum|max|histogram_quantile)\b", expression)


def test_grafana_s_rates_look_back_over_prometheus_s_scrapes() -> None:
    scrapes = re.search(r"scrape_interval: (\w+)", (DOCKER / "prometheus.yml").read_text(encoding="utf-8"))
    source = (DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text(encoding="utf-8")
    assert scrapes is not None and f"timeInterval: {scrapes[1]} " in source


def test_grafana_is_told_where_the_dashboards_are() -> None:
    provider = (DOCKER / "grafana/provisioning/dashboards/gptoss-trt.yaml").read_text(encoding="utf-8")
    assert "path: /etc/grafana/dashboards\n" in provider
