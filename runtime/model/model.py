"""The forward pass of one rank: embedding, layers, logits of the wanted rows.

Invariant: `forward` reads a StepBatch and the KV cache and changes nothing but the cache; the same batch gives the same
logits. Must not know requests, sampling or sockets.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import torch

from gptoss_trt.build_engine.spec import ModelConfig
from gptoss_trt.ops import dispatch, ops
from gptoss_trt.ops.prepare import RopeConfig, rope_table
from gptoss_trt.runtime.model.batch import StepBatch
from gptoss_trt.runtime.model.collectives import Groups
from gptoss_trt.runtime.model.kv import KvCache, block_bytes
from gptoss_trt.runtime.model.layers import DOWN, GATE_UP, Attention, Dense, Experts, Norm
from gptoss_trt.runtime.model.loader import RankWeights, load_weights
from gptoss_trt.runtime.model.one_token import OneToken, layer_tensors, unsuited_model, whole
from gptoss_trt.runtime.model.step import Ends, Step
from gptoss_trt.runtime.model.taps import FeatureTap

log = logging.getLogger(__name__)


class GptOssModel:
    """One rank's model. `allocate_kv` comes before the first `forward`."""

    def __init__(self, weights: RankWeights, device: torch.device, groups: Groups | None = None) -> None:
        self.config: ModelConfig = weights.manifest.model
        self.device = device
        self._manifest = weights.manifest
        self._formats = weights.manifest.formats
        self._groups = groups or Groups()
        self._vocab = weights.share.vocab
        self._kv_heads = weights.share.kv_heads[1] - weights.share.kv_heads[0]
        self._embedding = weights["embedding.weight"]
        layers = range(self.config.num_layers)
        self._attention = [Attention(weights, n, self._groups.attention) for n in layers]
        self._experts = [Experts(weights, n, self._groups.experts) for n in layers]
        self._final_norm = Norm(weights, "norm", self._formats.dense == "fp8_block128")
        self._lm_head = Dense(weights, "lm_head")
        self._cos_sin = rope_table(_rope(self.config), self.config.max_context, device)
        self._kv: KvCache | None = None
        self.one_launch = False  # whether allocate_kv makes one_token ready where the model suits it
        self.one_token: OneToken | None = None  # serves decode steps of one sequence; may be taken away
        self.tap: FeatureTap | None = None  # takes hidden states, set before any graph is captured
        if self._formats.dense == "fp8_block128":
            _tell_pins_without_effect()

    @property
    def embedding(self) -> torch.Tensor:
        """This rank's rows of the embedding, bf16 [V, H]."""
        return self._embedding

    def kv_block_bytes(self, block_tokens: int) -> tuple[int, int]:
        """Bytes on this rank of one block over all layers of its pool: (full, window). Raises ValueError as
        allocate_kv."""
        return block_bytes(self.config, self._formats, self._kv_heads, block_tokens)

    def expert_copies_bytes(self, most_tokens: int) -> int:
        """The most bytes that copy_experts takes."""
        return sum(sum(experts.prefill_bytes(most_tokens)) for experts in self._experts[:-1])

    def copy_experts(self, most_bytes: int, most_tokens: int) -> tuple[int, int, int]:
        """Copies expert weights to FP8 for steps of many tokens, of `most_tokens` at most, as far as `most_bytes` go:
        (layers whose gate_up is copied, layers whose down is, bytes). Comes before any graph is captured. (0, 0, 0)
        where no step would read them.

        All layers' gate_up first: it saves a tenth more for its bytes (tests/perf/NOTES.md). Not the last layer's, of
        which a prompt needs one token."""
        copied = self._experts[:-1]
        sizes = [experts.prefill_bytes(most_tokens) for experts in copied]
        layers, total = [0, 0], 0
        for part in (GATE_UP, DOWN):
            for experts, size in zip(copied, sizes, strict=True):
                if size[part] == 0 or total + size[part] > most_bytes:
                    break
                experts.copy_for_prefill(part)
                layers[part], total = layers[part] + 1, total + size[part]
        return layers[GATE_UP], layers[DOWN], total

    def allocate_kv(self, full_blocks: int, window_blocks: int, block_tokens: int) -> None:
        """(Re)allocates both pools, zeroed. Raises ValueError for a block_tokens outside 1..64 or negative counts."""
        self._kv = self.one_token = None  # frees the old pools first
        self._kv = KvCache(
            self.config,
            self._formats,
            self._kv_heads,
            self.device,
            full_blocks=full_blocks,
            window_blocks=window_blocks,
            block_tokens=block_tokens,
        )
        if self.one_launch:
            ranks, layout = self._groups.experts.size, self._experts[0].layout
            reason = unsuited_model(self._manifest, self.device, block_tokens, ranks, layout)
            if reason is None:
                self.one_token = self._one_token(self._kv)
            else:
                log.debug("decode steps of one sequence run layer by layer: %s", reason)

    def _one_token(self, kv: KvCache) -> OneToken:
        parts = enumerate(zip(self._attention, self._experts, strict=True))
        layers = [layer_tensors(*pair, kv.layer(n), self.config.window(n)) for n, pair in parts]
        return OneToken(layers, whole(self.config, self._embedding, self._final_norm, self._lm_head, self._cos_sin))

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v of a layer's part of the cache. Raises RuntimeError before allocate_kv."""
        if self._kv is None:
            raise RuntimeError("allocate_kv comes before the cache")
        return self._kv.layer(layer)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, *, ends_only: bool = False) -> torch.Tensor:
        """Runs a step: writes its keys and values, returns fp32 logits [R, vocab] of batch.logits_rows.

        With `ends_only` these all are the last tokens of their sequences, and sequences without a token stand at the
        end: the last layer then attends and runs experts for one token a sequence.

        Raises RuntimeError before allocate_kv, and (on a CPU) ValueError for token ids, positions or blocks that do not
        exist.
        """
        if self._kv is None:
            raise RuntimeError("allocate_kv comes before the first forward")
        self._check(batch)
        if self.one_token is not None and self.tap is None and _is_one_token(batch):
            return self.one_token(batch)
        step = Step.of(batch, self._kv.block_tokens)
        residual = torch.empty((step.tokens, self.config.hidden_size), dtype=torch.bfloat16, device=self.device)
        ops.embedding(batch.token_ids, self._embedding, self._vocab[0], residual)
        residual = self._groups.attention.all_reduce(residual)
        normed = self._attention[0].norm(residual)
        ends = None
        for n, (attention, experts) in enumerate(zip(self._attention, self._experts, strict=True)):
            if self.tap is not None:
                self.tap.take(n, residual)
            if ends_only and n + 1 == self.config.num_layers:
                ends = Ends.of(batch)
            delta = attention(normed, step, self._kv.layer(n), self._cos_sin, residual, ends)
            if ends is not None:
                residual, step = residual[ends.rows], dataclasses.replace(step, token_count=ends.count)
            following = self._attention[n + 1].norm if n + 1 < self.config.num_layers else None
            residual, after = experts(residual, delta, step, following)
            normed = normed if after is None else after
        if ends is not None:
            return self._logits(residual[ends.wanted])
        every = len(batch.logits_rows) == step.tokens  # they ascend, so it is each of them
        return self._logits(residual if every else residual[batch.logits_rows.long()])

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        if not len(rows):  # a part of a prompt; no op is asked for nothing
            return torch.empty((0, self.config.vocab_size), dtype=torch.float32, device=rows.device)
        local = self._lm_head(self._final_norm(rows), torch.float32)
        return self._groups.attention.all_gather(local, dim=1)

    def _check(self, batch: StepBatch) -> None:
        """Ids outside the vocabulary, where looking is free; a GPU would read another row or zeros."""
        if self.device.type != "cpu" or not len(batch.token_ids):
            return
        low, high = int(batch.token_ids.min()), int(batch.token_ids.max())
        if low < 0 or high >= self.config.vocab_size:
            raise ValueError(f"token ids {low} to {high} are outside the vocabulary of {self.config.vocab_size}")


