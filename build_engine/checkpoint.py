"""Opens a checkpoint folder: which files, which layout, which configuration, and that every tensor is what it must be.

Invariant: after `open_checkpoint` every key of the chosen layout is known and every expected tensor is there with its
shape and dtype; nothing was loaded but headers. Must not convert numbers.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gptoss_trt.build_engine.model_config import CONFIG_NAME, read_config, read_json
from gptoss_trt.build_engine.names import Expected, Layout, expected_keys, layouts_of
from gptoss_trt.build_engine.safetensors_file import CheckpointError, TensorEntry, open_file
from gptoss_trt.build_engine.spec import ModelConfig

MODELOPT_CONFIG = "hf_quant_config.json"
MODELOPT_ALGORITHMS = ("FP8", "FP8_PB_WO", "FP8_PB_REAL", "FP8_PER_CHANNEL_PER_TOKEN")
_SHOWN = 5  # names listed in an error before "and N more"


@dataclass(frozen=True)
class Checkpoint:
    """A checked checkpoint: `tensors` maps canonical names to their places, `keys` to the checkpoint's own names.

    `ignored` says what stands in the folder and is not read (another layout beside the chosen one, unused scales).
    """

    folder: Path
    layout: Layout
    config: ModelConfig
    tensors: Mapping[str, TensorEntry]
    keys: Mapping[str, str]
    quantization: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.tensors.values())

    @property
    def files(self) -> list[Path]:
        return sorted({entry.path for entry in self.tensors.values()})


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens `path`, or `path/original` when only that one holds weights. Of two layouts in one folder Hugging Face's is
    read. Raises CheckpointError naming file, tensor and both shapes."""
    folder, notes = _weights_folder(path)
    entries, unlisted = _read_headers(folder)
    layouts = layouts_of(set(entries))
    if not layouts:
        raise CheckpointError(f"{folder}: no layout of gpt-oss has these tensors: {_names(entries)}")
    layout = layouts[-1]
    config = read_config(folder)
    quantization = _modelopt_config(folder) if layout != "openai" else {}
    expected = expected_keys(config, layout)
    by_key = {one.key: one for one in expected.values()}
    others = {one.key for other in layouts[:-1] for one in expected_keys(config, other).values()}
    present = {key: entry for key, entry in entries.items() if key in by_key}
    _check_names(folder, by_key, set(entries) - others, set(present))
    for key, entry in present.items():
        _check_tensor(key, entry, by_key[key])
    if others & set(entries):
        notes.append(f"{len(others & set(entries))} tensors of layout {layouts[0]} in the same folder")
    return Checkpoint(
        folder=folder,
        layout=layout,
        config=config,
        tensors={by_key[key].canonical: entry for key, entry in present.items()},
        keys={by_key[key].canonical: key for key in present},
        quantization=quantization,
        ignored=(*notes, *unlisted, *_unused_scales(present)),
    )


def _weights_folder(path: Path) -> tuple[Path, list[str]]:
    if not path.is_dir():
        raise CheckpointError(f"{path}: not a folder")
    original = path / "original"
    has_original = original.is_dir() and any(original.glob("*.safetensors"))
    if any(path.glob("*.safetensors")):
        return path, ["original/ (the same model in OpenAI's layout)"] if has_original else []
    if has_original:
        return original, []
    raise CheckpointError(f"{path}: no *.safetensors there or in original/")


def _read_headers(folder: Path) -> tuple[dict[str, TensorEntry], list[str]]:
    """All tensors of the folder, and notes on files that an index leaves out."""
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    files = sorted(folder.glob("*.safetensors"))
    if not indexes:
        return _merge(files), []
    weight_map: dict[str, str] = {}
    for index in indexes:
        section = read_json(index).get("weight_map")
        if not isinstance(section, dict) or not all(isinstance(name, str) for name in section.values()):
            raise CheckpointError(f"{index}: weight_map is not a table of tensor to file")
        weight_map |= section
    outside = sorted(name for name in set(weight_map.values()) if Path(name).name != name)
    if outside:
        raise CheckpointError(f"{indexes[0]}: names files outside its folder: {_names(outside)}")
    listed = {folder / name for name in weight_map.values()}
    entries = _merge(sorted(listed))
    _check_index(indexes[0], weight_map, entries)
    return entries, [f"{file.name} (not in the index)" for file in files if file not in listed]


def _merge(files: Iterable[Path]) -> dict[str, TensorEntry]:
    merged: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in open_file(file).items():
            if name in merged:
                raise CheckpointError(f"tensor {name} is in {merged[name].path} and in {file}")
            merged[name] = entry
    return merged


def _check_index(index: Path, weight_map: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> None:
    for name, file in weight_map.items():
        entry = entries.get(name)
        if entry is None or entry.path.name != file:
            where = "no file" if entry is None else entry.path.name
            raise CheckpointError(f"{index}: says that {name} is in {file}; it is in {where}")
    unlisted = sorted(set(entries) - set(weight_map))
    if unlisted:
        raise CheckpointError(f"{index}: does not list {_names(unlisted)}, found in {entries[unlisted[0]].path.name}")


def _modelopt_config(folder: Path) -> dict[str, Any]:
    """What an nvidia-modelopt export says of itself: {} where it is none. Raises CheckpointError for an algorithm that
    this build does not read."""
    path = folder / MODELOPT_CONFIG
    if path.is_file():
        raw = read_json(path).get("quantization", {})
    else:
        path = folder / CONFIG_NAME
        raw = read_json(path).get("quantization_config") or {}
        if not isinstance(raw, dict) or raw.get("quant_method") != "modelopt":
            return {}
    algorithm = raw.get("quant_algo") if isinstance(raw, dict) else None
    if algorithm not in MODELOPT_ALGORITHMS:
        raise CheckpointError(f"{path}: quant_algo is {algorithm!r}; this build reads {', '.join(MODELOPT_ALGORITHMS)}")
    kv_cache = raw.get("kv_cache_quant_algo") or ("FP8" if raw.get("kv_cache_scheme") else None)
    return {"producer": "nvidia-modelopt", "quant_algo": algorithm, "kv_cache_quant_algo": kv_cache}


def _check_names(folder: Path, by_key: Mapping[str, Expected], keys: set[str], present: set[str]) -> None:
    missing = sorted(key for key, one in by_key.items() if not one.optional and key not in present)
    unknown = sorted(keys - set(by_key))
    problems = []
    if missing:
        problems.append(f"missing tensors: {_names(missing)}")
    if unknown:
        close = difflib.get_close_matches(unknown[0], missing or sorted(by_key), n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        problems.append(f"unknown tensors: {_names(unknown)}{hint}")
    if problems:
        raise CheckpointError(f"{folder}: {'; '.join(problems)}")


def _check_tensor(key: str, entry: TensorEntry, expected: Expected) -> None:
    if expected.shape is not None and entry.shape != expected.shape:
        raise CheckpointError(
            f"{entry.path}: tensor {key} has shape {list(entry.shape)}, the configuration wants {list(expected.shape)}"
        )
    if entry.dtype not in expected.dtypes:
        raise CheckpointError(
            f"{entry.path}: tensor {key} has dtype {entry.dtype}, expected {' or '.join(expected.dtypes)}"
        )


def _unused_scales(keys: Iterable[str]) -> list[str]:
    count = sum(key.endswith("input_scale") for key in keys)
    return [f"{count} input_scale tensors (activations are scaled as they come)"] if count else []


def _names(names: Iterable[str]) -> str:
    shown = list(names)
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more
