"""Plan files: what is read and refused, which of two goes first, and that the shipped one says what the rules say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gptoss_trt.ops import plan
from gptoss_trt.ops.library import ABI_VERSION, DenseFormat
from gptoss_trt.ops.plan import Choices, Plan, PlanError

ROOT = Path(__file__).parents[3]
GPU = "NVIDIA H200"
COMPILER = shutil.which("g++") or shutil.which("c++")


@pytest.fixture(autouse=True)
def built_in() -> Iterator[None]:
    plan.activate(None)
    yield
    plan.activate(None)


def text(**changes: Any) -> dict[str, Any]:
    dense = {"64x128": [[4, "few"], [64, "64/2"], [None, "auto"]]}
    return {"version": 1, "gpu": GPU, "abi": ABI_VERSION, "ops": {"dense_fp8": dense}} | changes


def write(path: Path, raw: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(raw if isinstance(raw, str) else json.dumps(raw))
    return path


def test_a_file_is_read_and_written_back(tmp_path: Path) -> None:
    read = Plan.read(write(tmp_path / "a.json", text()))
    assert read.ops == {"dense_fp8": {(64, 128): Choices((4, 64), ("few", "64/2", "auto"))}}
    read.write(tmp_path / "b.json")
    assert Plan.read(tmp_path / "b.json") == read
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]


def test_choices_hold_up_to_their_tokens() -> None:
    choices = Choices((4, 64), ("few", "64/2", "auto"))
    assert [choices.at(tokens) for tokens in (0, 1, 4, 5, 64, 65, 9000)] == [
        "few", "few", "few", "64/2", "64/2", "auto", "auto",
    ]  # fmt: skip
    assert (choices.least("few"), choices.least("auto"), choices.least("tiles")) == (1, 65, None)


def shape(op: str, name: str, pairs: Any) -> dict[str, Any]:
    return text(ops={op: {name: pairs}})


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ("{", "is not JSON"),
        ([], "the plan is list"),
        (text(version=2), "version is 2; this build reads 1"),
        (text(gpu=7), "gpu is 7"),
        ({"version": 1, "gpu": GPU, "ops": {}}, "there is no 'abi'"),
        (text(speed=1), "unknown key 'speed'"),
        (text(ops={"dense_fp4": {}}), "unknown op 'dense_fp4'; ops: dense, dense_fp8"),
        (text(ops={"dense": []}), "dense is list"),
        (shape("dense", "64", [[None, "few"]]), "dense: unknown shape '64'"),
        (shape("experts", "bf16 32x64x64", [[None, "auto"]]), "experts: unknown shape 'bf16 32x64x64'"),
        (shape("dense", "64x64", []), "dense 64x64 is []"),
        (shape("dense", "64x64", [["few"]]), "['few'] is no [tokens, choice]"),
        (shape("dense", "64x64", [[8, "few"], [None, "fast"]]), "unknown choice 'fast'; choices: few, triton"),
        (shape("dense_fp8", "64x64", [[None, "192/1"]]), "unknown choice '192/1'"),
        (shape("dense_fp8", "64x64", [[None, "256/2"]]), "unknown choice '256/2'"),
        (shape("dense", "64x64", [[8, "few"], [8, "triton"], [None, "triton"]]), "8 tokens, not a number above"),
        (shape("dense", "64x64", [[True, "few"], [None, "triton"]]), "True tokens, not a number"),
        (shape("dense", "64x64", [[8, "triton"]]), "the last number of tokens is 8, not null"),
        (shape("dense", "64x64", [[17, "few"], [None, "triton"]]), "few takes up to 16 tokens, not 17"),
        (shape("dense", "64x64", [[None, "few"]]), "few takes up to 16 tokens, not any number"),
        (shape("rmsnorm_route", "8x64", [[513, "cluster"], [None, "pieces"]]), "cluster takes up to 512"),
        (shape("experts", "fp8 8x64x64", [[8, "tiles"], [None, "decode"]]), "decode behind tiles"),
    ],
)
def test_what_is_unknown_is_refused_by_name(tmp_path: Path, raw: Any, words: str) -> None:
    path = write(plan.engine_file(tmp_path, GPU), raw)
    with pytest.raises(PlanError, match=re.escape(words)) as error:
        Plan.read(path)
    assert str(path) in str(error.value)
    with pytest.raises(PlanError):
        plan.select(GPU, tmp_path)


def test_the_engines_plan_goes_first_shape_by_shape(tmp_path: Path) -> None:
    qkv, own = (5120, 2880), [[2, "few"], [None, "128/1"]]
    write(plan.engine_file(tmp_path, GPU), text(ops={"dense_fp8": {"5120x2880": own}}))
    selected = plan.select(GPU, tmp_path)
    assert selected.table["dense_fp8"][qkv] == Choices((2,), ("few", "128/1"))
    shipped = plan.select(GPU)
    assert selected.table["dense_fp8"][2880, 4096] == shipped.table["dense_fp8"][2880, 4096]
    assert selected.table["experts"] == shipped.table["experts"]
    assert selected.text == f"{plan.engine_file(tmp_path, GPU)}; shipped for {GPU}" and not selected.is_built_in


@pytest.mark.parametrize(("change", "words"), [({"gpu": "NVIDIA H100"}, "of NVIDIA H100"), ({"abi": 1}, "ABI 1, not")])
def test_a_plan_of_another_card_or_library_is_passed_over(tmp_path: Path, change: Any, words: str) -> None:
    write(plan.engine_file(tmp_path, GPU), text(**change))
    selected = plan.select(GPU, tmp_path)
    assert selected.table == plan.select(GPU).table
    assert "not used" in selected.text and words in selected.text


def test_a_card_without_a_plan_has_the_built_in_rule(tmp_path: Path) -> None:
    selected = plan.select("NVIDIA H100 PCIe", tmp_path)
    assert selected.is_built_in and selected.text == "built-in rule (none shipped for NVIDIA H100 PCIe)"
    plan.activate(selected.table)
    assert plan.choices("dense", (5120, 2880)) is None


def test_the_shipped_plan_follows_the_built_in_rules_of_python() -> None:
    """With the plan and without it every call has the same kernel."""
    from gptoss_trt.ops import dense, rmsnorm_route  # bring Triton, whose interpreter the interpret tier chooses first

    sizes = {(5120, 2880): [4096, 512, 512], (2880, 4096): [], (201088, 2880): []}
    tensors = {size: torch.empty(size, device="meta") for size in sizes}

    def chosen(tokens: int) -> list[object]:
        found: list[object] = [rmsnorm_route.kernels_for(tokens, 2880, experts, 4) for experts in (32, 128)]
        for (rows, columns), segments in sizes.items():
            x = torch.empty(tokens, columns, device="meta")
            found += [dense.takes(number, x, tensors[rows, columns], segments) for number in DenseFormat]
        return found

    steps = [*range(600), 767, 768, 1023, 1024, 3071, 3072, 4095, 4096, 8192, 32768, 32769]
    usual = [chosen(tokens) for tokens in steps]
    plan.activate(plan.select(GPU).table)
    assert {op: len(shapes) for op, shapes in plan.active().items()} == {
        "dense": 3, "dense_fp8": 3, "experts": 4, "rmsnorm_route": 2,
    }  # fmt: skip
    assert [chosen(tokens) for tokens in steps] == usual


RULES = r"""
#include <cstdio>
#include "dense_fp8/plan.h"
#include "gptoss_trt.h"
#include "moe_gemm_fp8/plan.h"

