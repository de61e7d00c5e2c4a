"""The bound against figures worked out apart from it, and random engines: one seed, one model, in both storages."""

from __future__ import annotations

import pytest
import torch

from gptoss_trt.build_engine.shapes import MODELS, model_config
from gptoss_trt.build_engine.spec import Formats
from gptoss_trt.ops.storage import mxfp4_to_fp8
from gptoss_trt.reference import fp8_block, mxfp4
from gptoss_trt.runtime.bench.bound import decode_seconds, distinct_experts, prefill_seconds
from gptoss_trt.runtime.bench.observe import mean_distinct_experts
from gptoss_trt.runtime.model import GptOssModel
from gptoss_trt.runtime.model.loader import random_weights
from gptoss_trt.runtime.model.random_tensors import RandomTensors

CPU = torch.device("cpu")
FP8_DENSE = Formats("mxfp4", "fp8_block128")


@pytest.mark.parametrize(
    ("model", "formats", "batch", "context", "tokens_s"),
    [
        ("gpt-oss-120b", FP8_DENSE, 1, 1024, 1294),
        ("gpt-oss-120b", Formats(), 1, 1024, 900),
        ("gpt-oss-120b", FP8_DENSE, 128, 8192, 5771),
        ("gpt-oss-20b", Formats(), 64, 1024, 20179),
        ("gpt-oss-20b", Formats("fp8_block128", "fp8_block128"), 8, 1024, 2595),
    ],
)
def test_decode_bounds(model: str, formats: Formats, batch: int, context: int, tokens_s: float) -> None:
    assert batch / decode_seconds(MODELS[model], formats, batch, context) == pytest.approx(tokens_s, rel=1e-3)


@pytest.mark.parametrize(
    ("model", "formats", "tokens", "ms"),
    [
        ("gpt-oss-120b", Formats("fp8_block128", "fp8_block128"), 1024, 25.6),
        ("gpt-oss-120b", FP8_DENSE, 1024, 13.8),
        ("gpt-oss-20b", Formats("fp8_block128", "fp8_block128"), 8192, 48.6),
    ],
)
def test_prefill_bounds(model: str, formats: Formats, tokens: int, ms: float) -> None:
    assert prefill_seconds(MODELS[model], formats, tokens) * 1e3 == pytest.approx(ms, rel=5e-3)


def test_distinct_experts() -> None:
    assert distinct_experts(MODELS["gpt-oss-120b"], 32) == pytest.approx(81.7, abs=0.05)
    assert distinct_experts(MODELS["gpt-oss-20b"], 1) == pytest.approx(4.0)


def test_a_name_is_one_tensor_and_a_seed_one_model() -> None:
    config = model_config("tiny")
    first, again, other = (RandomTensors(config, Formats(), seed, CPU) for seed in (3, 3, 4))
    for name in first:
        assert torch.equal(first[name], again[name]) and torch.equal(first[name], first[name])
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert first["lm_head.weight"].float().std() == pytest.approx(0.02, rel=0.05)
    scales = first["layers.1.moe.down.scales"]
    assert (int(scales.min()), int(scales.max())) == (118, 120)
    assert len(first["layers.0.moe.gate_up.blocks"].unique()) == 256


def test_both_storages_hold_the_same_numbers() -> None:
    config = model_config("tiny")
    small, large = (RandomTensors(config, Formats(experts), 0, CPU) for experts in ("mxfp4", "fp8_block128"))  # type: ignore[arg-type]
    stem = "layers.0.moe.gate_up"
    want = mxfp4.decode(small[f"{stem}.blocks"], small[f"{stem}.scales"]).float()
    weight, scale = large[f"{stem}.weight"], large[f"{stem}.weight_scale"]
    assert torch.equal(fp8_block.dequantise(weight, scale), want)
    scale_first = large[f"{stem}.weight_scale"]
    assert torch.equal(scale_first, scale)
    assert torch.equal(mxfp4_to_fp8(small[f"{stem}.blocks"], small[f"{stem}.scales"])[1], scale)


def test_tensors_are_the_table_s() -> None:
    formats = Formats("fp8_block128", "fp8_block128")
    weights = random_weights(model_config("tiny"), formats, 0, CPU)
    assert len(list(weights.tensors)) == len(weights.tensors)
    with pytest.raises(KeyError):
        weights["layers.9.moe.router.weight"]
    model = GptOssModel(weights, CPU)
    model.allocate_kv(2, 2, 16)
    assert model.kv(1)[0].shape == (2, 2, 16, 32)


def test_work_without_a_router_has_no_experts() -> None:
    with pytest.raises(ValueError, match="routed no tokens"):
        mean_distinct_experts(lambda: torch.ones(2))
