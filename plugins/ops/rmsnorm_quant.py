"""rmsnorm_quant and moe_combine_norm on libgptoss_trt.so; widths that it does not take go to Triton.

Invariant: which of them runs depends on shapes and dtypes alone, and a token's result does not depend on the others.
Must not know layers.
"""

from __future__ import annotations

import torch

from gptoss_trt.ops import library
from gptoss_trt.ops.library import RmsnormQuantArgs
from gptoss_trt.triton_kernels import rmsnorm_quant as triton_norm

MOST_HIDDEN = 4096
HIDDEN_STEP = 8  # columns
TOP_K = 4

Outputs = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]  # normed, quantised, scales


def takes(hidden: int) -> bool:
    """Whether the library takes rows of so many columns."""
    return hidden <= MOST_HIDDEN and hidden % HIDDEN_STEP == 0


def rmsnorm_quant(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    normed: torch.Tensor | None,
    quantised: torch.Tensor | None,
    scales: torch.Tensor | None,
) -> None:
    """The op of that name; see ops/schemas.py. Runs on the current stream. Raises LibraryError when the call fails."""
    if not len(residual):
        return
    if takes(residual.shape[1]):
        add_and_norm(residual, delta, residual, weight, eps, (normed, quantised, scales))
    else:
        triton_norm.rmsnorm_quant(residual, delta, weight, eps, normed, quantised, scales)


def moe_combine_norm(
    rows: torch.Tensor,
    expert_ids: torch.Tensor,
    first_expert: int,
    num_local_experts: int,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    normed: torch.Tensor | None,
    quantised: torch.Tensor | None,
    scales: torch.Tensor | None,
) -> None:
    """The op of that name; see ops/schemas.py. Runs on the current stream. Raises LibraryError when the call fails."""
    if not len(residual):
        return
    if takes(residual.shape[1]) and rows.shape[1] == TOP_K and rows.dtype == torch.bfloat16:
        args = _arguments(residual, residual, weight, eps, (normed, quantised, scales))
        args.rows, args.expert_ids = rows.data_ptr(), expert_ids.data_ptr()
        args.first_expert, args.local_experts = first_expert, num_local_experts
        _launch(args, residual.device)
    else:
        triton_norm.moe_combine_norm(
            rows, expert_ids, first_expert, num_local_experts, residual, weight, eps, normed, quantised, scales
        )


def add_and_norm(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    updated: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    outputs: Outputs,
) -> None:
    """updated = bf16(residual + delta), and its norm into `outputs`. `updated` may be `residual`; without delta it is
    the residual's copy, or itself. For widths that `takes` takes."""
    args = _arguments(residual, updated, weight, eps, outputs)
    args.delta = _address(delta)
    _launch(args, residual.device)


def _arguments(
    residual: torch.Tensor, updated: torch.Tensor, weight: torch.Tensor, eps: float, outputs: Outputs
) -> RmsnormQuantArgs:
    tokens, hidden = residual.shape
    normed, quantised, scales = outputs
    return RmsnormQuantArgs(
        flags=library.DEPENDENT_LAUNCH,
        tokens=tokens,
        hidden=hidden,
        eps=eps,
        residual=residual.data_ptr(),
        updated=updated.data_ptr(),
        gain=weight.data_ptr(),
        normed=_address(normed),
        quantised=_address(quantised),
        scales=_address(scales),
    )


def _launch(args: RmsnormQuantArgs, device: torch.device) -> None:
    with torch.cuda.device(device):
        library.load().rmsnorm_quant(args, torch.cuda.current_stream(device).cuda_stream)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
