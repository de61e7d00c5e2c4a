"""attention_prefill and attention_decode by FlashInfer's kernels with sinks (XQA; FA3), where that package is installed
and has them for the shape: a second implementation, never a dependency.

Invariant: caches are read as they lie, since [blocks, kv_heads, block_tokens, head_dim] is FlashInfer's HND; a call
that its kernels do not take goes to the library. Must not know layers, nor when this implementation is the faster one.

Its pages begin at the first block that a sequence keeps, so positions are counted from there: a mask by distance does
not change. XQA needs no plan and runs in a captured graph. FA3 plans on the host for the lengths of a step, which have
to be read back from the GPU: once a call, and not while a graph is captured.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from gptoss_trt.ops import library

log = logging.getLogger(__name__)

PACKAGE = "flashinfer"
LEAST = (0, 7)  # version: XQA with sinks and a window, FA3 with sinks in blocks of any stride
BLOCKS = (16, 32, 64)  # tokens of a cache block
SCRATCH_BYTES = 16 << 20  # XQA: at most one part a multiprocessor, a few KiB each; FA3 keeps its plan elsewhere
SEMAPHORES = 1 << 16  # of sequence and KV head

Shape = tuple[int, int, int, int, bool]  # heads, KV heads, head_dim, tokens of a block, whether there is a window

_held: dict[Any, Any] = {}  # by device and stream: workspaces and wrappers
_wide_sinks: Any = WeakIdKeyDictionary()  # tensor -> (its version, itself in fp32)
_kept_plans: dict[Any, Plan] | None = None


def _library_attention() -> Any:
    """Imported when it is called: it needs Triton, which torch's CPU build comes without."""
    return importlib.import_module("gptoss_trt.ops.attention")


def unusable() -> str | None:
    """Why FlashInfer cannot be called here, or None (a probe for the dispatch table; imports the package)."""
    return _unusable()


