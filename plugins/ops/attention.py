"""attention_prefill and attention_decode on libgptoss_trt.so for bf16 caches; what it does not take goes to Triton.

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
MAX_PAIRS = 1 << 16  # of sequence and KV head: tickets of one launch


@dataclass(frozen=True)
class Options:
    """What a caller may fix about a launch: the header's plan, parts and flags."""

    plan: int = 0
    parts: int = 0
    flags: int = 0


# Dependent launch is always right: the kernels wait for the one ahead before they touch what a step writes.
DEFAULT = Options(flags=library.DEPENDENT_LAUNCH)

# By device and stream: launches of one stream follow each other, and each leaves its tickets zero.
_tickets: dict[tuple[torch.device, int], torch.Tensor] = {}


def takes_decode(q: torch.Tensor, k_cache: torch.Tensor, sequences: int) -> bool:
    """Whether the library's kernel takes a decode call of these tensors: one token each, groups of 8 heads of 64."""
    return q.shape[0] == sequences and _takes(q, k_cache) and k_cache.shape[2] in DECODE_BLOCKS


def takes_prefill(q: torch.Tensor, k_cache: torch.Tensor) -> bool:
    """Whether the library's kernel takes a prefill call of these tensors."""
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
    out: torch.Tensor,
    options: Options = DEFAULT,
) -> None:
    """The op of that name; see ops/schemas.py. Runs on the current stream; allocates the parts of a cut range.
    Raises LibraryError when the call fails."""
    if not takes_decode(q, k_cache, context_lens.shape[0]):
        triton_attention.attention_decode(
            q, k_cache, v_cache, block_table, first_block, context_lens, sinks, window, scale, k_scale, v_scale, out
        )
        return
    loaded = library.load()
    args = _arguments(q, k_cache, v_cache, block_table, first_block, context_lens, sinks, window, scale, out, options)
    stream = torch.cuda.current_stream(q.device).cuda_stream
    size = loaded.attention_workspace(args)
    workspace = torch.empty(size, dtype=torch.uint8, device=q.device) if size else None
    if workspace is not None:
        args.tickets = _tickets_of(q.device, stream, context_lens.shape[0] * k_cache.shape[1]).data_ptr()
        args.workspace, args.workspace_bytes = workspace.data_ptr(), size
    with torch.cuda.device(q.device):
        loaded.attention_decode(args, stream)


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
    out: torch.Tensor,
    options: Options = DEFAULT,
) -> None:
    """The op of that name; see ops/schemas.py. Runs on the current stream. Raises LibraryError when the call fails."""
    if not takes_prefill(q, k_cache):
        triton_attention.attention_prefill(
            q, k_cache, v_cache, block_table, first_block, query_start, context_lens, sinks, window, scale, k_scale,
            v_scale, out,
        )  # fmt: skip
        return
    args = _arguments(q, k_cache, v_cache, block_table, first_block, context_lens, sinks, window, scale, out, options)
    args.query_start = query_start.data_ptr()
    with torch.cuda.device(q.device):
        library.load().attention_prefill(args, torch.cuda.current_stream(q.device).cuda_stream)


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
    out: torch.Tensor,
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
        out=out.data_ptr(),
    )


def _tickets_of(device: torch.device, stream: int, pairs: int) -> torch.Tensor:
    """Zeros, made once a stream. Raises ValueError for more pairs of sequence and KV head than there are tickets."""
    if pairs > MAX_PAIRS:
        raise ValueError(f"attention_decode of {pairs} pairs of sequence and KV head; the limit is {MAX_PAIRS}")
    key = (device, stream)
    if key not in _tickets:
        _tickets[key] = torch.zeros(MAX_PAIRS, dtype=torch.int32, device=device)
    return _tickets[key]
