"""`build` and `inspect` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from gptoss_trt.build_engine.spec import Manifest
from gptoss_trt.build_engine.synthetic import small_config, write_checkpoint
from gptoss_trt.client.cli import gptoss_trt
from gptoss_trt.runtime.launch.server_binary import LaunchError
from gptoss_trt.runtime.launch.tritonserver import check_engine


def run(*arguments: object) -> Result:
    return CliRunner().invoke(gptoss_trt, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("cli") / "checkpoint", small_config())


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Path:
    result = run("build", checkpoint, "--out", checkpoint.parent / "engine", "--tp", 2, "--experts", "fp8_block128")
    assert result.exit_code == 0, result.output
    return checkpoint.parent / "engine"


def test_build_says_what_it_did(checkpoint: Path, tmp_path: Path) -> None:
    result = run("build", checkpoint, "--out", tmp_path / "engine", "--dense", "fp8_block128", "--dp", 2)
    assert result.exit_code == 0
    assert "Hugging Face, experts in MXFP4" in result.output
    assert "192 of 192 blocks exact, 0 rounded; largest spread 5 octaves" in result.output
    assert "lm_head: relative rms error" in result.output
    assert "GB/s" in result.output


def test_build_as_json(checkpoint: Path, tmp_path: Path) -> None:
    result = run("build", checkpoint, "--out", tmp_path / "engine", "--h-scale", "static", "--kv", "fp8", "--json")
    report = json.loads(result.stdout)
    assert report["formats"] == {
        "experts": "mxfp4", "dense": "bf16", "kv": "fp8", "h_scale": "static", "weight_layout": "plain",
    }  # fmt: skip
    assert report["bytes_written"] == report["files"]["rank0.safetensors"]["bytes"]
    assert report["gb_per_second"] >= 0


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--tp", "3"], 2, "tp is 3; allowed: 1, 2, 4, 8"),
        (["--ep", "4", "--tp", "2"], 2, "ep 4 does not divide the world of tp 2 x dp 1 = 2 ranks"),
        (["--experts", "fp8"], 2, "'fp8' is not one of 'mxfp4', 'fp8_block128'"),
        (["--exprets", "mxfp4"], 2, "Did you mean"),
        (["--tp", "8"], 1, "tp 8 does not divide 2 KV heads"),
    ],
)
def test_wrong_use_is_named(arguments: list[str], status: int, message: str, checkpoint: Path, tmp_path: Path) -> None:
    result = run("build", checkpoint, "--out", tmp_path / "engine", *arguments)
    assert result.exit_code == status
    assert message in result.output
    assert not (tmp_path / "engine").exists()


def test_an_engine_that_serve_refuses_is_warned_of(checkpoint: Path, tmp_path: Path) -> None:
    """At build time and by its help, in the launcher's words."""
    options = ("--experts", "fp8_block128", "--json")
    several = run("build", checkpoint, "--out", tmp_path / "two", "--tp", 2, *options)
    assert "warning: an engine of 2 ranks" in several.stderr and "`gptoss-trt serve` runs one rank" in several.stderr
    assert json.loads(several.stdout)["mapping"]["tp"] == 2
    one = run("build", checkpoint, "--out", tmp_path / "one", *options)
    assert "warning" not in one.stderr
    assert "runs one rank so far" in " ".join(run("build", "--help").output.split())
    with pytest.raises(LaunchError, match="built for 2 ranks, and the engine process runs one"):
        check_engine(tmp_path / "two")
    check_engine(tmp_path / "one")


def test_inspect_describes_a_checkpoint(checkpoint: Path) -> None:
    assert json.loads(run("inspect", checkpoint, "--json").stdout)["layout"] == "hf_mxfp4"
    text = run("inspect", checkpoint).output
    assert "layout_text: Hugging Face, experts in MXFP4" in text
    assert "layer_types: sliding_attention, full_attention" in text


def test_inspect_says_what_a_modelopt_export_is(tmp_path: Path) -> None:
    text = run("inspect", write_checkpoint(tmp_path / "fp8", small_config(), layout="modelopt_fp8")).output
    assert "producer: nvidia-modelopt" in text
    assert "quant_algo: FP8" in text


def test_inspect_describes_an_engine(engine: Path) -> None:
    described = json.loads(run("inspect", engine, "--json").stdout)
    assert described["kind"] == "engine"
    assert described["mapping"] == {"tp": 2, "ep": 1, "dp": 1}
    assert "largest_spread_octaves: 5" in run("inspect", engine).output


