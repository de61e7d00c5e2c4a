"""Which products go to the library's kernel for few tokens: a function of shapes alone."""

from __future__ import annotations

import pytest
import torch

from gptoss_trt.ops.library import DenseFormat

BF16, FP8 = DenseFormat.BF16, DenseFormat.FP8


@pytest.mark.parametrize(
    ("dense_format", "tokens", "rows", "columns", "segments", "taken"),
    [
        (BF16, 1, 5120, 2880, [], True),
        (BF16, 8, 2880, 4096, [], True),
        (BF16, 9, 2880, 4096, [], False),
        (BF16, 0, 2880, 4096, [], False),
        (BF16, 1, 201088, 2880, [], False),  # the lm head
        (BF16, 1, 64, 4128, [], False),
        (BF16, 1, 64, 2896, [], False),
        (FP8, 4, 2880, 4096, [], True),
        (FP8, 5, 2880, 4096, [], False),
        (FP8, 1, 201088, 2880, [], False),
        (FP8, 1, 5120, 2880, [4096, 512, 512], True),
        (FP8, 1, 100, 2880, [], True),
        (FP8, 1, 108, 2880, [36, 36, 36], False),
        (FP8, 1, 64, 2848, [], False),
    ],
)
def test_takes(
    dense_format: DenseFormat, tokens: int, rows: int, columns: int, segments: list[int], taken: bool
) -> None:
    from gptoss_trt.ops import dense  # brings Triton, whose interpreter the interpret tier chooses first

    x = torch.empty(tokens, columns, device="meta")
    weight = torch.empty(rows, columns, device="meta")
    assert dense.takes(dense_format, x, weight, segments) == taken


@pytest.mark.parametrize(
    ("tokens", "columns", "tiles", "taken"),
    [
        (511, 4096, "", False),
        (512, 4096, "", True),
        (512, 4096, "few", True),
        (512, 4096, "64/1", False),
        (512, 4096, "128/1", True),
        (512, 4096, "128/2", False),
        (8192, 4096, "256/1", True),
        (8192, 4104, "256/1", False),
    ],
)
def test_which_products_end_with_an_addition(tokens: int, columns: int, tiles: str, taken: bool) -> None:
    from gptoss_trt.ops import dense

    x, weight = torch.empty(tokens, columns, device="meta"), torch.empty(2880, columns, device="meta")
    assert dense.takes_addition(x, weight, [], dense._tiles_of(tiles)) == taken


def test_no_tokens_ask_nothing_of_the_library() -> None:
    """Nor is there one on this machine."""
    from gptoss_trt.ops import dense

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    fp8, bf16, ints = torch.float8_e4m3fn, torch.bfloat16, empty(0, dtype=torch.int32)
    segments = [512, 64, 64]
    x = empty(0, 256, dtype=fp8), empty(2, 0, dtype=torch.float32)
    weight = empty(640, 256, dtype=fp8), empty(6, 2, dtype=torch.float32)
    dense.dense_fp8(*x, *weight, segments, None, empty(0, 640, dtype=bf16))
    dense.dense_fp8_add(*x, *weight, segments, None, empty(0, 640, dtype=bf16))
    angles, q, cache = empty(4, 64, dtype=torch.float32), empty(0, 8, 64, dtype=bf16), empty(1, 1, 64, 64, dtype=bf16)
    dense.dense_fp8_rope_kv_append(*x, *weight, segments, None, ints, angles, ints, 1.0, 1.0, q, cache, cache)
