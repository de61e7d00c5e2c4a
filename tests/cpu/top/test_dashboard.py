"""The Grafana dashboard asks for metrics that the server publishes, with the labels that it gives them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gptoss_trt.client.protocol import METRICS

DOCKER = Path(__file__).parents[3] / "docker"
DASHBOARD = json.loads((DOCKER / "grafana/dashboards/gptoss-trt.json").read_text(encoding="utf-8"))
TRITON_COUNTERS = {"nv_inference_request_success": set(), "nv_inference_request_failure": {"reason"}}
SELECTOR = re.compile(r"\b((?:nv|gptoss)_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)="([^"]*)"')


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def problem(expression: str) -> str | None:
    """What a server would not know of an expression."""
    for name, matchers in SELECTOR.findall(expression):
        if name in TRITON_COUNTERS:
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


def test_grafana_is_told_where_the_dashboards_are() -> None:
    provider = (DOCKER / "grafana/provisioning/dashboards/gptoss-trt.yaml").read_text(encoding="utf-8")
    assert "path: /etc/grafana/dashboards\n" in provider
