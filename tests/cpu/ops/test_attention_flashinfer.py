"""What surrounds FlashInfer's kernels, without the package: a stand-in computes what their documentation says, so that
layout, windows, scale and sinks are compared with the reference; and when it is registered, chosen and left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from gptoss_trt.ops import attention as library_attention
from gptoss_trt.ops import attention_flashinfer, dispatch, library
from gptoss_trt.ops.dispatch import NoImplementationError
from gptoss_trt.reference.attention import PagedKv
from gptoss_trt.reference.attention import attention_decode as reference_decode
from gptoss_trt.reference.attention import attention_prefill as reference_prefill
from gptoss_trt.reference.tolerance import assert_close

HEADS, KV_HEADS, D, SCALE = 16, 2, 32, 0.25
I32 = torch.int32


def one_sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, scale: float, left: int
) -> torch.Tensor:
    """q [n, heads, D] at the end of k, v [KV heads, keys, D]; `left` keys before a query's own, or all if negative."""
    n, keys, group = len(q), k.shape[1], q.shape[1] // len(k)
    scores = torch.einsum("nhd,hkd->hnk", q.double(), k.double().repeat_interleave(group, 0)) * scale
    behind = torch.arange(keys - n, keys).unsqueeze(1) - torch.arange(keys)
    scores = scores.masked_fill((behind < 0) | ((behind > left) if left >= 0 else False), float("-inf"))
    with_sink = torch.cat((scores, sinks.double().view(-1, 1, 1).expand(-1, n, 1)), -1)
    weights = with_sink.softmax(-1)[..., :-1]
    return torch.einsum("hnk,hkd->nhd", weights, v.double().repeat_interleave(group, 0))


def gathered(cache: torch.Tensor, pages: list[int], tokens: int) -> torch.Tensor:
    """[KV heads, tokens, D] of an HND cache."""
    return cache[pages].transpose(0, 1).flatten(1, 2)[:, :tokens]


class Wrapper:
    """BatchAttentionWithAttentionSinkWrapper: plan(), then run(q, (k, v), sinks, sm_scale)."""

    made = 0

    def __init__(self, workspace: torch.Tensor, **options: Any) -> None:
        assert options["kv_layout"] == "HND" and options["head_dim_qk"] == options["head_dim_vo"] == D
        self.windowed = options["window_left"] >= 0
        type(self).made += 1

    def plan(
        self, query_start: torch.Tensor, page_start: torch.Tensor, pages: torch.Tensor, last: torch.Tensor,
        heads: int, kv_heads: int, head_dim: int, page_size: int, **options: Any,
    ) -> None:  # fmt: skip
        assert options["causal"] and (options["window_left"] >= 0) == self.windowed
        assert (heads, kv_heads, head_dim) == (HEADS, KV_HEADS, D)
        self.starts, self.pages, self.last = query_start.tolist(), page_start.tolist(), last.tolist()
        self.indices, self.page_size, self.left = pages.tolist(), page_size, options["window_left"]

    def run(
        self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], sinks: torch.Tensor, scale: float, *,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        assert len(q) == self.starts[-1] and sinks.dtype == torch.float32
        for s, last in enumerate(self.last):
            pages = self.indices[self.pages[s] : self.pages[s + 1]]
            tokens = (len(pages) - 1) * self.page_size + last
            rows = slice(self.starts[s], self.starts[s + 1])
            k, v = (gathered(cache, pages, tokens) for cache in caches)
            out[rows] = one_sequence(q[rows], k, v, sinks, scale, self.left).to(out.dtype)


