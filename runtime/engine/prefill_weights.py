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
from gptoss_trt.runtime.engine.step_memory import step_bytes

if TYPE_CHECKING:
    from gptoss_trt.runtime.model.model import GptOssModel

log = logging.getLogger(__name__)


def copies_bytes(options: EngineOptions, free_bytes: int, kept_bytes: int, all_bytes: int) -> int:
    """The most bytes of copies where `free_bytes` are free, `kept_bytes` of them for steps and caches, and copies of
    all layers take `all_bytes`; `auto` is what kv_bytes leaves, or all layers where they take a quarter or less: else a
    cache is worth more."""
    if options.deterministic or options.prefill_weights == "none":
        return 0
    room = max(0, free_bytes - kept_bytes)
    if options.prefill_weights != "auto":
        return min(room, int(float(options.prefill_weights) * (1 << 30)))
    if options.kv_bytes:
        return room
    return all_bytes if all_bytes <= min(room, free_bytes // 4) else 0


def copy_experts(model: GptOssModel, options: EngineOptions, kept_bytes: int | None = None) -> None:
    """Makes the copies that `options` allow, on the model's GPU; nothing on a CPU. `kept_bytes` of what is free stay
    for steps and caches (what steps of this model take)."""
    if model.device.type != "cuda":
        return
    torch.cuda.empty_cache()  # what loading took
    free, _total = torch.cuda.mem_get_info()
    began = time.monotonic()
    chosen = options.resolved(model.device.type)
    most_tokens = chosen.step_tokens
    kept = step_bytes(model.config, chosen) if kept_bytes is None else kept_bytes
    most_bytes = copies_bytes(options, free, kept, model.expert_copies_bytes(most_tokens))
    gate_up, down, size = model.copy_experts(most_bytes, most_tokens)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    log.info(
        "FP8 copies of experts for steps of many tokens: gate_up of %d and down of %d of %d layers, %.1f of the "
        "%.1f GiB that were free, in %.1f s",
        gate_up, down, model.config.num_layers, size / (1 << 30), free / (1 << 30), time.monotonic() - began,
    )  # fmt: skip
