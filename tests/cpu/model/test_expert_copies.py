"""FP8 copies of experts: which steps read them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gptoss_trt.ops import weight_layout
from gptoss_trt.reference import fp8_block
from gptoss_trt.runtime.model import layers, load_model


def test_steps_of_many_tokens_read_the_copies(
    make_engine: Callable[..., Path], scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as the memory goes, of all layers' gate_up first, none of the last layer; the numbers are the same."""
    engine = make_engine(h_scale="static")
    ids = torch.randint(0, 320, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    usual = scheduler(load_model(engine)).step({"a": ids}, rows="all")

    def copy(weight: torch.Tensor, scale: torch.Tensor, _shape: tuple[int, int]) -> layers.Prepared:
        made.append(weight_layout.pack_tiles(*fp8_block.from_mxfp4(weight, scale)[:2]))
        return made[-1], torch.empty(0), "sm90_tiles_v1"

    made: list[torch.Tensor] = []
    monkeypatch.setattr(layers, "prefill_bytes", lambda op, *_: {"moe_gate_up": 2000, "moe_down": 1000}[op])
    monkeypatch.setattr(layers, "prefill_experts", copy)
    monkeypatch.setattr(layers, "PREFILL_ROWS", 8)
    model = load_model(engine)
    count = model.config.num_layers - 1
    assert model.copy_experts(9999, 7) == (0, 0, 0)  # no step would be long enough
    assert model.expert_copies_bytes(150) == 3000 * count and model.expert_copies_bytes(7) == 0
    assert load_model(engine).copy_experts(1999, 150) == (0, 1, 1000)
    assert load_model(engine).copy_experts(2999, 150) == (1, 0, 2000)
    made.clear()
    assert model.copy_experts(2000 * count + 1999, 150) == (count, 1, 2000 * count + 1000)
    with_copies = scheduler(model)
    assert torch.equal(with_copies.step({"a": ids}, rows="all"), usual)
    for tiles in made:
        tiles.zero_()
    few = scheduler(model).step({"a": ids[:4]}, rows="all")
    assert torch.equal(few, usual[:4])  # read from the weights themselves
    assert not torch.equal(scheduler(model).step({"a": ids}, rows="all"), usual)  # and here from the copies
