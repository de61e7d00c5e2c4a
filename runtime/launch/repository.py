"""The model repository that a launch serves: a copy of the packaged one with this deployment's parameters.

Invariant: the copy differs from the packaged repository in `parameters`, transaction policy and instance count only.
Must not know the server process.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from gptoss_trt.runtime.triton_models.pbtxt import config_text, model_names


def packaged_repository() -> Path:
    """The folder of the shipped model repository."""
    return Path(str(resources.files("gptoss_trt") / "model_repository"))


def assemble_repository(
    target: Path, parameters: Mapping[str, str], *, decoupled: bool = True, instances: int = 1
) -> Path:
    """Copies every model into `target` and writes its config.pbtxt anew with `parameters` (those that the model
    declares), `decoupled` and `instances`. Returns `target`."""
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in model_names():
        source, copy = packaged_repository() / name, target / name
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "config.pbtxt"))
        (copy / "config.pbtxt").write_text(
            config_text(name, parameters, decoupled=decoupled, instances=instances), encoding="utf-8"
        )
        (copy / "1").mkdir(exist_ok=True)  # Triton wants a version folder even where an ensemble has no file in it
    return target
