"""The forward pass of a tiny model with every operator but the bf16 products taken by its Triton kernel: prompt, decode
and a padded decode step give the CPU implementations' logits."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch

from gptoss_trt.build_engine.shapes import model_config
from gptoss_trt.build_engine.spec import Formats
from gptoss_trt.ops import dispatch
from gptoss_trt.runtime.model import GptOssModel, GraphedModel, StepBatch, layers
from gptoss_trt.runtime.model.loader import random_weights

pytestmark = pytest.mark.interpret
CPU = torch.device("cpu")
BLOCK_TOKENS = 16
OPS = (
    "embedding", "rmsnorm_quant", "kv_slots", "rope_kv_append", "attention_prefill",
    "attention_decode", "rmsnorm_route", "moe_gate_up", "moe_down", "moe_combine", "moe_combine_norm",
)  # fmt: skip


@pytest.fixture
def on_triton() -> Generator[Any, None, None]:
    """Call it to have the CPU's tensors go through the Triton kernels from then on."""
    library: Any = torch.library.Library("gptoss_trt", "IMPL")

    def switch() -> None:
        for op in OPS:
            kernel = dispatch._load(dispatch._TARGETS[op, "triton"])
            library.impl(op, kernel, "CPU", allow_override=True)

    yield switch
    library._destroy()


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def prompt(ids: list[int]) -> StepBatch:
    table = ints([[0, 1]])
    return StepBatch(
        ints(ids), torch.arange(len(ids), dtype=torch.int32), ints([0, len(ids)]), ints([len(ids)]), table, table,
        ints([0]), ints([len(ids) - 1]),
    )  # fmt: skip


def decode(rows: int, context: int) -> StepBatch:
    table = torch.arange(rows * 2, dtype=torch.int32).reshape(rows, 2)
    same = torch.ones(rows, dtype=torch.int32)
    return StepBatch(
        torch.arange(rows, dtype=torch.int32) + 9, same * (context - 1), torch.arange(rows + 1, dtype=torch.int32),
        same * context, table, table, same * 0, torch.arange(rows, dtype=torch.int32),
    )  # fmt: skip


def run(model: GraphedModel) -> list[torch.Tensor]:
    model.allocate_kv(6, 6, BLOCK_TOKENS)
    first = model.forward(prompt(list(range(5)))).clone()
    return [first, model.forward(decode(1, 6)).clone(), model.forward(decode(3, 7)).clone()]


def test_a_model_on_triton_kernels(on_triton: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "ENDS_APART_TOKENS", 5)
    weights = random_weights(model_config("tiny"), Formats(), 2, CPU)
    model = GraphedModel(GptOssModel(weights, CPU))
    want = run(model)
    on_triton()
    got = run(model)
    for ours, theirs in zip(got, want, strict=True):
        assert float((ours - theirs).abs().max()) < 0.1 * float(theirs.std())
