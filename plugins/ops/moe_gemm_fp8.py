"""moe_gate_up and moe_down on Hopper: torch tensors to calls of libgptoss_trt.so (layout sm90_v1).

Invariant: a call allocates nothing after one of its kind of as many tokens (workspaces are kept by stream, shape and
plan, and serve calls of fewer tokens), so it can be captured in a CUDA graph once it has run eagerly. A call without
options of its own follows the plan (plan.py). Must not know layers or engines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gptoss_trt.ops import library, plan
from gptoss_trt.ops.library import MoeGemmArgs, OutDtype, Plan, Product, ScaleMode, Storage
from gptoss_trt.ops.weight_layout import LayoutError, expert_bytes, tiles_bytes

LAYOUT = "sm90_v1"
TILES = "sm90_tiles_v1"  # FP8, of calls with many rows an expert
PACKED = (Storage.MXFP4, Storage.FP8)  # in LAYOUT
_SCALE_MODES = {0: ScaleMode.STATIC, 128: ScaleMode.BLOCK128, 64: ScaleMode.BLOCK64}
# Of a plan file; FP8 tiles lie in a copy that the caller chooses, or there is none.
_PLANS = {"auto": Plan.AUTO, "decode": Plan.WGMMA, "prefill": Plan.PREFILL, "tiles": Plan.PREFILL}
_OUT_DTYPES = {torch.bfloat16: OutDtype.BF16, torch.float32: OutDtype.FP32}


@dataclass(frozen=True)
class Options:
    """What a caller may fix about a product: the header's plan, k_split and flags."""

    plan: Plan = Plan.AUTO
    k_split: int = 0
    flags: int = 0


# Dependent launch is always right: the kernel waits for the one ahead before it touches memory.
DEFAULT = Options(flags=library.DEPENDENT_LAUNCH)


@dataclass(frozen=True)
class _Shape:
    """What the layout of a workspace depends on, but for the tokens that it serves."""

    product: Product
    storage: Storage
    scale_mode: ScaleMode
    out_dtype: OutDtype
    experts: int
    top_k: int
    n: int
    k: int
    options: Options


# By stream: the offsets of its last moe_gate_up, until moe_down takes them. Whatever runs behind that product began
# after its wait, and so after the routing was written: moe_down need not wait for it (ROUTING_READY).
_routed: dict[int, int] = {}
# For each kind of call the workspaces of its sizes, by the tokens that they serve, the last one the largest. A graph
# may have been captured with any of them.
_workspaces: dict[tuple[_Shape, torch.device, int], dict[int, torch.Tensor]] = {}


def moe_gate_up(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    _weight_scale: torch.Tensor,
    bias: torch.Tensor,
    expert_offsets: torch.Tensor,
    _active_experts: torch.Tensor,
    row_slots: torch.Tensor,
    top_k: int,
    limit: float,
    alpha: float,
    layout: str,
    h_group: int,
    h: torch.Tensor,
    h_scale: torch.Tensor | None,
    options: Options = DEFAULT,
) -> None:
    """The schema's moe_gate_up; weight u8 [E, bytes] as `weight_layout.pack_mxfp4` or `pack_fp8` makes it, whose scales
    are inside. Runs on the current stream. Raises LayoutError for another layout, LibraryError when the call fails."""
    n, k = 2 * h.shape[1], x.shape[1]
    shape = _shape(Product.GATE_UP, weight, layout, h_group, OutDtype.NONE, (top_k, n, k, x.shape[0]), options)
    args = _arguments(shape, x.shape[0])
    args.limit, args.alpha = limit, alpha
    args.x, args.x_scale = x.data_ptr(), x_scale.data_ptr()
    args.weights, args.bias = weight.data_ptr(), bias.data_ptr()
    args.expert_offsets, args.row_slots = expert_offsets.data_ptr(), row_slots.data_ptr()
    args.out, args.out_scale = h.data_ptr(), _pointer(h_scale)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    _launch(shape, args, x.device, stream, options.flags)
    _routed[stream] = expert_offsets.data_ptr()


