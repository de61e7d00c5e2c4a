"""rmsnorm_route on libgptoss_trt.so: steps of decode in one kernel, prompts of few experts in one and a sorting kernel,
of many with cuBLAS's product and the library's norm and sorting; what the library does not take goes to Triton.

Invariant: which of them runs depends on shapes and the plan (plan.py) alone, so a captured graph fixes it. Must not
know layers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from gptoss_trt.ops import library, plan
from gptoss_trt.ops import rmsnorm_quant as library_norm
from gptoss_trt.ops.library import RmsnormRouteArgs, RouteRowsArgs
from gptoss_trt.triton_kernels import moe_route as triton_choice
from gptoss_trt.triton_kernels import rmsnorm_route as triton_route

# The built-in rule, where no plan names the shape.
# Measured on an H200: at 8 tokens Triton takes 5.8 us for 32 experts and 9.3 for 128, the library 5.7 and 7.2; at one
# Triton takes 3.
LEAST_TOKENS = 8
# Experts, and up to how many tokens the clusters of one kernel run side by side: 10.3 us for 256 tokens of 32 experts,
# where the pieces take 14.3, and 19.0 for 256 of 128 experts, where they take 15.1.
MOST_FEW_TOKENS = ((32, 256), (128, 128), (sys.maxsize, 0))
# Of more tokens than RESIDENT_TOKENS the library takes norm, product and choice in one kernel, where the router fits
# into a multiprocessor's shared memory.
RESIDENT_TOKENS, RESIDENT_EXPERTS, RESIDENT_HIDDEN = 512, 32, 3072
MOST_TOKENS = 1 << 15
MOST_EXPERTS = 128
TOP_K = 4

# By device and stream: launches of one stream follow each other, and each leaves its ticket zero.
_tickets: dict[tuple[torch.device, int], torch.Tensor] = {}


def fits(tokens: int, hidden: int, experts: int, top_k: int) -> bool:
    """Whether the library can have a part in a call."""
    sizes = library_norm.takes(hidden) and TOP_K <= experts <= MOST_EXPERTS and top_k == TOP_K
    return sizes and 0 < tokens <= MOST_TOKENS


def kernels_for(tokens: int, hidden: int, experts: int, top_k: int) -> str:
    """`triton`, `cluster` (one kernel of the library) or `pieces` (several, and cuBLAS)."""
    if not fits(tokens, hidden, experts, top_k):
        return "triton"
    choices = plan.choices("rmsnorm_route", (experts, hidden))
    if choices is not None:
        return choices.at(tokens)
    if tokens < LEAST_TOKENS:
        return "triton"
    return "cluster" if tokens <= next(most for up_to, most in MOST_FEW_TOKENS if experts <= up_to) else "pieces"


def is_resident(tokens: int, hidden: int, experts: int) -> bool:
    """Whether `pieces` of a call are the library's kernel with the router in shared memory."""
    return tokens > RESIDENT_TOKENS and experts <= RESIDENT_EXPERTS and hidden <= RESIDENT_HIDDEN


def rmsnorm_route(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    router: torch.Tensor,
    router_bias: torch.Tensor,
    token_count: torch.Tensor | None,
    first_expert: int,
    num_local_experts: int,
    updated: torch.Tensor,
    quantised: torch.Tensor,
    scales: torch.Tensor,
    *routed: torch.Tensor,
) -> None:
    """The op of that name; see ops/schemas.py. Runs on the current stream. For many tokens allocates the norm and the
    logits. Raises LibraryError when a call fails."""
    run = _KERNELS[kernels_for(len(residual), residual.shape[1], len(router), routed[0].shape[1])]
    run(
        residual, delta, weight, eps, router, router_bias, token_count, first_expert, num_local_experts, updated,
        quantised, scales, *routed,
    )  # fmt: skip


