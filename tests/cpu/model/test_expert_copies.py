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
    """Of one layer, as far as the memory goes; the numbers are the same."""
    engine = make_engine(h_scale="static")
    ids = torch.randint(0, 320, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    usual = scheduler(load_model(engine)).step({"a": ids}, rows="all")

    def copy(weight: torch.Tensor, scale: torch.Tensor, _shape: tuple[int, int]) -> layers.Prepared:
        made.append(weight_layout.pack_tiles(*fp8_block.from_mxfp4(weight, scale)[:2]))
        return made[-1], torch.empty(0), "sm90_tiles_v1"

    made: list[torch.Tensor] = []
    monkeypatch.setattr(layers, "prefill_bytes", lambda *_: 1000)
    monkeypatch.setattr(layers, "prefill_experts", copy)
    monkeypatch.setattr(layers, "PREFILL_ROWS", 8)
    model = load_model(engine)
    assert model.copy_experts(3999, 7) == (0, 0)  # no step would be long enough
    assert model.expert_copies_bytes(150) == 2000 * model.config.num_layers and model.expert_copies_bytes(7) == 0
    assert model.copy_experts(3999, 150) == (1, 2000)
    with_copies = scheduler(model)
    assert torch.equal(with_copies.step({"a": ids}, rows="all"), usual)
    for tiles in made:
        tiles.zero_()
    few = scheduler(model).step({"a": ids[:4]}, rows="all")
    assert torch.equal(few, usual[:4])  # read from the weights themselves
