"""Whether `build --tune` can measure here. Imports no kernels: where there is no GPU there may be no Triton either."""

from __future__ import annotations

import torch


class TuneError(RuntimeError):
    """Nothing can be tuned here, or the base itself does not run."""


def require_gpu() -> str:
    """The GPU's name. Raises TuneError without one."""
    if not torch.cuda.is_available():
        raise TuneError(f"--tune measures on a GPU, and torch {torch.__version__} sees none here")
    return torch.cuda.get_device_name()