def rmsnorm_route_library(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    router: torch.Tensor,
    router_bias: torch.Tensor,
    token_count: torch.Tensor | None,
    first_expert: int,
    num_local_experts: int,
    updated: torch.Tensor,
    quantised: torch.Tensor,
    scales: torch.Tensor,
    *routed: torch.Tensor,
) -> None:
    """By the library alone: one kernel up to RESIDENT_TOKENS, above them two where `is_resident`. A token's result does
    not depend on the others."""
    expert_ids, expert_weights, expert_offsets, active_experts, row_slots = routed
    stream = torch.cuda.current_stream(residual.device).cuda_stream
    args = RmsnormRouteArgs(
        flags=library.DEPENDENT_LAUNCH,
        tokens=residual.shape[0],
        hidden=residual.shape[1],
        experts=router.shape[0],
        first_expert=first_expert,
        local_experts=num_local_experts,
        eps=eps,
        residual=residual.data_ptr(),
        delta=None if delta is None else delta.data_ptr(),
        gain=weight.data_ptr(),
        router=router.data_ptr(),
        bias=router_bias.data_ptr(),
        token_count=None if token_count is None else token_count.data_ptr(),
        updated=updated.data_ptr(),
        quantised=quantised.data_ptr(),
        scales=scales.data_ptr(),
        expert_ids=expert_ids.data_ptr(),
        expert_weights=expert_weights.data_ptr(),
        expert_offsets=expert_offsets.data_ptr(),
        active_experts=active_experts.data_ptr(),
        row_slots=row_slots.data_ptr(),
        ticket=_ticket_of(residual.device, stream).data_ptr(),
    )
    with torch.cuda.device(residual.device):
        library.load().rmsnorm_route(args, stream)


def rmsnorm_route_many(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    router: torch.Tensor,
    router_bias: torch.Tensor,
    token_count: torch.Tensor | None,
    first_expert: int,
    num_local_experts: int,
    updated: torch.Tensor,
    quantised: torch.Tensor,
    scales: torch.Tensor,
    *routed: torch.Tensor,
) -> None:
    """Norm, product, choice and sorting one after the other, or the library's kernel for the first three."""
    tokens, experts = len(residual), len(router)
    if is_resident(tokens, residual.shape[1], experts):
        rmsnorm_route_library(
            residual, delta, weight, eps, router, router_bias, token_count, first_expert, num_local_experts, updated,
            quantised, scales, *routed,
        )  # fmt: skip
        return
    expert_ids, expert_weights, *rows = routed
    normed = torch.empty_like(residual)
    library_norm.add_and_norm(residual, delta, updated, weight, eps, (normed, quantised, scales))
    logits = torch.empty((tokens, experts), dtype=torch.float32, device=residual.device)
    torch.mm(normed, router.T, out_dtype=torch.float32, out=logits)
    triton_choice.choose(logits[None], router_bias, token_count, expert_ids, expert_weights)
    sort_rows(expert_ids, first_expert, num_local_experts, *rows)


_KERNELS: dict[str, Callable[..., None]] = {
    "triton": triton_route.rmsnorm_route,
    "cluster": rmsnorm_route_library,
    "pieces": rmsnorm_route_many,
}


def sort_rows(
    expert_ids: torch.Tensor,
    first_expert: int,
    num_local_experts: int,
    expert_offsets: torch.Tensor,
    active_experts: torch.Tensor,
    row_slots: torch.Tensor,
) -> None:
    """The rows of moe_route's last three outputs from its first, int32 [T, 4], T from 1 to MOST_TOKENS."""
    args = RouteRowsArgs(
        flags=library.DEPENDENT_LAUNCH,
        tokens=len(expert_ids),
        first_expert=first_expert,
        local_experts=num_local_experts,
        expert_ids=expert_ids.data_ptr(),
        expert_offsets=expert_offsets.data_ptr(),
        active_experts=active_experts.data_ptr(),
        row_slots=row_slots.data_ptr(),
    )
    with torch.cuda.device(expert_ids.device):
        library.load().route_rows(args, torch.cuda.current_stream(expert_ids.device).cuda_stream)


def _ticket_of(device: torch.device, stream: int) -> torch.Tensor:
    """A zero, made once a stream."""
    key = (device, stream)
    if key not in _tickets:
        _tickets[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return _tickets[key]
