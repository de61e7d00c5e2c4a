"""Whole builds: the same engine from every layout, honest reports, and nothing half-written under the engine's name."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptoss_trt.build_engine import builder, inspection
from gptoss_trt.build_engine.builder import BuildOptions, BuildResult, build_engine
from gptoss_trt.build_engine.safetensors_file import CheckpointError
from gptoss_trt.build_engine.spec import Manifest, ParallelMapping, SpecError
from gptoss_trt.build_engine.synthetic import small_config, write_checkpoint
from gptoss_trt.reference import fp8_block, mxfp4

CONFIG = small_config()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    layouts = ("openai", "hf_mxfp4", "hf_bf16", "modelopt_fp8")
    return {layout: write_checkpoint(root / layout, CONFIG, layout=layout, shards=2, seed=3) for layout in layouts}  # type: ignore[arg-type]


def build(checkpoint: Path, out: Path, **options: Any) -> BuildResult:
    return build_engine(checkpoint, out, BuildOptions(workers=2, **options))


def checkpoint_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def weights(engine: Path, rank: int = 0) -> dict[str, torch.Tensor]:
    return load_file(engine / f"rank{rank}.safetensors")


def test_both_mxfp4_layouts_give_the_same_bytes(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    for experts in ("mxfp4", "fp8_block128"):
        first = build(checkpoints["openai"], tmp_path / f"openai-{experts}", experts=experts).manifest
        second = build(checkpoints["hf_mxfp4"], tmp_path / f"hf-{experts}", experts=experts).manifest
        assert first.files == second.files
        assert first.exactness["mxfp4_blocks"]["rounded"] == 0


def test_fp8_is_the_same_from_mxfp4_and_from_its_bf16_values(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    exact = build(checkpoints["hf_mxfp4"], tmp_path / "a", experts="fp8_block128")
    quantised = build(checkpoints["hf_bf16"], tmp_path / "b")
    assert quantised.manifest.formats.experts == "fp8_block128"
    assert quantised.manifest.exactness == {"relative_rms_error": {"experts": 0.0}}
    assert exact.manifest.files == quantised.manifest.files


def test_stored_values_are_the_checkpoints(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    build(checkpoints["hf_bf16"], tmp_path / "engine", experts="mxfp4")
    source = checkpoint_tensors(checkpoints["hf_bf16"])
    engine = weights(tmp_path / "engine")
    stem = "layers.1.moe.gate_up"
    decoded = mxfp4.decode(engine[f"{stem}.blocks"], engine[f"{stem}.scales"])
    assert torch.equal(decoded, source["model.layers.1.mlp.experts.gate_up_proj"].float().transpose(1, 2))
    qkv = [source[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(engine["layers.1.attention.qkv.weight"], torch.cat(qkv))
    assert torch.equal(engine["embedding.weight"], source["model.embed_tokens.weight"])
    assert torch.equal(engine["lm_head.weight"], source["lm_head.weight"])


def test_modelopt_weights_pass_bit_for_bit(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    result = build(checkpoints["modelopt_fp8"], tmp_path / "engine", dense="fp8_block128", kv="fp8")
    assert result.manifest.formats.experts == "fp8_block128"
    assert result.manifest.exactness["relative_rms_error"]["experts"] == 0.0
    engine = weights(tmp_path / "engine")
    source = checkpoint_tensors(checkpoints["modelopt_fp8"])
    stored = source["model.layers.0.mlp.experts.down_proj"].transpose(1, 2).contiguous()
    assert torch.equal(engine["layers.0.moe.down.weight"].view(torch.uint8), stored.view(torch.uint8))
    assert engine["layers.0.attention.k_scale"].tolist() == [0.25]
    assert inspection.verify(tmp_path / "engine") == []


def test_fp8_kv_without_scales_has_ones(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    build(checkpoints["hf_mxfp4"], tmp_path / "engine", kv="fp8")
    assert weights(tmp_path / "engine")["layers.1.attention.v_scale"].tolist() == [1.0]


def test_dense_fp8_reports_its_error(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    errors = build(checkpoints["hf_mxfp4"], tmp_path / "engine", dense="fp8_block128").manifest.exactness
    engine, wanted = weights(tmp_path / "engine"), checkpoint_tensors(checkpoints["hf_mxfp4"])["lm_head.weight"]
    found = fp8_block.dequantise(engine["lm_head.weight"], engine["lm_head.weight_scale"])
    error = float((found - wanted.float()).norm() / wanted.float().norm())
    assert errors["relative_rms_error"]["lm_head"] == pytest.approx(error, rel=1e-4)
    assert 0.01 < error < 0.03


@pytest.mark.parametrize("experts", ["mxfp4", "fp8_block128"])
def test_blocks_that_are_not_exact_are_counted_and_named(experts: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", CONFIG)
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    scales, blocks = (tensors[f"model.layers.1.mlp.experts.down_proj_{word}"] for word in ("scales", "blocks"))
    scales[5, 128:, 4:] = 120  # block [1, 1] of expert 5
    blocks[5, 128:, 4:] = 0x71  # 6 and 0.5: half of 2^-9 cannot be kept 15 octaves down
    scales[5, 130, 4] = 105  # 15 octaves below
    scales[6, 0, 0] = 123 - 13  # 13 octaves at most: exact
    save_file(tensors, path)
    report = build(checkpoint, tmp_path / "engine", experts=experts).manifest.exactness
    blocks_report = report["mxfp4_blocks"]
    assert (blocks_report["total"], blocks_report["rounded"]) == (192, 1)
    assert blocks_report["largest_spread_octaves"] == 15
    assert blocks_report["largest_spread_at"] == {"tensor": "layers.1.moe.down", "expert": 5, "block": [1, 1]}
    assert blocks_report["rounded_at"] == [{"tensor": "layers.1.moe.down", "expert": 5, "blocks": 1}]
    if experts == "fp8_block128":
        assert 0 < report["relative_rms_error"]["experts"] < 1e-3


def test_a_scale_byte_255_names_file_and_tensor(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", CONFIG)
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.layers.0.mlp.experts.gate_up_proj_scales"][2, 7, 1] = 255
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: tensor .*gate_up_proj_blocks of expert 2: .*255 .* at \(7, 1\)"
    ):
        build(checkpoint, tmp_path / "engine")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_a_value_that_is_not_finite(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", CONFIG, layout="hf_bf16")
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.layers.0.mlp.experts.down_proj"][0, 0, 0] = float("nan")
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match="down_proj of expert 0: values to be stored as FP8 are not finite"):
        build(checkpoint, tmp_path / "engine")


@pytest.mark.parametrize(
    "key",
    ["model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"]
    + [f"model.layers.0.{part}" for part in ("self_attn.q_proj.weight", "self_attn.sinks", "mlp.router.bias")],
)
def test_a_value_of_plain_bf16_that_is_not_finite(key: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", CONFIG)
    tensors = load_file(checkpoint / "model.safetensors")
    tensors[key].view(-1)[3] = float("nan")
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match="values to be stored as BF16 are not finite"):
        build(checkpoint, tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_f32_checkpoints_are_rounded_to_bf16(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", CONFIG, layout="hf_bf16")
    tensors = {name: value.float() * 1.001 for name, value in load_file(checkpoint / "model.safetensors").items()}
    save_file(tensors, checkpoint / "model.safetensors")
    report = build(checkpoint, tmp_path / "engine").manifest.exactness["relative_rms_error"]
    assert 0 < report["qkv"] < 0.004
    assert torch.equal(weights(tmp_path / "engine")["norm.weight"], tensors["model.norm.weight"].to(torch.bfloat16))


def test_large_vocabularies_are_read_in_pieces(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = build(checkpoints["openai"], tmp_path / "whole", dense="fp8_block128", mapping=ParallelMapping(tp=2))
    monkeypatch.setattr(builder, "CHUNK_BYTES", 1)  # 128 rows at a time
    pieces = build(checkpoints["openai"], tmp_path / "pieces", dense="fp8_block128", mapping=ParallelMapping(tp=2))
    assert whole.manifest.files == pieces.manifest.files


def test_refused_mappings_leave_nothing(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="tp 4 does not divide 2 KV heads"):
        build(checkpoints["openai"], tmp_path / "engine", mapping=ParallelMapping(tp=4))
    assert list(tmp_path.iterdir()) == []


def test_an_engine_is_replaced_only_by_force(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "engine"
    build(checkpoints["openai"], out)
    before = (out / "manifest.json").read_text()
    with pytest.raises(CheckpointError, match="is an engine already; --force replaces it"):
        build(checkpoints["openai"], out)
    assert (out / "manifest.json").read_text() == before
    build(checkpoints["openai"], out, force=True, experts="fp8_block128")
    assert Manifest.read(out).formats.experts == "fp8_block128"
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def test_other_folders_are_never_replaced(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="exists and is not an engine"):
        build(checkpoints["openai"], tmp_path / "thesis", force=True)
    assert (tmp_path / "thesis" / "chapter1.txt").read_text() == "years of work"


def test_a_failed_replacement_keeps_the_old_engine(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "engine"
    build(checkpoints["openai"], out)
    bad = write_checkpoint(tmp_path / "bad", CONFIG)
    tensors = load_file(bad / "model.safetensors")
    tensors["model.layers.0.mlp.experts.down_proj_scales"][0, 0, 0] = 255
    save_file(tensors, bad / "model.safetensors")
    with pytest.raises(CheckpointError, match="255"):
        build(bad, out, force=True)
    assert inspection.verify(out) == []


def test_progress_reaches_the_end(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    result = build_engine(
        checkpoints["openai"],
        tmp_path / "engine",
        BuildOptions(workers=2),
        lambda done, total: seen.append((done, total)),
    )
    assert seen[-1][0] == seen[-1][1] == result.bytes_read
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


SLOW_BUILD = """
import sys, time
from pathlib import Path
from gptoss_trt.build_engine import builder
real = builder._Plan._expert
def slow(self, *arguments):
    time.sleep(0.05)
    real(self, *arguments)
