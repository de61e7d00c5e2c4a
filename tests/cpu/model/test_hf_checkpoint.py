"""A checkpoint folder, read by transformers and built into an engine: the same logits without quantisation, and the
same greedy tokens, up to rounding, with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import GptOssForCausalLM

from gptoss_trt.build_engine.spec import Manifest
from gptoss_trt.reference import fp8_block
from gptoss_trt.reference.forward import Architecture, ReferenceModel
from gptoss_trt.reference.rope import RopeConfig
from gptoss_trt.reference.tolerance import compare_tokens
from gptoss_trt.runtime.model import load_model

_TOKENS = 140


def _prompt() -> list[int]:
    return torch.randint(0, 320, (_TOKENS,), generator=torch.Generator().manual_seed(9)).tolist()


def _unquantised(engine: Path) -> ReferenceModel:
    config = Manifest.read(engine).model
    tensors = load_file(engine / "rank0.safetensors")
    weights = {
        name: fp8_block.dequantise(tensor, tensors[f"{name}_scale"]) if f"{name}_scale" in tensors else tensor
        for name, tensor in tensors.items()
    }
    architecture = Architecture(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        experts_per_token=config.experts_per_token,
        windows=[config.window(n) for n in range(config.num_layers)],
        rope=RopeConfig(head_dim=config.head_dim),
    )
    return ReferenceModel(architecture, weights)


@torch.no_grad()
def test_engine_of_a_checkpoint_agrees_with_transformers(make_engine: Callable[..., Path], scheduler: Any) -> None:
    engine = make_engine(layout="hf_bf16")
    theirs = GptOssForCausalLM.from_pretrained(engine.parent / "checkpoint", dtype=torch.float32).eval()
    ids = torch.tensor(_prompt())
    expected = theirs(input_ids=ids[None], use_cache=False).logits[0]
    plain = _unquantised(engine).forward(ids)
    assert ((plain - expected).abs().amax(dim=1) / expected.abs().amax(dim=1)).max() < 2e-5

    quantised = scheduler(load_model(engine)).step({"a": _prompt()}, rows="all")
    error = (quantised - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.median() < 0.1  # what FP8 activations and bf16 cost this random model
    margin = 6 * float((quantised - expected).square().mean().sqrt())
    for row in range(_TOKENS):
        ours, best = quantised[row : row + 1].argmax(dim=1), expected[row : row + 1].argmax(dim=1)
        assert compare_tokens(ours.tolist(), best.tolist(), expected[row : row + 1], margin) is None
