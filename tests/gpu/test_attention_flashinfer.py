"""FlashInfer's attention with sinks against the CPU ops, where it is installed: windows, chunks, padding, large sinks,
and what it hands to the library. Without the package every test says so; it is an extra, so that is no failure.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from test_attention import BLOCK_TOKENS, TOLERANCE, D, Paged, worst

from gptoss_trt.ops import attention_flashinfer, dispatch

OPS = ("attention_decode", "attention_prefill")


def shape(window: int) -> attention_flashinfer.Shape:
    return 64, 8, D, BLOCK_TOKENS, window > 0


@pytest.fixture(autouse=True)
def pinned() -> Iterator[None]:
    reasons = {attention_flashinfer.missing(op, shape(window)) for op in OPS for window in (0, 128)}
    if reasons != {None}:
        pytest.xfail("; ".join(sorted(reason for reason in reasons if reason)))  # an extra: missing is no failure
    for op in OPS:
        dispatch.select(op, "flashinfer")
    yield
    for op in OPS:
        dispatch.select(op, None)


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("sink", [None, 30.0, -30.0])
def test_decode(window: int, sink: float | None) -> None:
    contexts = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 192, 1025, 3000, 0]
    case = Paged.make(contexts, [1] * len(contexts), window, width=0 if window else 64)
    if sink is not None:
        case.sinks = torch.full_like(case.sinks, sink)
    got = case.cuda().decode()
    assert worst(got, case.decode()) < TOLERANCE
    assert torch.count_nonzero(got[-1]) == 0


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("contexts", [[8192], [2000, 1, 700], [100 + 61 * i for i in range(70)]], ids=len)
def test_decode_in_parts_and_in_a_graph(window: int, contexts: list[int]) -> None:
    case = Paged.make(contexts, [1] * len(contexts), window, width=0 if window else 128)
    want, card = case.decode(), case.cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        eager = card.decode()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outs = [card.decode() for _ in range(3)]
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    for got in (eager, *outs):
        assert worst(got, want) < TOLERANCE


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize(
    ("contexts", "fresh"),
    [
        ([300, 1, 129, 70, 1000, 65], [300, 1, 129, 5, 200, 65]),
        ([3000], [512]),
        ([777], [777]),
        ([40 + i for i in range(40)], [1 + i % 9 for i in range(40)]),
        ([200, 0, 150], [72, 0, 150]),
    ],
    ids=["ragged", "chunk", "one", "many", "none"],
)
@pytest.mark.parametrize("sink", [None, 30.0])
def test_prefill(contexts: list[int], fresh: list[int], window: int, sink: float | None) -> None:
    case = Paged.make(contexts, fresh, window, padding=30)
    if sink is not None:
        case.sinks = torch.full_like(case.sinks, sink)
    got = case.cuda().prefill()
    assert worst(got, case.prefill()) < TOLERANCE
    assert torch.count_nonzero(got[-30:]) == 0


def test_it_agrees_with_the_library() -> None:
    """One implementation against the other, same arguments."""
    decode, prefill = Paged.make([5000, 333], [1, 1], 0, width=128).cuda(), Paged.make([4000], [1500], 128).cuda()
    theirs = decode.decode(), prefill.prefill()
    for op in OPS:
        dispatch.select(op, "cuda")
    ours = decode.decode(), prefill.prefill()
    for got, want in zip(theirs, ours, strict=True):
        assert worst(got, want.cpu()) < TOLERANCE


def test_what_it_does_not_take_goes_to_the_library() -> None:
    drafts = Paged.make([300, 8, 2000], [4, 4, 4], 0, width=32)
    assert worst(drafts.cuda().decode(), drafts.decode()) < TOLERANCE
    case = Paged.make([500], [500], 0)
    want, card = case.prefill(), case.cuda()
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):  # no plan can be made here
        out = card.prefill()
    graph.replay()
    torch.cuda.synchronize()
    assert worst(out, want) < TOLERANCE
