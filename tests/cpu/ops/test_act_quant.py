"""The quantisation rule, bit for bit, on inputs made to break it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gptoss_trt.ops import ops
from gptoss_trt.reference.act_quant import act_dequant, act_quant

_FP8 = torch.float8_e4m3fn
_CODES = torch.arange(256, dtype=torch.uint8).view(_FP8).float()
_NUMBERS = _CODES[_CODES.isfinite()].sort().values.unique()


def _nearest_even(value: float) -> float:
    """The e4m3 number nearest to value, ties to the even code; an own search, not torch's cast."""
    distance = (_NUMBERS.double() - value).abs()
    best = (distance == distance.min()).nonzero().flatten()
    codes = _NUMBERS[best].to(_FP8).view(torch.uint8)
    return float(_NUMBERS[best[int((codes % 2 == 0).nonzero()[0])] if len(best) > 1 else best[0]])


def _by_hand(row: torch.Tensor, group: int) -> tuple[list[float], list[float]]:
    values, scales = [], []
    for first in range(0, len(row), group):
        part = row[first : first + group].float()
        scale = torch.tensor(float(part.abs().max())) / torch.tensor(448.0)
        scale = torch.tensor(1.0) if scale == 0 else scale
        scales.append(float(scale))
        values += [_nearest_even(max(-448.0, min(448.0, float(x / scale)))) for x in part]
    return values, scales


def _adversarial(random: Callable[..., torch.Tensor], channels: int) -> torch.Tensor:
    x = random(7, channels, dtype=torch.float32)
    x[0] = 0
    x[1, 5] = 3e38
    x[2] *= 1e-38
    x[3] = torch.tensor([448.0, 1.0625, 1.1875, -432.0]).repeat(channels // 4 + 1)[:channels]  # ties under scale 1
    x[4, : channels // 2] = 0
    x[5] = -0.0
    return x.to(torch.bfloat16)


@pytest.mark.parametrize("channels", [40, 128, 192, 300])
@pytest.mark.parametrize("group", [128, 64])
def test_codes_and_scales_by_hand(
    channels: int, group: int, random: Callable[..., torch.Tensor], outputs: Callable[..., torch.Tensor]
) -> None:
    x = _adversarial(random, channels)
    codes = outputs(len(x), channels, dtype=_FP8)
    scales = outputs(-(-channels // group), len(x), dtype=torch.float32)
    ops.act_quant(x, group, codes, scales)
    for row in range(len(x)):
        values, expected_scales = _by_hand(x[row], group)
        assert codes[row].float().tolist() == values, row
        assert scales[:, row].tolist() == expected_scales, row


def test_static_scale(random: Callable[..., torch.Tensor], outputs: Callable[..., torch.Tensor]) -> None:
    x = random(4, 100, dtype=torch.float32) * 20
    codes = outputs(4, 100, dtype=_FP8)
    ops.act_quant(x, 0, codes, None)
    assert codes.float().flatten().tolist() == [
        _nearest_even(max(-448.0, min(448.0, v * 8))) for v in x.flatten().tolist()
    ]


def test_never_nan_from_finite_fp32() -> None:
    tiny = torch.tensor([[1e-45] * 8, [1e-43] * 8, [3.4e38] * 8, [6.2e-43, 1e-45] * 4], dtype=torch.float32)
    codes, scales = act_quant(tiny)
    assert scales is not None
    assert codes.float().isfinite().all()
    assert (scales > 0).all() and scales.isfinite().all()


@pytest.mark.parametrize("group", [128, 64, 0])
def test_dequantised_error_is_half_a_step(group: int, random: Callable[..., torch.Tensor]) -> None:
    x = random(16, 2880, dtype=torch.float32).clamp(-50, 50)
    back = act_dequant(*act_quant(x, group))
    relative = ((back - x).square().sum() / x.square().sum()).sqrt()
    assert 0.02 < relative < 0.03


def test_empty_batch(outputs: Callable[..., torch.Tensor]) -> None:
    ops.act_quant(
        torch.zeros(0, 128, dtype=torch.bfloat16), 128, outputs(0, 128, dtype=_FP8), outputs(1, 0, dtype=torch.float32)
    )
