"""What several tiers share: the demo checkpoint and its engine, made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped demo weights as a Hugging Face checkpoint folder."""
    from gptoss_trt.build_engine.demo.expand import expand_demo_checkpoint

    return expand_demo_checkpoint(tmp_path_factory.mktemp("demo") / "checkpoint")


@pytest.fixture(scope="session")
def demo_engine(demo_checkpoint: Path) -> Path:
    """The demo checkpoint's engine directory, as `gptoss-trt build` makes it."""
    from gptoss_trt.build_engine.builder import BuildOptions, build_engine

    engine = demo_checkpoint.parent / "engine"
    build_engine(demo_checkpoint, engine, BuildOptions())
    return engine
