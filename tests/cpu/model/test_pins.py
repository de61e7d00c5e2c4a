"""A pinned implementation that a model never calls is told when the model is made."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from gptoss_trt.ops import dispatch
from gptoss_trt.runtime.model import load_model


@pytest.mark.parametrize(
    ("dense", "pins", "told"),
    [
        (
            "fp8_block128",
            {"attention_decode": "flashinfer"},
            ["attention_decode is pinned to flashinfer without effect"],
        ),
        ("fp8_block128", dict.fromkeys(("attention_prefill", "attention_prefill_quant"), "triton"), []),
        ("fp8_block128", {}, []),
        ("bf16", {"attention_decode": "flashinfer"}, []),
    ],
)
def test_a_pin_without_effect_is_told(
    make_engine: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dense: str,
    pins: dict[str, str],
    told: list[str],
) -> None:
    monkeypatch.setattr(dispatch, "_pinned", pins)
    with caplog.at_level(logging.WARNING, "gptoss_trt.runtime.model.model"):
        load_model(make_engine(dense=dense))
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == told
