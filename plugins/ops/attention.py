"""attention_prefill and attention_decode, with their output in bf16 or quantised, on libgptoss_trt.so for bf16 caches;
what it does not take goes to Triton.

Invariant: which of the two runs depends on shapes and dtypes alone, so a captured graph fixes it. Must not know layers:
window, scale and tables are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gptoss_trt.ops import library
from gptoss_trt.ops.library import AttentionArgs
from gptoss_trt.triton_kernels import attention as triton_attention

GROUP, HEAD_DIM = 8, 64
DECODE_BLOCKS = (16, 32, 64)  # tokens of a cache block
PREFILL_BLOCK = 64
MAX_PAIRS = 1 << 16  # of token and KV head: tickets of one launch
MAX_QUERIES = 8  # tokens of a sequence that each read its keys for themselves, from the second-level cache
FIXED_PLAN = 4  # of decode: a token's bits depend on its position and keys alone
FEW_TOKENS = 64  # of a ragged step: few enough that cutting their keys into parts beats sharing them


@dataclass(frozen=True)
class Options:
    """What a caller may fix about a launch: the header's plan, parts and flags."""

    plan: int = 0
    parts: int = 0
    flags: int = 0


# Dependent launch is right in a step: the kernels wait for the one ahead before they touch what the step writes. They
# read tables, lengths and older keys before, so who writes those on the same stream puts another kernel between.
DEFAULT = Options(flags=library.DEPENDENT_LAUNCH)

# By device and stream: launches of one stream follow each other, and each leaves its tickets zero.
_tickets: dict[tuple[torch.device, int], torch.Tensor] = {}


def takes_decode(q: torch.Tensor, k_cache: torch.Tensor, sequences: int) -> bool:
    """Whether the library takes a call for a few tokens of each sequence: groups of 8 heads of 64 columns, bf16."""
    fits = q.shape[0] <= MAX_QUERIES * sequences and q.shape[0] * k_cache.shape[1] <= MAX_PAIRS
    return fits and _takes(q, k_cache) and k_cache.shape[2] in DECODE_BLOCKS


def takes_prefill(q: torch.Tensor, k_cache: torch.Tensor) -> bool:
    """Whether the library takes a call for chunks of any length."""
    return _takes(q, k_cache) and k_cache.shape[2] == PREFILL_BLOCK


def _takes(q: torch.Tensor, k_cache: torch.Tensor) -> bool:
    heads, head_dim = q.shape[1:]
    return k_cache.dtype == torch.bfloat16 and head_dim == HEAD_DIM and heads == GROUP * k_cache.shape[1]


def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    first_block: torch.Tensor | None,
    context_lens: torch.Tensor,
    sinks: torch.Tensor,
    window: int,
    scale: float,
    k_scale: float,
    v_scale: float,
    *outputs: torch.Tensor,
    options: Options = DEFAULT,
) -> None:
    """The op of that name, or with two outputs attention_decode_quant; see ops/schemas.py. Runs on the current stream;
    allocates the parts of a cut range. Raises LibraryError when the call fails."""
    if q.shape[0] == 0:  # of no sequences, too
        return
    if options.plan == FIXED_PLAN:
        _check_fixed(q, k_cache)
    elif q.shape[0] % context_lens.shape[0] or not takes_decode(q, k_cache, context_lens.shape[0]):
        triton = (triton_attention.attention_decode, triton_attention.attention_decode_quant)[len(outputs) - 1]
        triton(
            q, k_cache, v_cache, block_table, first_block, context_lens, sinks, window, scale, k_scale, v_scale,
            *outputs,
        )  # fmt: skip
        return
    args = _arguments(
        q, k_cache, v_cache, block_table, first_block, context_lens, sinks, window, scale, outputs, options
    )
    _launch_decode(args, q.device)


