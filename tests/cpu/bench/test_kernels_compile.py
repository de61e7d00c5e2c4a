"""Triton kernels compile for sm_90 without a card: what an interpreter cannot see, such as an argument that is 1 and
becomes a constant. A driver that only names its target stands in for the card; nothing is launched."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Named:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


driver.set_active(Named())
compiled = []
run = JITFunction.run


def compile_only(self, *arguments, grid, warmup, **options):
    kernel = run(self, *arguments, grid=grid, warmup=True, **options)
    assert kernel.asm["cubin"], self.__name__
    compiled.append(self.__name__)


JITFunction.run = compile_only
from gptoss_trt.build_engine.spec import Formats
from gptoss_trt.ops import dispatch
from gptoss_trt.runtime.bench.op_cases import Cases
from gptoss_trt.build_engine.shapes import model_config
from gptoss_trt.ops.schemas import SCHEMAS

library = torch.library.Library("gptoss_trt", "IMPL")
for op in SCHEMAS:
    if op not in ("dense", "moe_gate_up", "moe_down"):
        library.impl(op, dispatch._load(dispatch._TARGETS[op, "triton"]), "CPU", allow_override=True)
cases = Cases(model_config("tiny"), Formats(), torch.device("cpu"), 0)
tokens = int(sys.argv[1])
for op in ("embedding", "rmsnorm_quant", "kv_slots", "rope_kv_append", "attention_decode", "attention_prefill",
           "moe_route", "rmsnorm_route", "moe_combine_norm", "sample", "feed"):
    for case in cases.make(op, tokens, 600, True):
        case.call(0)
print(*sorted(set(compiled)))
"""


@pytest.mark.parametrize("tokens", [1, 40])
def test_kernels_compile_for_hopper(tokens: int) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE, str(tokens)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "0"},  # which tests/interpret sets for the process that collects it
    )
    assert done.returncode == 0, done.stderr[-3000:]
    names = done.stdout.split()
    assert {
        "_decode_kernel",
        "_merge_kernel",
        "_prefill_kernel",
        "_rope_kv_append_kernel",
        "_product_kernel",
        "_blocks_kernel",
        "_token_kernel",
        "_feed_kernel",
    } <= set(names)
    few = tokens == 1
    assert ("_small_kernel" in names) == ("_norm_router_kernel" in names) == few and ("_rows_kernel" in names) != few