def xqa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor,
    scratch: torch.Tensor, semaphores: torch.Tensor, kv_heads: int, page_size: int, *, sinks: torch.Tensor,
    q_scale: float, sliding_win_size: int, kv_layout: str,
) -> None:  # fmt: skip
    """flashinfer.xqa.xqa for one token a sequence."""
    assert kv_layout == "HND" and k.shape[1:3] == (kv_heads, page_size) and q.shape == out.shape
    assert lengths.dtype == semaphores.dtype == torch.uint32 and lengths.shape == (len(q), 1)
    assert sinks.dtype == torch.float32 and sinks.shape == (kv_heads, q.shape[2] // kv_heads)
    for s, (tokens,) in enumerate(lengths.tolist()):
        pages = table[s, : -(-tokens // page_size)].tolist()
        keys, values = (gathered(cache, pages, tokens) for cache in (k, v))
        scale, left = q_scale / q.shape[-1] ** 0.5, sliding_win_size - 1
        out[s] = one_sequence(q[s], keys, values, sinks, scale, left).to(out.dtype) if tokens else 0


Handed = list[str]


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> Handed:
    """Calls that go to the library."""
    calls: Handed = []
    for op in ("attention_decode", "attention_prefill"):
        monkeypatch.setattr(library_attention, op, lambda *_, op=op: calls.append(op))
    return calls


def forget() -> None:
    attention_flashinfer._unusable.cache_clear()
    attention_flashinfer._build.cache_clear()
    attention_flashinfer._held.clear()
    for op in ("attention_decode", "attention_prefill"):
        dispatch.select(op, None)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, handed: Handed) -> Iterator[ModuleType]:
    module, kernels = ModuleType("flashinfer"), ModuleType("flashinfer.xqa")
    module.__version__ = "0.7.4"  # type: ignore[attr-defined]
    module.BatchAttentionWithAttentionSinkWrapper = Wrapper  # type: ignore[attr-defined]
    kernels.xqa, kernels.get_xqa_module = xqa, lambda *_: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setitem(sys.modules, "flashinfer.xqa", kernels)
    monkeypatch.setattr(library, "unusable", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    forget()
    yield module
    forget()


class Case:
    """Sequences in shuffled blocks; with a window only its blocks are kept, and what no query may see is NaN."""

    def __init__(self, contexts: list[int], fresh: list[int], window: int, block: int, padding: int = 0) -> None:
        torch.manual_seed(1)
        total = sum(-(-context // block) for context in contexts) + 1
        order = torch.randperm(total).tolist()
        self.k, self.v = (torch.full((total, KV_HEADS, block, D), float("nan")) for _ in range(2))
        self.table = torch.full((len(contexts), 1 + max(-(-c // block) for c in contexts)), -1, dtype=I32)
        lows = [max(0, c - n - window + 1) // block if window else 0 for c, n in zip(contexts, fresh, strict=True)]
        for s, (context, low) in enumerate(zip(contexts, lows, strict=True)):
            for entry in range(low, -(-context // block)):
                held = min(block, context - entry * block)
                self.table[s, entry - low] = page = order.pop()
                self.k[page, :, :held], self.v[page, :, :held] = torch.randn(2, KV_HEADS, held, D)
        self.k, self.v = self.k.to(torch.bfloat16), self.v.to(torch.bfloat16)
        self.first = torch.tensor(lows, dtype=I32) if window else None
        self.contexts, self.window = torch.tensor(contexts, dtype=I32), window
        self.starts = torch.tensor([0, *fresh]).cumsum(0).to(I32)
        self.q = torch.randn(sum(fresh) + padding, HEADS, D).to(torch.bfloat16)
        self.sinks = (torch.randn(HEADS) + 3).to(torch.bfloat16)

    def call(self, op: str) -> torch.Tensor:
        out = torch.full_like(self.q, 77.0)
        starts = (self.starts,) if op == "attention_prefill" else ()
        implementation = getattr(attention_flashinfer, op)
        implementation(self.q, self.k, self.v, self.table, self.first, *starts, self.contexts, self.sinks, self.window,
                       SCALE, 1.0, 1.0, out)  # fmt: skip
        return out

    def want(self, op: str) -> torch.Tensor:
        kv, how = PagedKv(self.k, self.v, self.table, self.first), {"window": self.window, "scale": SCALE}
        if op == "attention_decode":
            return reference_decode(self.q, kv, self.contexts, self.sinks, **how)  # type: ignore[arg-type]
        return reference_prefill(self.q, kv, self.starts, self.contexts, self.sinks, **how)  # type: ignore[arg-type]

    def check(self, op: str) -> None:
        assert_close(op, self.call(op), self.want(op).to(torch.bfloat16))


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("window", [0, 32, 128])
@pytest.mark.parametrize("block", [16, 64])
def test_decode_reads_our_caches_as_they_lie(window: int, block: int, handed: Handed) -> None:
    contexts = [1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 300, 0]
    Case(contexts, [1] * len(contexts), window, block).check("attention_decode")
    assert not handed


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("window", [0, 32, 128])
@pytest.mark.parametrize("block", [16, 64])
def test_prefill_of_chunks_behind_kept_blocks(window: int, block: int, handed: Handed) -> None:
    case = Case([300, 1, 129, 0, 70, 200], [300, 1, 5, 0, 0, 65], window, block, padding=7)
    case.check("attention_prefill")
    assert torch.count_nonzero(case.call("attention_prefill")[-7:]) == 0
    assert Wrapper.made and not handed


@pytest.mark.usefixtures("package")
def test_padding_alone_is_zeros(handed: Handed) -> None:
    case = Case([0, 0], [0, 0], 0, 64, padding=5)
    assert torch.count_nonzero(case.call("attention_prefill")) == 0
    assert not handed


def test_pages_are_counted_from_the_first_kept_block() -> None:
    pages = attention_flashinfer.pages_of([0, 3, 3, 4], [200, 90, 128], [1, 0, 1], 64)
    assert pages == attention_flashinfer.Pages([0, 3, 4], [0, 3, 4], [8, 64], [0, 2])


@pytest.mark.usefixtures("package")
def test_what_it_does_not_take_goes_to_the_library(handed: Handed, monkeypatch: pytest.MonkeyPatch) -> None:
    Case([40, 50], [2, 2], 0, 64).call("attention_decode")  # several tokens a sequence
    narrow = Case([40], [1], 0, 64)
    narrow.k, narrow.v = narrow.k.to(torch.float8_e4m3fn), narrow.v.to(torch.float8_e4m3fn)
    narrow.call("attention_decode")
    narrow.call("attention_prefill")
    Case([40], [1], 0, 8).call("attention_decode")  # blocks of 8 tokens
    monkeypatch.setattr(attention_flashinfer, "capturing", lambda: True)
    Case([40], [40], 0, 64).call("attention_prefill")
    decode, prefill = "attention_decode", "attention_prefill"
    assert handed == [decode, decode, prefill, decode, prefill]


@pytest.mark.usefixtures("package")
def test_a_kept_plan_serves_captured_calls(handed: Handed, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([200], [100], 32, 64)
    with attention_flashinfer.kept_plans():
        case.call("attention_prefill")
        monkeypatch.setattr(attention_flashinfer, "capturing", lambda: True)
        case.check("attention_prefill")
    assert not handed
    case.call("attention_prefill")
    assert handed == ["attention_prefill"]


@pytest.mark.usefixtures("package")
def test_sinks_are_widened_once_and_again_when_written() -> None:
    sinks = torch.ones(4, dtype=torch.bfloat16)
    first = attention_flashinfer._wide(sinks)
    assert attention_flashinfer._wide(sinks) is first
    sinks.mul_(2)
    assert attention_flashinfer._wide(sinks).tolist() == [2.0] * 4


@pytest.mark.usefixtures("package")
def test_it_is_registered_and_chosen_by_name_only() -> None:
    for op in ("attention_decode", "attention_prefill"):
        assert dispatch.registered()[op] == ("cuda", "triton", "flashinfer")
        assert dispatch.preferred(op) == "cuda"
        dispatch.select(op, "flashinfer")
        assert dispatch.preferred(op) == "flashinfer"
    assert "flashinfer" not in dispatch.registered()["dense"]


def absent(monkeypatch: pytest.MonkeyPatch, package: ModuleType) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)


def old(monkeypatch: pytest.MonkeyPatch, package: ModuleType) -> None:
    package.__version__ = "0.6.13"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("how", "words"),
    [(absent, r"cannot be imported .*pip install gptoss-trt\[flashinfer\]"), (old, "is of version 0.6.13; 0.7 or")],
)
def test_without_the_package_it_is_refused_by_name(
    how: Callable[..., None], words: str, package: ModuleType, handed: Handed, monkeypatch: pytest.MonkeyPatch
) -> None:
    how(monkeypatch, package)
    forget()
    with pytest.raises(NoImplementationError, match=words):
        dispatch.select("attention_decode", "flashinfer")
    assert dispatch.preferred("attention_decode") in ("cuda", "triton")
    assert "flashinfer" in str(attention_flashinfer.missing("attention_decode", (16, 2, 32, 64, True)))
    Case([40], [1], 0, 64).call("attention_decode")
    assert handed == ["attention_decode"]


def test_a_kernel_that_cannot_be_built_is_left_out(
    package: ModuleType, handed: Handed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("nvcc is not here")

    monkeypatch.setattr(sys.modules["flashinfer.xqa"], "get_xqa_module", fail)
    reason = attention_flashinfer.missing("attention_decode", (16, 2, 32, 64, False))
    assert reason == "RuntimeError: nvcc is not here"
    case = Case([40], [1], 0, 64)
    case.call("attention_decode")
    assert handed == ["attention_decode"]
    case.check("attention_prefill")  # has its own
