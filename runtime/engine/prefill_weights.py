"""FP8 copies of experts on a GPU, for steps of many tokens: how much memory they get, and when they are made.

Invariant: made once, behind loading and ahead of caches and graphs; without room the engine runs as it does without
copies. Must not know layouts or kernels.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch

from gptoss_trt.runtime.engine.options import EngineOptions

if TYPE_CHECKING:
    from gptoss_trt.runtime.model.model import GptOssModel

log = logging.getLogger(__name__)

STEP_SHARE = 0.15  # of what is free, left to steps


def copies_bytes(options: EngineOptions, free_bytes: int, all_bytes: int) -> int:
    """The most bytes of copies where `free_bytes` are free, caches are not allocated yet and copies of all layers take
    `all_bytes`; `auto` is what kv_bytes leaves, or all layers where they take a quarter or less: else a cache is worth
    more."""
    if options.deterministic or options.prefill_weights == "none":
        return 0
    room = max(0, int(free_bytes * (1 - STEP_SHARE)) - options.kv_bytes)
    if options.prefill_weights != "auto":
        return min(room, int(float(options.prefill_weights) * (1 << 30)))
    if options.kv_bytes:
        return room
    return all_bytes if all_bytes <= free_bytes // 4 else 0


def copy_experts(model: GptOssModel, options: EngineOptions) -> None:
    """Makes the copies that `options` allow, on the model's GPU; nothing on a CPU."""
    if model.device.type != "cuda":
        return
    torch.cuda.empty_cache()  # what loading took
    free, _total = torch.cuda.mem_get_info()
    began = time.monotonic()
    most_tokens = options.resolved(model.device.type).step_tokens
    most_bytes = copies_bytes(options, free, model.expert_copies_bytes(most_tokens))
    gate_up, down, size = model.copy_experts(most_bytes, most_tokens)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    log.info(
        "FP8 copies of experts for steps of many tokens: gate_up of %d and down of %d of %d layers, %.1f of the "
        "%.1f GiB that were free, in %.1f s",
        gate_up, down, model.config.num_layers, size / (1 << 30), free / (1 << 30), time.monotonic() - began,
    )  # fmt: skip
