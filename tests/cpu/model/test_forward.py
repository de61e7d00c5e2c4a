"""A built engine's forward pass: against the reference rounding for rounding, however the work is cut and shared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gptoss_trt.build_engine.spec import Manifest, ParallelMapping, qkv_segments
from gptoss_trt.ops.cpu_weights import make_product
from gptoss_trt.reference import fp8_block
from gptoss_trt.reference.forward import Architecture, ReferenceModel
from gptoss_trt.reference.product import ExactProduct, Product
from gptoss_trt.reference.rope import RopeConfig
from gptoss_trt.reference.rounding import ENGINE, UNQUANTISED, Numerics
from gptoss_trt.runtime.model import StepBatch, layers, load_model

MakeEngine = Callable[..., Path]


def _prompt(n: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 320, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def _reference(
    engine: Path, numerics: Numerics, product: Callable[[torch.Tensor], Product] = ExactProduct
) -> ReferenceModel:
    manifest = Manifest.read(engine)
    config, formats = manifest.model, manifest.formats
    tensors = load_file(engine / "rank0.safetensors")
    weights = {}
    for name, tensor in tensors.items():
        stem, _, part = name.rpartition(".")
        if part == "blocks":
            weight, scale, _ = fp8_block.from_mxfp4(tensor, tensors[f"{stem}.scales"])
            weights[f"{stem}.weight"] = fp8_block.dequantise(weight, scale)
        elif part == "weight" and f"{stem}.weight_scale" in tensors:
            scale = tensors[f"{stem}.weight_scale"]
            if stem.endswith("qkv"):
                segments = qkv_segments(config, ParallelMapping())
                weights[name] = fp8_block.dequantise_segments(tensor, scale, segments)
            else:
                weights[name] = fp8_block.dequantise(tensor, scale)
        elif part not in ("scales", "weight_scale"):
            weights[name] = tensor
    architecture = Architecture(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        experts_per_token=config.experts_per_token,
        windows=[config.window(n) for n in range(config.num_layers)],
        rope=RopeConfig(head_dim=config.head_dim, initial_context=config.initial_context),
        h_scale=formats.h_scale,
        quantise_dense=formats.dense == "fp8_block128",
    )
    return ReferenceModel(architecture, weights, numerics, product)


_FORMATS: list[dict[str, Any]] = [
    {},
    {"experts": "fp8_block128", "dense": "fp8_block128"},
    {"h_scale": "static"},
    {"h_scale": "block64", "layout": "hf_bf16"},
]


@pytest.mark.parametrize("options", _FORMATS, ids=lambda o: "-".join(map(str, o.values())) or "default")
def test_engine_equals_the_reference_in_its_formats(
    options: dict[str, Any], make_engine: MakeEngine, scheduler: Any
) -> None:
    engine = make_engine(**options)
    ids = _prompt(150)
    actual = scheduler(load_model(engine)).step({"a": ids}, rows="all")
    assert actual.dtype == torch.float32
    same_sums = _reference(engine, ENGINE, make_product).forward(torch.tensor(ids))
    assert torch.equal(actual, same_sums)
    exact_sums = _reference(engine, ENGINE).forward(torch.tensor(ids))
    error = (actual - exact_sums).norm(dim=1) / exact_sums.norm(dim=1)
    assert (error < 1e-6).sum() >= 3
    assert error.max() < 0.2  # from the first bf16 that rounds to the other side on, FP8 codes differ too
    plain = _reference(engine, UNQUANTISED).forward(torch.tensor(ids))
    quantised = (actual - plain).norm(dim=1) / plain.norm(dim=1)
    assert 1e-3 < quantised.median() < 0.3  # FP8 and bf16 cost something, but not the model


def test_the_residual_that_out_adds_has_the_bits_of_the_norms(
    make_engine: MakeEngine, scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(experts="fp8_block128", dense="fp8_block128")
    ids, calls, add_to = _prompt(40), [], layers.Dense.add_to
    monkeypatch.setattr(layers.Dense, "add_to", lambda *call: calls.append(call) or add_to(*call))
    want = scheduler(load_model(engine)).step({"a": ids}, rows="all")
    assert not calls
    monkeypatch.setattr(layers, "ADDING_TOKENS", 40)
    model = load_model(engine)
    assert torch.equal(scheduler(model).step({"a": ids}, rows="all"), want)
    assert len(calls) == model.config.num_layers


def test_zeroed_experts_change_the_answer(make_engine: MakeEngine) -> None:
    engine = make_engine()
    reference = _reference(engine, ENGINE)
    ids = torch.tensor(_prompt(20))
    before = reference.forward(ids)
    for name, weight in reference._weights.items():
        if "moe.down.weight" in name:
            weight.zero_()
    assert (reference.forward(ids) - before).norm() / before.norm() > 0.05


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_one_piece_chunks_and_tokens_agree_to_the_bit(kv: str, make_engine: MakeEngine, scheduler: Any) -> None:
    model = load_model(make_engine(kv=kv) if kv == "bf16" else make_engine(layout="modelopt_fp8", kv=kv))
    ids = _prompt(150)
    whole = scheduler(model).step({"a": ids}, rows="all")
    for sizes in ([127, 1, 1, 21], [64, 64, 22], [100] + [1] * 50):
        chunked, begin, parts = scheduler(model), 0, []
        for size in sizes:
            parts.append(chunked.step({"a": ids[begin : begin + size]}, rows="all"))
            begin += size
        assert torch.equal(torch.cat(parts), whole), sizes


def test_alone_and_among_others_agree_to_the_bit(make_engine: MakeEngine, scheduler: Any) -> None:
    """Three requests of different lengths that come and go; window blocks freed by one are used by the next."""
    model = load_model(make_engine())
    prompts = {name: _prompt(n, seed) for name, n, seed in (("a", 140, 1), ("b", 3, 2), ("c", 260, 3))}

    def generate(names: list[str]) -> tuple[dict[str, list[int]], dict[str, torch.Tensor]]:
        table = scheduler(model, full_blocks=60, window_blocks=40)
        tokens = {name: list(prompts[name]) for name in names}
        new: dict[str, list[int]] = {}
        last: dict[str, torch.Tensor] = {}
        for turn in range(14):
            for name, joins in zip(names, (0, 2, 5), strict=False):
                if turn == joins:
                    new[name] = tokens[name]
            logits = table.step(new)
            for row, name in enumerate(new):
                last[name] = logits[row]
                tokens[name].append(int(logits[row].argmax()))
            new = {name: tokens[name][-1:] for name in new}
        return {name: tokens[name][len(prompts[name]) :] for name in names}, last

    together, _ = generate(["a", "b", "c"])
    for name in prompts:
        alone, _ = generate([name])
        assert together[name] == alone[name][: len(together[name])], name


def test_batching_mixes_prompts_and_single_tokens(make_engine: MakeEngine, scheduler: Any) -> None:
    model = load_model(make_engine())
    a, b = _prompt(130, 4), _prompt(40, 5)
    alone = scheduler(model)
    alone.step({"a": a[:-1]})
    expected_a = alone.step({"a": a[-1:]})
    expected_b = scheduler(model).step({"b": b})
    both = scheduler(model)
    both.step({"a": a[:-1]})
    mixed = both.step({"a": a[-1:], "b": b})
    assert torch.equal(mixed, torch.cat((expected_a, expected_b)))


def test_blocks_of_both_pools_hold_only_their_layers(make_engine: MakeEngine, scheduler: Any) -> None:
    """A full and a window block of the same number are different memory, and poison in unused blocks is never read."""
    model = load_model(make_engine())
    ids = _prompt(170)
    clean = scheduler(model).step({"a": ids}, rows="all")
    poisoned = scheduler(model)
    for layer in range(model.config.num_layers):
        for cache in model._kv.layer(layer):
            cache.fill_(float("nan"))
    assert torch.equal(poisoned.step({"a": ids}, rows="all"), clean)
    pointers = {cache.data_ptr() for n in range(model.config.num_layers) for cache in model._kv.layer(n)}
    assert len(pointers) == 2 * model.config.num_layers


def test_positions_beyond_the_initial_context(make_engine: MakeEngine, scheduler: Any) -> None:
    """YaRN's stretch inside a short prompt (trained on 64 positions only); the real sizes are compared elsewhere."""
    engine = make_engine({"num_layers": 2, "initial_context": 64})
    ids = _prompt(300)
    logits = scheduler(load_model(engine)).step({"a": ids})
    expected = _reference(engine, ENGINE, make_product).forward(torch.tensor(ids))[-1:]
    assert torch.equal(logits, expected)


