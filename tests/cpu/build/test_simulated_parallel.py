"""Every TP/EP/DP mapping, run rank by rank in one process from the files that the builder wrote, gives the logits of
the unsharded reference model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from transformers import GptOssForCausalLM

from gptoss_trt.build_engine.builder import BuildOptions, build_engine
from gptoss_trt.build_engine.safetensors_file import TensorReader, open_file
from gptoss_trt.build_engine.spec import (
    Manifest,
    ModelConfig,
    ParallelMapping,
    RankShare,
    qkv_segments,
    rank_file,
    rank_share,
)
from gptoss_trt.build_engine.synthetic import small_config, write_checkpoint
from gptoss_trt.reference import fp8_block, mxfp4
from gptoss_trt.reference.attention import PagedKv, attention_prefill
from gptoss_trt.reference.embedding import embedding
from gptoss_trt.reference.forward import Architecture, ReferenceModel
from gptoss_trt.reference.moe_combine import moe_combine
from gptoss_trt.reference.moe_gemm_fp8 import moe_down, moe_gate_up
from gptoss_trt.reference.moe_route import moe_route, sort_rows
from gptoss_trt.reference.product import ExactProduct
from gptoss_trt.reference.rmsnorm_quant import rmsnorm
from gptoss_trt.reference.rope import RopeConfig, rope_table
from gptoss_trt.reference.rope_kv_append import kv_slots, split_rotate, store_kv
from gptoss_trt.reference.rounding import keep

CONFIG = small_config(
    hidden_size=96,
    intermediate_size=1120,  # 8.75 blocks: every cut has another width somewhere
    num_heads=16,
    num_kv_heads=8,
    head_dim=16,
    vocab_size=1100,
    sliding_window=4,
)
PROMPTS = (torch.tensor([3, 1099, 640, 5, 128, 127, 700]), torch.tensor([900, 1, 77]))
MAPPINGS = [
    ParallelMapping(tp, ep, dp)
    for tp, ep, dp in itertools.product((1, 2, 4, 8), repeat=3)
    if tp * dp <= 8 and (tp * dp) % ep == 0
]
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("parallel") / "checkpoint", CONFIG, seed=7)


def read_rank(engine: Path, manifest: Manifest, rank: int) -> Weights:
    """A rank's file with every weight expanded to fp32 under `....weight`."""
    entries = open_file(engine / rank_file(rank))
    reader = TensorReader()
    raw = {name: reader.read(name, entry) for name, entry in entries.items()}
    reader.close()
    weights: Weights = {}
    for name, value in raw.items():
        stem, word = name.rsplit(".", 1)
        if word == "blocks":
            weights[f"{stem}.weight"] = mxfp4.decode(value, raw[f"{stem}.scales"])
        elif word == "weight" and f"{stem}.weight_scale" in raw:
            scale = raw[f"{stem}.weight_scale"]
            segments = qkv_segments(manifest.model, manifest.mapping) if stem.endswith(".qkv") else None
            weights[name] = (
                fp8_block.dequantise_segments(value, scale, segments)
                if segments
                else fp8_block.dequantise(value, scale)
            )
        elif word not in ("scales", "weight_scale"):
            weights[name] = value.float()
    return weights


def architecture(config: ModelConfig) -> Architecture:
    windows = [config.window(layer) for layer in range(config.num_layers)]
    rope = RopeConfig(head_dim=config.head_dim)
    return Architecture(config.num_heads, config.num_kv_heads, config.experts_per_token, windows, rope)


