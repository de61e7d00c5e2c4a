"""Which plan file (ops/plan.py) an engine's kernels follow, and a line about it in the log.

Invariant: settled once, ahead of loading. Must not know what a plan holds.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from gptoss_trt.ops import plan

log = logging.getLogger(__name__)


def use_plan(
    engine_dir: Path | None, device: str, *, draft_dir: Path | None = None, deterministic: bool = False
) -> None:
    """Activates the plan of `engine_dir` and of this GPU for the process, and for shapes that only a draft engine has
    the plan of `draft_dir`. Results that do not depend on the batch have one choice for all, and a CPU has none. Raises
    PlanError for a file that is not a plan."""
    plan.activate(None)
    if device != "cuda" or deterministic:
        return
    folders = [folder for folder in (engine_dir, draft_dir) if folder is not None]
    selected = plan.select(torch.cuda.get_device_name(), *folders)
    plan.activate(selected.table)
    log.info("plan of kernels: %s", selected.text)
