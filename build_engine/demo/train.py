"""The trainer: `python -m gptoss_trt.build_engine.demo.train --out FOLDER`; on a GPU minutes, on a CPU as long as it
takes.

Invariant: everything that a run needs to go on stands in its state file (masters, optimisers, step, used ids), so
`--resume` continues it. The last quarter of the steps trains with MXFP4 expert weights and FP8 activations, as the
engine computes. Writes `weights.xz` (the packed form), `held_out.json` and `log.jsonl` into FOLDER.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gptoss_trt.build_engine.demo import check, network
from gptoss_trt.build_engine.demo.dataset import Encoder, Layout, Loader, scan_used
from gptoss_trt.build_engine.demo.kinds import KINDS
from gptoss_trt.build_engine.demo.muon import Muon
from gptoss_trt.build_engine.demo.pack import Packed, masters_of, pack_weights, read_packed, vocabulary_rows

MUON_RATE, ADAM_RATE = 0.02, 2e-3
WARM_UP_STEPS = 50
CONSTANT_SHARE = 0.4  # of the steps; then the rates fall to zero in a line
QUANTISED_FROM = 0.75
MEASURED_STEPS = 60  # steps after which `--seconds` becomes a number of steps
CHECK_AT = (0.25, 0.5, 0.75, 0.9)
LossFunction = Callable[..., tuple[Tensor, Tensor, Tensor]]


@dataclass
class Run:
    """A training run's state."""

    shape: network.Shape
    layout: Layout
    device: torch.device
    used: list[int]
    masters: dict[str, Tensor]
    muon: Muon
    adam: torch.optim.AdamW
    step: int = 0
    steps: int = 0
    rate: float = 1.0
    loss: LossFunction = network.loss_and_hits
    tables: tuple[Tensor, Tensor] = field(init=False)
    bank_source: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.tables = network.yarn_tables(self.layout.tokens, self.shape.head_dim, self.device)
        self.bank_source = torch.Generator(device=self.device).manual_seed(1234 + self.step)

    @property
    def share(self) -> float:
        return self.step / max(1, self.steps)

    def bank(self) -> Tensor:
        size = (self.layout.bank, self.shape.hidden)
        return torch.randint(0, 256, size, generator=self.bank_source, device=self.device, dtype=torch.uint8)