class SimulatedRank:
    """One rank's part of each layer, from its own file alone."""

    def __init__(self, config: ModelConfig, share: RankShare, weights: Weights) -> None:
        self.config, self.share, self.weights = config, share, weights

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return embedding(ids, self.weights["embedding.weight"], self.share.vocab[0])

    def attention(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        stem, config = f"layers.{layer}.attention", self.config
        tokens = len(x)
        heads, kv_heads = (last - first for first, last in (self.share.q_heads, self.share.kv_heads))
        normed = rmsnorm(x, self.weights[f"{stem}.norm.weight"], config.rms_norm_eps)
        qkv = normed @ self.weights[f"{stem}.qkv.weight"].T + self.weights[f"{stem}.qkv.bias"]
        positions = torch.arange(tokens)
        table = rope_table(architecture(config).rope, tokens)
        q, k, v = split_rotate(qkv, positions, table, heads, kv_heads)
        shape = (1, kv_heads, 64, config.head_dim)
        kv = PagedKv(torch.zeros(shape), torch.zeros(shape), torch.zeros(1, 1, dtype=torch.int64))
        starts, lens = torch.tensor([0, tokens]), torch.tensor([tokens])
        slots = kv_slots(positions, starts, kv.block_table, None, 64)
        store_kv(k, slots, 1.0, kv.k)
        store_kv(v, slots, 1.0, kv.v)
        out = attention_prefill(
            q, kv, starts, lens, self.weights[f"{stem}.sinks"], window=config.window(layer), scale=config.head_dim**-0.5
        )
        return out.reshape(tokens, -1) @ self.weights[f"{stem}.out.weight"].T + self.weights[f"{stem}.out.bias"]

    def experts(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        stem, config = f"layers.{layer}.moe", self.config
        first, last = self.share.experts
        normed = rmsnorm(x, self.weights[f"{stem}.norm.weight"], config.rms_norm_eps)
        router = ExactProduct(self.weights[f"{stem}.router.weight"])
        ids, scores = moe_route(normed, router, self.weights[f"{stem}.router.bias"], config.experts_per_token, keep)
        rows = sort_rows(ids, first, last - first)
        gate_up, down = self.weights[f"{stem}.gate_up.weight"], self.weights[f"{stem}.down.weight"]
        h = moe_gate_up(
            normed,
            lambda expert: ExactProduct(gate_up[expert]),
            self.weights[f"{stem}.gate_up.bias"],
            rows,
            config.experts_per_token,
            limit=config.swiglu_limit,
            alpha=config.swiglu_alpha,
        )
        bias = self.weights[f"{stem}.down.bias"]
        weighted = moe_down(h, lambda expert: ExactProduct(down[expert]), bias, scores, rows)
        by_slot = torch.zeros(len(x) * config.experts_per_token, config.hidden_size)
        by_slot[rows.slots[: len(weighted)].long()] = weighted
        return moe_combine(by_slot.view(len(x), config.experts_per_token, -1), ids, first, last - first)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        normed = rmsnorm(x, self.weights["norm.weight"], self.config.rms_norm_eps)
        return normed @ self.weights["lm_head.weight"].T


def simulate(
    engine: Path,
    read: Callable[[Path, Manifest, int], Weights] = read_rank,
    prompts: tuple[torch.Tensor, ...] = PROMPTS,
) -> list[torch.Tensor]:
    """Logits of each DP group's prompt: all-reduces inside a group for attention, over the world for the experts."""
    manifest = Manifest.read(engine)
    config, mapping = manifest.model, manifest.mapping
    ranks = [
        SimulatedRank(config, rank_share(config, mapping, rank), read(engine, manifest, rank))
        for rank in range(mapping.world)
    ]
    groups = [ranks[first : first + mapping.tp] for first in range(0, mapping.world, mapping.tp)]
    inputs = [prompts[number % len(prompts)] for number in range(mapping.dp)]
    states = [sum_of(rank.embed(ids) for rank in group) for group, ids in zip(groups, inputs, strict=True)]
    for layer in range(config.num_layers):
        states = [
            x + sum_of(rank.attention(layer, x) for rank in group) for group, x in zip(groups, states, strict=True)
        ]
        gathered = torch.cat(states)
        gathered = gathered + sum_of(rank.experts(layer, gathered) for rank in ranks)
        states = list(gathered.split([len(ids) for ids in inputs]))
    return [torch.cat([rank.logits(x) for rank in group], dim=1) for group, x in zip(groups, states, strict=True)]


def sum_of(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(parts)).sum(dim=0)


def build(checkpoint: Path, mapping: ParallelMapping, formats: str, folder: Path) -> Path:
    engine = folder / "engine"
    dense = "bf16" if formats == "mxfp4" else "fp8_block128"
    build_engine(checkpoint, engine, BuildOptions(experts=formats, dense=dense, mapping=mapping, workers=2))
    return engine


@pytest.fixture(scope="module")
def unsharded(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[torch.Tensor]]:
    """The reference model's logits of each prompt, from the engine of one rank."""
    result = {}
    for formats in ("mxfp4", "fp8_block128"):
        engine = build(checkpoint, ParallelMapping(), formats, tmp_path_factory.mktemp(formats))
        model = ReferenceModel(architecture(CONFIG), read_rank(engine, Manifest.read(engine), 0))
        result[formats] = [model.forward(ids) for ids in PROMPTS]
    return result


# Every mapping in FP8, whose scales are cut too; a few of the same cuts in MXFP4.
CASES = [(mapping, "fp8_block128") for mapping in MAPPINGS]
CASES += [(ParallelMapping(*sizes), "mxfp4") for sizes in ((8, 1, 1), (4, 2, 2), (1, 8, 8), (2, 1, 1))]


@pytest.mark.parametrize(
    ("mapping", "formats"),
    CASES,
    ids=lambda value: value if isinstance(value, str) else f"tp{value.tp}-ep{value.ep}-dp{value.dp}",
)
def test_a_mapping_equals_the_unsharded_model(
    mapping: ParallelMapping,
    formats: str,
    checkpoint: Path,
    unsharded: dict[str, list[torch.Tensor]],
    tmp_path: Path,
) -> None:
    for number, logits in enumerate(simulate(build(checkpoint, mapping, formats, tmp_path))):
        expected = unsharded[formats][number % len(PROMPTS)]
        worst = worst_row(logits, expected)
        assert worst < 2e-5, f"DP group {number}: the worst row differs by {worst:.1e} of its largest logit"


def worst_row(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference of a row over the row's largest logit, of the worst row."""
    return float(((logits - expected).abs().amax(dim=1) / expected.abs().amax(dim=1)).max())


@pytest.mark.parametrize("name", ["layers.0.attention.out.bias", "layers.1.moe.down.bias"])
def test_a_bias_added_by_two_ranks_would_be_seen(
    name: str, checkpoint: Path, unsharded: dict[str, list[torch.Tensor]], tmp_path: Path
) -> None:
    def with_bias_of_rank_0(engine: Path, manifest: Manifest, rank: int) -> Weights:
        return read_rank(engine, manifest, rank) | {name: read_rank(engine, manifest, 0)[name]}

    engine = build(checkpoint, ParallelMapping(tp=2), "mxfp4", tmp_path)
    assert worst_row(simulate(engine, with_bias_of_rank_0)[0], unsharded["mxfp4"][0]) > 1e-3


@pytest.mark.parametrize("tp", [1, 2])
def test_an_engine_from_a_hugging_face_checkpoint_equals_transformers(tp: int, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", small_config(), layout="hf_bf16", shards=2)
    theirs, report = GptOssForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values())
    ids = torch.tensor([1, 5, 300, 7, 9, 2])
    with torch.no_grad():
        expected = theirs(ids.unsqueeze(0)).logits[0]
    engine = tmp_path / "engine"
    build_engine(folder, engine, BuildOptions(mapping=ParallelMapping(tp=tp), workers=2))
    assert worst_row(simulate(engine, prompts=(ids,))[0], expected) < 1e-5