def _tell_pins_without_effect() -> None:
    """With dense FP8 attention writes FP8, by ops of their own (..._quant): pins of the plain ones do nothing then."""
    for op in ("attention_prefill", "attention_decode"):
        name, called = dispatch.pinned(op), f"{op}_quant"
        if name is not None and name != (taken := dispatch.preferred(called)):
            log.warning("%s is pinned to %s without effect: with dense FP8 %s runs, on %s", op, name, called, taken)


def _is_one_token(batch: StepBatch) -> bool:
    return len(batch.token_ids) == len(batch.context_lens) == len(batch.logits_rows) == 1


def load_model(engine_dir: Path, *, rank: int = 0, device: str = "cpu", groups: Groups | None = None) -> GptOssModel:
    """The model of one rank of an engine directory.

    `groups` connects the ranks; without it the engine must be built for one. Raises SpecError for an engine or mapping
    that cannot be used here, LoadError for weight files that are not what the manifest says.
    """
    where = torch.device(device)
    groups = groups or Groups()
    return GptOssModel(load_weights(engine_dir, rank, where, groups.experts.size), where, groups)


def _rope(config: ModelConfig) -> RopeConfig:
    return RopeConfig(
        head_dim=config.head_dim,
        theta=config.rope_theta,
        scaling_factor=config.rope_scaling_factor,
        initial_context=config.initial_context,
        beta_fast=config.rope_beta_fast,
        beta_slow=config.rope_beta_slow,
    )
