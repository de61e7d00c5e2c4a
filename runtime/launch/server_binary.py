"""Which tritonserver to run, and the folder of backends and libraries that it needs beside it.

Invariant: nothing outside the state folder is written. The order is GPTOSS_TRT_TRITONSERVER, /opt/tritonserver, PATH,
then the server inside the `nvidia-pytriton` wheel. Must not know models, ports or engines.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gptoss_trt.runtime.launch import settings

SYSTEM_ROOT = Path("/opt/tritonserver")
PYPI_SERVER_PYTHONS = ((3, 11), (3, 12))  # numpy 1.26, which its stubs need, has no build for other Pythons
PYPI_SERVER_VERSION = "2.51.0"
OLDEST_TO_EXPOSE = (
    "26.05"  # the first monthly release after NVIDIA's bulletin 5828 (2026-05-20, CVE-2026-24206 and 24207)
)


class LaunchError(RuntimeError):
    """Something that the launch needs is missing or wrong; the text says what to do about it."""


@dataclass(frozen=True)
class ServerBinary:
    """One tritonserver: its executable, where it came from, and its python backend's files."""

    path: Path
    source: Literal["system", "pypi"]
    backend: Path  # folder with libtriton_python.so and triton_python_backend_utils.py
    stub: Path
    library_dirs: tuple[Path, ...]


def find_server() -> ServerBinary:
    """The server to run. Raises LaunchError that lists the places looked at."""
    named = settings.read("GPTOSS_TRT_TRITONSERVER")
    if named is not None and not named.is_file():
        raise LaunchError(f"GPTOSS_TRT_TRITONSERVER={named} is not a file")
    on_path = shutil.which("tritonserver")
    candidates = [named, SYSTEM_ROOT / "bin" / "tritonserver", Path(on_path) if on_path else None]
    for path in candidates:
        if path is not None and path.is_file():
            return _system_server(path.resolve())
    root = _pytriton_root()
    if root is None:
        looked = ", ".join(str(path) for path in candidates if path is not None)
        raise LaunchError(
            f"no tritonserver: looked at {looked}, PATH and the Python package nvidia-pytriton. "
            f"Run inside NVIDIA's tritonserver image, or: pip install 'gptoss-trt[pypi-server]' (Python 3.11 or 3.12)"
        )
    return _pypi_server(root)


def _system_server(path: Path) -> ServerBinary:
    backend = path.parent.parent / "backends" / "python"
    stub = backend / "triton_python_backend_stub"
    for needed in (backend / "libtriton_python.so", stub):
        if not needed.is_file():
            raise LaunchError(f"{path} has no python backend: {needed} is missing")
    return ServerBinary(path, "system", backend, stub, (path.parent.parent / "lib",))


def _pytriton_root() -> Path | None:
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "tritonserver"


def _pypi_server(root: Path) -> ServerBinary:
    version = sys.version_info[:2]
    if version not in PYPI_SERVER_PYTHONS:
        raise LaunchError(
            f"the tritonserver from PyPI serves from Python 3.11 or 3.12, this is {version[0]}.{version[1]}: "
            "numpy 1.26, which its stubs need, has no build for it"
        )
    _refuse_numpy_2()
    stub = root / "python_backend_stubs" / f"{version[0]}.{version[1]}" / "triton_python_backend_stub"
    libraries = root.parent.parent / "nvidia_pytriton.libs"
    return ServerBinary(root / "bin" / "tritonserver", "pypi", root / "backends" / "python", stub, (libraries,))


def _refuse_numpy_2() -> None:
    version = importlib.metadata.version("numpy")
    if int(version.split(".")[0]) >= 2:
        raise LaunchError(
            f"numpy {version} breaks the python stubs of the tritonserver from PyPI in silence (string "
            "tensors kill them, integers come back empty): pip install 'numpy==1.26.4'"
        )


def libpython() -> Path | None:
    """This interpreter's shared library, which the stub loads; None when it has none."""
    name = f"libpython{sys.version_info[0]}.{sys.version_info[1]}.so.1.0"
    places = [sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("LIBPL"), f"{sys.base_prefix}/lib"]
    multiarch = sysconfig.get_config_var("MULTIARCH")
    if multiarch:
        places.append(f"/usr/lib/{multiarch}")
    for place in places:
        if place and (Path(place) / name).is_file():
            return Path(place) / name
    return None


def server_environment(binary: ServerBinary) -> dict[str, str]:
    """The environment of the server process: libraries first, and this interpreter's `python3` first on PATH, because
    the stub embeds the interpreter that it finds there."""
    python_library = libpython()
    if python_library is None:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise LaunchError(
            f"libpython{version}.so.1.0 is missing, and the python backend loads it: install the Debian package "
            f"libpython{version}, or use a Python that was built with --enable-shared"
        )
    libraries = [str(path) for path in (*binary.library_dirs, python_library.parent)]
    environment = dict(os.environ)
    old = environment.get("LD_LIBRARY_PATH")
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(libraries + ([old] if old else []))
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    # A server of its own: what a test runner or a shell set for its own interpreter must not reach the stubs.
    for name in ("PYTHONHOME", "PYTHONPATH"):
        environment.pop(name, None)
    return environment


def assemble_backends(binary: ServerBinary, folder: Path) -> Path:
    """Makes `folder/python` of links to the backend's library, its Python module and the stub of this Python's version.
    Returns `folder`, the value of --backend-directory."""
    python = folder / "python"
    python.mkdir(parents=True, exist_ok=True)
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        _relink(python / name, binary.backend / name)
    _relink(python / "triton_python_backend_stub", binary.stub)
    return folder


def _relink(link: Path, target: Path) -> None:
    link.unlink(missing_ok=True)
    link.symlink_to(target)


def check_stub(binary: ServerBinary) -> None:
    """Runs the stub without arguments: exit status 1 is health, anything else a missing library, which would make the
    server hang at start. Raises LaunchError with what the loader said."""
    result = subprocess.run(
        [str(binary.stub)], env=server_environment(binary), capture_output=True, text=True, timeout=30, check=False
    )
    if result.returncode != 1:
        raise LaunchError(
            f"the python stub {binary.stub} does not start (exit status {result.returncode}): "
            f"{(result.stderr or result.stdout).strip()[:400]}"
        )
