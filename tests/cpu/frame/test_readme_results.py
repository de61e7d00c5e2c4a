"""The README's results are those of the results files, and its links lead somewhere."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "tests" / "perf" / "results"


@pytest.fixture(scope="module")
def report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("h200_report", ROOT / "tests" / "perf" / "h200_report.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_what_the_report_makes_of_the_results(report: ModuleType) -> None:
    peer = json.loads((RESULTS / "vllm_h200.json").read_text(encoding="utf-8"))
    tables = {
        "h200": report.rows(report.cells(RESULTS / "h200.jsonl"), peer),
        "triton": report.served_rows(RESULTS / "triton_h200.jsonl"),
        "trace": report.trace_rows(RESULTS / "trace_h200.jsonl"),
    }
    for name, lines in tables.items():
        assert report.put_into(README, name, lines) == README, "python tests/perf/h200_report.py --readme README.md"


def test_a_table_is_put_between_its_marks_only(report: ModuleType) -> None:
    text = "a\n<!-- results: h200 -->\nold\n<!-- end -->\nb\n<!-- results: triton -->\nkept\n<!-- end -->\n"
    changed = report.put_into(text, "h200", ["new", "", "more"])
    assert changed == text.replace("old\n", "\nnew\n\nmore\n\n")
    assert report.put_into(changed, "h200", ["new", "", "more"]) == changed
    with pytest.raises(ValueError):
        report.put_into(text, "other", [])


def test_links_and_paths_exist() -> None:
    headings = {
        re.sub(r"[^\w -]", "", line).lower().replace(" ", "-") for line in re.findall(r"^#+ (.*)", README, re.M)
    }
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", README):
        assert target[1:] in headings if target.startswith("#") else (ROOT / target).exists(), target
    for path in re.findall(r"`((?:tests|docker|runtime|client|build_engine|plugins)/[\w./-]+)`", README):
        assert (ROOT / path).exists(), path
