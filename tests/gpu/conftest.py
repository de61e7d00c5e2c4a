"""GPU tests: skipped where there is no Hopper GPU, failures there when anything skips and `--expect-gpu` is given."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # tests are imported by file; what several of them share lies beside them


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--expect-gpu", action="store_true", help="a machine with an H200: a skipped GPU test is a failure"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


def missing_gpu() -> str | None:
    """Why GPU tests cannot run here, or None."""
    if not torch.cuda.is_available():
        return "no GPU that torch can use"
    major, minor = torch.cuda.get_device_capability()
    return None if major == 9 else f"compute capability {major}.{minor}, not 9.x"


def pytest_runtest_setup(item: pytest.Item) -> None:
    reason = missing_gpu()
    if reason is not None:
        pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.config.getoption("--expect-gpu", default=False):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} skipped although a GPU is expected: {report.longrepr}"
    return report


@pytest.fixture(params=["cuda", "triton"])
def pinned(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each implementation of the norms in turn."""
    from gptoss_trt.ops import dispatch

    ops = ("rmsnorm_quant", "moe_combine_norm", "rmsnorm_route")
    for op in ops:
        dispatch.select(op, request.param)
    yield request.param
    for op in ops:
        dispatch.select(op, None)