def test_kv_block_bytes_are_what_is_allocated(make_engine: MakeEngine) -> None:
    model = load_model(make_engine())
    full, window = model.kv_block_bytes(16)
    model.allocate_kv(3, 5, 16)
    by_kind = {"full_attention": 0, "sliding_attention": 0}
    for n, kind in enumerate(model.config.layer_types):
        by_kind[kind] += sum(cache.numel() * cache.element_size() for cache in model._kv.layer(n))
    assert by_kind == {"full_attention": 3 * full, "sliding_attention": 5 * window}
    with pytest.raises(ValueError, match="block_tokens is 65; allowed are 1 to 64"):
        model.allocate_kv(1, 1, 65)
    with pytest.raises(ValueError, match="neither may be negative"):
        model.allocate_kv(-1, 1, 16)


def test_refusals(make_engine: MakeEngine, scheduler: Any) -> None:
    model = load_model(make_engine())
    empty = torch.zeros(0, dtype=torch.int32)
    nothing = StepBatch(
        empty, empty, torch.zeros(1, dtype=torch.int32), empty, empty.view(0, 0), empty.view(0, 0), empty, empty
    )
    with pytest.raises(RuntimeError, match="allocate_kv comes before"):
        model.forward(nothing)
    table = scheduler(model)
    assert model.forward(nothing).shape == (0, 320)
    with pytest.raises(ValueError, match="token ids 5 to 320 are outside the vocabulary of 320"):
        table.step({"a": [5, 320]})
    with pytest.raises(ValueError, match="positions 0 to 4096 are outside the rope table of 4096"):
        scheduler(model, full_blocks=300, window_blocks=300).step({"a": _prompt(4097)})


def test_no_logits_wanted(make_engine: MakeEngine, scheduler: Any) -> None:
    model = load_model(make_engine())
    table = scheduler(model)
    table.step({"a": _prompt(30)})
    before = table.step({"a": [7]})
    scheduler(model)  # fresh pools
    ints = torch.arange(30, dtype=torch.int32)
    blocks = torch.tensor([[0, 1]], dtype=torch.int32)
    ids = torch.tensor(_prompt(30), dtype=torch.int32)
    zero, none = torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    starts, lens = torch.tensor([0, 30], dtype=torch.int32), torch.tensor([30], dtype=torch.int32)
    assert model.forward(StepBatch(ids, ints, starts, lens, blocks, blocks, zero, none)).shape == (0, 320)
    one = torch.ones(1, dtype=torch.int32)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    after = model.forward(StepBatch(one * 7, one * 30, starts, one * 31, blocks, blocks, zero, zero))
    assert torch.equal(after, before)
