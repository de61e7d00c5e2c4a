"""MXFP4 and FP8 rounding against the reference, and the packed file against itself."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest
import torch

from gptoss_trt.build_engine.demo import network, pack
from gptoss_trt.build_engine.demo.rounding import mxfp4_codes, mxfp4_values, round_fp8, round_mxfp4

LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def test_values_keep_their_codes() -> None:
    weight = mxfp4_values(*mxfp4_codes(torch.randn(5, 7, 96, generator=torch.Generator().manual_seed(0))))
    again = mxfp4_values(*mxfp4_codes(weight))
    assert torch.equal(weight, again)


def test_rounding_is_the_nearest_of_the_scale() -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    codes, exponents = mxfp4_codes(weight)
    scaled = weight.reshape(64, 4, 32) / torch.exp2(exponents.float()).unsqueeze(-1)
    nearest = (scaled.abs().unsqueeze(-1) - LEVELS).abs().amin(-1)
    kept = (scaled - mxfp4_values(codes, torch.zeros_like(exponents)).reshape(64, 4, 32)).abs()
    assert torch.allclose(kept, nearest, atol=1e-6)


def test_zero_and_tiny_groups_stay_within_the_spread() -> None:
    weight = torch.ones(4, 64)
    weight[1] = 0.0
    weight[2] *= 2.0**-30
    _, exponents = mxfp4_codes(weight)
    assert int(exponents.max() - exponents.min()) <= 11
    assert torch.equal(round_mxfp4(weight)[1], weight[1])


def test_fp8_rounding_is_that_of_the_ops() -> None:
    x = torch.randn(9, 192, generator=torch.Generator().manual_seed(2)) * torch.logspace(-3, 3, 9).unsqueeze(1)
    x[4] = 0.0
    got = round_fp8(x, torch.tensor(True))
    for start, end in ((0, 128), (128, 192)):
        part = x[:, start:end]
        amax = part.abs().amax(-1, keepdim=True)
        scale = torch.where(amax > 0, amax / 448, 1.0)
        want = (part / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
        assert torch.allclose(got[:, start:end], want, rtol=1e-6, atol=0)
    assert torch.equal(round_fp8(x, torch.tensor(False)), x)


def test_gradients_pass_the_rounding() -> None:
    weight = torch.randn(2, 32, requires_grad=True)
    (round_mxfp4(weight) * 3).sum().backward()
    assert torch.equal(weight.grad, torch.full((2, 32), 3.0))


def test_packed_file_gives_the_rounded_weights_back(tmp_path: Path) -> None:
    shape = network.Shape(layers=2, hidden=64, intermediate=32, experts=4, heads=2, kv_heads=1)
    masters = network.create_weights(shape, 10, seed=0)
    masters["down"] += torch.randn(masters["down"].shape)
    used = [3, 5, 8, 13, 21, 34, 55, 89, 144, 233]
    size = pack.pack_weights(masters, used, tmp_path / "w.xz")
    packed = pack.read_packed(tmp_path / "w.xz")
    assert size == (tmp_path / "w.xz").stat().st_size and packed.used_ids.tolist() == used
    back = pack.masters_of(packed)
    for name, value in network.rounded(masters).items():
        want = value if name in network.EXPERT_MATRICES else value.bfloat16().float()
        assert torch.equal(back[name], want), name


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.xz").write_bytes(b"not xz")
    with pytest.raises(pack.PackError, match=r"a\.xz is not an xz file"):
        pack.read_packed(tmp_path / "a.xz")
    from safetensors.torch import save

    (tmp_path / "b.xz").write_bytes(lzma.compress(save({"x": torch.zeros(1)}, metadata={"format": "other"})))
    with pytest.raises(pack.PackError, match="'other'"):
        pack.read_packed(tmp_path / "b.xz")