def attention_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    first_block: torch.Tensor | None,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    sinks: torch.Tensor,
    window: int,
    scale: float,
    k_scale: float,
    v_scale: float,
    *outputs: torch.Tensor,
    options: Options = DEFAULT,
) -> None:
    """The op of that name, or with two outputs attention_prefill_quant; see ops/schemas.py. Runs on the current stream;
    few tokens, as of drafts to be checked, take the decode kernel, unless a plan is asked for. Raises LibraryError when
    the call fails."""
    few = q.shape[0] <= FEW_TOKENS and options.plan == 0 and takes_decode(q, k_cache, context_lens.shape[0])
    if options.plan == FIXED_PLAN:
        _check_fixed(q, k_cache)
        few = True
    elif not few and not takes_prefill(q, k_cache):
        triton = (triton_attention.attention_prefill, triton_attention.attention_prefill_quant)[len(outputs) - 1]
        triton(
            q, k_cache, v_cache, block_table, first_block, query_start, context_lens, sinks, window, scale, k_scale,
            v_scale, *outputs,
        )  # fmt: skip
        return
    args = _arguments(
        q, k_cache, v_cache, block_table, first_block, context_lens, sinks, window, scale, outputs, options
    )
    args.query_start = query_start.data_ptr()
    if few:
        _launch_decode(args, q.device)
        return
    with torch.cuda.device(q.device):
        library.load().attention_prefill(args, torch.cuda.current_stream(q.device).cuda_stream)


attention_decode_quant = attention_decode
attention_prefill_quant = attention_prefill


def _check_fixed(q: torch.Tensor, k_cache: torch.Tensor) -> None:
    """Raises ValueError for what FIXED_PLAN does not serve: there is no other kernel for it."""
    pairs = q.shape[0] * k_cache.shape[1]
    if not _takes(q, k_cache) or k_cache.shape[2] not in DECODE_BLOCKS or pairs > MAX_PAIRS:
        raise ValueError(
            f"attention that does not depend on the batch takes bf16 caches in blocks of {DECODE_BLOCKS}, groups "
            f"of {GROUP} heads of {HEAD_DIM} columns and {MAX_PAIRS} pairs of token and KV head, not a {k_cache.dtype} "
            f"cache {tuple(k_cache.shape)} and queries {tuple(q.shape)}"
        )


def _launch_decode(args: AttentionArgs, device: torch.device) -> None:
    loaded = library.load()
    stream = torch.cuda.current_stream(device).cuda_stream
    size = loaded.attention_workspace(args)
    workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
    if workspace is not None:
        args.tickets = _tickets_of(device, stream).data_ptr()
        args.workspace, args.workspace_bytes = workspace.data_ptr(), size
    with torch.cuda.device(device):
        loaded.attention_decode(args, stream)


def _arguments(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    first_block: torch.Tensor | None,
    context_lens: torch.Tensor,
    sinks: torch.Tensor,
    window: int,
    scale: float,
    outputs: tuple[torch.Tensor, ...],
    options: Options,
) -> AttentionArgs:
    tokens, heads, head_dim = q.shape
    blocks, kv_heads, block_tokens, _ = k_cache.shape
    return AttentionArgs(
        flags=options.flags,
        plan=options.plan,
        parts=options.parts,
        tokens=tokens,
        sequences=context_lens.shape[0],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
        blocks=blocks,
        table_width=block_table.shape[1],
        window=window,
        scale=scale,
        q=q.data_ptr(),
        k_cache=k_cache.data_ptr(),
        v_cache=v_cache.data_ptr(),
        block_table=block_table.data_ptr(),
        first_block=None if first_block is None else first_block.data_ptr(),
        context_lens=context_lens.data_ptr(),
        sinks=sinks.data_ptr(),
        out=outputs[0].data_ptr(),
        out_scale=outputs[1].data_ptr() if len(outputs) > 1 else None,
    )


def _tickets_of(device: torch.device, stream: int) -> torch.Tensor:
    """MAX_PAIRS zeros, made once a stream."""
    key = (device, stream)
    if key not in _tickets:
        _tickets[key] = torch.zeros(MAX_PAIRS, dtype=torch.int32, device=device)
    return _tickets[key]
