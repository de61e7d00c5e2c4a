"""The manifest: what is written is read back, and everything else is an error that names itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptoss_trt.build_engine.spec import FileEntry, Formats, Manifest, ParallelMapping, SpecError
from gptoss_trt.build_engine.synthetic import small_config

MANIFEST = Manifest(
    model=small_config(),
    formats=Formats(experts="fp8_block128", kv="fp8"),
    mapping=ParallelMapping(tp=2, ep=2, dp=2),
    files={"rank0.safetensors": FileEntry(12, "ab")},
    provenance={"layout": "openai"},
    exactness={"mxfp4_blocks": {"total": 3}},
)


def test_round_trip(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(MANIFEST.to_json())
    assert Manifest.read(tmp_path) == MANIFEST


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(schema_version=99), "schema_version is 99; this build reads 1"),
        (lambda m: m.pop("schema_version"), "schema_version is None"),
        (lambda m: m.update(extra=1), r"manifest: unknown keys \['extra'\]"),
        (lambda m: m.pop("files"), r"missing keys \['files'\]"),
        (lambda m: m.update(files=[]), "manifest.files is list"),
        (lambda m: m.update(provenance=7), "manifest.provenance is int"),
        (lambda m: m.update(exactness=[]), "manifest.exactness is list"),
        (lambda m: m["provenance"].update(random_seed=-1), "random_seed is -1"),
        (lambda m: m["provenance"].update(random_seed="1"), "random_seed is '1'"),
        (lambda m: m["files"].update(x=1), r"files\['x'\] is int"),
        (lambda m: m["files"]["rank0.safetensors"].update(bytes="12"), "bytes is '12'"),
        (lambda m: m["model"].update(hidden_size=2.5), "model.hidden_size is 2.5"),
        (lambda m: m["model"].update(num_layers=True), "model.num_layers is True"),
        (lambda m: m["model"].update(num_layers=3), "layer_types has 2 entries for 3 layers"),
        (lambda m: m["model"].update(layer_types=["full", "full"]), "model.layer_types"),
        (lambda m: m["model"].update(layer_typos=[]), r"model: unknown keys \['layer_typos'\]"),
        (lambda m: m["formats"].update(experts="int8"), "formats.experts is 'int8'"),
        (lambda m: m["mapping"].update(tp=3), "tp is 3; allowed"),
        (lambda m: m.update(model=None), "model is NoneType"),
        (lambda m: m["model"].update(vocab_size=0), "model.vocab_size is 0; it must be at least 1"),
        (lambda m: m["model"].update(max_context=-1), "model.max_context is -1"),
        (lambda m: m["model"].update(eos_token_id=-1), "model.eos_token_id is -1"),
        (lambda m: m["model"].update(rope_theta=float("nan")), "model.rope_theta is nan"),
        (lambda m: m["model"].update(rms_norm_eps=0.0), "model.rms_norm_eps is 0.0"),
        (lambda m: m["model"].update(experts_per_token=999), "experts_per_token is 999, of"),
        (lambda m: m["model"].update(num_heads=7), "num_heads is 7"),
        (lambda m: m["files"].update({"../x": {"bytes": 1, "sha256": "ab"}}), r"files\['../x'\] lies outside"),
        (lambda m: m["files"].update({"/x": {"bytes": 1, "sha256": "ab"}}), r"files\['/x'\] lies outside"),
    ],
)
def test_anything_else_is_named(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    raw = json.loads(MANIFEST.to_json())
    change(raw)
    with pytest.raises(SpecError, match=message):
        Manifest.from_json(json.dumps(raw))


def test_folders_without_a_manifest(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"is not an engine directory: manifest\.json is missing"):
        Manifest.read(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(SpecError, match="is not JSON"):
        Manifest.read(tmp_path)
