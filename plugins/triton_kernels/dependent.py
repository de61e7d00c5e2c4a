"""Programmatic dependent launch: a kernel starts while the one before it runs, and waits before it reads.

Invariant: every kernel launched with `DEPENDENT` calls `wait` in all its programs, ahead of its first store and of
its first load of anything that a step writes. So a kernel that ends has seen its predecessor end, and whoever waits for
it has waited for all kernels before it. Ahead of `wait` a kernel may read weights, which never change, and what was
written before the step: a step's first kernel (kv_slots) and all of torch's own are launched without `DEPENDENT`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gptoss_trt.triton_kernels.numerics import INTERPRETED

# Launch options. The interpreter drops what it does not know; a card below sm_90 is refused long before.
DEPENDENT = {"launch_pdl": True}
LINE_BYTES = tl.constexpr(128)
PREFETCH_LINES = tl.constexpr(128)  # a line for each thread of four warps


@triton.jit
def wait():  # type: ignore[no-untyped-def]
    """Until the kernel before this one, and so all before it, has ended and its stores can be seen."""
    if not INTERPRETED:
        gdc_wait()


@triton.jit
def release():  # type: ignore[no-untyped-def]
    """Lets the next kernel start once all programs of this one have come here (or ended)."""
    if not INTERPRETED:
        gdc_launch_dependents()


@triton.jit
def prefetch(start, valid_bytes, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Asks the L2 cache for BYTES from pointer `start`, of which valid_bytes may be read. Returns at once."""
    if not INTERPRETED:
        line = tl.arange(0, PREFETCH_LINES) * LINE_BYTES
        for offset in tl.static_range(0, BYTES, PREFETCH_LINES * LINE_BYTES):
            # A line is asked for twice rather than one behind the end: inline assembly has no mask.
            address = start.to(tl.int64) + tl.minimum(offset + line, tl.maximum(valid_bytes - 1, 0))
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
            )
