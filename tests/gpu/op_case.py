"""What tests of operators against their CPU implementations share: the real models' widths, poisoned outputs, both
devices' results, comparisons row by row and bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import gptoss_trt.ops  # noqa: F401 - registers torch.ops.gptoss_trt

OPS = torch.ops.gptoss_trt
E4M3 = torch.float8_e4m3fn
H, INTER, HEADS, KV_HEADS, D, BLOCK_TOKENS = 2880, 2880, 64, 8, 64, 64


def bf16(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).to(torch.bfloat16)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.empty(*shape, dtype=dtype)
    out.view(torch.uint8).fill_(0x7B)
    return out


def both(op: str, inputs: Sequence[Any], outputs: Sequence[torch.Tensor | None]) -> tuple[list[Any], list[Any]]:
    """The outputs of `op` on the CPU and on the GPU, from the same inputs and the same poison."""

    def copy(device: str) -> list[Any]:
        moved = [x.to(device).clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        outs = [out.clone().to(device) if out is not None else None for out in outputs]
        getattr(OPS, op)(*moved, *outs)
        return [out.cpu() if out is not None else None for out in outs]

    want, got = copy("cpu"), copy("cuda")
    torch.cuda.synchronize()
    return got, want


def assert_rows(got: torch.Tensor, want: torch.Tensor, eps: float) -> None:
    got, want = got.float(), want.float()
    worst = (got - want).abs().amax(-1) / want.abs().amax(-1).clamp(min=1e-6)
    assert float(worst.max()) < eps, f"worst row {int(worst.argmax())}: {float(worst.max()):.3g}"


def exact(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def adversarial(tokens: int, width: int) -> torch.Tensor:
    x = torch.randn(tokens, width)
    x[0] = 0
    x[1, width // 2] = 1e4
    x[2] *= 1e-30
    return x.to(torch.bfloat16)
