"""Builds an engine from a synthetic checkpoint of several GB under a memory limit, and reports peak memory and speed.

    python tests/perf/build_streaming.py --gigabytes 5 --limit-mib 1536

The builder runs in a process of its own whose private writable memory (RLIMIT_DATA: heap, anonymous maps, stacks) is
limited far below the checkpoint's size. Prints one JSON record; not part of any test run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gptoss_trt.build_engine.checkpoint import open_checkpoint
from gptoss_trt.build_engine.names import LAYOUTS
from gptoss_trt.build_engine.spec import ModelConfig
from gptoss_trt.build_engine.synthetic import small_config, write_checkpoint

LAYER_BYTES = {"openai": 480e6, "hf_mxfp4": 480e6, "hf_bf16": 1.65e9, "modelopt_fp8": 0.85e9}  # at the sizes below
VOCABULARY_BYTES = 2.31e9


def full_size_config(layers: int) -> ModelConfig:
    """gpt-oss-20b with fewer layers, and a vocabulary 128 rows short: no tokenizer files are written for it."""
    sizes = {"hidden_size": 2880, "intermediate_size": 2880, "num_experts": 32, "vocab_size": 200960}
    config = small_config(num_layers=layers)
    return dataclasses.replace(config, **sizes, num_heads=64, num_kv_heads=8, head_dim=64)


def limited(limit_mib: int) -> Any:
    """A function for the child, before it runs: limits its private writable memory."""

    def apply() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit_mib << 20, limit_mib << 20))

    return apply


def drop_from_cache(folder: Path) -> None:
    """Asks the kernel to forget the files, so that the build reads the disk."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(checkpoint: Path, out: Path, arguments: list[str], limit_mib: int) -> dict[str, Any]:
    """Runs `gptoss-trt build`; returns its own report with the peak resident memory of the process."""
    drop_from_cache(checkpoint)
    command = [sys.executable, "-m", "gptoss_trt", "build", str(checkpoint), "--out", str(out), "--json", *arguments]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limited(limit_mib), check=False)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    if done.returncode:
        raise SystemExit(f"the build failed with status {done.returncode}:\n{done.stderr}")
    report: dict[str, Any] = json.loads(done.stdout)
    assert peak > before, "a larger child ran before; its peak hides this one's"
    return {
        "formats": report["formats"],
        "mapping": report["mapping"],
        "read_gb": round(report["bytes_read"] / 1e9, 3),
        "written_gb": round(report["bytes_written"] / 1e9, 3),
        "seconds": report["seconds"],
        "gb_per_second": report["gb_per_second"],
        "peak_rss_mib": peak // 1024,
        "limit_mib": limit_mib,
        "exactness": report["exactness"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=5, help="size of the checkpoint, at least about 3")
    parser.add_argument("--layout", choices=LAYOUTS, default="hf_mxfp4")
    parser.add_argument("--limit-mib", type=int, default=1536, help="private writable memory of the build")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    parser.add_argument("build", nargs="*", help="arguments of gptoss-trt build, after --")
    options = parser.parse_args()
    layers = max(1, round((options.gigabytes * 1e9 - VOCABULARY_BYTES) / LAYER_BYTES[options.layout]))
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        checkpoint = Path(work) / "checkpoint"
        started = time.monotonic()
        write_checkpoint(checkpoint, full_size_config(layers), layout=options.layout, shards=4)
        written = time.monotonic() - started
        record = {
            "benchmark": "build_streaming",
            "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} processors",
            "layout": options.layout,
            "layers": layers,
            "checkpoint_gb": round(open_checkpoint(checkpoint).bytes / 1e9, 3),
            "seconds_to_make_it": round(written, 1),
            "free_disk_gb": round(shutil.disk_usage(work).free / 1e9),
            **measure(checkpoint, Path(work) / "engine", options.build, options.limit_mib),
        }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
