"""Imports go one way, the client knows no torch, and nothing is imported by a bare folder's name."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = {
    "build_engine": ROOT / "build_engine",
    "client": ROOT / "client",
    "runtime": ROOT / "runtime",
    "model_repository": ROOT / "model_repository",
    "ops": ROOT / "plugins" / "ops",
    "reference": ROOT / "plugins" / "reference",
    "triton_kernels": ROOT / "plugins" / "triton_kernels",
}
STANDARD_LIBRARY_ONLY = (
    "client/protocol.py",
    "client/wire_tensors.py",
    "build_engine/shapes.py",
    "build_engine/spec.py",
    "build_engine/vocabulary.py",
)
# What each package may import besides itself. The shared modules of STANDARD_LIBRARY_ONLY are open to all.
ALLOWED = {
    "client": set(),
    "reference": set(),
    "triton_kernels": {"reference"},
    "ops": {"triton_kernels", "reference"},
    "build_engine": {"ops", "reference"},
    "runtime": {"ops", "client", "build_engine"},
    "model_repository": {"runtime"},
}
# The launcher runs the demo, the benchmark makes its engine, and the command line reaches every command by name.
RUNTIME_IMPORTS_OF_BUILD = {"runtime/launch/demo.py", "runtime/launch/doctor.py", "runtime/bench_engine.py"}
SHARED = {f"gptoss_trt.{path[:-3].replace('/', '.')}" for path in STANDARD_LIBRARY_ONLY}


def python_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*.py")) if "__pycache__" not in path.parts]


def imported(path: Path) -> set[str]:
    """Absolute names of every module that a file imports, `from package import module` included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def is_shared(name: str) -> bool:
    return any(name == shared or name.startswith(shared + ".") for shared in SHARED)


def violations(package: str, path: Path) -> list[str]:
    found = []
    relative = str(path.relative_to(ROOT))
    for name in imported(path):
        parts = name.split(".")
        if parts[0] in FOLDERS:
            found.append(f"{relative}: bare import of {name}")
        if parts[0] != "gptoss_trt" or len(parts) < 2 or parts[1] not in FOLDERS or is_shared(name):
            continue
        target = parts[1]
        if target != package and target not in ALLOWED[package]:
            found.append(f"{relative}: {package} imports {name}")
        if package == "runtime" and target == "build_engine" and relative not in RUNTIME_IMPORTS_OF_BUILD:
            found.append(f"{relative}: only RUNTIME_IMPORTS_OF_BUILD may import {name}")
        if package == "runtime" and target == "client" and not relative.startswith("runtime/launch/"):
            found.append(f"{relative}: only the launcher may import {name}")
    return found


@pytest.mark.parametrize("package", sorted(FOLDERS))
def test_imports_go_one_way(package: str) -> None:
    files = python_files(FOLDERS[package])
    assert files, f"{package} holds no Python file"
    assert [fault for path in files for fault in violations(package, path)] == []


def test_a_planted_import_is_seen(tmp_path: Path) -> None:
    planted = ROOT / "client" / "planted.py"
    source = "import runtime\nfrom gptoss_trt.runtime import engine\n"
    path = tmp_path / "planted.py"
    path.write_text(source)
    names = imported(path)
    assert names == {"runtime", "gptoss_trt.runtime.engine"}
    assert not planted.exists()


@pytest.mark.parametrize("relative", STANDARD_LIBRARY_ONLY)
def test_shared_contracts_use_the_standard_library_only(relative: str) -> None:
    outside = {
        name
        for name in imported(ROOT / relative)
        if name.split(".")[0] not in sys.stdlib_module_names | {"__future__"} and not is_shared(name)
    }
    assert outside == set()


def test_the_client_imports_no_torch() -> None:
    modules = [
        "gptoss_trt." + str(path.relative_to(ROOT))[:-3].replace("/", ".") for path in python_files(FOLDERS["client"])
    ]
    code = f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m.removesuffix('.__init__'))\n"
    code += "assert 'torch' not in sys.modules, 'torch came along'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_bare_folder_names_cannot_be_imported() -> None:
    code = (
        "import importlib.util as u; print([n for n in ('client', 'runtime', 'build_engine', 'ops') if u.find_spec(n)])"
    )
    result = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"


def reads_our_environment(node: ast.AST) -> bool:
    """Whether a node reads a variable named GPTOSS_TRT_* from os.environ."""
    text = ast.unparse(node) if isinstance(node, ast.Call | ast.Subscript) else ""
    reads = text.startswith(("os.environ.get(", "os.getenv(")) or (
        isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and text.startswith("os.environ[")
    )
    return reads and "GPTOSS_TRT_" in text


def test_environment_variables_are_read_in_one_place() -> None:
    readers = {
        str(path.relative_to(ROOT))
        for folder in FOLDERS.values()
        for path in python_files(folder)
        if any(map(reads_our_environment, ast.walk(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert readers <= {"runtime/launch/settings.py"}


def test_an_environment_read_is_seen() -> None:
    tree = ast.parse("import os\nx = os.environ['GPTOSS_TRT_ENGINE']\n")
    assert any(map(reads_our_environment, ast.walk(tree)))
