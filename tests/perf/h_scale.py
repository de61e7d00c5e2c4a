"""The full-layer error of each h scale: what one expert layer of 20b's width gives in FP8 against unquantised products.

    python tests/perf/h_scale.py

One JSON line an input: relative root-mean-square error of the layer's output (router weights equal, four experts a
token, x in FP8 with 1x128 scales in every column), and the ratio of `static` to `block128`. Weights as in a random
engine, and times `gain`, which moves |h| from small to its bound. About a minute on two cores.
"""

from __future__ import annotations

import json

import torch

from gptoss_trt.build_engine.shapes import model_config
from gptoss_trt.build_engine.spec import H_GROUPS, Formats
from gptoss_trt.reference import mxfp4
from gptoss_trt.reference.act_quant import fake_quant
from gptoss_trt.reference.moe_gemm_fp8 import swiglu
from gptoss_trt.runtime.model.random_tensors import RandomTensors

TOKENS, EXPERTS, LIMIT, ALPHA = 16, 4, 7.0, 1.702
GAINS = (0.03, 0.1, 0.3, 1.0, 3.0)
OUTLIERS = 20.0  # one channel in 360 is so many times larger, as some of trained models are


def main() -> None:
    config = model_config("gpt-oss-20b", 1)
    tensors = RandomTensors(config, Formats(), 0, torch.device("cpu"))
    weights = []
    for stem in ("gate_up", "down"):
        blocks, scales = (tensors[f"layers.0.moe.{stem}.{part}"][:EXPERTS] for part in ("blocks", "scales"))
        weights.append([mxfp4.decode(blocks[e : e + 1], scales[e : e + 1])[0].float() for e in range(EXPERTS)])
    generator = torch.Generator().manual_seed(1)
    for outliers in (False, True):
        for gain in GAINS:
            x = torch.randn((TOKENS, config.hidden_size), generator=generator)
            if outliers:
                x[:, torch.randperm(config.hidden_size, generator=generator)[: config.hidden_size // 360]] *= OUTLIERS
            print(json.dumps(measured(x, weights, gain) | {"outliers": outliers}), flush=True)


def measured(x: torch.Tensor, weights: list[list[torch.Tensor]], gain: float) -> dict[str, float]:
    """Errors of the layer for tokens x fp32 [T, H]."""
    exact, seen = torch.zeros_like(x), {name: torch.zeros_like(x) for name in H_GROUPS}
    sizes = []
    for gate_up, down in zip(*weights, strict=True):
        exact += swiglu(gain * (x @ gate_up.T), LIMIT, ALPHA) @ down.T / EXPERTS
        h = swiglu(gain * (fake_quant(x) @ gate_up.T), LIMIT, ALPHA)
        sizes.append(h.square().mean())
        for name, group in H_GROUPS.items():
            seen[name] += fake_quant(h, group) @ down.T / EXPERTS
    errors = {name: float((out - exact).norm() / exact.norm()) for name, out in seen.items()}
    return {
        "gain": gain,
        "h_rms": round(float(torch.stack(sizes).mean().sqrt()), 4),
        **{name: round(error, 5) for name, error in errors.items()},
        "static_over_block128": round(errors["static"] / errors["block128"], 3),
    }


if __name__ == "__main__":
    main()
