"""The ops that do not depend on the batch: which they are, how they are chosen, what they refuse."""

from __future__ import annotations

import inspect

import pytest
import torch

from gptoss_trt.ops import dispatch
from gptoss_trt.ops.schemas import SCHEMAS


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatch table of a machine where everything can be used, for one test."""
    for name in ("_chosen", "_pinned"):
        monkeypatch.setattr(dispatch, name, dict(getattr(dispatch, name)))
    monkeypatch.setattr(dispatch, "_unusable", lambda _name: None)


def test_all_are_chosen_and_let_go(table: None) -> None:
    before = {op: dispatch.preferred(op) for op in SCHEMAS}
    assert not dispatch.is_invariant()
    dispatch.be_invariant(True)
    assert dispatch.is_invariant()
    chosen = {op for op in SCHEMAS if dispatch.preferred(op) == dispatch.INVARIANT}
    assert {"dense", "dense_fp8", "attention_decode", "attention_prefill", "moe_gate_up", "moe_down"} < chosen
    assert {op for op in SCHEMAS if "norm" in op or op in ("moe_route", "moe_combine")} < chosen
    assert dispatch.layout_of("moe_gate_up") == "sm90_v1"
    dispatch.be_invariant(False)
    assert {op: dispatch.preferred(op) for op in SCHEMAS} == before


def test_other_pins_stay_when_it_was_not_chosen(table: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_load", lambda target: lambda *_: target)
    dispatch.select("attention_decode", "flashinfer")
    dispatch.be_invariant(False)
    assert dispatch.pinned("attention_decode") == "flashinfer" and dispatch.pinned("dense") is None


def test_each_takes_its_schema_s_arguments(table: None) -> None:
    for op in dispatch._INVARIANT_OPS:
        implementation = dispatch._load(dispatch._TARGETS[op, dispatch.INVARIANT])
        inspect.signature(implementation).bind(*SCHEMAS[op].arguments.split(", "))


def test_without_the_library_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_unusable", lambda name: "not built" if name == dispatch.INVARIANT else None)
    with pytest.raises(dispatch.NoImplementationError, match="invariant: not built"):
        dispatch.be_invariant(True)


@pytest.mark.parametrize(
    ("shape", "dtype", "heads"),
    [
        ((4, 2, 64, 64), torch.float8_e4m3fn, 16),
        ((4, 2, 8, 64), torch.bfloat16, 16),
        ((4, 2, 64, 64), torch.bfloat16, 8),
        ((4, 2, 64, 32), torch.bfloat16, 16),
    ],
)
def test_attention_that_it_does_not_take_is_an_error(shape: tuple[int, ...], dtype: torch.dtype, heads: int) -> None:
    from gptoss_trt.ops import attention

    q, cache = torch.empty(1, heads, shape[-1], device="meta"), torch.empty(shape, dtype=dtype, device="meta")
    with pytest.raises(ValueError, match="does not depend on the batch takes bf16 caches"):
        attention._check_fixed(q, cache)
