"""Goodput of a trace of mixed prompts through tritonserver, with and without chunked prefill and prefix caching.

    gptoss-trt bench random-engine engine-20b/
    python tests/perf/served_trace.py engine-20b/ --out FILE [--in-flight 256] [--rates 20,28]

Serves the engine once for each configuration and sends the loads of trace_dataset.py one after another: `--in-flight`
requests at a time (closed loop), then each of `--rates` in requests a second (Poisson). Each load has prompts of its
own, the same in every configuration, so that none meets what another left in the cache. One JSON line for each
configuration and load: that of `gptoss-trt bench serve` with `configuration` and the notes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import trace_dataset
from serving import COMMAND, served

CONFIGURATIONS = {  # name: engine options beside max_batch
    "chunked": (),
    "no prefix cache": ("prefix_cache=false",),
    "whole prompts": ("step_tokens=17408",),  # over the longest prompt and 256 decoding sequences
}
MAX_BATCH = 256
WARM = 8  # requests before each load, not counted
SECONDS_OF_RATE = 10  # a load at a rate has as many requests as come in this time


def measured(address: str, dataset: Path, load: list[str], requests: int) -> dict[str, object]:
    """`bench serve`'s line for one load."""
    command = [*COMMAND, "bench", "serve", "--url", f"grpc://{address}", "--dataset", str(dataset), *load]
    command += ["--requests", str(requests), "--warmup", str(WARM), "--temperature", "1"]
    command += ["--slo-ttft-ms", "1000", "--slo-tpot-ms", "25", "--json"]
    line: dict[str, object] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--in-flight", type=int, default=256, help="0: no such load")
    parser.add_argument(
        "--rates", type=lambda text: [float(rate) for rate in text.split(",") if rate], default=[20, 28]
    )
    parser.add_argument("--configurations", default=",".join(CONFIGURATIONS))
    parser.add_argument("--note", action="append", default=[], metavar="KEY=VALUE", help="put into every line")
    options = parser.parse_args()
    notes = dict(note.split("=", 1) for note in options.note)
    loads = [(["--concurrency", str(options.in_flight)], options.in_flight * 5 // 4)] if options.in_flight else []
    loads += [(["--request-rate", f"{rate:g}"], round(rate * SECONDS_OF_RATE)) for rate in options.rates]
    if len({requests for _, requests in loads}) < len(loads):  # their number chooses the prompts
        parser.error("two loads have as many requests and so the same prompts; change --in-flight or --rates")
    with tempfile.TemporaryDirectory() as folder, options.out.open("a", encoding="utf-8") as out:
        for name in options.configurations.split(","):
            chosen = (f"max_batch={MAX_BATCH}", *CONFIGURATIONS[name])
            with served(options.engine, Path(folder) / "state", chosen, options.instances) as server:
                for load, requests in loads:
                    dataset = Path(folder) / f"{'-'.join(load)}.jsonl"
                    trace_dataset.write(dataset, requests + WARM, seed=requests)
                    record = {"configuration": name, **measured(server["grpc"], dataset, load, requests), **notes}
                    print(json.dumps(record), file=out, flush=True)
                    print(f"{name}, {record['load']}: {record['goodput_s']} good requests/s", flush=True)


if __name__ == "__main__":
    main()