builder._Plan._expert = slow
builder.build_engine(Path(sys.argv[1]), Path(sys.argv[2]), builder.BuildOptions(workers=2, force=True))
"""


def start_slow_build(checkpoint: Path, out: Path) -> subprocess.Popen[bytes]:
    """A build in its own process that takes at least 0.8 s; returns once it writes."""
    process = subprocess.Popen([sys.executable, "-c", SLOW_BUILD, str(checkpoint), str(out)])
    written = out.with_name(out.name + ".building") / "rank0.safetensors"
    deadline = time.monotonic() + 60
    while not written.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("old_engine", [False, True])
def test_a_killed_build_leaves_no_engine_and_the_next_one_works(
    old_engine: bool, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "engine"
    if old_engine:
        build(checkpoints["openai"], out)
    process = start_slow_build(checkpoints["openai"], out)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert out.exists() == old_engine
    assert not old_engine or inspection.verify(out) == []
    assert (tmp_path / "engine.building").exists()
    build(checkpoints["openai"], out, force=True)
    assert inspection.verify(out) == []
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def test_two_builds_of_one_engine(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    process = start_slow_build(checkpoints["openai"], tmp_path / "engine")
    with pytest.raises(CheckpointError, match="another build of it is running"):
        build(checkpoints["openai"], tmp_path / "engine")
    assert process.wait(60) == 0
    assert inspection.verify(tmp_path / "engine") == []


def test_an_interruption_between_the_two_renames_is_repaired(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "engine"
    build(checkpoints["openai"], out)
    out.rename(tmp_path / "engine.replaced")
    with pytest.raises(CheckpointError, match="is an engine already"):
        build(checkpoints["openai"], out)
    assert inspection.verify(out) == []


def test_a_full_disk_is_named_and_leaves_nothing(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"No space left on device: .*rank0\.safetensors"):
        build(checkpoints["openai"], tmp_path / "engine")
    assert list(tmp_path.iterdir()) == []


def test_harmony_models_bring_their_tokenizer(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "HARMONY_VOCAB_SIZE", CONFIG.vocab_size)
    manifest = build(checkpoints["openai"], tmp_path / "engine").manifest
    assert {"rank0.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(manifest.files)
    assert inspection.verify(tmp_path / "engine") == []
