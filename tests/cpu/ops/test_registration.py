"""The table of ops, as torch sees it: schemas, fakes, argument errors, and the dispatch table's last case."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gptoss_trt.ops import checks, dispatch, ops
from gptoss_trt.ops.checks import ArgumentError
from gptoss_trt.ops.dispatch import NoImplementationError
from gptoss_trt.ops.schemas import SCHEMAS
from gptoss_trt.ops.shapes import TENSORS
from gptoss_trt.reference.tolerance import TOLERANCES

_BF16, _F32, _I32, _FP8 = torch.bfloat16, torch.float32, torch.int32, torch.float8_e4m3fn


@pytest.mark.parametrize("op", SCHEMAS)
def test_schema_marks_what_it_mutates(op: str) -> None:
    schema = getattr(ops, op).default._schema
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert written
    assert not schema.returns
    assert tuple(a.name for a in schema.arguments) == checks._ARGUMENT_NAMES[op]


@pytest.mark.parametrize("op", SCHEMAS)
def test_every_op_runs_on_cpu_cuda_and_meta(op: str) -> None:
    for key in ("CPU", "CUDA", "Meta"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"gptoss_trt::{op}", key)
    assert op in TOLERANCES
    tensors = {tensor.name for tensor in TENSORS[op]}
    assert tensors <= set(checks._ARGUMENT_NAMES[op])


def test_fakes_check_and_do_nothing() -> None:
    meta = torch.device("meta")
    x = torch.empty(3, 40, dtype=_BF16, device=meta)
    weight = torch.empty(7, 40, dtype=_BF16, device=meta)
    out = torch.empty(3, 7, dtype=_BF16, device=meta)
    assert ops.dense(x, weight, None, out) is None
    with pytest.raises(ArgumentError, match=r"dense: out has shape \(3, 7\).*N = 8"):
        ops.dense(x, torch.empty(8, 40, dtype=_BF16, device=meta), None, out)


def test_argument_errors_name_op_argument_and_limit() -> None:
    x, weight, out = torch.zeros(3, 40, dtype=_BF16), torch.zeros(7, 40, dtype=_BF16), torch.zeros(3, 7, dtype=_BF16)
    cases = {
        r"dense: x is float32, not bfloat16": (x.float(), weight, None, out),
        r"dense: weight has shape \(7, 39\), expected \[N, K\] with K = 40": (x, weight[:, :39], None, out),
        r"dense: weight has shape \(7,\)": (x, weight[:, 0], None, out),
        r"dense: x is not contiguous: shape \(3, 40\), strides \(1, 3\)": (x.T.contiguous().T, weight, None, out),
        r"dense: out is int32, not bfloat16 or float32": (x, weight, None, out.int()),
        r"dense: bias has shape \(6,\)": (x, weight, torch.zeros(6, dtype=_BF16), out),
    }
    for message, arguments in cases.items():
        with pytest.raises(ArgumentError, match=message):
            ops.dense(*arguments)


def test_rules_between_arguments() -> None:
    x = torch.zeros(2, 256, dtype=_BF16)
    codes = torch.zeros(2, 256, dtype=_FP8)
    with pytest.raises(ArgumentError, match="group is 96; allowed: 128, 64, 0"):
        ops.act_quant(x, 96, codes, torch.zeros(3, 2))
    with pytest.raises(ArgumentError, match="None for group 0"):
        ops.act_quant(x, 0, codes, torch.zeros(2, 2))
    with pytest.raises(ArgumentError, match=r"scales has shape \(2, 2\), expected \[4, 2\]"):
        ops.act_quant(x, 64, codes, torch.zeros(2, 2))
    norm = torch.ones(256, dtype=_BF16)
    with pytest.raises(ArgumentError, match="together or not at all"):
        ops.rmsnorm_quant(x, None, norm, 1e-5, None, codes, None)
    with pytest.raises(ArgumentError, match="neither normed nor quantised"):
        ops.rmsnorm_quant(x, None, norm, 1e-5, None, None, None)
    cache = torch.zeros(2, 1, 128, 32, dtype=_BF16)
    with pytest.raises(ArgumentError, match="block_tokens is 128, allowed are 1 to 64"):
        ints = torch.zeros(1, dtype=_I32)
        q = torch.zeros(1, 2, 32, dtype=_BF16)
        ops.attention_decode(
            q,
            cache,
            cache,
            torch.zeros(1, 1, dtype=_I32),
            None,
            ints,
            norm[:2].contiguous(),
            0,
            0.1,
            1.0,
            1.0,
            q.clone(),
        )


def test_a_check_that_passed_is_not_a_pass_for_other_shapes() -> None:
    x, weight = torch.zeros(3, 40, dtype=_BF16), torch.zeros(7, 40, dtype=_BF16)
    ops.dense(x, weight, None, torch.zeros(3, 7, dtype=_BF16))
    with pytest.raises(ArgumentError):
        ops.dense(x, weight, None, torch.zeros(3, 8, dtype=_BF16))
    with pytest.raises(ArgumentError):
        ops.dense(x, weight, None, torch.zeros(7, 3, dtype=_BF16).T)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("_TARGETS", "_PROBES", "_chosen", "_pinned"):
        monkeypatch.setattr(dispatch, name, {})
    yield


@pytest.mark.usefixtures("registry")
def test_an_op_without_implementation_says_what_was_tried() -> None:
    with pytest.raises(
        NoImplementationError, match=r"gptoss_trt::dense has no GPU implementation here \(cuda: not reg"
    ):
        dispatch.run("dense", ())


calls: list[tuple[object, ...]] = []


def _implementation(*arguments: object) -> None:
    calls.append(arguments)


def _other(*arguments: object) -> None:
    calls.append(("other", *arguments))


def _absent() -> str:
    return "libgptoss_trt.so is not here"


@pytest.mark.usefixtures("registry")
def test_preference_probes_and_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = {"here:triton": _implementation, "here:cuda": _other, "here:absent": _absent}
    monkeypatch.setattr(dispatch, "_load", targets.__getitem__)
    calls.clear()
    dispatch.register("dense", "triton", "here:triton")
    dispatch.run("dense", (1,))
    dispatch.register("dense", "cuda", "here:cuda")
    dispatch.run("dense", (2,))
    assert dispatch.preferred("dense") == "cuda"
    dispatch.select("dense", "triton")
    assert dispatch.preferred("dense") == "triton"
    dispatch.run("dense", (3,))
    dispatch.select("dense", None)
    assert calls == [(1,), ("other", 2), (3,)]
    assert dispatch.registered()["dense"] == ("cuda", "triton")
    dispatch.register("embedding", "cuda", "here:cuda", probe="here:absent")
    with pytest.raises(NoImplementationError, match=r"cuda: libgptoss_trt\.so is not here; triton: not registered"):
        dispatch.run("embedding", ())
    assert dispatch.preferred("embedding") is None
    with pytest.raises(ValueError, match="already has an implementation"):
        dispatch.register("dense", "cuda", "here:other")
    with pytest.raises(ValueError, match="there is no op 'dens'"):
        dispatch.register("dens", "cuda", "here:cuda")
    with pytest.raises(ValueError, match="allowed: cuda, triton"):
        dispatch.register("dense", "tritn", "here:cuda")


@pytest.mark.usefixtures("registry")
def test_expert_products_go_to_who_reads_their_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_load", {"here:triton": _implementation, "here:cuda": _other}.__getitem__)
    calls.clear()
    dispatch.register("moe_down", "triton", "here:triton")
    place = checks._ARGUMENT_NAMES["moe_down"].index("layout")
    plain, packed = [None] * place + ["plain"], [None] * place + ["sm90_v1"]
    with pytest.raises(NoImplementationError, match="cuda: not registered; triton: reads layout plain, not sm90_v1"):
        dispatch.run("moe_down", tuple(packed))
    dispatch.register("moe_down", "cuda", "here:cuda")
    assert dispatch.preferred("moe_down") == "cuda"
    dispatch.run("moe_down", tuple(plain))
    dispatch.run("moe_down", tuple(packed))
    assert [call[0] for call in calls] == [None, "other"]
    dispatch.select("moe_down", "cuda")
    with pytest.raises(NoImplementationError, match="cuda: reads layout sm90_v1 or sm90_tiles_v1, not plain"):
        dispatch.run("moe_down", tuple(plain))


def test_the_compiled_library_is_asked_for_before_it_is_used() -> None:
    """Without the library the table says so, and Triton's kernel is preferred."""
    reason = dispatch._unusable("cuda")
    expected = "cuda" if reason is None else "triton"
    assert dispatch.preferred("moe_gate_up") == expected
    assert dispatch.preferred("embedding") == "triton"  # has no other
