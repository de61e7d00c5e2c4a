"""Builds the CUDA library into the wheel when nvcc is there; everything else is in pyproject.toml."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

ROOT = Path(__file__).parent
LIBRARY = "libgptoss_trt.so"


def nvcc_path() -> str | None:
    """The compiler of CUDA_HOME, else the one on PATH."""
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")


class BuildWithLibrary(build_py):
    """Copies the packages, then compiles plugins/csrc into gptoss_trt/lib of the build folder."""

    def run(self) -> None:
        super().run()
        if self.editable_mode or nvcc_path() is None or not (ROOT / "plugins" / "CMakeLists.txt").exists():
            return
        build = Path("build/cuda").resolve()
        subprocess.run(
            [
                "cmake",
                "-S",
                str(ROOT / "plugins"),
                "-B",
                str(build),
                "-DCMAKE_BUILD_TYPE=Release",
                f"-DCMAKE_CUDA_COMPILER={nvcc_path()}",
            ],
            check=True,
        )
        subprocess.run(["cmake", "--build", str(build), "--parallel"], check=True)
        target = Path(self.build_lib) / "gptoss_trt" / "lib"
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy2(build / LIBRARY, target / LIBRARY)


class WheelForAnyPython(bdist_wheel):
    """The library has a C ABI and links no Python: a wheel that carries it serves every Python of its platform."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


class PlatformDistribution(Distribution):
    """Marks the wheel as of one platform when it carries the library."""

    def has_ext_modules(self) -> bool:
        return nvcc_path() is not None


setup(cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": WheelForAnyPython}, distclass=PlatformDistribution)
