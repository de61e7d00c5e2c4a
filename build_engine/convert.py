"""Turns a checkpoint's weights into the formats of an engine, and tells the report what that cost.

Invariant: a weight that already is in the wanted format passes bit for bit; MXFP4 becomes FP8 by fp8_block's rule only.
Must not read files or cut for ranks.
"""

from __future__ import annotations

import torch

from gptoss_trt.build_engine.report import ConversionReport
from gptoss_trt.build_engine.sources import Fp8, Packed, Plain
from gptoss_trt.build_engine.spec import Formats
from gptoss_trt.reference import fp8_block, mxfp4

Parts = dict[str, torch.Tensor]  # the engine tensor's last word ("weight", "weight_scale", "blocks", "scales") -> value


def convert_expert(
    weight: Packed | Plain | Fp8, formats: Formats, report: ConversionReport, stem: str, expert: int
) -> Parts:
    """One expert's weight [N, K] in `formats.experts`. Raises FormatError for bytes that are no numbers."""
    if formats.experts == "mxfp4":
        return _expert_to_mxfp4(weight, report, stem, expert)
    if isinstance(weight, Packed):
        values, scale, plan = fp8_block.from_mxfp4(weight.blocks, weight.scales)
        report.add_blocks(stem, expert, plan)
        _report_rounding(weight, values, scale, plan, report)
        return {"weight": values, "weight_scale": scale}
    return _to_fp8(weight, report, "experts")


def _report_rounding(
    weight: Packed, values: torch.Tensor, scale: torch.Tensor, plan: fp8_block.BlockExponents, report: ConversionReport
) -> None:
    """Blocks that are not exact have an error; exact ones are proved, not measured."""
    if bool(plan.exact.all()):
        return
    wanted = mxfp4.decode(weight.blocks, weight.scales).double()
    error = (fp8_block.dequantise(values, scale).double() - wanted).square().sum()
    report.add_error("experts", float(error), float(wanted.square().sum()))


def _expert_to_mxfp4(weight: Packed | Plain | Fp8, report: ConversionReport, stem: str, expert: int) -> Parts:
    """Stored MXFP4 passes bit for bit; values are encoded, without error where they came from MXFP4."""
    if isinstance(weight, Packed):
        blocks, scales = weight.blocks, weight.scales
    else:
        values = _values(weight)
        blocks, scales, error = mxfp4.encode(values)
        report.add_error("experts", float(error), float(values.double().square().sum()))
    report.add_blocks(stem, expert, fp8_block.block_exponents(blocks, scales))
    return {"blocks": blocks, "scales": scales}


def convert_dense(segments: list[Plain | Fp8], formats: Formats, report: ConversionReport, tensor_class: str) -> Parts:
    """Segments of rows of one dense weight in `formats.dense`, put together again; FP8 blocks begin anew at each."""
    if formats.dense == "bf16":
        return {"weight": torch.cat([_to_bf16(segment, report, tensor_class) for segment in segments])}
    parts = [_to_fp8(segment, report, tensor_class) for segment in segments]
    weight = torch.cat([part["weight"].view(torch.uint8) for part in parts]).view(fp8_block.E4M3)
    return {"weight": weight, "weight_scale": torch.cat([part["weight_scale"] for part in parts])}


def convert_plain(values: torch.Tensor) -> torch.Tensor:
    """Embedding, norms, router, biases and sinks are bf16 in every engine. FormatError for what is not finite."""
    return _finite(values.to(torch.bfloat16))


def _finite(stored: torch.Tensor) -> torch.Tensor:
    if not bool(torch.isfinite(stored).all()):
        raise mxfp4.FormatError("values to be stored as BF16 are not finite")
    return stored


def _values(weight: Plain | Fp8) -> torch.Tensor:
    return weight.values if isinstance(weight, Plain) else fp8_block.dequantise(weight.weight, weight.scale)


def _to_bf16(weight: Plain | Fp8, report: ConversionReport, tensor_class: str) -> torch.Tensor:
    values = _values(weight)
    rounded = _finite(values.to(torch.bfloat16))
    if values.dtype != torch.bfloat16:
        wide = values.double()
        error = (rounded.double() - wide).square().sum()
        report.add_error(tensor_class, float(error), float(wide.square().sum()))
    return rounded


def _to_fp8(weight: Plain | Fp8, report: ConversionReport, tensor_class: str) -> Parts:
    if isinstance(weight, Fp8):
        report.add_error(tensor_class, 0.0, 0.0)
        return {"weight": weight.weight, "weight_scale": weight.scale}
    result = fp8_block.quantise(weight.values)
    report.add_quantised(tensor_class, result)
    return {"weight": result.weight, "weight_scale": result.scale}
