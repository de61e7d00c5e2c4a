"""Programmatic dependent launch: a kernel starts while the one before it runs, and waits before it reads.

Invariant: every kernel launched with `DEPENDENT` calls `wait` in all its programs, ahead of its first store and of
its first load of anything that a step writes. So a kernel that ends has seen its predecessor end, and whoever waits for
it has waited for all kernels before it. Ahead of `wait` a kernel may read weights, which never change, and what was
written before the step: a step's first kernel (kv_slots) and all of torch's own are launched without `DEPENDENT`.
The product of q, k and v reads kv_slots' slots there too: the kernel behind kv_slots (embedding) has no `DEPENDENT`
either, so slots are written before anything dependent starts.
"""

from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401 - the interpreter looks for it in every function that it calls
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gptoss_trt.triton_kernels.numerics import INTERPRETED

# Launch options. The interpreter drops what it does not know; a card below sm_90 is refused long before.
DEPENDENT = {"launch_pdl": True}


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
