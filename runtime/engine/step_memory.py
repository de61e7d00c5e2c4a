"""How much of a GPU's memory steps take beside weights, FP8 copies and KV caches: arithmetic from the sizes of a model
and of a step.

Invariant: no tensor and no device is looked at, and every term is the most that a step takes. Must not know caches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gptoss_trt.build_engine.spec import ModelConfig
from gptoss_trt.runtime.engine.options import EngineOptions
from gptoss_trt.runtime.engine.scheduler import PROMPT_LOGPROB_STEP_ROWS
from gptoss_trt.runtime.model.graph_shapes import MAX_ROWS, MOST_PROMPT_TOKENS, PROMPT_SEQUENCES

if TYPE_CHECKING:
    from gptoss_trt.runtime.engine.speculation.eagle_head import HeadConfig

# Code of kernels and 53 graphs take 120 MiB, cuBLAS's workspace 32 (tests/perf/NOTES.md); kernels of rarer steps more.
FIXED_BYTES = 320 << 20
MARGIN = 0.1  # of all terms, for what the allocator cannot put together
MOST_SHARE = 0.5  # of what is free: on a small GPU a cache that small steps leave is worth more than a large step
SAMPLER_COPIES = 4  # of the rows of logits that are not drawn in the step itself
FIXED_PART_KEYS = 4096  # of a part of attention that does not depend on the batch
PACKED_ROWS = 31  # with which an expert's rows are padded
PACKED_COLUMNS, PACKED_BYTES = 128, 136  # of a record of codes with its scales


def step_bytes(config: ModelConfig, options: EngineOptions) -> int:
    """The most that steps of a model take by resolved `options`: activations of a captured step and of one that runs
    eagerly, or the logits behind it, the workspaces of the expert products, FIXED_BYTES and a margin."""
    row = 4 * config.vocab_size  # of logits
    sampled = min(options.step_tokens, options.max_batch * (1 + options.draft_tokens))
    drawn = next((rows for rows in PROMPT_SEQUENCES if sampled <= rows), MAX_ROWS)
    captured = activation_bytes(config, min(options.step_tokens, MOST_PROMPT_TOKENS)) + 2 * drawn * row
    prompts = min(options.step_tokens, PROMPT_LOGPROB_STEP_ROWS)
    rows = sampled + prompts + SAMPLER_COPIES * min(sampled, options.max_batch)
    layer = activation_bytes(config, options.step_tokens)
    if options.deterministic:
        layer += parts_bytes(config, options.step_tokens, options.max_context or config.max_context)
    eager = max(layer, rows * row)
    return _with_margin(captured + eager + workspace_bytes(config, options.step_tokens) + FIXED_BYTES)


def head_bytes(head: HeadConfig, options: EngineOptions) -> int:
    """The most that passes of an EAGLE-3 head take: its layer over the tokens of a step, their features, which are kept
    until the next, and logits of a batch."""
    channels = 16 * head.hidden + 4 * head.intermediate + 2 * head.heads * head.head_dim
    logits = 6 * options.max_batch * head.draft_vocabulary
    return _with_margin(2 * options.step_tokens * channels + logits)


def left_to_steps(wanted_bytes: int, free_bytes: int) -> int:
    """What steps get of `free_bytes` when they want so much."""
    return min(wanted_bytes, int(free_bytes * MOST_SHARE))


def least_cache_bytes(steps_bytes: int, context_bytes: int) -> int:
    """What copies of experts leave to caches: one whole context, and enough that left_to_steps gives steps all that
    they want."""
    return max(context_bytes, int(steps_bytes * (1 / MOST_SHARE - 1)))


def activation_bytes(config: ModelConfig, tokens: int) -> int:
    """Of a step in a layer's experts, where it has most: the residual, its norm and what both products read and give
    for each of a token's experts."""
    hidden, inter = config.hidden_size, config.intermediate_size
    attention = 2 * (hidden + config.qkv_size + 2 * config.q_size)
    experts = 2 * hidden + config.experts_per_token * (inter + 2 * hidden)
    return tokens * (2 * 2 * hidden + max(attention, experts))


def parts_bytes(config: ModelConfig, tokens: int, context: int) -> int:
    """Of attention whose results do not depend on the batch: each token's sums of each part of the longest context,
    with a maximum and a divisor a head."""
    parts = -(-context // FIXED_PART_KEYS)
    return 0 if parts == 1 else 4 * tokens * parts * config.num_heads * (config.head_dim + 2)


def workspace_bytes(config: ModelConfig, tokens: int) -> int:
    """Of gate_up's and down's products of packed weights and gate_up's of FP8 tiles: tokens sorted by expert, for the
    next power of two of them."""
    most = 1 << max(0, tokens - 1).bit_length()
    rows = config.experts_per_token * most + PACKED_ROWS * config.num_experts
    return 3 * rows * -(-max(config.hidden_size, config.intermediate_size) // PACKED_COLUMNS) * PACKED_BYTES


def _with_margin(size: int) -> int:
    return size + int(size * MARGIN)