int main() {
  const int shapes[3][3] = {{5120, 40, 23}, {2880, 23, 32}, {201088, 1571, 23}};
  for (int tokens = 1; tokens <= 9000; ++tokens) {
    for (const auto& shape : shapes) {
      const auto plan = gptoss::dense_fp8::choose_plan(tokens, shape[1], shape[2], 132);
      std::printf("dense %d %d %d/%d\n", shape[0], tokens, plan.tile_tokens, plan.parts);
    }
    for (int experts = 32; experts <= 128; experts += 96) {
      for (int form = 0; form < 12; ++form) {  // product, storage, scale mode
        gptoss_trt_moe_gemm_args args{};
        args.product = 1 + form % 2;
        args.storage = 1 + form / 2 % 2;
        args.scale_mode = 1 + form / 4;
        args.experts = experts, args.tokens = args.max_tokens = tokens, args.top_k = 4;
        args.n = args.product == 1 ? 5760 : 2880, args.k = 2880;
        const auto plan = gptoss::moe::make_plan(args);
        args.plan = plan.kind;
        const auto same = gptoss::moe::make_plan(args);
        const bool equal = same.k_split == plan.k_split && same.token_block == plan.token_block;
        std::printf("moe %d %d %s\n", experts, tokens, !equal ? "?" : plan.kind == 2 ? "decode" : "prefill");
      }
    }
  }
}
"""


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_the_shipped_plan_follows_the_rules_of_the_library(tmp_path: Path) -> None:
    csrc, program = ROOT / "plugins" / "csrc", tmp_path / "rules"
    (tmp_path / "rules.cpp").write_text(RULES)
    sources = [tmp_path / "rules.cpp", csrc / "dense_fp8" / "plan.cpp", csrc / "moe_gemm_fp8" / "plan.cpp"]
    flags = ["-std=c++17", "-O1", f"-I{csrc}", f"-I{ROOT / 'plugins' / 'include'}"]
    for name in ("driver_types.h", "cuda_runtime_api.h", "cuda_runtime.h"):  # types alone, where there is no CUDA
        (tmp_path / name).write_text("typedef struct CUstream_st* cudaStream_t;\n")
    (tmp_path / "cuda_runtime_api.h").write_text('#include "driver_types.h"\n')
    subprocess.run([str(COMPILER), *flags, f"-I{tmp_path}", *sources, "-o", program], check=True, timeout=120)
    lines = subprocess.run([program], capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    table = plan.select(GPU).table
    columns = {5120: 2880, 2880: 4096, 201088: 2880}
    for line in lines:
        what, size, tokens, name = line.split()
        if what == "dense":
            choice = table["dense_fp8"][int(size), columns[int(size)]].at(int(tokens))
            assert choice in (name, "few"), line
        else:
            for storage in ("mxfp4", "fp8"):
                choice = table["experts"][storage, int(size), 2880, 2880].at(int(tokens))
                assert choice == name or (choice, name) == ("tiles", "prefill"), line
    assert len(lines) == 9000 * (3 + 24)


def test_a_plans_tiles_reach_the_calls() -> None:
    from gptoss_trt.ops import dense

    assert dense.tiles_for(64, 5120, 2880) == dense.CHOSEN
    plan.activate(plan.select(GPU).table)
    assert dense.tiles_for(64, 5120, 2880) == dense.Tiles(64, 2)
    assert dense.tiles_for(4096, 5120, 2880) == dense.Tiles(256, 1)
    assert dense.tiles_for(1, 5120, 2880) == dense.CHOSEN  # `few`, of a call that it does not take
    assert dense.tiles_for(64, 64, 64) == dense.CHOSEN


def test_a_plan_reaches_the_expert_products_and_options_go_before_it() -> None:
    from gptoss_trt.ops import moe_gemm_fp8
    from gptoss_trt.ops.library import OutDtype, Product
    from gptoss_trt.ops.library import Plan as MoePlan
    from gptoss_trt.ops.weight_layout import expert_bytes

    weight = torch.empty(32, expert_bytes(5760, 2880, True), dtype=torch.uint8, device="meta")

    def used(tokens: int, options: moe_gemm_fp8.Options = moe_gemm_fp8.DEFAULT) -> MoePlan:
        sizes = (4, 5760, 2880, tokens)
        shape = moe_gemm_fp8._shape(Product.GATE_UP, weight, "sm90_v1", 0, OutDtype.NONE, sizes, options)
        return shape.options.plan

    assert used(1) == MoePlan.AUTO
    plan.activate(plan.select(GPU).table)
    assert [used(tokens) for tokens in (256, 257, 768)] == [MoePlan.WGMMA, MoePlan.PREFILL, MoePlan.PREFILL]
    assert used(1, moe_gemm_fp8.Options(MoePlan.SIMT)) == MoePlan.SIMT


@pytest.mark.parametrize("experts", [32, 128])
def test_steps_on_tiles_are_those_of_the_built_in_rule(experts: int) -> None:
    from gptoss_trt.ops.prepare import PREFILL_ROWS

    choices = plan.select(GPU).table["experts"]["mxfp4", experts, 2880, 2880]
    assert choices.least("tiles") == PREFILL_ROWS * experts // 4