def moe_down(
    h: torch.Tensor,
    h_scale: torch.Tensor | None,
    weight: torch.Tensor,
    _weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    expert_weights: torch.Tensor,
    expert_offsets: torch.Tensor,
    _active_experts: torch.Tensor,
    row_slots: torch.Tensor,
    layout: str,
    h_group: int,
    out: torch.Tensor,
    options: Options = DEFAULT,
) -> None:
    """The schema's moe_down; weight as for moe_gate_up. Runs on the current stream. Raises LayoutError for another
    layout, LibraryError when the call fails."""
    tokens, top_k, n = out.shape
    sizes = (top_k, n, h.shape[1], tokens)
    shape = _shape(Product.DOWN, weight, layout, h_group, _OUT_DTYPES[out.dtype], sizes, options)
    args = _arguments(shape, tokens)
    args.x, args.x_scale = h.data_ptr(), _pointer(h_scale)
    args.weights, args.bias = weight.data_ptr(), _pointer(bias)
    args.expert_offsets, args.row_slots = expert_offsets.data_ptr(), row_slots.data_ptr()
    args.expert_weights, args.out = expert_weights.data_ptr(), out.data_ptr()
    stream = torch.cuda.current_stream(h.device).cuda_stream
    ready = _routed.pop(stream, None) == expert_offsets.data_ptr() and options is DEFAULT
    _launch(shape, args, h.device, stream, options.flags | (library.ROUTING_READY if ready else 0))


def storage_of(weight: torch.Tensor, n: int, k: int) -> Storage:
    """Which storage the packed weight u8 [E, bytes] of [n, k] has, by its size. Raises LayoutError for neither."""
    for storage in PACKED:
        if weight.dtype == torch.uint8 and weight.shape[1:] == (expert_bytes(n, k, storage is Storage.MXFP4),):
            return storage
    sizes = ", ".join(f"{s.name.lower()} {expert_bytes(n, k, s is Storage.MXFP4)}" for s in PACKED)
    raise LayoutError(f"{LAYOUT} weight of [{n}, {k}] is {weight.dtype} {tuple(weight.shape)}; bytes: {sizes}")


def _tiles_of(weight: torch.Tensor, n: int, k: int) -> Storage:
    if weight.dtype == torch.uint8 and weight.shape[1:] == (tiles_bytes(n, k),):
        return Storage.FP8_TILES
    size = tiles_bytes(n, k)
    raise LayoutError(f"{TILES} weight of [{n}, {k}] is {weight.dtype} {tuple(weight.shape)}; bytes: {size}")


def _shape(
    product: Product,
    weight: torch.Tensor,
    layout: str,
    group: int,
    out_dtype: OutDtype,
    sizes: tuple[int, int, int, int],
    options: Options,
) -> _Shape:
    if layout not in (LAYOUT, TILES):
        raise LayoutError(f"the CUDA expert product reads layout {LAYOUT} or {TILES}, not {layout!r}")
    top_k, n, k, tokens = sizes
    storage = storage_of(weight, n, k) if layout == LAYOUT else _tiles_of(weight, n, k)
    experts = weight.shape[0]
    fixed = replace(options, flags=0)  # flags do not change a workspace
    if options is DEFAULT and layout == LAYOUT:
        widths = (k, n // 2) if product is Product.GATE_UP else (n, k)  # hidden, intermediate
        choices = plan.choices("experts", (storage.name.lower(), experts, *widths))
        fixed = fixed if choices is None else Options(_PLANS[choices.at(tokens)])
    return _Shape(product, storage, _SCALE_MODES[group], out_dtype, experts, top_k, n, k, fixed)


def _arguments(shape: _Shape, tokens: int) -> MoeGemmArgs:
    return MoeGemmArgs(
        product=shape.product,
        storage=shape.storage,
        scale_mode=shape.scale_mode,
        plan=shape.options.plan,
        k_split=shape.options.k_split,
        out_dtype=shape.out_dtype,
        experts=shape.experts,
        tokens=tokens,
        top_k=shape.top_k,
        n=shape.n,
        k=shape.k,
    )


def _launch(shape: _Shape, args: MoeGemmArgs, device: torch.device, stream: int, flags: int) -> None:
    loaded = library.load()
    made = _workspaces.setdefault((shape, device, stream), {})
    args.max_tokens = next(reversed(made), 0)
    fresh = not made or args.max_tokens < args.tokens
    if fresh:
        args.max_tokens = 1 << max(0, args.tokens - 1).bit_length()  # few sizes, whatever the batch
        size = loaded.moe_gemm_workspace(args)
        made[args.max_tokens] = torch.empty(size, dtype=torch.uint8, device=device)
    workspace = made[args.max_tokens]
    args.flags = flags
    args.workspace, args.workspace_bytes = workspace.data_ptr(), workspace.numel()
    with torch.cuda.device(device):
        if fresh:
            loaded.moe_gemm_prepare(args, stream)
        loaded.moe_gemm(args, stream)


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
