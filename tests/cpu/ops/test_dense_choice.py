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