def test_verify_finds_a_flipped_bit(engine: Path, tmp_path: Path) -> None:
    assert json.loads(run("inspect", engine, "--verify", "--json").stdout) == {
        "kind": "engine", "path": str(engine), "ok": True, "problems": [],
    }  # fmt: skip
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in engine.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    data = bytearray((copy / "rank1.safetensors").read_bytes())
    data[-5] ^= 1
    (copy / "rank1.safetensors").write_bytes(data)
    (copy / "stray.txt").write_text("?")
    result = run("inspect", copy, "--verify", "--json")
    assert result.exit_code == 1
    first, second = json.loads(result.stdout)["problems"]
    assert first.startswith("rank1.safetensors: sha256")
    assert second == "stray.txt: not in the manifest"


def test_verify_finds_files_of_another_length_or_shape(engine: Path, tmp_path: Path) -> None:
    for file in engine.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "rank1.safetensors").write_bytes((engine / "rank0.safetensors").read_bytes())
    problems = json.loads(run("inspect", tmp_path, "--verify", "--json").stdout)["problems"]
    assert any("bytes, the manifest says" in problem for problem in problems)
    assert any("tensor embedding.weight is BF16 [256, 160], not BF16 [64, 160]" in problem for problem in problems)


def test_verify_finds_a_bias_that_two_ranks_add(checkpoint: Path, tmp_path: Path) -> None:
    run("build", checkpoint, "--out", tmp_path / "e", "--dp", 2)
    manifest = Manifest.read(tmp_path / "e")
    assert manifest.mapping.world == 2
    (tmp_path / "e" / "rank1.safetensors").write_bytes((tmp_path / "e" / "rank0.safetensors").read_bytes())
    problems = json.loads(run("inspect", tmp_path / "e", "--verify", "--json").stdout)["problems"]
    assert any("rank1.safetensors" in problem for problem in problems)


def test_verify_reads_a_checkpoint(checkpoint: Path) -> None:
    result = run("inspect", checkpoint, "--verify")
    assert result.exit_code == 0
    assert "is right: every tensor" in result.output


def test_verify_finds_numbers_that_are_none(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "bad", small_config())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("inf")
    tensors["model.layers.1.mlp.experts.down_proj_scales"][1, 2, 3] = 255
    save_file(tensors, folder / "model.safetensors")
    result = run("inspect", folder, "--verify", "--json")
    assert result.exit_code == 1
    first, second = json.loads(result.stdout)["problems"]
    assert first == "model.norm.weight: 1 values are not finite"
    assert "down_proj_blocks: MXFP4 scale byte 255" in second


@pytest.mark.parametrize("name", ["layers.1.moe.down", "layers.1.moe.down.weight_scale", "layers.1.moe.down.weight"])
def test_one_tensor_dequantised(name: str, engine: Path) -> None:
    statistics = json.loads(run("inspect", engine, "--tensor", name, "--rank", 1, "--json").stdout)
    assert statistics["stored_as"] == "F8_E4M3 [8, 160, 96] + F32 [8, 2, 1]"
    assert statistics["values"] == 8 * 160 * 96
    assert statistics["max"] == 6 * 2.0 ** (123 - 127)
    assert statistics["not_finite"] == 0


def test_engine_and_checkpoint_have_the_same_statistics(engine: Path, checkpoint: Path, tmp_path: Path) -> None:
    run("build", checkpoint, "--out", tmp_path / "one")
    for stem, key in (
        ("layers.0.moe.gate_up", "model.layers.0.mlp.experts.gate_up_proj_blocks"),
        ("embedding", "model.embed_tokens.weight"),
    ):
        ours = json.loads(run("inspect", tmp_path / "one", "--tensor", stem, "--json").stdout)
        theirs = json.loads(run("inspect", checkpoint, "--tensor", key, "--json").stdout)
        for field in ("values", "zeros", "min", "max", "mean", "rms"):
            assert ours[field] == theirs[field]


def test_a_tensor_that_is_not_there(engine: Path) -> None:
    result = run("inspect", engine, "--tensor", "layers.0.atention.sinks")
    assert result.exit_code == 1
    assert "did you mean layers.0.attention.sinks" in result.output
    assert "rank 9 is outside" in run("inspect", engine, "--tensor", "norm.weight", "--rank", 9).output


def test_help_has_examples() -> None:
    for command in ("build", "inspect"):
        assert "Examples:" in run(command, "--help").output
