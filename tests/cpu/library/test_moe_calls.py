"""What the torch side hands to the library: arguments, workspaces and flags, with a library that only writes down."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from gptoss_trt.ops import library, moe_gemm_fp8, weight_layout
from gptoss_trt.ops.library import MoeGemmArgs, OutDtype, Plan, Product, ScaleMode, Storage
from gptoss_trt.ops.moe_gemm_fp8 import DEFAULT, Options, moe_down, moe_gate_up
from gptoss_trt.ops.weight_layout import LayoutError

EXPERTS, HIDDEN, INTER, TOP_K = 4, 128, 64, 2


class Recorder:
    """Stands in for the library: remembers each call's arguments."""

    def __init__(self) -> None:
        self.calls: list[MoeGemmArgs] = []
        self.prepared = 0

    def moe_gemm_workspace(self, args: MoeGemmArgs) -> int:
        return 64 * args.max_tokens

    def moe_gemm_prepare(self, args: MoeGemmArgs, stream: int) -> None:
        self.prepared += 1

    def moe_gemm(self, args: MoeGemmArgs, stream: int) -> None:
        self.calls.append(args)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    fake = Recorder()
    monkeypatch.setattr(library, "load", lambda: fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    monkeypatch.setattr(moe_gemm_fp8, "_workspaces", {})
    monkeypatch.setattr(moe_gemm_fp8, "_routed", {})
    return fake


def e4m3(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)


def packed(n: int, k: int, mxfp4_storage: bool = True) -> torch.Tensor:
    return torch.zeros(EXPERTS, weight_layout.expert_bytes(n, k, mxfp4_storage), dtype=torch.uint8)


OFFSETS = torch.zeros(EXPERTS + 1, dtype=torch.int32)
NONE = torch.empty(0)


def gate_up(
    tokens: int,
    options: Options = DEFAULT,
    layout: str = "sm90_v1",
    offsets: torch.Tensor = OFFSETS,
    weight: torch.Tensor | None = None,
) -> None:
    slots = torch.zeros(tokens * TOP_K, dtype=torch.int32)
    bias = torch.zeros(EXPERTS, 2 * INTER, dtype=torch.bfloat16)
    h = e4m3(tokens * TOP_K, INTER)
    if weight is None:
        weight = packed(2 * INTER, HIDDEN)
    moe_gate_up(
        e4m3(tokens, HIDDEN), torch.ones(1, tokens), weight, NONE, bias, offsets, NONE, slots, TOP_K, 7.0, 1.702,
        layout, 0, h, None, options,
    )  # fmt: skip


def down(tokens: int, options: Options = DEFAULT, dtype: torch.dtype = torch.bfloat16, fp8: bool = False) -> None:
    slots = torch.zeros(tokens * TOP_K, dtype=torch.int32)
    out = torch.zeros(tokens, TOP_K, HIDDEN, dtype=dtype)
    scales = torch.ones(1, tokens * TOP_K)
    moe_down(
        e4m3(tokens * TOP_K, INTER), scales, packed(HIDDEN, INTER, not fp8), NONE, None, torch.ones(tokens, TOP_K),
        OFFSETS, NONE, slots, "sm90_v1", 128, out, options,
    )  # fmt: skip


def test_arguments_of_gate_up(recorder: Recorder) -> None:
    gate_up(3)
    (args,) = recorder.calls
    assert (args.product, args.storage, args.scale_mode) == (Product.GATE_UP, Storage.MXFP4, ScaleMode.STATIC)
    assert (args.experts, args.tokens, args.max_tokens, args.top_k) == (EXPERTS, 3, 4, TOP_K)
    assert (args.n, args.k, args.plan) == (2 * INTER, HIDDEN, Plan.AUTO)
    assert args.limit == 7.0 and abs(args.alpha - 1.702) < 1e-6
    assert args.bias and args.x_scale and not args.out_scale and not args.expert_weights


def test_arguments_of_down(recorder: Recorder) -> None:
    down(3, dtype=torch.float32, fp8=True)
    (args,) = recorder.calls
    assert (args.product, args.storage, args.scale_mode) == (Product.DOWN, Storage.FP8, ScaleMode.BLOCK128)
    assert (args.n, args.k, args.out_dtype) == (HIDDEN, INTER, OutDtype.FP32)
    assert args.expert_weights and args.x_scale and not args.bias


def test_tiles_are_a_storage_of_their_own(recorder: Recorder) -> None:
    weight = torch.zeros(EXPERTS, weight_layout.tiles_bytes(2 * INTER, HIDDEN), dtype=torch.uint8)
    gate_up(3, layout="sm90_tiles_v1", weight=weight)
    (args,) = recorder.calls
    assert (args.storage, args.scale_mode, args.plan) == (Storage.FP8_TILES, ScaleMode.STATIC, Plan.AUTO)


def test_a_workspace_is_prepared_once_for_few_sizes(recorder: Recorder) -> None:
    for tokens in (5, 6, 8, 7):
        gate_up(tokens)
    assert recorder.prepared == 1
    gate_up(9)
    gate_up(8, Options(k_split=2))
    assert recorder.prepared == 3


def test_the_largest_workspace_serves_calls_of_fewer_tokens(recorder: Recorder) -> None:
    for tokens in (8, 600, 3, 1024, 1025):
        gate_up(tokens)
    assert [args.max_tokens for args in recorder.calls] == [8, 1024, 1024, 1024, 2048]
    assert [args.workspace_bytes for args in recorder.calls] == [64 * args.max_tokens for args in recorder.calls]
    first, *others = [args.workspace for args in recorder.calls]
    assert others[0] == others[1] == others[2] != first  # one stays for graphs that were captured with it
    assert recorder.prepared == 3


def test_down_reads_ahead_only_behind_its_own_gate_up(recorder: Recorder) -> None:
    dependent, both = library.DEPENDENT_LAUNCH, library.DEPENDENT_LAUNCH | library.ROUTING_READY
    down(2)
    gate_up(2)
    down(2)
    down(2)  # the offsets may have been written again since
    gate_up(2, offsets=OFFSETS.clone())
    down(2)
    gate_up(2)
    down(2, Options())
    assert [args.flags for args in recorder.calls] == [
        dependent, dependent, both, dependent, dependent, dependent, dependent, 0,
    ]  # fmt: skip


def test_refuses_another_layout_and_size(recorder: Recorder) -> None:
    with pytest.raises(LayoutError, match="reads layout sm90_v1 or sm90_tiles_v1, not 'plain'"):
        gate_up(1, layout="plain")
    with pytest.raises(LayoutError, match=r"sm90_tiles_v1 weight of \[128, 128\] is .*; bytes: 16512"):
        gate_up(1, layout="sm90_tiles_v1")
    with pytest.raises(LayoutError, match=r"bytes: mxfp4 \d+, fp8 \d+"):
        moe_gemm_fp8.storage_of(torch.zeros(1, 5, dtype=torch.uint8), 64, 64)
