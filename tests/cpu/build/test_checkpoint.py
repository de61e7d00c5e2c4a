"""Checkpoint folders: the layout by its keys, and one clear error for each thing that can be wrong."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptoss_trt.build_engine.checkpoint import MODELOPT_CONFIG, open_checkpoint
from gptoss_trt.build_engine.names import Layout
from gptoss_trt.build_engine.safetensors_file import CheckpointError
from gptoss_trt.build_engine.sources import Fp8, Plain, Source
from gptoss_trt.build_engine.synthetic import INDEX_NAME, small_config, write_checkpoint
from gptoss_trt.reference import fp8_block

CONFIG = small_config(num_layers=1)
LAYOUTS: tuple[Layout, ...] = ("openai", "hf_mxfp4", "hf_bf16", "modelopt_fp8")
Tensors = dict[str, torch.Tensor]


def rewrite(folder: Path, change: Callable[[Tensors], Any]) -> None:
    """Loads the folder's one file, lets `change` edit it, and writes it back."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shards", [1, 3])
def test_every_layout_is_recognised(layout: Layout, shards: int, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, CONFIG, layout=layout, shards=shards))
    assert checkpoint.layout == layout
    assert checkpoint.config.hidden_size == CONFIG.hidden_size
    assert len(checkpoint.files) == shards


def test_a_folder_with_original_beside_reads_hugging_face(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, layout="hf_mxfp4")
    write_checkpoint(tmp_path / "original", CONFIG, layout="openai")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.layout == "hf_mxfp4"
    assert any("original/" in note for note in checkpoint.ignored)


def test_a_folder_that_holds_only_original(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "original", CONFIG, layout="openai")
    assert open_checkpoint(tmp_path).layout == "openai"


def test_both_layouts_in_one_folder(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, layout="openai")
    (tmp_path / "model.safetensors").rename(tmp_path / "openai.safetensors")
    write_checkpoint(tmp_path, CONFIG, layout="hf_bf16")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.layout == "hf_bf16"
    assert any("tensors of layout openai" in note for note in checkpoint.ignored)


def test_files_outside_the_index_are_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, shards=2)
    save_file({"extra": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    assert "consolidated.safetensors (not in the index)" in open_checkpoint(tmp_path).ignored


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "missing tensors: model.norm.weight"),
        (
            lambda t: t.update({"model.nrom.weight": t.pop("model.norm.weight")}),
            r"unknown tensors: model\.nrom\.weight \(did you mean model\.norm\.weight\?\)",
        ),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(320, 161, dtype=torch.bfloat16)}),
            r"model\.safetensors: tensor lm_head\.weight has shape \[320, 161\], the configuration wants \[320, 160\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(160, dtype=torch.uint8)}),
            "tensor model.norm.weight has dtype U8, expected BF16 or F16 or F32",
        ),
        (lambda t: t.clear() or t.update({"wte.weight": torch.zeros(2)}), "no layout of gpt-oss .* wte.weight"),
    ],
)
def test_wrong_tensors(change: Callable[[Tensors], Any], message: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG)
    rewrite(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_a_truncated_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG)
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated"):
        open_checkpoint(tmp_path)


def test_a_pipe_in_a_shards_place_is_refused_at_once(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG)
    path = tmp_path / "model.safetensors"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is no regular file"):
        open_checkpoint(tmp_path)


def test_a_missing_shard(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors: No such file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update({"model.norm.weight": "model-00002-of-00002.safetensors"}), "it is in model-00001"),
        (lambda m: m.update({"ghost": "model-00001-of-00002.safetensors"}), "ghost is in model-00001.* no file"),
        (lambda m: m.pop("model.norm.weight"), "does not list model.norm.weight"),
        (lambda m: m.update({"model.norm.weight": "../x.safetensors"}), r"outside its folder: \.\./x"),
        (lambda m: m.update({"model.norm.weight": 7}), "weight_map is not a table"),
    ],
)
def test_a_wrong_index(change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, shards=2)
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    change(index["weight_map"])
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG)
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"is in .*model\.safetensors and in .*other\.safetensors"):
        open_checkpoint(tmp_path)


def test_folders_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="not a folder"):
        open_checkpoint(tmp_path / "nowhere")


def test_modelopt_says_what_it_is(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, CONFIG, layout="modelopt_fp8"))
    assert checkpoint.quantization == {
        "producer": "nvidia-modelopt",
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
    }
    assert any("input_scale" in note for note in checkpoint.ignored)


