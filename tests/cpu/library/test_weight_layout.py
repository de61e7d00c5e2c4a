"""Layout sm90_v1 against its definition: round trips, single weights by address, and one WGMMA strip by hand."""

from __future__ import annotations

import pytest
import torch

from gptoss_trt.ops import prepare, weight_layout
from gptoss_trt.ops.weight_layout import LayoutError
from gptoss_trt.reference import fp8_block, mxfp4

SHAPES = [(128, 256), (192, 192), (320, 2880), (100, 96), (64, 64), (66, 32)]


def random_mxfp4(n: int, k: int, experts: int = 2, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, n, k // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(113, 128, (experts, n, k // 32), generator=generator, dtype=torch.uint8)
    return blocks, scales


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_mxfp4_round_trip_is_byte_for_byte(n: int, k: int) -> None:
    blocks, scales = random_mxfp4(n, k)
    blocks[0, 0, 0] = 0x80  # a group of zeros and minus zeros keeps its scale while that is one of the 15
    packed = weight_layout.pack_mxfp4(blocks, scales)
    assert packed.shape == (2, weight_layout.expert_bytes(n, k, True))
    again, again_scales = weight_layout.unpack_mxfp4(packed, n, k)
    assert torch.equal(again, blocks)
    assert torch.equal(again_scales, scales)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_fp8_round_trip_is_byte_for_byte(n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(0, 256, (2, n, k), generator=generator, dtype=torch.uint8)
    scale = torch.rand(2, -(-n // 128), -(-k // 128), generator=generator)
    packed = weight_layout.pack_fp8(weight.view(fp8_block.E4M3), scale)
    assert packed.shape == (2, weight_layout.expert_bytes(n, k, False))
    again, again_scale = weight_layout.unpack_fp8(packed, n, k)
    assert torch.equal(again.view(torch.uint8), weight)
    assert torch.equal(again_scale, scale)


def test_many_experts_are_packed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, scales = random_mxfp4(64, 64, experts=5)
    whole = weight_layout.pack_mxfp4(blocks, scales)
    monkeypatch.setattr(weight_layout, "_CHUNK_WEIGHTS", 2 * 64 * 64)
    assert torch.equal(weight_layout.pack_mxfp4(blocks, scales), whole)


@pytest.mark.parametrize("spread", [0, 11, 14, 15, 17, 20, 40])
def test_both_storages_hold_the_same_fp8_values(spread: int) -> None:
    """Also where the block is not exact: the packer rounds as the builder's conversion does."""
    generator = torch.Generator().manual_seed(spread)
    blocks = torch.randint(0, 256, (1, 128, 4, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120 - spread, 121, (1, 128, 4), generator=generator, dtype=torch.uint8)
    expected, scale, _ = fp8_block.from_mxfp4(blocks, scales)
    packed = weight_layout.pack_mxfp4(blocks, scales)
    again = fp8_block.from_mxfp4(*weight_layout.unpack_mxfp4(packed, 128, 128))
    assert torch.equal(again[0].view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(again[1], scale)


def e4m3_at(packed: torch.Tensor, strip_bytes: int, row: int, column: int) -> float:
    """One MXFP4 weight without the block scale, by the definition in layout.h and nothing else."""
    record = row // 64 * strip_bytes + column // 128 * (16 + 2 * 2112)
    half = record + 16 + column % 128 // 64 * 2112
    inside, quad = column % 16, column % 64 // 16
    high, g, w = row % 2, row % 16 // 2, row % 64 // 16
    shifts = int(packed[half + 16 * w + 2 * g + quad // 2])
    d = (shifts >> 4 if high else shifts & 15) - 8
    thread = 32 * w + 4 * g + quad
    at = half + 64 + 16 * thread + 4 * (2 * (inside // 8) + high)
    word = int.from_bytes(bytes(packed[at : at + 4].tolist()), "little")
    h, b = inside // 4 % 2, inside % 4
    magnitude = mxfp4.E2M1_VALUES[(word >> (16 * h + 4 * b)) & 7]
    sign = (word >> (8 * b + (3 if h else 7))) & 1
    return (-magnitude if sign else magnitude) * 2.0**d


def test_single_weights_lie_where_the_definition_says() -> None:
    blocks, scales = random_mxfp4(192, 192, experts=1)
    packed = weight_layout.pack_mxfp4(blocks, scales)[0]
    expected = fp8_block.from_mxfp4(blocks, scales)[0][0].to(torch.float32)
    generator = torch.Generator().manual_seed(5)
    for _ in range(400):
        row = int(torch.randint(192, (), generator=generator))
        column = int(torch.randint(192, (), generator=generator))
        assert e4m3_at(packed, weight_layout.strip_bytes(192, True), row, column) == float(expected[row, column])


def a_fragments(packed_half: torch.Tensor) -> torch.Tensor:
    """FP8 bytes of half a record -> A operands of its two instructions, f32 [2, 64, 32], by the instruction set's
    definition: register r of lane 4g + t holds row g + 8 (r % 2), columns 16 (r / 2) + 4t .. + 3."""
    values = packed_half.view(fp8_block.E4M3).to(torch.float32).reshape(2, 4, 8, 4, 4, 4)  # [i, w, g, t, r, b]
    a = torch.zeros(2, 64, 32)
    for w in range(4):
        for g in range(8):
            for t in range(4):
                for r in range(4):
                    row, column = 16 * w + g + 8 * (r % 2), 16 * (r // 2) + 4 * t
                    a[:, row, column : column + 4] = values[:, w, g, t, r]
    return a


def test_one_strip_by_hand_equals_the_product() -> None:
    """Weights by fragment times tokens in the kernel's order (a 4 x 4 transpose of words) is weight times token."""
    generator = torch.Generator().manual_seed(3)
    weight = (torch.randn(1, 64, 64, generator=generator) * 8).to(fp8_block.E4M3)
    x = (torch.randn(64, generator=generator) * 8).to(fp8_block.E4M3)
    packed = weight_layout.pack_fp8(weight, torch.ones(1, 1, 1))[0]
    a = a_fragments(packed[16 : 16 + 4096])
    tokens = x.view(torch.uint8).reshape(4, 4, 4).transpose(0, 1).reshape(2, 32).view(fp8_block.E4M3).to(torch.float64)
    result = a[0].to(torch.float64) @ tokens[0] + a[1].to(torch.float64) @ tokens[1]
    expected = weight[0].to(torch.float64) @ x.to(torch.float64)
    places = torch.tensor([16 * (r // 16) + 2 * (r % 8) + r % 16 // 8 for r in range(64)])
    assert torch.equal(result, expected[places])


def test_refuses_odd_rows_and_other_sizes() -> None:
    with pytest.raises(LayoutError, match="3 rows"):
        weight_layout.pack_mxfp4(*random_mxfp4(3, 32))
    with pytest.raises(LayoutError, match="K is 48"):
        weight_layout.pack_fp8(torch.zeros(1, 2, 48, dtype=torch.uint8).view(fp8_block.E4M3), torch.ones(1, 1, 1))
    with pytest.raises(LayoutError, match=r"\[64, 64\] needs 2176 bytes"):
        weight_layout.unpack_mxfp4(torch.zeros(1, 100, dtype=torch.uint8), 64, 64)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_tiles_round_trip_is_byte_for_byte(n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randint(0, 256, (2, n, k), generator=generator, dtype=torch.uint8)
    scale = torch.rand(2, -(-n // 128), -(-k // 128), generator=generator)
    packed = weight_layout.pack_tiles(weight.view(fp8_block.E4M3), scale)
    assert packed.shape == (2, weight_layout.tiles_bytes(n, k))
    again, again_scale = weight_layout.unpack_tiles(packed, n, k)
    assert torch.equal(again.view(torch.uint8), weight)
    assert torch.equal(again_scale, scale)


def test_tiles_lie_as_shared_memory_has_them() -> None:
    """Chunks of 16 columns are exchanged inside a row by its number; behind n and k there are zeros."""
    weight = torch.arange(1, 192 * 160 + 1).to(torch.uint8).reshape(1, 192, 160)
    packed = weight_layout.pack_tiles(weight.view(fp8_block.E4M3), torch.arange(4.0).reshape(1, 2, 2))
    tiles = packed.reshape(2, 2, weight_layout.TILE_BYTES)
    for row, column in ((0, 0), (1, 0), (7, 127), (9, 130), (127, 64), (128, 5), (191, 159)):
        inside = column % 128
        at = 128 * (row % 128) + 16 * (inside // 16 ^ row % 8) + inside % 16
        assert int(tiles[row // 128, column // 128, at]) == int(weight[0, row, column])
    assert int(tiles[1, :, 64 * 128 : 128 * 128].max()) == 0
    assert tiles[..., 128 * 128 : 128 * 128 + 4].contiguous().view(torch.float32).flatten().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("at_once", [1, 2, 3])
@pytest.mark.parametrize("mxfp4_storage", [True, False])
def test_copies_for_prefill_hold_the_same_values(
    mxfp4_storage: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_layout, "_CHUNK_WEIGHTS", at_once * 192 * 320)
    blocks, scales = random_mxfp4(192, 320, experts=3)
    weight, scale, _ = fp8_block.from_mxfp4(blocks, scales)
    if mxfp4_storage:
        packed, marker = weight_layout.pack_mxfp4(blocks, scales), torch.empty(0, dtype=torch.uint8)
    else:
        packed, marker = weight_layout.pack_fp8(weight, scale), torch.empty(0)
    tiles, empty, layout = prepare.prefill_experts(packed, marker, (192, 320))
    assert (layout, empty.dtype, empty.numel()) == ("sm90_tiles_v1", torch.float32, 0)
    assert torch.equal(tiles, weight_layout.pack_tiles(weight, scale))
