"""What this machine can and cannot do, as a list of findings with what to do about each.

Invariant: looks only; changes nothing and starts nothing but short version calls. A check that fails to look is a
finding, not a crash. Must not know how its findings are shown.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import psutil

from gptoss_trt.runtime.launch import settings
from gptoss_trt.runtime.launch.server_binary import (
    OLDEST_TO_EXPOSE,
    PYPI_SERVER_VERSION,
    LaunchError,
    check_stub,
    find_server,
    libpython,
)

GIB = 2**30
DISK_FOR_20B_GIB = 30  # checkpoint 13.8 GB and an engine of the same size
MEMORY_FOR_DEMO_GIB = 4
SHM_MIB = 256  # four regions of the python backend and room to grow
PORTS = (("HTTP", 8000), ("gRPC", 8001), ("metrics", 8002), ("OpenAI", 8080))
SERVE_PACKAGES = ("tritonclient", "msgpack", "openai-harmony", "torch", "safetensors")

Status = Literal["ok", "note", "missing"]


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `note` limits something, `missing` stops `serve` on this machine."""

    name: str
    status: Status
    detail: str
    action: str = ""


def python_finding() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        return Finding("python", "missing", version, "use Python 3.10 to 3.13 (3.11 serves from PyPI's tritonserver)")
    if sys.version_info[:2] not in ((3, 11), (3, 12)):
        return Finding(
            "python", "note", version, "PyPI's tritonserver needs 3.11 or 3.12; NVIDIA's image brings its own"
        )
    return Finding("python", "ok", version)


def packages_finding() -> Finding:
    found, absent = [], []
    for name in SERVE_PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            absent.append(name)
    if absent:
        return Finding("packages", "missing", f"not installed: {', '.join(absent)}", "pip install 'gptoss-trt[serve]'")
    return Finding("packages", "ok", ", ".join(found))


