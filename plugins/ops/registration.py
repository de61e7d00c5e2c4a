"""Registers every op of `schemas.py` with torch: checks, then the CPU's, the GPU's or (fake) no implementation.

Invariant: importing this module once makes all of `torch.ops.gptoss_trt.*` callable on CPU, CUDA and meta tensors. Uses
Library.define and impl (about 1 us a call), not custom_op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gptoss_trt.ops import cpu, dispatch
from gptoss_trt.ops.checks import check, check_call
from gptoss_trt.ops.schemas import NAMESPACE, SCHEMAS


def _on_cpu(op: str) -> Callable[..., None]:
    implementation: Callable[..., None] = getattr(cpu, op)

    def call(*arguments: Any) -> None:
        check(op, arguments)
        implementation(*arguments)

    return call


def _on_gpu(op: str) -> Callable[..., None]:
    def call(*arguments: Any) -> None:
        check(op, arguments)
        dispatch.run(op, arguments)

    return call


def _fake(op: str) -> Callable[..., None]:
    def call(*arguments: Any) -> None:
        check_call(op, arguments)  # symbolic sizes cannot be remembered

    return call


_library: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
for _op, _schema in SCHEMAS.items():
    _library.define(_schema.definition)
    _library.impl(_op, _on_cpu(_op), "CPU")
    _library.impl(_op, _on_gpu(_op), "CUDA")
    _library.impl(_op, _fake(_op), "Meta")

ops: Any = getattr(torch.ops, NAMESPACE)
