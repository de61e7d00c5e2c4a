"""The demo's vocabulary, checkpoint and engine, made once for all tests of this folder."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from gptoss_trt.build_engine.builder import BuildOptions, build_engine
from gptoss_trt.build_engine.demo.codec import Codec
from gptoss_trt.build_engine.demo.expand import expand_demo_checkpoint
from gptoss_trt.build_engine.demo.names import NamePool


@pytest.fixture(scope="session")
def codec() -> Codec:
    return Codec()


@pytest.fixture(scope="session")
def pool(codec: Codec) -> NamePool:
    return NamePool.build(codec)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return expand_demo_checkpoint(tmp_path_factory.mktemp("demo") / "checkpoint")


@pytest.fixture(scope="session")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo-engine") / "engine"
    build_engine(checkpoint, out, BuildOptions())
    return out


@pytest.fixture(scope="session")
def demo_eval() -> ModuleType:
    """tests/perf/demo_eval.py, whose `answers` runs conversations through an engine."""
    path = Path(__file__).parents[2] / "perf" / "demo_eval.py"
    spec = importlib.util.spec_from_file_location("demo_eval", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
