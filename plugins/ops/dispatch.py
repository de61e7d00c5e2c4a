"""Which implementation an op has on a GPU: one table of (op, name), whose last case raises.

Invariant: nothing is imported before its first call, and an op without an implementation is an error that lists what
was tried. Must not know what an implementation does; the CPU's (cpu.py) is registered with torch directly.

To add a kernel: write a function of the schema's arguments, in order, and add its line to `_TARGETS`. A library that
has to be found first names a probe in `_PROBES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from gptoss_trt.ops.schemas import SCHEMAS

Implementation = Callable[..., None]

_KERNELS = "gptoss_trt.triton_kernels"
INVARIANT = "invariant"  # the implementation whose results do not depend on the batch (invariant.py)
_INVARIANT_OPS = (
    "dense", "dense_fp8", "dense_fp8_add", "dense_fp8_rope_kv_append", "rmsnorm_quant",
    "rmsnorm_route", "moe_route", "moe_combine", "moe_combine_norm", "attention_prefill", "attention_decode",
    "attention_prefill_quant", "attention_decode_quant", "moe_gate_up", "moe_down",
)  # fmt: skip

# (op, implementation's name) -> "module:function".
_TARGETS: dict[tuple[str, str], str] = {
    ("embedding", "triton"): f"{_KERNELS}.dense:embedding",
    ("rmsnorm_quant", "triton"): f"{_KERNELS}.rmsnorm_quant:rmsnorm_quant",
    ("act_quant", "triton"): f"{_KERNELS}.act_quant:act_quant",
    ("dense", "triton"): f"{_KERNELS}.dense:dense",
    ("dense_fp8", "triton"): f"{_KERNELS}.dense:dense_fp8",
    ("dense_fp8_add", "triton"): f"{_KERNELS}.dense:dense_fp8_add",
    ("kv_slots", "triton"): f"{_KERNELS}.rope_kv_append:kv_slots",
    ("rope_kv_append", "triton"): f"{_KERNELS}.rope_kv_append:rope_kv_append",
    ("attention_prefill", "triton"): f"{_KERNELS}.attention:attention_prefill",
    ("attention_decode", "triton"): f"{_KERNELS}.attention:attention_decode",
    ("dense_fp8_rope_kv_append", "triton"): f"{_KERNELS}.rope_kv_append:dense_fp8_rope_kv_append",
    ("attention_prefill_quant", "triton"): f"{_KERNELS}.attention:attention_prefill_quant",
    ("attention_decode_quant", "triton"): f"{_KERNELS}.attention:attention_decode_quant",
    ("moe_route", "triton"): f"{_KERNELS}.moe_route:moe_route",
    ("rmsnorm_route", "triton"): f"{_KERNELS}.rmsnorm_route:rmsnorm_route",
    ("moe_gate_up", "triton"): f"{_KERNELS}.moe_gemm_fp8:moe_gate_up",
    ("moe_down", "triton"): f"{_KERNELS}.moe_gemm_fp8:moe_down",
    ("moe_combine", "triton"): f"{_KERNELS}.rmsnorm_quant:moe_combine",
    ("moe_combine_norm", "triton"): f"{_KERNELS}.rmsnorm_quant:moe_combine_norm",
    ("sample", "triton"): f"{_KERNELS}.sample:sample",
    ("feed", "triton"): f"{_KERNELS}.feed:feed",
    ("attention_prefill", "cuda"): "gptoss_trt.ops.attention:attention_prefill",
    ("attention_decode", "cuda"): "gptoss_trt.ops.attention:attention_decode",
    ("attention_prefill", "flashinfer"): "gptoss_trt.ops.attention_flashinfer:attention_prefill",
    ("attention_decode", "flashinfer"): "gptoss_trt.ops.attention_flashinfer:attention_decode",
    ("attention_prefill_quant", "cuda"): "gptoss_trt.ops.attention:attention_prefill_quant",
    ("attention_decode_quant", "cuda"): "gptoss_trt.ops.attention:attention_decode_quant",
    ("dense_fp8_rope_kv_append", "cuda"): "gptoss_trt.ops.dense:dense_fp8_rope_kv_append",
    ("dense", "cuda"): "gptoss_trt.ops.dense:dense",
    ("dense_fp8", "cuda"): "gptoss_trt.ops.dense:dense_fp8",
    ("dense_fp8_add", "cuda"): "gptoss_trt.ops.dense:dense_fp8_add",
    ("rmsnorm_quant", "cuda"): "gptoss_trt.ops.rmsnorm_quant:rmsnorm_quant",
    ("moe_combine_norm", "cuda"): "gptoss_trt.ops.rmsnorm_quant:moe_combine_norm",
    ("rmsnorm_route", "cuda"): "gptoss_trt.ops.rmsnorm_route:rmsnorm_route",
    ("moe_gate_up", "cuda"): "gptoss_trt.ops.moe_gemm_fp8:moe_gate_up",
    ("moe_down", "cuda"): "gptoss_trt.ops.moe_gemm_fp8:moe_down",
} | {(op, INVARIANT): f"gptoss_trt.ops.invariant:{op}" for op in _INVARIANT_OPS}

# Which layouts of expert weights an implementation reads, for the ops that have the argument: its own first.
_LAYOUTS = {"triton": ("plain",), "cuda": ("sm90_v1", "sm90_tiles_v1"), INVARIANT: ("sm90_v1",)}
_LAYOUT_ARGUMENT = {
    op: names.index("str layout")
    for op, schema in SCHEMAS.items()
    if "str layout" in (names := schema.arguments.split(", "))
}

# Implementation's name -> "module:function" returning None when it can be used here, else the reason why not.
_PROBES: dict[str, str] = dict.fromkeys(("cuda", INVARIANT), "gptoss_trt.ops.library:unusable") | {
    "flashinfer": "gptoss_trt.ops.attention_flashinfer:unusable"
}

# The first that can be used wins. Of the shapes measured, FlashInfer's attention is level with ours at one, else behind
# it (tests/perf/NOTES.md).
PREFERENCE = ("cuda", "triton", "flashinfer")

_pinned: dict[str, str] = {}  # op -> name
_chosen: dict[tuple[str, str | None], Implementation] = {}  # by op and layout


class NoImplementationError(NotImplementedError):
    """An op was called on a device for which nothing usable is registered."""


def register(op: str, name: str, target: str, probe: str | None = None) -> None:
    """Adds implementation `name` of `op`: target is "module:function", probe likewise (see `_PROBES`).

    Raises ValueError for an op that has no schema, a name that PREFERENCE lacks, or a pair that is taken.
    """
    _check_op(op)
    if name not in PREFERENCE:
        raise ValueError(f"implementation is called {name!r}; allowed: {', '.join(PREFERENCE)}")
    if (op, name) in _TARGETS:
        raise ValueError(f"{op} already has an implementation {name!r}: {_TARGETS[op, name]}")
    _TARGETS[op, name] = target
    if probe is not None:
        _PROBES[name] = probe
    _forget(op)


def select(op: str, name: str | None) -> None:
    """Pins the implementation of `op` by name (tests and benchmarks compare them); None returns to PREFERENCE.

    Raises ValueError for an unknown op, NoImplementationError when that implementation cannot be used.
    """
    _check_op(op)
    _pinned.pop(op, None)
    _forget(op)
    if name is not None:
        _resolve(op, (name,), None)
        _pinned[op] = name


def pinned(op: str) -> str | None:
    """The implementation that `select` pinned."""
    return _pinned.get(op)


def be_invariant(wanted: bool) -> None:
    """Pins every op that has one to the implementation whose results do not depend on the batch, or lets go of it and
    leaves other pins alone; comes before a model is loaded. Raises NoImplementationError where it cannot be used."""
    for op in _INVARIANT_OPS:
        if wanted:
            select(op, INVARIANT)
        elif pinned(op) == INVARIANT:
            select(op, None)


def is_invariant() -> bool:
    """Whether be_invariant chose for this process."""
    return all(_pinned.get(op) == INVARIANT for op in _INVARIANT_OPS)


def layout_of(op: str) -> str | None:
    """The layout of expert weights that a GPU call of `op` serves all steps with here, None when it has no
    implementation."""
    return next(iter(layouts_of(op)), None)


def layouts_of(op: str) -> tuple[str, ...]:
    """All layouts of expert weights that a GPU call of `op` reads here."""
    name = preferred(op)
    return () if name is None else _LAYOUTS[name]


def registered() -> dict[str, tuple[str, ...]]:
    """Every op with the names of its GPU implementations, in the order in which they are tried."""
    return {op: tuple(name for name in PREFERENCE if (op, name) in _TARGETS) for op in SCHEMAS}


def preferred(op: str) -> str | None:
    """The name of the implementation that a GPU call of `op` takes here, None when there is none.

    What depends on it, such as a layout of weights, is settled when a model is loaded (prepare.py).
    """
    if op in _pinned:
        return _pinned[op]
    return next((name for name in PREFERENCE if (op, name) in _TARGETS and _unusable(name) is None), None)


def run(op: str, arguments: tuple[Any, ...]) -> None:
    """Calls the chosen implementation of `op`: the pinned one, or the first of PREFERENCE that can be used and reads
    the call's layout. Raises NoImplementationError when there is none."""
    place = _LAYOUT_ARGUMENT.get(op)
    layout = None if place is None else arguments[place]
    implementation = _chosen.get((op, layout))
    if implementation is None:
        names = (_pinned[op],) if op in _pinned else PREFERENCE
        implementation = _chosen[op, layout] = _resolve(op, names, layout)
    implementation(*arguments)


def _forget(op: str) -> None:
    for key in [key for key in _chosen if key[0] == op]:
        del _chosen[key]


def _resolve(op: str, names: tuple[str, ...], layout: str | None) -> Implementation:
    tried = []
    for name in names:
        target = _TARGETS.get((op, name))
        reason = "not registered" if target is None else _unusable(name)
        if reason is None and layout is not None and layout not in _LAYOUTS[name]:
            reason = f"reads layout {' or '.join(_LAYOUTS[name])}, not {layout}"
        if target is not None and reason is None:
            return _load(target)
        tried.append(f"{name}: {reason}")
    raise NoImplementationError(f"gptoss_trt::{op} has no GPU implementation here ({'; '.join(tried)})")


def _unusable(name: str) -> str | None:
    probe = _PROBES.get(name)
    if probe is None:
        return None
    reason: str | None = _load(probe)()
    return reason


def _load(target: str) -> Callable[..., Any]:
    module, _, function = target.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded


def _check_op(op: str) -> None:
    if op not in SCHEMAS:
        raise ValueError(f"there is no op {op!r}; ops: {', '.join(SCHEMAS)}")
