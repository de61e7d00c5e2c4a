"""MXFP4 and FP8 128x128: values, the rule for a block's exponent, exactness at its edges, best scales."""

from __future__ import annotations

import pytest
import torch

from gptoss_trt.reference import fp8_block, mxfp4


def random_packed(
    rows: int, groups: int, *, seed: int = 0, low: int = 120, high: int = 127
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (rows, groups, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(low, high, (rows, groups), generator=generator, dtype=torch.uint8)
    return blocks, scales


def decode_by_definition(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """One value at a time, from the definition."""
    rows, groups = scales.shape
    out = torch.zeros(rows, groups * 32, dtype=torch.float64)
    for row in range(rows):
        for group in range(groups):
            for element in range(32):
                byte = int(blocks[row, group, element // 2])
                code = byte >> 4 if element % 2 else byte & 15
                sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
                magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
                out[row, group * 32 + element] = (-1) ** sign * magnitude * 2.0 ** (int(scales[row, group]) - 127)
    return out


def test_decode_follows_the_definition() -> None:
    blocks, scales = random_packed(3, 2, low=0, high=255)
    assert torch.equal(mxfp4.decode(blocks, scales, torch.float64), decode_by_definition(blocks, scales))


def test_decode_names_scale_255() -> None:
    blocks, scales = random_packed(4, 3)
    scales[2, 1] = 255
    with pytest.raises(mxfp4.FormatError, match=r"255 .* at \(2, 1\)"):
        mxfp4.decode(blocks, scales)


def test_shapes_that_do_not_belong_together() -> None:
    blocks, scales = random_packed(4, 3)
    with pytest.raises(mxfp4.FormatError, match=r"\(4, 3, 16\).*\(4, 2\)"):
        mxfp4.decode(blocks, scales[:, :2])


def test_encode_keeps_mxfp4_values() -> None:
    blocks, scales = random_packed(40, 6, seed=1)
    values = mxfp4.decode(blocks, scales)
    encoded, encoded_scales, error = mxfp4.encode(values.to(torch.bfloat16))
    assert float(error) == 0.0
    assert torch.equal(mxfp4.decode(encoded, encoded_scales), values)


def test_encode_takes_the_better_exponent() -> None:
    values = torch.zeros(1, 32)
    values[0, 0] = 7.9  # clipped to 6 under 2^0, nearly 8 under 2^1
    blocks, scales, _ = mxfp4.encode(values)
    assert float(mxfp4.decode(blocks, scales)[0, 0]) == 8.0


@pytest.mark.parametrize(("spread", "exact"), [(0, True), (11, True), (14, True), (15, False), (40, False)])
def test_exactness_at_its_edges(spread: int, exact: bool) -> None:
    blocks = torch.full((130, 5, 16), 0x17, dtype=torch.uint8)  # 6 and 0.5: both ends of the range in each group
    scales = torch.full((130, 5), 127, dtype=torch.uint8)
    scales[100, 3] = 127 - spread
    weight, scale, plan = fp8_block.from_mxfp4(blocks, scales)
    assert plan.spread.tolist() == [[spread, 0], [0, 0]]
    assert plan.exact.tolist() == [[exact, True], [True, True]]
    assert plan.k.tolist() == [[-6, -6], [-6, -6]]
    same = fp8_block.dequantise(weight, scale) == mxfp4.decode(blocks, scales)
    assert bool(same.all()) is exact
    assert bool(same[128:].all())
    assert bool(same[:, 128:].all())


def test_every_code_under_every_exact_shift() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16).repeat(15, 1, 1)
    scales = (torch.arange(15, dtype=torch.uint8) + 100).unsqueeze(1).expand(15, 16).contiguous()
    weight, scale, plan = fp8_block.from_mxfp4(blocks, scales)
    assert bool(plan.exact.all())
    decoded = mxfp4.decode(blocks, scales)
    dequantised = fp8_block.dequantise(weight, scale)
    assert torch.equal(dequantised, decoded)
    assert torch.equal(torch.signbit(dequantised), torch.signbit(decoded))


def test_groups_of_zeros_do_not_count() -> None:
    blocks, scales = random_packed(128, 4, low=120, high=121)
    blocks[5, 2] = 0x88  # minus zeros
    scales[5, 2] = 250
    blocks[6, 1] = 0
    scales[6, 1] = 3
    weight, scale, plan = fp8_block.from_mxfp4(blocks, scales)
    assert plan.spread.tolist() == [[0]]
    assert float(scale) == 2.0 ** (120 - 127 - 6)
    assert torch.equal(fp8_block.dequantise(weight, scale), mxfp4.decode(blocks, scales))


def test_a_block_of_zeros_has_scale_one() -> None:
    blocks = torch.zeros(128, 4, 16, dtype=torch.uint8)
    scales = torch.full((128, 4), 9, dtype=torch.uint8)
    weight, scale, plan = fp8_block.from_mxfp4(blocks, scales)
    assert plan.k.tolist() == [[0]]
    assert scale.tolist() == [[1.0]]
    assert not weight.float().any()


def test_rounded_blocks_round_to_nearest_even() -> None:
    blocks, scales = random_packed(128, 4, seed=4, low=90, high=128)
    weight, scale, _ = fp8_block.from_mxfp4(blocks, scales)
    expected = (mxfp4.decode(blocks, scales, torch.float32) / scale).to(torch.float8_e4m3fn)
    assert torch.equal(weight.view(torch.uint8), expected.view(torch.uint8))


def test_scale_outside_fp32_is_named() -> None:
    blocks, scales = random_packed(256, 4, low=3, high=4)
    with pytest.raises(fp8_block.FormatError, match=r"2\^-130 at block \(0, 0\)"):
        fp8_block.from_mxfp4(blocks, scales)


def test_leading_dimensions_are_independent() -> None:
    blocks, scales = random_packed(2 * 200, 5, seed=2)
    together = fp8_block.from_mxfp4(blocks.reshape(2, 200, 5, 16), scales.reshape(2, 200, 5))
    alone = fp8_block.from_mxfp4(blocks[200:], scales[200:])
    assert torch.equal(together[0][1].view(torch.uint8), alone[0].view(torch.uint8))
    assert torch.equal(together[1][1], alone[1])


def test_quantise_is_exact_for_values_that_were_mxfp4() -> None:
    blocks, scales = random_packed(200, 5, seed=3)
    values = mxfp4.decode(blocks, scales)
    result = fp8_block.quantise(values.to(torch.bfloat16))
    assert result.relative_error == 0.0
    assert torch.equal(fp8_block.dequantise(result.weight, result.scale), values)


def test_quantise_beats_the_plain_scale() -> None:
    values = torch.randn(300, 200, generator=torch.Generator().manual_seed(5))
    result = fp8_block.quantise(values)
    difference = fp8_block.dequantise(result.weight, result.scale) - values
    assert float(difference.double().square().sum()) == pytest.approx(float(result.squared_error.sum()), rel=1e-6)
    plain_scale = fp8_block._block_sum_or_max(values.abs(), largest=True) / 448
    _, plain_error = fp8_block._quantise_with(values, plain_scale)
    assert bool((result.squared_error <= plain_error).all())
    assert result.relative_error < 0.03


def test_quantise_handles_zeros_and_one_huge_value() -> None:
    values = torch.zeros(129, 130)
    values[0, 0] = 3e38
    values[128, 129] = 1e-38
    values[128, 0] = 1e-45  # the smallest subnormal becomes zero
    result = fp8_block.quantise(values)
    back = fp8_block.dequantise(result.weight, result.scale)
    assert bool(torch.isfinite(back).all())
    assert float(back[0, 0]) == pytest.approx(3e38, rel=0.04)
    assert float(back[128, 129]) == pytest.approx(1e-38, rel=0.04)
    assert 0 <= result.relative_error < 0.04
    assert back[128, 0] == 0
    assert result.scale[0, 1] == 1.0


def test_segments_begin_new_blocks() -> None:
    values = torch.randn(192, 64, generator=torch.Generator().manual_seed(6))
    parts = [fp8_block.quantise(part) for part in values.split([64, 64, 64])]
    weight = torch.cat([part.weight.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    scale = torch.cat([part.scale for part in parts])
    back = fp8_block.dequantise_segments(weight, scale, (64, 64, 64))
    assert torch.equal(back[64:128], fp8_block.dequantise(parts[1].weight, parts[1].scale))
    with pytest.raises(fp8_block.FormatError, match="192 rows"):
        fp8_block.dequantise_segments(weight, scale, (64, 64))


def test_every_e4m3_number_decodes_fast_as_slow() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    assert torch.equal(fp8_block.decode_e4m3(numbers), numbers.float())


def test_ties_go_to_the_even_code() -> None:
    values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0, 6.0]).repeat(4)[:32].unsqueeze(0)
    blocks, scales, _ = mxfp4.encode(values)
    assert scales.tolist() == [[127]]
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -0.0, -4.0, 6.0]).repeat(4)[:32]
    assert torch.equal(mxfp4.decode(blocks, scales)[0], expected)
