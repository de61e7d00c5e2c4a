"""Small shapes of every hand-written kernel under compute-sanitizer: `python tests/gpu/sanitize.py` (make sanitize).

    sanitize.py [--tools memcheck,racecheck,synccheck] [--groups NAME,...] [--seconds N] [--jobs N] [--logs FOLDER]
    sanitize.py --here GROUP

Each group of calls runs in a process of its own under each tool, `--jobs` of them at once in the order of `--groups`,
with an allocation of its own for each tensor, so that memcheck knows where one ends. Verdicts come as groups end, with
the first lines of what was found; the exit status is 1 when a tool or a group reports an error or ran out of time.
Shapes are small, because a tool slows a kernel down a hundredfold: results are compared in the tests beside this file,
here only accesses and barriers count; torch's own kernels are let be. The tools do not see races between copies of the
tensor memory accelerator or WGMMA and ordinary accesses (test_moe_gemm.py and test_attention.py repeat those under
load).
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from sanitize_groups import GROUPS, report

TOOLS = ("memcheck", "racecheck", "synccheck")
FOUND = 99  # exit status of a tool that found something
SHOWN = 8  # lines of what was found
# Parts of the mangled names of kernels that are not ours: torch's, and what it takes from cuBLAS and CUB.
SPARED = ("at6native", "2at4cuda", "3cub", "cublas", "cutlass", "nvjet", "xmma")
# What a tool cannot judge, as far as its reports tell: racecheck sees races where warps hand h over by bar.arrive and
# where an item is handed over by an mbarrier that counts bytes too, both of which order accesses.
BLIND = {("racecheck", "experts_prefill-gate_up")}


def sanitizer() -> str:
    """The tool's path. Raises SystemExit when there is none."""
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if found is None:
        raise SystemExit("compute-sanitizer is not on the PATH nor in /usr/local/cuda/bin")
    return found


@dataclass
class Checked:
    """A group under a tool, running."""

    tool: str
    group: str
    log: Path

    def __post_init__(self) -> None:
        options = ["--error-exitcode", str(FOUND), "--print-limit", "20", "--target-processes", "application-only"]
        for part in SPARED:
            options += ["--kernel-name-exclude", f"kns={part}"]
        command = [sanitizer(), "--tool", self.tool, *options, sys.executable, __file__, "--here", self.group]
        own_memory = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        self.began = time.monotonic()
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=own_memory, start_new_session=True
            )

    def stop(self) -> None:
        """With what the tool started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def verdict(self) -> str:
        """In a line, and lines that say what was found, or how far it came."""
        status, lines = self.process.poll(), self.log.read_text(errors="replace").strip().splitlines()
        words = {0: "clean", FOUND: "ERRORS", -signal.SIGKILL: "OUT OF TIME"}.get(status or 0, f"exit {status}")
        line = f"{self.tool:10} {self.group:24} {words} after {time.monotonic() - self.began:.0f} s ({self.log})"
        found = [text for text in lines if text.startswith("=========") and text.strip("= ")][1:]
        told = status != -signal.SIGKILL and len(found) > 2  # beside the tool's summary
        shown = [] if status == 0 else found[:SHOWN] if told else lines[-SHOWN:]
        return "\n    ".join([line, *shown])


def run_all(pairs: list[tuple[str, str]], logs: Path, jobs: int, seconds: float) -> int:
    """Runs groups under tools in order, at most `jobs` at a time, for `seconds`; how many were not clean."""
    deadline = time.monotonic() + seconds
    waiting, running, failed = list(pairs), list[Checked](), 0
    try:
        while waiting or running:
            late = time.monotonic() > deadline
            if late:
                for checked in running:
                    checked.stop()
            for checked in [one for one in running if one.process.poll() is not None]:
                running.remove(checked)
                failed += checked.process.returncode != 0
                print(checked.verdict(), flush=True)
            if late:
                break
            while waiting and len(running) < jobs:
                tool, group = waiting.pop(0)
                running.append(Checked(tool, group, logs / f"{tool}-{group}.log"))
            time.sleep(0.1)
    finally:
        for checked in running:
            checked.stop()
    for tool, group in waiting:
        print(f"{tool:10} {group:24} NOT BEGUN within {seconds:.0f} s")
    return failed + len(waiting)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="groups at once")
    parser.add_argument("--logs", type=Path, default=Path("build/sanitize"))
    parser.add_argument("--here", choices=GROUPS, help="run one group in this process, without a tool")
    args = parser.parse_args()
    if args.here:
        GROUPS[args.here]()
        report(f"{args.here}: done")
        return 0
    args.logs.mkdir(parents=True, exist_ok=True)
    asked = [(tool, group) for group in args.groups.split(",") for tool in args.tools.split(",")]
    unknown = {group for _, group in asked} - set(GROUPS)
    if unknown:
        parser.error(f"no groups {sorted(unknown)}; there are {', '.join(GROUPS)}")
    for tool, group in sorted(BLIND & set(asked)):
        print(f"{tool:10} {group:24} left out: the tool cannot judge it")
    return int(run_all([pair for pair in asked if pair not in BLIND], args.logs, args.jobs, args.seconds) > 0)


if __name__ == "__main__":
    sys.exit(main())
