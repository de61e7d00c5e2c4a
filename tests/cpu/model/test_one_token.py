"""Which models one launch does not suit, by what it says about them; on a card, test_decode_one.py."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gptoss_trt.build_engine.shapes import model_config
from gptoss_trt.build_engine.spec import Formats, Manifest, ParallelMapping
from gptoss_trt.build_engine.synthetic import small_config
from gptoss_trt.runtime.model import GptOssModel
from gptoss_trt.runtime.model.loader import random_weights
from gptoss_trt.runtime.model.one_token import unsuited_model

CUDA = torch.device("cuda")
SUITED = Formats(experts="mxfp4", dense="bf16", kv="bf16", h_scale="static")


@pytest.mark.parametrize(
    ("formats", "device", "ranks", "layout", "words"),
    [
        (SUITED, torch.device("cpu"), 1, "sm90_v1", "on cpu"),
        (SUITED, CUDA, 2, "sm90_v1", "among 2 ranks"),
        (SUITED, CUDA, 1, "plain", "layout plain"),
        (dataclasses.replace(SUITED, kv="fp8"), CUDA, 1, "sm90_v1", "kv fp8"),
        (dataclasses.replace(SUITED, h_scale="block128"), CUDA, 1, "sm90_v1", "h_scale block128"),
        (dataclasses.replace(SUITED, experts="fp8_block128"), CUDA, 1, "sm90_v1", "experts fp8_block128"),
    ],
)
def test_the_reason_is_named(formats: Formats, device: torch.device, ranks: int, layout: str, words: str) -> None:
    manifest = Manifest(model_config("gpt-oss-20b"), formats, ParallelMapping(), {})
    reason = unsuited_model(manifest, device, 64, ranks, layout)
    assert reason is not None and words in reason


def test_other_widths_are_refused() -> None:
    config = dataclasses.replace(model_config("gpt-oss-20b"), head_dim=128)
    reason = unsuited_model(Manifest(config, SUITED, ParallelMapping(), {}), CUDA, 64, 1, "sm90_v1")
    assert reason is not None and "widths" in reason


def test_a_model_that_it_does_not_suit_runs_its_layers() -> None:
    device = torch.device("cpu")
    model = GptOssModel(random_weights(small_config(), Formats(), 1, device), device)
    model.one_launch = True
    model.allocate_kv(4, 4, 16)
    assert model.one_token is None