def gpu_finding() -> Finding:
    query = _first_line(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"])
    if query is None:
        return Finding("gpu", "note", "no NVIDIA GPU or driver found", "engines run on the CPU: small models only")
    if "H200" not in query and "H100" not in query:
        return Finding("gpu", "note", query, "the kernels are for Hopper (sm_90a); this card runs nothing of ours")
    if importlib.util.find_spec("torch") is None:
        return Finding("gpu", "note", f"{query}; torch is not installed", "pip install 'gptoss-trt[serve]'")
    import torch

    if not torch.cuda.is_available():
        action = "engines run on the CPU: install torch's build for CUDA (rm -r .venv, make setup) or a newer driver"
        return Finding("gpu", "note", f"{query}; torch {torch.__version__} cannot use it", action)
    return Finding("gpu", "ok", query)


def nvcc_finding() -> Finding:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return Finding("nvcc", "note", "not on PATH", "needed only to compile the CUDA library from source")
    lines = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    release = next((line.strip() for line in lines.splitlines() if "release" in line), "unknown release")
    return Finding("nvcc", "ok", f"{nvcc}: {release}")


def library_finding() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("cuda library", "note", "not looked at: torch is not installed")
    from gptoss_trt.ops.library import SEARCH_PATHS, load, unusable

    if not any(path.is_file() for path in SEARCH_PATHS):
        return Finding("cuda library", "note", "not built; a GPU needs it, a CPU does not", "make library")
    problem = unusable()
    if problem is not None:
        return Finding("cuda library", "note", problem, "make library")
    return Finding("cuda library", "ok", str(load().path))


def plan_finding() -> Finding:
    """Of kernels: what an engine without a plan of its own follows."""
    if importlib.util.find_spec("torch") is None:
        return Finding("kernel plan", "note", "not looked at: torch is not installed")
    import torch

    from gptoss_trt.ops import plan

    if not torch.cuda.is_available():
        return Finding("kernel plan", "ok", "none needed without a GPU")
    try:
        selected = plan.select(torch.cuda.get_device_name())
    except plan.PlanError as error:
        return Finding("kernel plan", "missing", str(error), "reinstall gptoss-trt")
    if selected.is_built_in:
        return Finding("kernel plan", "note", selected.text, "gptoss-trt build ENGINE_DIR --tune measures one")
    return Finding("kernel plan", "ok", selected.text)


def tritonserver_finding() -> Finding:
    try:
        binary = find_server()
        check_stub(binary)
    except (LaunchError, settings.SettingsError) as error:
        return Finding("tritonserver", "missing", str(error))
    if binary.source == "pypi":
        return Finding(
            "tritonserver",
            "note",
            f"{PYPI_SERVER_VERSION} (2024) from the nvidia-pytriton wheel",
            f"for trying on loopback; expose release {OLDEST_TO_EXPOSE} or newer, from NVIDIA's image",
        )
    return Finding("tritonserver", "ok", str(binary.path))


def libpython_finding() -> Finding:
    path = libpython()
    if path is None:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        return Finding("libpython", "missing", f"no libpython{version}.so.1.0", f"apt install libpython{version}")
    return Finding("libpython", "ok", str(path))


def vocabulary_finding() -> Finding:
    from gptoss_trt.build_engine import vocabulary

    try:
        count = len(vocabulary.load_ranks())
    except (OSError, ValueError) as error:
        return Finding("tokenizer", "missing", str(error), "reinstall gptoss-trt")
    return Finding("tokenizer", "ok", f"o200k_harmony, {count:,} ranks shipped with the package, checksum right")


def memory_finding() -> Finding:
    free = psutil.virtual_memory().available / GIB
    if free < MEMORY_FOR_DEMO_GIB:
        return Finding("memory", "note", f"{free:.1f} GiB free", f"the demo wants {MEMORY_FOR_DEMO_GIB} GiB")
    return Finding("memory", "ok", f"{free:.1f} GiB free, {os.cpu_count()} CPU cores")


def shm_finding() -> Finding:
    free = shutil.disk_usage("/dev/shm").free / 2**20
    if free < SHM_MIB:
        return Finding("/dev/shm", "note", f"{free:.0f} MiB free", "start the container with --shm-size=1g")
    return Finding("/dev/shm", "ok", f"{free:.0f} MiB free")


def disk_finding() -> Finding:
    folder = settings.state_home()
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(nearest).free / GIB
    if free < DISK_FOR_20B_GIB:
        return Finding(
            "disk",
            "note",
            f"{free:.0f} GiB free at {folder}",
            f"checkpoint and engine of gpt-oss-20b want {DISK_FOR_20B_GIB} GiB",
        )
    return Finding("disk", "ok", f"{free:.0f} GiB free at {folder}")


def ports_finding() -> Finding:
    taken = []
    for name, port in PORTS:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                taken.append(f"{name} {port}")
    if taken:
        action = "serve with --http-port, --grpc-port, --metrics-port or --openai-port N (0 takes a free one)"
        return Finding("ports", "note", f"taken: {', '.join(taken)}", action)
    return Finding("ports", "ok", ", ".join(f"{name} {port}" for name, port in PORTS) + " are free")


CHECKS: tuple[tuple[str, Callable[[], Finding]], ...] = (
    ("python", python_finding),
    ("packages", packages_finding),
    ("libpython", libpython_finding),
    ("tritonserver", tritonserver_finding),
    ("tokenizer", vocabulary_finding),
    ("gpu", gpu_finding),
    ("nvcc", nvcc_finding),
    ("cuda library", library_finding),
    ("kernel plan", plan_finding),
    ("memory", memory_finding),
    ("/dev/shm", shm_finding),
    ("disk", disk_finding),
    ("ports", ports_finding),
)


def examine() -> Iterator[Finding]:
    """Runs every check in turn. A check that cannot look yields a finding that says why."""
    for name, check in CHECKS:
        try:
            yield check()
        except (OSError, ValueError, ImportError, subprocess.SubprocessError) as error:
            yield Finding(name, "missing", f"could not look: {type(error).__name__}: {error}", "report this")


def _first_line(command: list[str]) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    lines = result.stdout.strip().splitlines()
    return lines[0] if result.returncode == 0 and lines else None
