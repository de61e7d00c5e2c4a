"""Engine directories that are not what they say: each is refused by name, and nothing is copied when all is well."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptoss_trt.build_engine.spec import FileEntry, Manifest, ParallelMapping, SpecError
from gptoss_trt.runtime.model import LoadError, load_model
from gptoss_trt.runtime.model.loader import load_weights

_WEIGHTS = "rank0.safetensors"


@pytest.fixture
def engine(make_engine: Callable[..., Path], tmp_path: Path) -> Path:
    shutil.copytree(make_engine(), tmp_path / "engine")
    return tmp_path / "engine"


def _seal(engine: Path, **changes: object) -> None:
    """Makes the manifest agree with the files again, with other changes."""
    data = (engine / _WEIGHTS).read_bytes()
    manifest = Manifest.read(engine)
    files = dict(manifest.files) | {_WEIGHTS: FileEntry(len(data), hashlib.sha256(data).hexdigest())}
    (engine / "manifest.json").write_text(dataclasses.replace(manifest, files=files, **changes).to_json())


def _rewrite(engine: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(engine / _WEIGHTS).items()}
    edit(tensors)
    save_file(tensors, engine / _WEIGHTS)
    _seal(engine)


def test_tensors_are_mapped_not_copied(engine: Path) -> None:
    weights = load_weights(engine, 0, torch.device("cpu"), 1)
    maps = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in maps if line.endswith(str((engine / _WEIGHTS).resolve()))]
    place = weights["embedding.weight"].data_ptr()
    assert any(int(low, 16) <= place < int(high, 16) for low, high in ranges)


def test_not_an_engine(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"is not an engine directory: manifest\.json is missing"):
        load_model(tmp_path)


def test_truncated_changed_and_missing_files(engine: Path) -> None:
    path = engine / _WEIGHTS
    data = bytearray(path.read_bytes())
    path.write_bytes(data[:-8])
    with pytest.raises(LoadError, match=rf"has {len(data) - 8} bytes, the manifest says {len(data)}"):
        load_model(engine)
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(LoadError, match=r"has sha256 .*, the manifest says"):
        load_model(engine)
    path.unlink()
    with pytest.raises(LoadError, match=r"rank0\.safetensors is missing"):
        load_model(engine)


def test_other_tensors_than_expected(engine: Path) -> None:
    _rewrite(engine, lambda tensors: tensors.update(extra=tensors.pop("norm.weight")))
    with pytest.raises(LoadError, match=r"missing tensors \['norm.weight'\], unknown tensors \['extra'\]"):
        load_model(engine)


def test_wrong_shape_and_dtype(engine: Path) -> None:
    _rewrite(engine, lambda tensors: tensors.update({"norm.weight": tensors["norm.weight"][:-1].clone()}))
    with pytest.raises(LoadError, match=r"norm.weight is bfloat16 \(159,\), expected BF16 \(160,\)"):
        load_model(engine)
    _rewrite(engine, lambda tensors: tensors.update({"norm.weight": torch.ones(160)}))
    with pytest.raises(LoadError, match=r"norm.weight is float32 \(160,\), expected BF16"):
        load_model(engine)


def test_garbage(engine: Path) -> None:
    (engine / _WEIGHTS).write_bytes(b"\xff" * 1000)
    _seal(engine)
    with pytest.raises(LoadError, match="is not a safetensors file"):
        load_model(engine)


def test_a_mapping_that_does_not_fit(make_engine: Callable[..., Path], engine: Path) -> None:
    two = make_engine({"intermediate_size": 256}, mapping=ParallelMapping(tp=2))
    with pytest.raises(SpecError, match=r"built for 2 ranks \(tp 2, ep 1, dp 1\); 1 is running"):
        load_model(two)
    with pytest.raises(SpecError, match="rank 1 is outside the world of 1 ranks"):
        load_model(engine, rank=1)