@functools.cache
def _unusable() -> str | None:
    try:
        package = importlib.import_module(PACKAGE)
    except Exception as error:  # a package for another CUDA or torch fails in its own ways
        return f"{PACKAGE} cannot be imported ({type(error).__name__}: {error}); pip install gptoss-trt[{PACKAGE}]"
    version = str(getattr(package, "__version__", "0"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < LEAST:
        return f"{PACKAGE} is of version {version}; {'.'.join(map(str, LEAST))} or later has the kernels"
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        return f"{PACKAGE}'s kernels are asked of compute capability 9.0 only"
    return library.unusable()  # what serves the other calls


def shape_of(q: torch.Tensor, k_cache: torch.Tensor, window: int) -> Shape:
    """What a kernel is built for."""
    return q.shape[1], k_cache.shape[1], q.shape[2], k_cache.shape[2], window > 0


def missing(op: str, shape: Shape) -> str | None:
    """Why FlashInfer has no kernel of `op` for a bf16 cache of this shape, or None; builds it where its cache does not
    hold it, which takes minutes."""
    reason = _unusable()
    if reason is not None:
        return reason
    heads, kv_heads, head_dim, block_tokens, _ = shape
    if heads % kv_heads or head_dim % 16 or block_tokens not in BLOCKS:
        return f"no kernel for {heads} heads over {kv_heads}, {head_dim} columns and blocks of {block_tokens} tokens"
    return _build(op, shape)


@functools.cache
def _build(op: str, shape: Shape) -> str | None:
    try:
        _BUILDERS[op](shape)
    except Exception as error:  # a compiler's, a loader's or the package's own
        log.warning("FlashInfer's %s cannot be built for %s: %s", op, shape, error)
        return f"{type(error).__name__}: {error}"
    return None


def _build_decode(shape: Shape) -> None:
    heads, kv_heads, head_dim, block_tokens, windowed = shape
    bf16 = torch.bfloat16
    xqa = importlib.import_module(f"{PACKAGE}.xqa")
    xqa.get_xqa_module(bf16, bf16, block_tokens, head_dim, heads // kv_heads, windowed, bf16, 1)


def _build_prefill(shape: Shape) -> None:
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    _wrapper(device, shape)


_BUILDERS: dict[str, Callable[[Shape], None]] = {
    "attention_decode": _build_decode, "attention_prefill": _build_prefill,
}  # fmt: skip


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
) -> None:
    """The op of that name; see ops/schemas.py. Several tokens a sequence and caches other than bf16 go to the
    library. Runs on the current stream."""
    shape = shape_of(q, k_cache, window)
    sequences = context_lens.shape[0]
    fits = q.shape[0] == sequences and sequences * shape[1] <= SEMAPHORES and k_cache.dtype == torch.bfloat16
    if not fits or missing("attention_decode", shape) is not None:
        _library_attention().attention_decode(
            q, k_cache, v_cache, block_table, first_block, context_lens, sinks, window, scale, k_scale, v_scale, out
        )
        return
    block_tokens = k_cache.shape[2]
    lengths = context_lens if first_block is None else torch.sub(context_lens, first_block, alpha=block_tokens)
    scratch, semaphores = _workspace(q.device)
    importlib.import_module(f"{PACKAGE}.xqa").xqa(
        q.unsqueeze(1), k_cache, v_cache, block_table, lengths.view(torch.uint32).unsqueeze(1), out.unsqueeze(1),
        scratch, semaphores, shape[1], block_tokens,
        sinks=_wide(sinks).view(shape[1], -1),
        q_scale=scale * shape[2] ** 0.5,  # the kernel divides by that root
        sliding_win_size=window, kv_layout="HND",
    )  # fmt: skip


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
) -> None:
    """The op of that name; see ops/schemas.py. Waits for the stream, to read the lengths. Captured calls, few tokens
    and caches other than bf16 go to the library."""
    shape = shape_of(q, k_cache, window)
    plan = None
    if k_cache.dtype == torch.bfloat16 and missing("attention_prefill", shape) is None:
        plan = _plan(shape, q.device, block_table, first_block, query_start, context_lens, window)
    if plan is None:
        _library_attention().attention_prefill(
            q, k_cache, v_cache, block_table, first_block, query_start, context_lens, sinks, window, scale, k_scale,
            v_scale, out,
        )  # fmt: skip
        return
    used = plan.tokens
    if used < len(out):
        out[used:].zero_()
    if used:
        plan.wrapper.run(q[:used], (k_cache, v_cache), _wide(sinks), scale, out=out[:used])


@dataclass(frozen=True)
class Pages:
    """A step's sequences that have queries, as FlashInfer counts them: prefix sums, and the rows of the table."""

    query_start: list[int]
    page_start: list[int]
    last_page_tokens: list[int]
    rows: list[int]


def pages_of(
    query_start: Sequence[int], context_lens: Sequence[int], first_block: Sequence[int], block_tokens: int
) -> Pages:
    """Pages of each sequence from its first kept block to its last; sequences without queries are left out."""
    rows = [row for row in range(len(context_lens)) if query_start[row + 1] > query_start[row]]
    counts = [-(-context_lens[row] // block_tokens) - first_block[row] for row in rows]
    fresh = (query_start[row + 1] - query_start[row] for row in rows)
    return Pages(
        list(itertools.accumulate(fresh, initial=0)),
        list(itertools.accumulate(counts, initial=0)),
        [(context_lens[row] - 1) % block_tokens + 1 for row in rows],
        rows,
    )


@dataclass(frozen=True)
class Plan:
    """A wrapper that is ready for the lengths of a step, and the number of tokens that are no padding."""

    wrapper: Any
    tokens: int


@contextmanager
def kept_plans() -> Iterator[None]:
    """For measurements: inside, a plan is made once for each window and number of tokens and holds for all calls,
    captured ones too. Lengths and tables must not change."""
    global _kept_plans  # noqa: PLW0603 (one measurement at a time)
    _kept_plans = {}
    try:
        yield
    finally:
        _kept_plans = None


def _plan(
    shape: Shape,
    device: torch.device,
    block_table: torch.Tensor,
    first_block: torch.Tensor | None,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    window: int,
) -> Plan | None:
    """None while a graph is captured and no plan is kept."""
    key = (shape, window, device)
    if _kept_plans is not None and key in _kept_plans:
        return _kept_plans[key]
    if capturing():
        return None
    heads, kv_heads, head_dim, block_tokens, _ = shape
    sequences = len(context_lens)
    first = torch.zeros_like(context_lens) if first_block is None else first_block
    numbers = torch.cat((query_start, context_lens, first)).tolist()  # waits
    starts, contexts, firsts = numbers[: sequences + 1], numbers[sequences + 1 : -sequences], numbers[-sequences:]
    pages = pages_of(starts, contexts, firsts, block_tokens)
    plan = Plan(_wrapper(device, shape), pages.query_start[-1])
    if pages.rows:
        counts = [end - begin for begin, end in itertools.pairwise(pages.page_start)]
        held = [block_table[row, :count] for row, count in zip(pages.rows, counts, strict=True)]
        plan.wrapper.plan(
            *(torch.tensor(part, dtype=torch.int32) for part in (pages.query_start, pages.page_start)),
            torch.cat(held), torch.tensor(pages.last_page_tokens, dtype=torch.int32),
            heads, kv_heads, head_dim, block_tokens,
            causal=True, window_left=window - 1, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip
    if _kept_plans is not None:
        _kept_plans[key] = plan
    return plan


def _wrapper(device: torch.device, shape: Shape) -> Any:
    _, _, head_dim, _, windowed = shape

    def make() -> Any:
        return importlib.import_module(PACKAGE).BatchAttentionWithAttentionSinkWrapper(
            torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=device), kv_layout="HND", backend="fa3",
            q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, head_dim_qk=head_dim, head_dim_vo=head_dim,
            window_left=0 if windowed else -1,
        )  # fmt: skip

    return _hold(("wrapper", shape, *_place(device)), make)


def _workspace(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """XQA's scratch and its semaphores, which each launch leaves zero."""

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=device)
        return scratch, torch.zeros(SEMAPHORES, dtype=torch.int32, device=device).view(torch.uint32)

    made: tuple[torch.Tensor, torch.Tensor] = _hold(("workspace", *_place(device)), make)
    return made


def capturing() -> bool:
    """Whether launches go into a graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _place(device: torch.device) -> tuple[Any, ...]:
    """Launches of one stream follow each other, and may share memory."""
    return (device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)


def _hold(key: Any, make: Callable[[], Any]) -> Any:
    """Made once, except in a captured graph, whose memory is its own."""
    if key in _held:
        return _held[key]
    made = make()
    if not capturing():
        _held[key] = made
    return made


def _wide(sinks: torch.Tensor) -> torch.Tensor:
    """In fp32, as FlashInfer reads them; converted once for each tensor and what was written into it."""
    version = 0 if sinks.is_inference() else sinks._version
    known: tuple[int, torch.Tensor] | None = _wide_sinks.get(sinks)
    if known is None or known[0] != version:
        known = version, sinks.float()
        if not capturing():
            _wide_sinks[sinks] = known
    return known[1]
