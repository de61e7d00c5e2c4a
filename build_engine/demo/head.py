"""The demo's EAGLE-3 head: the packed file that ships, and its expansion to the published layout.

Format: an xz stream of one safetensors file. Tensors: those of the layout in bf16, and `draft_ids` int32, increasing,
in place of `d2t` and `t2d`. Metadata: `format` = "gptoss-trt demo head 1" and `config`, the head's config.json.

Invariant: packing what was expanded gives the same tensors. Knows no training (tests/perf/eagle_demo.py) and no engine.
"""

from __future__ import annotations

import json
import lzma
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save, save_file
from torch import Tensor

from gptoss_trt.build_engine.demo import PACKED_HEAD
from gptoss_trt.build_engine.demo.pack import PackError

FORMAT = "gptoss-trt demo head 1"


def pack_head(tensors: Mapping[str, Tensor], config: Mapping[str, Any], path: Path) -> int:
    """Writes the packed file of a head's tensors by their published names; returns its length in bytes."""
    own = {name: value for name, value in tensors.items() if name not in ("d2t", "t2d")}
    own["draft_ids"] = (tensors["d2t"] + torch.arange(len(tensors["d2t"]))).int()
    data = save(own, metadata={"format": FORMAT, "config": json.dumps(config)})
    packed = lzma.compress(data, preset=9)
    path.write_bytes(packed)
    return len(packed)


def expand_demo_head(folder: Path, *, packed: Path | None = None) -> Path:
    """Writes the demo's head to `folder` (config.json and model.safetensors) and returns it; `packed` takes the place
    of the shipped file. Raises PackError for anything but this format."""
    path = packed or PACKED_HEAD
    try:
        data = lzma.decompress(path.read_bytes())
        tensors = load(data)
    except (lzma.LZMAError, SafetensorError) as error:
        what = "an xz file" if isinstance(error, lzma.LZMAError) else "one of safetensors"
        raise PackError(f"{path} is not {what}: {error}") from error
    (length,) = struct.unpack("<Q", data[:8])
    meta = json.loads(data[8 : 8 + length]).get("__metadata__", {})
    if meta.get("format") != FORMAT:
        raise PackError(f"{path} has the format {meta.get('format')!r}; this build reads {FORMAT!r}")
    config = json.loads(meta["config"])
    ids = tensors.pop("draft_ids").long()
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill(0, ids, True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return folder