def create_run(
    shape: network.Shape, layout: Layout, device: torch.device, used: list[int], masters: dict[str, Tensor]
) -> Run:
    """A run at step 0 over the given masters (moved to `device`)."""
    params = {name: value.to(device).requires_grad_() for name, value in masters.items()}
    muon = Muon([params[name] for name in network.MATRICES], MUON_RATE, weight_decay=0.02)
    others = [value for name, value in params.items() if name not in network.MATRICES]
    adam = torch.optim.AdamW(others, ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda")
    return Run(shape, layout, device, used, params, muon, adam)


def to_device(batch: dict[str, NDArray[Any]], device: torch.device) -> network.Batch:
    """The arrays of one batch as tensors of the types that the network takes."""
    arrays = {name: torch.from_numpy(value).to(device, non_blocking=True) for name, value in batch.items()}
    return network.Batch(
        arrays["ids"].long(), arrays["docs"], arrays["positions"].long(), arrays["where"].long(),
        arrays["labels"].long(),
        arrays["weights"],
    )  # fmt: skip


def train_step(run: Run, batch: network.Batch) -> Tensor:
    """One optimiser step; returns the mean cross-entropy (a tensor, not read here)."""
    share = run.share
    factor = (
        run.rate * min(1.0, (run.step + 1) / WARM_UP_STEPS) * min(1.0, max(0.0, (1 - share) / (1 - CONSTANT_SHARE)))
    )
    for group in run.muon.param_groups:
        group["lr"] = MUON_RATE * factor
    for group in run.adam.param_groups:
        group["lr"] = ADAM_RATE * factor
    quantised = share >= QUANTISED_FROM
    # clones keep the compiled graph's inputs alike in both phases (none of the expert matrices a leaf)
    weights = network.rounded(run.masters) if quantised else network.cloned(run.masters)
    flag = torch.tensor(quantised, device=run.device)
    loss, mean, _ = run.loss(weights, run.shape, batch, run.bank(), run.tables, flag)
    torch.autograd.backward(loss)
    run.muon.step()
    run.adam.step()
    for value in run.masters.values():
        value.grad = None
    run.step += 1
    return mean


def check_run(run: Run, samples: list[check.Sample]) -> dict[str, tuple[int, int]]:
    """Held-out samples with the weights rounded as they would be packed."""
    weights = network.rounded(run.masters)
    flag = torch.tensor(True, device=run.device)

    def hits_of(batch: dict[str, NDArray[Any]]) -> NDArray[Any]:
        _, _, hits = run.loss(weights, run.shape, to_device(batch, run.device), run.bank(), run.tables, flag)
        return np.asarray(hits.cpu())

    return check.evaluate(samples, run.layout, hits_of)


def save_state(run: Run, path: Path) -> None:
    state = {
        "used": run.used, "masters": {name: value.detach() for name, value in run.masters.items()},
        "muon": run.muon.state_dict(), "adam": run.adam.state_dict(), "step": run.step, "steps": run.steps,
        "rate": run.rate,
    }  # fmt: skip
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


def load_state(path: Path, shape: network.Shape, layout: Layout, device: torch.device) -> Run:
    state = torch.load(path, map_location=device, weights_only=True)
    run = create_run(shape, layout, device, state["used"], state["masters"])
    run.muon.load_state_dict(state["muon"])
    run.adam.load_state_dict(state["adam"])
    run.step, run.steps, run.rate = state["step"], state["steps"], state["rate"]
    run.bank_source.manual_seed(1234 + run.step)
    return run


def _held_out_task(task: tuple[list[int], int, int, str]) -> list[check.Sample]:
    used, bank, count, kind = task
    return check.held_out_samples(Encoder(used, bank, 0), count, [kind])


def collect_samples(used: list[int], bank: int, count: int, workers: int) -> list[check.Sample]:
    tasks = [(used, bank, count, kind) for kind in KINDS]
    if not workers:
        return check.held_out_samples(Encoder(used, bank, 0), count, KINDS)
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        return [sample for part in pool.imap(_held_out_task, tasks) for sample in part]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains the demo checkpoint.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--steps", type=int, default=2640, help="optimiser steps (2640 see 97 million tokens)")
    parser.add_argument("--seconds", type=float, help="training time instead of a number of steps")
    parser.add_argument("--resume", type=Path, help="state file to continue from")
    parser.add_argument("--start", type=Path, help="packed weights to begin with instead of random ones")
    parser.add_argument("--state", type=Path, help="where the state file goes (default: OUT/state.pt)")
    parser.add_argument("--state-every", type=float, default=60.0, help="seconds between state files")
    parser.add_argument("--rate", type=float, default=1.0, help="factor on both learning rates")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=0, help="processes that make data")
    parser.add_argument("--compile", action="store_true", help="compile the forward and backward pass")
    parser.add_argument("--scan", type=int, default=1500, help="samples of each kind that tell the used ids")
    parser.add_argument("--check-samples", type=int, default=200, help="held-out samples of each kind at the end")
    for name, default in (("rows", 72), ("tokens", 512), ("learnt", 18_432), ("bank", 4096)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args(arguments)


def widened(packed: Packed, used: list[int]) -> dict[str, Tensor]:
    """The masters of a packed file, with rows for all of `used`: new ids start from the random rows of `expand`."""
    masters = masters_of(packed)
    embedding, head = vocabulary_rows(packed)
    masters["embedding"], masters["head"] = embedding[used].float(), head[used].float()
    return masters


def _begin(options: argparse.Namespace, layout: Layout) -> tuple[Run, list[check.Sample], Loader]:
    """Data first (its processes must fork before the GPU is touched), then the weights."""
    shape, device = network.Shape(), torch.device(options.device)
    stored = torch.load(options.resume, map_location="cpu", weights_only=True)["used"] if options.resume else None
    packed = read_packed(options.start) if options.start else None
    if stored is None:
        stored = scan_used(options.scan, options.workers)
        stored = sorted({*stored, *packed.used_ids.tolist()}) if packed else stored
    samples = collect_samples(stored, layout.bank, options.check_samples, options.workers)
    loader = Loader(stored, layout, options.workers, seed=int(time.time()) % 100_000)
    if options.resume:
        run = load_state(options.resume, shape, layout, device)
    else:
        masters = widened(packed, stored) if packed else network.create_weights(shape, len(stored), seed=7)
        run = create_run(shape, layout, device, stored, masters)
        run.steps, run.rate = options.steps, options.rate
    if options.compile:
        run.loss = torch.compile(network.loss_and_hits, fullgraph=True, dynamic=False)
    return run, samples, loader


def _finish(run: Run, samples: list[check.Sample], out: Path, name: str = "held_out") -> None:
    size = pack_weights(run.masters, run.used, out / "weights.xz") if run.share >= QUANTISED_FROM else 0
    result = check_run(run, samples)
    (out / f"{name}.json").write_text(json.dumps({"step": run.step, "bytes": size, "kinds": result}, indent=1))
    print(
        f"step {run.step}/{run.steps}: {size} bytes packed, {len(run.used)} used ids\n{check.report(result)}",
        flush=True,
    )


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    layout = Layout(options.rows, options.tokens, options.learnt, options.bank)
    began = time.time()
    run, samples, loader = _begin(options, layout)
    few = samples[:: max(1, options.check_samples // 40)]
    print(f"{len(run.used)} used ids, {len(samples)} held-out samples, {time.time() - began:.1f} s", flush=True)
    state = options.state or options.out / "state.pt"
    pending = [share for share in CHECK_AT if share > run.share]
    start = mark = saved = time.time()
    losses: list[Tensor] = []
    log = (options.out / "log.jsonl").open("a")
    for arrays in loader:
        if run.step >= run.steps:
            break
        losses.append(train_step(run, to_device(arrays, run.device)))
        if options.seconds and run.step == MEASURED_STEPS // 2:
            losses[-1].item()
            mark = time.time()
        if options.seconds and run.step == MEASURED_STEPS:
            losses[-1].item()
            pace = (time.time() - mark) / (MEASURED_STEPS - MEASURED_STEPS // 2)
            run.steps = run.step + int((options.seconds - (time.time() - start)) / pace)
            print(f"{pace * 1e3:.1f} ms a step: {run.steps} steps", flush=True)
        if run.step % 50 == 0 or run.step == run.steps:
            mean = torch.stack(losses).mean().item()
            losses.clear()
            log.write(
                json.dumps({"step": run.step, "loss": round(mean, 5), "seconds": round(time.time() - start, 1)}) + "\n"
            )
            log.flush()
            if run.step % 250 == 0:
                print(f"step {run.step}/{run.steps}  loss {mean:.4f}  {time.time() - start:.1f} s", flush=True)
        if pending and run.step > MEASURED_STEPS and run.share >= pending[0]:
            _finish(run, few, options.out, f"held_out_{pending.pop(0)}")
        if time.time() - saved > options.state_every:
            save_state(run, state)
            saved = time.time()
    save_state(run, state)
    loader.close()
    _finish(run, samples, options.out)
    tokens = run.step * layout.rows * layout.tokens / 1e6
    print(f"{run.step} steps, {tokens:.1f} million tokens, {time.time() - start:.1f} s")


if __name__ == "__main__":
    main()
