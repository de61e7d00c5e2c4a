"""The library as nvcc builds it: what it exports, what it refuses without a GPU, and that no kernel spills."""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gptoss_trt.ops import weight_layout
from gptoss_trt.ops.library import (
    AttentionArgs,
    DenseFewArgs,
    DenseFormat,
    DenseFp8Args,
    Library,
    LibraryError,
    MoeGemmArgs,
    OutDtype,
    Plan,
    Product,
    RmsnormQuantArgs,
    RmsnormRouteArgs,
    RouteRowsArgs,
    ScaleMode,
    Storage,
)

ROOT = Path(__file__).parents[3]
HEADER = ROOT / "plugins" / "include" / "gptoss_trt.h"
BUILD = ROOT / "build" / "cuda-test"
SHAPES = [(5760, 2880), (2880, 2880), (3072, 2880), (2688, 2880), (2880, 1344), (768, 2880), (512, 256), (100, 96)]


@pytest.fixture(scope="module")
def build_log() -> str:
    """Compiles into build/cuda-test from the start of the kernels, so that ptxas reports on each."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        options = ["-DCMAKE_BUILD_TYPE=Release", f"-DCMAKE_CUDA_COMPILER={shutil.which('nvcc')}"]
        for command in (
            ["cmake", "-S", str(ROOT / "plugins"), "-B", str(BUILD), *options],
            ["cmake", "--build", str(BUILD), "--clean-first"],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
            assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def library(build_log: str) -> Library:
    assert build_log
    return Library(BUILD / "libgptoss_trt.so")


def arguments(**changes: int) -> MoeGemmArgs:
    values = {
        "product": Product.GATE_UP,
        "storage": Storage.MXFP4,
        "scale_mode": ScaleMode.BLOCK128,
        "experts": 32,
        "tokens": 8,
        "max_tokens": 64,
        "top_k": 4,
        "n": 5760,
        "k": 2880,
    }
    return MoeGemmArgs(**(values | changes))


def test_exported_symbols_equal_the_header(library: Library) -> None:
    declared = set(re.findall(r"\b(gptoss_trt_\w+)\(", re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)))
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", str(library.path)], capture_output=True, text=True, check=True
    )
    assert {line.split()[-1] for line in listing.stdout.splitlines()} == declared
    assert len(declared) == 16


def test_links_no_framework(library: Library) -> None:
    needed = subprocess.run(["readelf", "-d", str(library.path)], capture_output=True, text=True, check=True).stdout
    names = set(re.findall(r"NEEDED.*\[(.*?)\]", needed))
    assert not [name for name in names if "torch" in name or "cudart" in name or "stdc++" in name], names


def test_no_kernel_spills_and_wgmma_is_not_serialised(build_log: str) -> None:
    kernels = re.findall(r"Compiling entry function '(\S+)'", build_log)
    assert len([name for name in kernels if "wgmma" in name]) == 8
    assert len([name for name in kernels if "moe_gemm_prefill" in name]) == 6
    spills = re.findall(
        r"Compiling entry function '(\S+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads", build_log, re.S
    )
    assert [name for name, *_ in spills] == kernels
    for name, *counts in spills:
        assert max(map(int, counts)) == 0, f"{name} spills {counts} bytes"
    assert "serialized" not in build_log


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("storage", list(Storage))
def test_weight_bytes_equal_the_packer(library: Library, storage: Storage, n: int, k: int) -> None:
    if storage is Storage.FP8_TILES:
        expected = weight_layout.tiles_bytes(n, k)
    else:
        expected = weight_layout.expert_bytes(n, k, storage is Storage.MXFP4)
    assert library.moe_weight_bytes(storage, n, k) == expected


def test_packed_weights_are_smaller_than_the_checkpoint(library: Library) -> None:
    assert library.moe_weight_bytes(Storage.MXFP4, 5760, 2880) < 5760 * 2880 * 4.25 / 8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"product": 3}, "product is 3, outside 1 to 2"),
        ({"storage": 0}, "storage is 0"),
        ({"scale_mode": 9}, "scale_mode is 9"),
        ({"plan": 7}, "plan is 7"),
        ({"k_split": 9}, "k_split is 9, outside 0 to 8"),
        ({"experts": 0}, "experts is 0"),
        ({"tokens": 65}, "tokens is 65, outside 0 to 64"),
        ({"top_k": 33}, "top_k is 33"),
        ({"n": 5761}, "n is 5761"),
        ({"k": 100}, "k is 100, not a multiple of 32"),
        ({"flags": 8}, "flags 0x8 are unknown"),
        ({"product": Product.DOWN}, "out_dtype is 0"),
    ],
)
def test_refuses_with_the_value(library: Library, changes: dict[str, int], words: str) -> None:
    with pytest.raises(LibraryError, match=re.escape(words)):
        library.moe_gemm_workspace(arguments(**changes))


def test_refuses_another_struct_size(library: Library) -> None:
    args = arguments()
    args.size -= 8
    with pytest.raises(LibraryError, match="this library's struct has"):
        library.moe_gemm_workspace(args)


def test_refuses_null_and_misaligned_pointers(library: Library) -> None:
    with pytest.raises(LibraryError, match="weights is null"):
        library.moe_gemm(arguments(), 0)
    args = arguments()
    args.weights = 4096 + 16
    with pytest.raises(LibraryError, match="weights at 0x1010 is not aligned to 128"):
        library.moe_gemm(args, 0)


def test_no_tokens_launch_nothing(library: Library) -> None:
    args = arguments(tokens=0)
    args.workspace, args.workspace_bytes = 4096, 1 << 40
    library.moe_gemm(args, 0)


def test_workspace_grows_with_max_tokens_and_is_checked(library: Library) -> None:
    sizes = [
        library.moe_gemm_workspace(arguments(plan=Plan.WGMMA, tokens=1, max_tokens=most)) for most in (1, 8, 64, 512)
    ]
    assert sizes == sorted(sizes) and sizes[-1] >= 512 * 4 * 2880 * 4
    args = arguments()
    args.workspace, args.workspace_bytes = 4096, 100
    with pytest.raises(LibraryError, match="workspace has 100 bytes"):
        library.moe_gemm_prepare(args, 0)


def test_prefill_keeps_its_tiles_in_the_workspace(library: Library) -> None:
    """Codes and scales of every row, and of 31 rows of padding an expert at most; AUTO takes as much from its limit."""
    per_row = 23 * (128 + 4)
    for tokens in (1, 257, 4096):
        size = library.moe_gemm_workspace(arguments(plan=Plan.PREFILL, tokens=tokens, max_tokens=tokens))
        assert 0 <= size - (4 * tokens + 31 * min(32, 4 * tokens)) * per_row <= 1024
    large = arguments(tokens=4096, max_tokens=4096, scale_mode=ScaleMode.STATIC)
    scales = (4 * 4096 // 256 + 32) * 23 * 256 * 4  # where it is expanded into FP8 tiles
    assert 0 <= library.moe_gemm_workspace(large) - size - scales <= 1024
    small = arguments(tokens=1, max_tokens=256, scale_mode=ScaleMode.STATIC)
    assert library.moe_gemm_workspace(small) == 0


def test_tables_of_too_many_experts_are_not_expanded_beside(library: Library) -> None:
    """They would not fit into shared memory beside the tiles; AUTO then takes the plan that gathers."""
    large = {"tokens": 65536, "max_tokens": 65536, "scale_mode": ScaleMode.STATIC}
    sizes = [library.moe_gemm_workspace(arguments(**large, experts=count)) for count in (384, 385)]
    blocks = 4 * 65536 // 256 + 384
    assert 0 <= sizes[0] + 31 * 23 * (128 + 4) - sizes[1] - blocks * 23 * 256 * 4 <= 1024


def test_prefill_refuses_what_it_cannot_do(library: Library) -> None:
    filled = {"weights": 4096, "x": 4096, "x_scale": 4096, "expert_offsets": 4096, "row_slots": 4096, "out": 4096}
    for changes, words in (({"k_split": 2}, "keeps K whole, k_split is 2"), ({"n": 100}, "n is 100, no multiple of 8")):
        args = arguments(plan=Plan.PREFILL, scale_mode=ScaleMode.STATIC, **changes)
        for name, pointer in filled.items():
            setattr(args, name, pointer)
        with pytest.raises(LibraryError, match=words):
            library.moe_gemm(args, 0)


TILES = {"storage": Storage.FP8_TILES, "scale_mode": ScaleMode.STATIC}


def test_tiles_keep_sorted_rows_and_their_scales_in_the_workspace(library: Library) -> None:
    for tokens in (1, 300, 4096):
        size = library.moe_gemm_workspace(arguments(**TILES, tokens=tokens, max_tokens=tokens))
        rows = 4 * tokens
        assert 0 <= size - rows * 2880 - (rows // 256 + min(32, rows)) * 23 * 256 * 4 < 768
    down = arguments(**TILES, product=Product.DOWN, out_dtype=OutDtype.BF16, n=2880)
    assert library.moe_gemm_workspace(down) == 256  # the items that have been taken


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"plan": Plan.WGMMA}, "FP8 tiles have a prefill plan only, not 2"),
        ({"scale_mode": ScaleMode.BLOCK128, "out_scale": 4096}, "FP8 tiles take static scales of h, not 2"),
        ({"n": 336}, "n 336, no multiple of 32"),
        ({"k_split": 2}, "or k_split 2"),
    ],
)
def test_tiles_refuse_what_they_cannot_do(library: Library, changes: dict[str, int], words: str) -> None:
    args = arguments(**(TILES | changes))
    for name in ("weights", "x", "x_scale", "expert_offsets", "row_slots", "out"):
        setattr(args, name, 4096)
    with pytest.raises(LibraryError, match=words):
        library.moe_gemm(args, 0)


@pytest.mark.parametrize("storage", [Storage.FP8_TILES, Storage.MXFP4])
def test_tiles_store_sixteen_bytes_at_once(library: Library, storage: Storage) -> None:
    args = arguments(**(TILES | {"storage": storage}), plan=Plan.PREFILL, tokens=2048, max_tokens=2048)
    for name in ("weights", "x", "x_scale", "expert_offsets", "row_slots", "workspace"):
        setattr(args, name, 4096)
    args.out, args.workspace_bytes = 4096 + 8, 1 << 40
    with pytest.raises(LibraryError, match="out at 0x1008 is not aligned to 16"):
        library.moe_gemm(args, 0)


def test_static_scale_needs_no_workspace_without_a_split(library: Library) -> None:
    assert library.moe_gemm_workspace(arguments(scale_mode=ScaleMode.STATIC, k_split=1)) == 0
    assert library.moe_gemm_workspace(arguments(scale_mode=ScaleMode.STATIC, plan=Plan.SIMT, k_split=1)) > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 3}, "format is 3, outside 1 to 2"),
        ({"out_dtype": 0}, "out_dtype is 0, outside 1 to 2"),
        ({"flags": 2}, "flags is 2, outside 0 to 1"),
        ({"tokens": 17}, "tokens is 17, outside 0 to 16"),
        ({"n": 0}, "n is 0"),
        ({"k": 4128}, "k is 4128, outside 32 to 4096"),
        ({"k": 2896}, "k is 2896, no multiple of 32"),
        ({"format": DenseFormat.FP8, "k": 2848}, "k is 2848, no multiple of 64"),
        ({"format": DenseFormat.FP8, "first_segment": 36}, "first_segment is 36, no multiple of 8"),
        ({}, "x is null"),
        ({"x": 4096, "weight": 4104}, "weight at 0x1008 is not aligned to 16"),
        ({"format": DenseFormat.FP8, "x": 4096, "weight": 4096}, "x_scale is null"),
        ({"format": DenseFormat.FP8, "x": 4096, "x_scale": 4096, "weight": 4096}, "weight_scale is null"),
    ],
)
def test_dense_few_refuses_with_the_value(library: Library, changes: dict[str, float], words: str) -> None:
    values = {"format": DenseFormat.BF16, "out_dtype": OutDtype.BF16, "tokens": 1, "n": 5120, "k": 2880}
    with pytest.raises(LibraryError, match=re.escape(words)):
        library.dense_few(DenseFewArgs(**(values | changes)), 0)


def test_dense_few_of_nothing(library: Library) -> None:
    library.dense_few(DenseFewArgs(format=DenseFormat.BF16, out_dtype=OutDtype.BF16, n=8, k=32), 0)


def attention_arguments(**changes: float) -> AttentionArgs:
    values = {
        "tokens": 8,
        "sequences": 8,
        "heads": 64,
        "kv_heads": 8,
        "head_dim": 64,
        "block_tokens": 64,
        "blocks": 1000,
        "table_width": 128,
        "scale": 0.125,
    }
    return AttentionArgs(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"plan": 5}, "plan is 5, outside 0 to 4"),
        ({"parts": 33}, "parts is 33, outside 0 to 32"),
        ({"tokens": -1}, "tokens is -1"),
        ({"kv_heads": 0}, "kv_heads is 0"),
        ({"heads": 63}, "heads is 63, outside 64 to 64"),
        ({"head_dim": 128}, "head_dim is 128"),
        ({"block_tokens": 8}, "block_tokens is 8"),
        ({"block_tokens": 48}, "block_tokens is 48, not 16, 32 or 64"),
        ({"window": -1}, "window is -1"),
        ({"flags": 2}, "flags is 2"),
        ({"scale": 0.0}, "scale is 0, not positive"),
    ],
)
def test_attention_refuses_with_the_value(library: Library, changes: dict[str, float], words: str) -> None:
    with pytest.raises(LibraryError, match=re.escape(words)):
        library.attention_workspace(attention_arguments(**changes))


def test_attention_refuses_what_it_cannot_run(library: Library) -> None:
    with pytest.raises(LibraryError, match="15 tokens of 8 sequences; this kernel takes 65535 tokens"):
        library.attention_decode(attention_arguments(tokens=15), 0)
    with pytest.raises(LibraryError, match="65 tokens of 8 sequences"):
        library.attention_decode(attention_arguments(tokens=65, query_start=4096), 0)
    with pytest.raises(LibraryError, match="q is null"):
        library.attention_prefill(attention_arguments(), 0)
    everything = dict.fromkeys(("q", "k_cache", "v_cache", "out", "sinks"), 4096)
    everything |= dict.fromkeys(("block_table", "query_start", "context_lens"), 4096)
    with pytest.raises(LibraryError, match="plan 3 takes a window of 128, not 179"):
        library.attention_prefill(attention_arguments(plan=3, window=179, **everything), 0)
    with pytest.raises(LibraryError, match="plan 1 takes a window of 0, not 128"):
        library.attention_prefill(attention_arguments(plan=1, window=128, **everything), 0)
    with pytest.raises(LibraryError, match="block_tokens is 32, not 64"):
        library.attention_prefill(attention_arguments(block_tokens=32, **everything), 0)
    for changes, text in (({"parts": 2}, "takes no other cut (parts is 2)"), ({"table_width": 2049}, "33 parts")):
        with pytest.raises(LibraryError, match=re.escape(text)):
            library.attention_decode(attention_arguments(plan=4, **changes), 0)
    library.attention_decode(attention_arguments(tokens=0, sequences=0), 0)
    library.attention_prefill(attention_arguments(tokens=0), 0)


def test_attention_parts_follow_the_shape(library: Library) -> None:
    def size(**changes: float) -> int:
        return library.attention_workspace(attention_arguments(**changes))

    assert size(window=128) == size(parts=1) == 0
    slot = 8 * 64 * 4 + 8 * 8
    assert size(parts=2) == 8 * 8 * 2 * slot
    assert size(parts=32, table_width=4) == size(parts=4, table_width=4)  # a part is one block at least
    # At 4k to 8k keys two blocks a multiprocessor or more, then one part each; short contexts are cut for few only.
    assert [size(tokens=n, sequences=n) // slot for n in (1, 8, 16, 32, 40, 64)] == [256, 512, 512, 0, 1280, 0]
    short = [size(tokens=n, sequences=n, table_width=32) // slot for n in (1, 4, 8, 64)]
    assert short == [128, 512, 0, 0]
    # Plan 4 cuts every 4,096 keys, whatever else.
    assert [size(plan=4, table_width=width) for width in (1, 64, 65, 2048)] == [0, 0, 64 * 2 * slot, 64 * 32 * slot]
    assert size(plan=4, window=128) == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"out_dtype": 3}, "out_dtype is 3, outside 1 to 2"),
        ({"flags": 4}, "flags is 4, outside 0 to 3"),
        ({"tokens": -1}, "tokens is -1, outside 0"),
        ({"n": 2884}, "n is 2884, no multiple of 8"),
        ({"k": 2888}, "k is 2888, no multiple of 16"),
        ({"first_segment": 4, "second_segment": 8}, "first_segment is 4, no multiple of 8"),
        ({"second_segment": 2888}, "second_segment is 2888, outside 0 to 2880"),
        ({"tile_tokens": 32}, "tile_tokens is 32, no multiple of 64"),
        ({"tile_tokens": 192}, "tile_tokens is 192, not 64, 128 or 256"),
        ({"parts": 9}, "parts is 9, outside 0 to 8"),
        ({"parts": 4, "k": 384}, "parts is 4, outside 0 to 3"),
        ({"tile_tokens": 256, "parts": 2}, "parts is 2 with tile_tokens 256, which keep K whole"),
        ({"flags": 2, "out_dtype": OutDtype.FP32}, "out_dtype is 2, outside 1 to 1"),
        ({"flags": 2, "parts": 2}, "parts is 2, outside 0 to 1"),
        ({"flags": 2, "tile_tokens": 64}, "tile_tokens is 64, outside 128 to 256"),
        ({"flags": 2, "k_cache": 4096}, "results are added and rotated"),
        ({}, "x is null"),
        ({"x": 4096, "x_scale": 4096, "weight": 4104}, "weight at 0x1008 is not aligned to 16"),
    ],
)
def test_dense_fp8_refuses_with_the_value(library: Library, changes: dict[str, float], words: str) -> None:
    values = {"out_dtype": OutDtype.BF16, "tokens": 64, "n": 2880, "k": 4096}
    with pytest.raises(LibraryError, match=re.escape(words)):
        library.dense_fp8(DenseFp8Args(**(values | changes)), 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_heads": 0}, "kv_heads is 0, outside 1"),
        ({"kv_heads": 4}, "second_segment is 512, outside 256 to 256"),
        ({"n": 5184}, "n is 5184, outside 5120 to 5120"),
        ({"first_segment": 4128, "n": 5152}, "first_segment is 4128, block_tokens 64; q has heads of 64 rows"),
        ({"block_tokens": 48}, "block_tokens 48; q has heads of 64 rows, a block of keys a power of two"),
        ({"block_tokens": 128}, "block_tokens is 128, outside 1 to 64"),
        ({"out_dtype": OutDtype.FP32}, "out_dtype is 2, outside 1 to 1"),
        ({}, "v_cache is null"),
        ({"out": None}, "out is null"),
        ({"out": None, "first_segment": 0, "n": 1024}, "v_cache is null"),  # no queries
        ({"v_cache": 4096}, "cos_sin is null"),
        ({"v_cache": 4096, "cos_sin": 4096, "positions": 4096}, "slots is null"),
    ],
)
def test_dense_fp8_refuses_a_rotation_with_the_value(
    library: Library, changes: dict[str, float | None], words: str
) -> None:
    values = {
        "out_dtype": OutDtype.BF16, "tokens": 64, "n": 5120, "k": 2880, "first_segment": 4096, "second_segment": 512,
        "kv_heads": 8, "block_tokens": 64,
    }  # fmt: skip
    pointers = dict.fromkeys(("x", "x_scale", "weight", "weight_scale", "out", "k_cache"), 4096)
    with pytest.raises(LibraryError, match=re.escape(words)):
        library.dense_fp8(DenseFp8Args(**(values | pointers | changes)), 0)


def test_dense_fp8_of_nothing(library: Library) -> None:
    library.dense_fp8(DenseFp8Args(out_dtype=OutDtype.BF16, n=8, k=32), 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"flags": 2}, "flags is 2, outside 0 to 1"),
        ({"tokens": 0}, "tokens is 0, outside 1 to 32768"),
        ({"tokens": 513, "experts": 33}, "tokens is 513, outside 1 to 512"),
        ({"tokens": 513, "hidden": 3080}, "tokens is 513, outside 1 to 512"),
        ({"tokens": 32769}, "tokens is 32769, outside 1 to 32768"),
        ({"hidden": 4104}, "hidden is 4104, outside 8 to 4096"),
        ({"hidden": 2884}, "hidden is 2884, no multiple of 8"),
        ({"experts": 129}, "experts is 129, outside 4 to 128"),
        ({"first_expert": 32}, "first_expert is 32, outside 0 to 31"),
        ({"first_expert": 16, "local_experts": 17}, "local_experts is 17, outside 1 to 16"),
        ({}, "residual is null"),
        ({"residual": 4104}, "residual at 0x1008 is not aligned to 16"),
        ({"residual": 4096, "gain": 4096}, "router is null"),
    ],
)
def test_rmsnorm_route_refuses_with_the_value(library: Library, changes: dict[str, float], words: str) -> None:
    values = {"tokens": 64, "hidden": 2880, "experts": 32, "local_experts": 32, "eps": 1e-5}
    with pytest.raises(LibraryError, match=re.escape(words)):
        library.rmsnorm_route(RmsnormRouteArgs(**(values | changes)), 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"flags": 2}, "flags is 2, outside 0 to 1"),
        ({"tokens": -1}, "tokens is -1, outside 0"),
        ({"hidden": 4104}, "hidden is 4104, outside 8 to 4096"),
        ({"hidden": 2884}, "hidden is 2884, no multiple of 8"),
        ({"delta": 4096, "rows": 4096}, "delta and rows are both given"),
        ({"normed": None}, "normed and quantised are both null"),
        ({}, "residual is null"),
        ({"residual": 4096}, "updated is null"),
        ({"residual": 4096, "updated": 4096, "gain": 4104}, "gain at 0x1008 is not aligned to 16"),
        ({"residual": 4096, "updated": 4096, "gain": 4096, "rows": 4096}, "expert_ids is null"),
        ({"residual": 4096, "updated": 4096, "gain": 4096, "quantised": 4096}, "scales is null"),
    ],
)
def test_rmsnorm_quant_refuses_with_the_value(library: Library, changes: dict[str, float], words: str) -> None:
    values = {"tokens": 64, "hidden": 2880, "eps": 1e-5, "normed": 4096}
    with pytest.raises(LibraryError, match=re.escape(words)):
        library.rmsnorm_quant(RmsnormQuantArgs(**(values | changes)), 0)


def test_rmsnorm_quant_of_nothing(library: Library) -> None:
    library.rmsnorm_quant(RmsnormQuantArgs(hidden=8), 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"flags": 2}, "flags is 2, outside 0 to 1"),
        ({"tokens": 0}, "tokens is 0, outside 1 to 32768"),
        ({"tokens": 32769}, "tokens is 32769, outside 1 to 32768"),
        ({"first_expert": -1}, "first_expert is -1"),
        ({"local_experts": 129}, "local_experts is 129, outside 1 to 128"),
        ({}, "expert_ids is null"),
        ({"expert_ids": 4096}, "expert_offsets is null"),
    ],
)
def test_route_rows_refuses_with_the_value(library: Library, changes: dict[str, int], words: str) -> None:
    with pytest.raises(LibraryError, match=re.escape(words)):
        library.route_rows(RouteRowsArgs(**({"tokens": 64, "local_experts": 32} | changes)), 0)
