"""The reference in its fp32 mode against transformers' GptOss: logits and greedy tokens on small random checkpoints.

Where transformers deviates from MODEL's arithmetic: in bf16 its router's softmax, its rotation (cos and sin are cast
to the activations' type) and its attention round inside the operator, as OpenAI's torch code does (`rounding.OPENAI`);
its top-k leaves the order of equal logits open. In fp32, compared here, none of these shows, and YaRN's unrounded
correction range is the same (`truncate: false` in the checkpoint's config; its default, true, rounds to 8 and 18).
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM

from gptoss_trt.reference.forward import Architecture, ReferenceModel
from gptoss_trt.reference.moe_gemm_fp8 import swiglu
from gptoss_trt.reference.rope import RopeConfig, correction_range, inverse_frequencies, rope_table
from gptoss_trt.reference.rope_kv_append import rotate
from gptoss_trt.reference.rounding import OPENAI, UNQUANTISED, Numerics, bf16

_WINDOW = 128


def _checkpoint(seed: int, **changes: object) -> GptOssForCausalLM:
    sizes: dict[str, object] = {
        "num_hidden_layers": 4,
        "hidden_size": 160,
        "intermediate_size": 96,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 499,
        "sliding_window": _WINDOW,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "attn_implementation": "eager",
    }
    model = GptOssForCausalLM(GptOssConfig(**(sizes | changes))).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("sinks"):
                parameter.copy_(3 + 0.5 * noise)
            elif "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("embed_tokens.weight"):
                parameter.copy_(noise)
            elif "bias" in name:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)
    return model


def _reference(model: GptOssForCausalLM, numerics: Numerics = UNQUANTISED) -> ReferenceModel:
    config = model.config
    state = model.state_dict()
    weights = {
        "embedding.weight": state["model.embed_tokens.weight"],
        "lm_head.weight": state["lm_head.weight"],
        "norm.weight": state["model.norm.weight"],
    }
    for n in range(config.num_hidden_layers):
        source, attention, moe = f"model.layers.{n}", f"layers.{n}.attention", f"layers.{n}.moe"
        for part in ("weight", "bias"):
            qkv = [state[f"{source}.self_attn.{x}_proj.{part}"] for x in "qkv"]
            weights[f"{attention}.qkv.{part}"] = torch.cat(qkv)
            weights[f"{attention}.out.{part}"] = state[f"{source}.self_attn.o_proj.{part}"]
            weights[f"{moe}.router.{part}"] = state[f"{source}.mlp.router.{part}"]
        weights[f"{attention}.sinks"] = state[f"{source}.self_attn.sinks"]
        weights[f"{attention}.norm.weight"] = state[f"{source}.input_layernorm.weight"]
        weights[f"{moe}.norm.weight"] = state[f"{source}.post_attention_layernorm.weight"]
        for ours, theirs in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
            weights[f"{moe}.{ours}.weight"] = state[f"{source}.mlp.experts.{theirs}"].transpose(1, 2)
            weights[f"{moe}.{ours}.bias"] = state[f"{source}.mlp.experts.{theirs}_bias"]
    architecture = Architecture(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        experts_per_token=config.num_experts_per_tok,
        windows=[_WINDOW if kind == "sliding_attention" else 0 for kind in config.layer_types],
        rope=RopeConfig(head_dim=config.head_dim),
        rms_norm_eps=config.rms_norm_eps,
    )
    return ReferenceModel(architecture, weights, numerics)


@torch.no_grad()
def _logits(model: GptOssForCausalLM, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
    where = None if positions is None else positions[None]
    return model(input_ids=ids[None], position_ids=where, use_cache=False).logits[0]


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 300])
def test_logits_agree(tokens: int) -> None:
    model = _checkpoint(seed=1)
    ids = torch.randint(0, 499, (tokens,), generator=torch.Generator().manual_seed(tokens))
    expected = _logits(model, ids)
    actual = _reference(model).forward(ids)
    assert expected.abs().max() > 1
    worst_row = (actual - expected).abs().amax(dim=1) / expected.abs().amax(dim=1)
    assert worst_row.max() < 2e-5


def test_positions_beyond_the_initial_context_agree() -> None:
    model = _checkpoint(seed=2)
    ids = torch.randint(0, 499, (200,), generator=torch.Generator().manual_seed(7))
    for first in (4000, 100_000):
        positions = torch.arange(first, first + 200)
        expected = _logits(model, ids, positions)
        actual = _reference(model).forward(ids, positions)
        worst_row = (actual - expected).abs().amax(dim=1) / expected.abs().amax(dim=1)
        assert worst_row.max() < 2e-5, first


def test_greedy_tokens_agree() -> None:
    model = _checkpoint(seed=3)
    ids = torch.randint(2, 499, (140,), generator=torch.Generator().manual_seed(3))
    generated = model.generate(ids[None], max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)[0]
    reference = _reference(model)
    ours = ids
    for _ in range(12):
        ours = torch.cat((ours, reference.forward(ours)[-1:].argmax(dim=-1)))
    assert ours.tolist() == generated.tolist()


def test_other_shapes_agree() -> None:
    model = _checkpoint(seed=4, hidden_size=96, intermediate_size=224, num_attention_heads=4, num_key_value_heads=4)
    ids = torch.randint(0, 499, (150,), generator=torch.Generator().manual_seed(4))
    expected = _logits(model, ids)
    actual = _reference(model).forward(ids)
    assert (actual - expected).abs().max() / expected.abs().max() < 2e-5


def test_a_wrong_reference_is_seen() -> None:
    """Each of these once-made mistakes moves the logits far beyond the tolerance above."""
    model = _checkpoint(seed=5)
    ids = torch.randint(0, 499, (200,), generator=torch.Generator().manual_seed(5))
    expected = _logits(model, ids)
    right = _reference(model)
    mistakes = {
        "window of 127": {"windows": [w and w - 1 for w in right._arch.windows]},
        "windows on the odd layers": {"windows": list(reversed(right._arch.windows))},
        "no stretch": {"rope": RopeConfig(scaling_factor=1.0)},
        "no limit": {"swiglu_limit": 1e9},
        "alpha of 1": {"swiglu_alpha": 1.0},
    }
    for name, change in mistakes.items():
        wrong = ReferenceModel(dataclasses.replace(right._arch, **change), right._weights)
        error = (wrong.forward(ids) - expected).abs().max() / expected.abs().max()
        assert error > 1e-3, name


def test_openai_roundings_are_those_of_bf16_torch_code() -> None:
    """Rotation and SwiGLU with the switch on equal the same formulas written in bf16 tensors, bit for bit."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(50, 3, 64, generator=generator).to(torch.bfloat16)
    table = rope_table(RopeConfig(), 5000)[4900:4950]
    first, second = x.chunk(2, dim=-1)
    cos, sin = table.to(torch.bfloat16).unsqueeze(1).chunk(2, dim=-1)
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    assert torch.equal(rotate(x, table, bf16), expected.float())
    assert not torch.equal(bf16(rotate(x, table)), expected.float())

    y = (4 * torch.randn(50, 96, generator=generator)).to(torch.bfloat16)
    gate, up = y[:, ::2].clamp(max=7.0), y[:, 1::2].clamp(-7.0, 7.0)
    expected = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    assert torch.equal(swiglu(y.float(), 7.0, 1.702, bf16), expected.float())
    assert not torch.equal(bf16(swiglu(y.float(), 7.0, 1.702)), expected.float())


def test_bf16_run_of_transformers_is_near() -> None:
    """bf16 noise only: transformers in bf16 against the reference with OpenAI's roundings, row by row."""
    model = _checkpoint(seed=6).to(torch.bfloat16)
    ids = torch.randint(0, 499, (60,), generator=torch.Generator().manual_seed(6))
    expected = _logits(model, ids).float()
    actual = _reference(model, OPENAI).forward(ids)
    row_error = (actual - expected).norm(dim=1) / expected.norm(dim=1)
    assert row_error.median() < 0.08  # experts that tie differently move single rows further


def test_yarn_range_is_not_rounded() -> None:
    low, high = correction_range(RopeConfig())
    assert (round(low, 4), round(high, 4)) == (8.0928, 17.3980)
    frequencies = inverse_frequencies(RopeConfig())
    trained = 150000.0 ** (-torch.arange(0, 64, 2) / 64)
    torch.testing.assert_close(frequencies[:9], trained[:9], rtol=1e-6, atol=0)
    torch.testing.assert_close(frequencies[18:], trained[18:] / 32, rtol=1e-6, atol=0)
    assert trained[9] / 32 < frequencies[9] < trained[9]
