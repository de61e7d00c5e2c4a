"""The least time of a step on a card: the larger of bytes over bandwidth and operations over rate.

    bytes = attention weights + router + experts in use + lm head + embedding rows + keys and values read or written
    time  = max(bytes / bandwidth, expert FLOP / FP8 rate + dense FLOP / dense rate + attention FLOP / BF16 rate)

Every weight byte counts once a step, a multiply-add is 2 FLOP, and under uniform routing T tokens touch
E (1 - (1 - k/E)^T) experts. Invariant: counts what no implementation can avoid. Must not know how a step runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from gptoss_trt.build_engine.spec import Formats, ModelConfig

WEIGHT_BYTES = {"mxfp4": 4.25 / 8, "fp8_block128": 1.0 + 4 / (128 * 128), "bf16": 2.0}
DENSE_BYTES = {"fp8_block128": 1, "bf16": 2}
KV_BYTES = {"fp8": 1, "bf16": 2}


@dataclass(frozen=True)
class Rates:
    """Bytes and operations a second. The defaults were measured on one H200: a kernel that only reads, and matrix
    products on random data."""

    bytes_s: float = 4.54e12
    fp8_flop_s: float = 1260e12
    bf16_flop_s: float = 740e12

    def seconds(self, bytes_moved: float, fp8_flop: float = 0.0, bf16_flop: float = 0.0) -> float:
        return max(bytes_moved / self.bytes_s, fp8_flop / self.fp8_flop_s + bf16_flop / self.bf16_flop_s)


H200 = Rates()


def distinct_experts(config: ModelConfig, tokens: int) -> float:
    """Experts of a layer that `tokens` tokens touch when every set of k is as likely."""
    experts = config.num_experts
    return experts * (1 - (1 - config.experts_per_token / experts) ** tokens)


def decode_seconds(config: ModelConfig, formats: Formats, batch: int, context: int, rates: Rates = H200) -> float:
    """Bound of one step of `batch` sequences that read `context` keys each (a window's worth in windowed layers)."""
    full, local = _layer_kinds(config)
    keys = full * context + local * min(context, config.sliding_window)
    kv_row = 2 * config.kv_size * KV_BYTES[formats.kv]
    flop = 4.0 * batch * config.q_size * keys
    return _seconds(config, formats, batch, batch * keys * kv_row, flop, batch, rates)


def prefill_seconds(config: ModelConfig, formats: Formats, tokens: int, rates: Rates = H200) -> float:
    """Bound of one prompt of `tokens` tokens, logits of the last one, its keys written and read once."""
    full, local = _layer_kinds(config)
    pairs = tokens * (tokens + 1) / 2
    flop = 4.0 * config.q_size * (full * pairs + local * min(pairs, tokens * config.sliding_window))
    kv_row = 2 * config.kv_size * KV_BYTES[formats.kv]
    return _seconds(config, formats, tokens, 2 * config.num_layers * tokens * kv_row, flop, 1, rates)


def _layer_kinds(config: ModelConfig) -> tuple[int, int]:
    full = sum(kind == "full_attention" for kind in config.layer_types)
    return full, config.num_layers - full


def _seconds(
    config: ModelConfig, formats: Formats, tokens: int, kv: float, attention_flop: float, logits: int, rates: Rates
) -> float:
    hidden, layers = config.hidden_size, config.num_layers
    dense = config.q_size * hidden + config.qkv_size * hidden
    expert = 3 * hidden * config.intermediate_size
    router = config.num_experts * hidden
    head = config.vocab_size * hidden
    wide = DENSE_BYTES[formats.dense]
    moved: float = layers * (dense * wide + router * 2)
    moved += layers * distinct_experts(config, tokens) * expert * WEIGHT_BYTES[formats.experts]
    moved += head * wide + tokens * hidden * 2 + kv
    expert_flop = 2.0 * tokens * layers * config.experts_per_token * expert
    dense_flop = 2.0 * tokens * layers * (dense + router) + 2.0 * logits * head
    if formats.dense == "bf16":
        return rates.seconds(moved, expert_flop, dense_flop + attention_flop)
    return rates.seconds(moved, expert_flop + dense_flop, attention_flop)
