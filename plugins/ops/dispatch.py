"""Which implementation an op has on a GPU: one table of (op, name), whose last case raises.

Invariant: nothing is imported before its first call, and an op without an implementation is an error that lists what
was tried. Must not know what an implementation does; the CPU's (cpu.py) is registered with torch directly.

To add a Triton kernel: write `triton_kernels/<op>.py` with a function of the schema's arguments, in order, and add its
line to `_TARGETS`. A library that has to be found first names a probe in `_PROBES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from gptoss_trt.ops.schemas import SCHEMAS

Implementation = Callable[..., None]

_KERNELS = "gptoss_trt.triton_kernels"

# (op, implementation's name) -> "module:function".
_TARGETS: dict[tuple[str, str], str] = {
    ("embedding", "triton"): f"{_KERNELS}.dense:embedding",
    ("rmsnorm_quant", "triton"): f"{_KERNELS}.rmsnorm_quant:rmsnorm_quant",
    ("act_quant", "triton"): f"{_KERNELS}.act_quant:act_quant",
    ("dense", "triton"): f"{_KERNELS}.dense:dense",
    ("dense_fp8", "triton"): f"{_KERNELS}.dense:dense_fp8",
    ("kv_slots", "triton"): f"{_KERNELS}.rope_kv_append:kv_slots",
    ("rope_kv_append", "triton"): f"{_KERNELS}.rope_kv_append:rope_kv_append",
    ("attention_prefill", "triton"): f"{_KERNELS}.attention:attention_prefill",
    ("attention_decode", "triton"): f"{_KERNELS}.attention:attention_decode",
    ("moe_route", "triton"): f"{_KERNELS}.moe_route:moe_route",
    ("moe_gate_up", "triton"): f"{_KERNELS}.moe_gemm_fp8:moe_gate_up",
    ("moe_down", "triton"): f"{_KERNELS}.moe_gemm_fp8:moe_down",
    ("moe_combine", "triton"): f"{_KERNELS}.rmsnorm_quant:moe_combine",
    ("moe_combine_norm", "triton"): f"{_KERNELS}.rmsnorm_quant:moe_combine_norm",
}

# Implementation's name -> "module:function" returning None when it can be used here, else the reason why not.
_PROBES: dict[str, str] = {}

PREFERENCE = ("cuda", "triton")  # the first that can be used wins

_chosen: dict[str, tuple[str, Implementation]] = {}  # by op: the name and what it calls


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
    _chosen.pop(op, None)


def select(op: str, name: str | None) -> None:
    """Pins the implementation of `op` by name (tests and benchmarks compare them); None returns to PREFERENCE.

    Raises ValueError for an unknown op, NoImplementationError when that implementation cannot be used.
    """
    _check_op(op)
    if name is None:
        _chosen.pop(op, None)
    else:
        _chosen[op] = _resolve(op, (name,))


def registered() -> dict[str, tuple[str, ...]]:
    """Every op with the names of its GPU implementations, in the order in which they are tried."""
    return {op: tuple(name for name in PREFERENCE if (op, name) in _TARGETS) for op in SCHEMAS}


def preferred(op: str) -> str | None:
    """The name of the implementation that a GPU call of `op` takes here, None when there is none.

    What depends on it, such as a layout of weights, is settled when a model is loaded (prepare.py).
    """
    if op in _chosen:
        return _chosen[op][0]
    return next((name for name in PREFERENCE if (op, name) in _TARGETS and _unusable(name) is None), None)


def run(op: str, arguments: tuple[Any, ...]) -> None:
    """Calls the chosen implementation of `op`. Raises NoImplementationError when there is none."""
    chosen = _chosen.get(op)
    if chosen is None:
        chosen = _chosen[op] = _resolve(op, PREFERENCE)
    chosen[1](*arguments)


def _resolve(op: str, names: tuple[str, ...]) -> tuple[str, Implementation]:
    tried = []
    for name in names:
        target = _TARGETS.get((op, name))
        reason = "not registered" if target is None else _unusable(name)
        if target is not None and reason is None:
            return name, _load(target)
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