def test_modelopt_with_another_algorithm_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, layout="modelopt_fp8")
    (tmp_path / MODELOPT_CONFIG).write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(CheckpointError, match=r"quant_algo is 'NVFP4'; this build reads FP8"):
        open_checkpoint(tmp_path)


STEM = "model.layers.0.self_attn.o_proj"


@pytest.mark.parametrize("shape", [(2, 1, 2, 1), (2, 2)])
def test_modelopt_block_scales_pass_unchanged(shape: tuple[int, ...], tmp_path: Path) -> None:
    """FP8_PB: one scale per 128 x 128 block, stored with or without singleton dimensions."""
    scale = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    write_checkpoint(tmp_path, CONFIG, layout="modelopt_fp8")
    rewrite(tmp_path, lambda t: t.update({f"{STEM}.weight_scale": scale.reshape(shape).contiguous()}))
    (weight,) = Source(open_checkpoint(tmp_path)).dense("layers.0.attention.out")
    assert isinstance(weight, Fp8)
    assert torch.equal(weight.scale, scale)


def test_modelopt_channel_scales_are_applied(tmp_path: Path) -> None:
    """FP8_PER_CHANNEL_PER_TOKEN: a scale per output."""
    write_checkpoint(tmp_path, CONFIG, layout="modelopt_fp8")
    scale = torch.rand(160) + 0.5
    experts = torch.rand(8, 448) + 0.5
    gate_up = "model.layers.0.mlp.experts.gate_up_proj"
    rewrite(tmp_path, lambda t: t.update({f"{STEM}.weight_scale": scale, f"{gate_up}_weight_scale": experts}))
    raw = load_file(tmp_path / "model.safetensors")
    source = Source(open_checkpoint(tmp_path))
    (weight,) = source.dense("layers.0.attention.out")
    assert isinstance(weight, Plain)
    assert torch.equal(weight.values, raw[f"{STEM}.weight"].float() * scale[:, None])
    expert = source.expert("layers.0.moe.gate_up", 3)
    assert isinstance(expert, Plain)
    assert torch.equal(expert.values, raw[gate_up][3].float().T * experts[3][:, None])


def test_modelopt_expert_scales_in_every_shape(tmp_path: Path) -> None:
    """A scalar, one an expert, or a grid of blocks stored input x output like the weight."""
    gate_up = "model.layers.0.mlp.experts.gate_up_proj"
    write_checkpoint(tmp_path, CONFIG, layout="modelopt_fp8")
    for scale in (torch.tensor(0.5), torch.arange(1.0, 9.0), torch.arange(1.0, 9.0).reshape(8, 1, 1)):
        rewrite(tmp_path, lambda t, scale=scale: t.update({f"{gate_up}_weight_scale": scale}))
        expert = Source(open_checkpoint(tmp_path)).expert("layers.0.moe.gate_up", 2)
        assert isinstance(expert, Fp8)
        assert expert.scale.unique().tolist() == [0.5 if scale.ndim == 0 else 3.0]
    grid = torch.rand(8, 2, 4) + 0.5  # [E, 160 / 128, 448 / 128]
    rewrite(tmp_path, lambda t: t.update({f"{gate_up}_weight_scale": grid}))
    raw = load_file(tmp_path / "model.safetensors")[gate_up]
    expert = Source(open_checkpoint(tmp_path)).expert("layers.0.moe.gate_up", 2)
    assert isinstance(expert, Fp8)
    assert torch.equal(expert.scale, grid[2].T)
    wide = fp8_block.expand_blocks(grid[2], 160, 448)
    assert torch.equal(fp8_block.dequantise(expert.weight, expert.scale), (raw[2].float() * wide).T)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(3), r"weight_scale of shape \[3\] is no scale for a weight of \[160, 256\]"),
        (torch.tensor(0.0), "not positive"),
        (torch.tensor(float("nan")), "not positive"),
    ],
)
def test_modelopt_scales_that_fit_nothing(scale: torch.Tensor, message: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, layout="modelopt_fp8")
    rewrite(tmp_path, lambda t: t.update({f"{STEM}.weight_scale": scale}))
    with pytest.raises(CheckpointError, match=message):
        Source(open_checkpoint(tmp_path)).dense("layers.0.attention.out")


def test_fp8_without_a_scale(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, layout="modelopt_fp8")
    rewrite(tmp_path, lambda t: t.pop(f"{STEM}.weight_scale"))
    with pytest.raises(CheckpointError, match=r"o_proj\.weight is F8_E4M3 and has no weight_scale"):
        Source(open_checkpoint(tmp_path)).dense("layers.0.attention.out")
