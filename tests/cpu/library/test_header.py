"""The header is C11, and the Python struct, enums and search paths say what it says."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gptoss_trt.ops import library
from gptoss_trt.ops.library import (
    AttentionArgs,
    DecodeOneArgs,
    DecodeOneLayer,
    DenseFewArgs,
    DenseFp8Args,
    Library,
    LibraryError,
    MoeGemmArgs,
    RmsnormQuantArgs,
    RmsnormRouteArgs,
    RouteRowsArgs,
)

ROOT = Path(__file__).parents[3]
HEADER = ROOT / "plugins" / "include" / "gptoss_trt.h"
COMPILER = shutil.which("cc") or shutil.which("gcc") or "cc"


@pytest.mark.parametrize(
    ("struct", "name_in_c"),
    [
        (MoeGemmArgs, "gptoss_trt_moe_gemm_args"),
        (AttentionArgs, "gptoss_trt_attention_args"),
        (DenseFewArgs, "gptoss_trt_dense_few_args"),
        (DenseFp8Args, "gptoss_trt_dense_fp8_args"),
        (RmsnormQuantArgs, "gptoss_trt_rmsnorm_quant_args"),
        (RmsnormRouteArgs, "gptoss_trt_rmsnorm_route_args"),
        (RouteRowsArgs, "gptoss_trt_route_rows_args"),
        (DecodeOneArgs, "gptoss_trt_decode_one_args"),
        (DecodeOneLayer, "gptoss_trt_decode_one_layer"),
    ],
)
def test_struct_layout_equals_the_compilers(
    struct: type[ctypes.Structure],
    name_in_c: str,
    tmp_path: Path,
) -> None:
    fields = [field[0] for field in struct._fields_]
    lines = [f'printf("{name} %zu\\n", offsetof({name_in_c}, {name}));' for name in fields]
    source = tmp_path / "layout.c"
    source.write_text(
        "#include <gptoss_trt.h>\n#include <stdio.h>\nint main(void) {\n"
        + "\n".join(lines)
        + f'\nprintf("size %zu version %d\\n", sizeof({name_in_c}), GPTOSS_TRT_ABI_VERSION);\nreturn 0; }}\n'
    )
    flags = [
        "-std=c11",
        "-pedantic-errors",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unused-function",
        f"-I{HEADER.parent}",
    ]
    program = tmp_path / "layout"
    subprocess.run([COMPILER, *flags, str(source), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.splitlines()
    expected = [f"{name} {getattr(struct, name).offset}" for name in fields]
    assert printed == [*expected, f"size {ctypes.sizeof(struct)} version {library.ABI_VERSION}"]


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        ("GPTOSS_TRT_MOE_PLAN_", library.Plan),
        ("GPTOSS_TRT_SCALE_", library.ScaleMode),
        ("GPTOSS_TRT_DENSE_", library.DenseFormat),
        ("GPTOSS_TRT_MOE_(?!PLAN)", None),
    ],
)
def test_enums_equal_the_header(
    prefix: str, words: type[library.Plan] | type[library.ScaleMode] | type[library.DenseFormat] | None
) -> None:
    found = {name: int(value) for name, value in re.findall(rf"\b{prefix}(\w+) = (\d+)", HEADER.read_text())}
    if words is not None:
        assert found == {member.name: member.value for member in words}
    else:
        both = {member.name: member.value for kind in (library.Product, library.Storage) for member in kind}
        assert found == both


def test_every_function_says_what_failure_does() -> None:
    text = HEADER.read_text()
    for match in re.finditer(r"GPTOSS_TRT_API (?:gptoss_trt_status|int32_t|const char\*)\s+(gptoss_trt_\w+)\(", text):
        comment = text[: match.start()].rstrip().rsplit("/*", 1)[1]
        assert "Fails with" in comment or "Never fails" in comment, match.group(1)


def test_a_missing_library_lists_the_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    paths = (tmp_path / "a" / library.NAME, tmp_path / "b" / library.NAME)
    monkeypatch.setattr(library, "SEARCH_PATHS", paths)
    library.load.cache_clear()
    try:
        with pytest.raises(LibraryError) as caught:
            library.load()
        assert all(str(path) in str(caught.value) for path in paths)
        assert library.unusable() == str(caught.value)
    finally:
        library.load.cache_clear()


def test_another_abi_version_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "old.c"
    source.write_text("int gptoss_trt_abi_version(void) { return 99; }\n")
    path = tmp_path / library.NAME
    subprocess.run([COMPILER, "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    with pytest.raises(LibraryError, match=f"ABI version 99; this build calls {library.ABI_VERSION}"):
        Library(path)


def test_a_library_that_lacks_a_function_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "part.c"
    source.write_text(f"int gptoss_trt_abi_version(void) {{ return {library.ABI_VERSION}; }}\n")
    path = tmp_path / library.NAME
    subprocess.run([COMPILER, "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    with pytest.raises(LibraryError, match=r"cannot be loaded: .*gptoss_trt_"):
        Library(path)


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / library.NAME
    path.write_bytes(b"not an ELF file")
    with pytest.raises(LibraryError, match="cannot be loaded"):
        Library(path)
