"""Tables and plots of the results files: `python tests/perf/h200_report.py [--readme FILE] [--plots FOLDER]`.

Reads tests/perf/results/h200.jsonl (the last record of a cell counts), vllm_h200.json, triton_h200.jsonl and
trace_h200.jsonl beside it; prints Markdown tables, dense BF16 and FP8 apart. --readme puts them into a file between the
lines `<!-- results: h200 -->` (or triton, trace) and `<!-- end -->`; --plots writes share_of_bound.svg and
speed_cost.svg (needs matplotlib).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
MODELS = ("gpt-oss-20b", "gpt-oss-120b")
CONTEXTS, BATCHES, PROMPTS = ("1024", "8192"), ("1", "8", "32", "64", "128"), ("1024", "4096", "8192", "32768")
COLORS = ("tab:blue", "tab:cyan", "tab:red", "tab:orange")  # 20b and 120b at both contexts
DENSE = {"bf16": "dense BF16", "fp8_block128": "dense FP8"}
SERVED = (  # row, way, key of the records, format
    ("over gRPC, all streams decoding", "tensorrt_llm", "tok_s", ",.0f"),
    ("at the engine's socket", "engine", "tok_s", ",.0f"),
    ("over gRPC, first submission to last token", "tensorrt_llm", "all_tok_s", ",.0f"),
    ("at the engine's socket", "engine", "all_tok_s", ",.0f"),
    ("over gRPC, ms between tokens", "tensorrt_llm", "tpot_ms", ".2f"),
    ("at the engine's socket, ms between tokens", "engine", "tpot_ms", ".2f"),
    ("tokens a response", "tensorrt_llm", "tokens_a_response", ".2f"),
)
TRACE_SPANS = (("ttft_ms", 0), ("tpot_ms", 1))  # key of the records, digits
Cells = dict[tuple[str, ...], dict[str, Any]]


def cells(path: Path) -> Cells:
    """The last record of each cell: (kind, dense, model, context, batch) or (kind, dense, model, tokens)."""
    found: Cells = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        key = (record["kind"], record["dense"], record["model"], str(record["context"]))
        found[(*key, str(record["batch"])) if record["kind"] == "decode" else key] = record
    return found


def rows(found: Cells, peer: dict[str, Any]) -> list[str]:
    """Two Markdown tables."""
    lines = ["| decode, tokens/s | batch 1 | 8 | 32 | 64 | 128 |", "|---|---|---|---|---|---|"]
    for model in MODELS:
        for context in CONTEXTS:
            name = f"{model.removeprefix('gpt-oss-')}, {int(context) // 1024}k"
            for dense, words in DENSE.items():
                values = [found.get(("decode", dense, model, context, batch)) for batch in BATCHES]
                if any(values):
                    lines.append(_row(f"{name}, {words}", [_speed(value) for value in values]))
            for key, words in (("decode_tok_s", "vLLM"), ("goal_decode_tok_s", "goal")):
                lines.append(_row(words, [f"{peer[key][model][context][batch]:,}" for batch in BATCHES]))
    lines += ["", "| prefill of one prompt, ms | 1,024 | 4,096 | 8,192 | 32,768 |", "|---|---|---|---|---|"]
    for model in MODELS:
        for dense, words in DENSE.items():
            values = [found.get(("prefill", dense, model, tokens)) for tokens in PROMPTS]
            if any(values):
                lines.append(_row(f"{model.removeprefix('gpt-oss-')}, {words}", [_span(value) for value in values]))
        for key, words in (("prefill_ms", "vLLM (best run)"), ("goal_prefill_ms", "goal")):
            lines.append(_row(words, [f"{peer[key][model][tokens]:g}" for tokens in PROMPTS]))
    return lines


def served_rows(path: Path) -> list[str]:
    """A Markdown table for each format of dense products: the load of served_decode.py over gRPC and at the engine's
    socket."""
    records = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    found = {(r.get("dense", "bf16"), r["way"], r["concurrency"]): r for r in records}
    lines: list[str] = []
    for dense, words in DENSE.items():
        streams = sorted({concurrency for of, _, concurrency in found if of == dense})
        if streams:
            lines += [] if not lines else [""]
            lines.append(
                f"| {words}, tokens/s | " + " | ".join([f"{streams[0]} stream", *map(str, streams[1:])]) + " |"
            )
            lines.append("|---" * (len(streams) + 1) + "|")
        for name, way, key, form in SERVED if streams else ():
            values = [_figure(found.get((dense, way, concurrency), {}).get(key), form) for concurrency in streams]
            if any(values):
                lines.append(_row(name, values))
    return lines


def _figure(value: Any, form: str) -> str:
    """A number, or the median of what has several; nothing where it was not measured."""
    return "" if value is None else format(value["p50"] if isinstance(value, dict) else value, form)


def trace_rows(path: Path) -> list[str]:
    """One Markdown table: the loads of served_trace.py, each in every configuration."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {(r["load"], r["configuration"]): r for r in records}
    lines = [
        "| load | configuration | good, of all requests/s | TTFT ms, p50, p99 | TPOT ms, p50, p99 |",
        "|---|---|---|---|---|",
    ]
    for (load, configuration), r in found.items():
        good = f"{r['goodput_s']:.1f} of {r['requests_s']:.1f}"
        spans = [f"{r[key]['p50']:,.{digits}f}, {r[key]['p99']:,.{digits}f}" for key, digits in TRACE_SPANS]
        lines.append(_row(load, [configuration, good, *spans]))
    return lines


def put_into(text: str, name: str, lines: list[str]) -> str:
    """`text` with `lines` between the marks of `name`. Raises ValueError without them."""
    start = text.index(begin := f"<!-- results: {name} -->\n") + len(begin)
    return "\n".join([text[:start], *lines, "", text[text.index("<!-- end -->", start) :]])


def _row(name: str, values: list[str]) -> str:
    return f"| {name} | " + " | ".join(values) + " |"


def _speed(record: dict[str, Any] | None) -> str:
    return "" if record is None else f"{record['tok_s']:,.0f}"


def _span(record: dict[str, Any] | None) -> str:
    return "" if record is None else f"{record['ms']:.1f}"


def plots(found: Cells, peer: dict[str, Any], folder: Path) -> None:
    """share_of_bound.svg: share of each cell's own bound by batch; speed_cost.svg: tokens/s of one user against USD
    for a million output tokens, vLLM's cells at the same price."""
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "gptoss-trt", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3})
    for name, draw in (("share_of_bound", _draw_share_of_bound), ("speed_cost", lambda a, f: _draw_cost(a, f, peer))):
        figure, axes = plt.subplots(figsize=(6.4, 3.8))
        draw(axes, found)
        axes.legend(fontsize=7)
        figure.tight_layout()
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


def _draw_share_of_bound(axes: Any, found: Cells) -> None:
    """A colour for each model and context; dense FP8 dashed and hollow."""
    for color, (model, context) in zip(COLORS, [(m, c) for m in MODELS for c in CONTEXTS], strict=True):
        for dense, (line, fill) in {"bf16": ("-", color), "fp8_block128": ("--", "white")}.items():
            keys = [(b, ("decode", dense, model, context, b)) for b in BATCHES]
            points = [(int(b), found[key]["share_of_bound"]) for b, key in keys if key in found]
            if points:
                label = f"{_label(model, context)}, {DENSE[dense]}"
                axes.plot(*zip(*points, strict=True), line, color=color, marker="o", markerfacecolor=fill, label=label)
    axes.set(xscale="log", ylim=(0, 1), xlabel="batch", ylabel="share of the bound: least time / measured")
    _plain_ticks(axes.xaxis, [int(batch) for batch in BATCHES])


def _draw_cost(axes: Any, found: Cells, peer: dict[str, Any]) -> None:
    """A colour for each model, a marker for each context, vLLM dotted; batches stand at the highest line's points."""
    price = next(r["usd_per_mtok"] * r["tok_s"] for r in found.values() if r["kind"] == "decode")
    for model, color in zip(MODELS, COLORS[::2], strict=True):
        for context, marker in zip(CONTEXTS, ("o", "s"), strict=True):
            ours = [(b, found[k]["tok_s"]) for b in BATCHES if (k := ("decode", "bf16", model, context, b)) in found]
            theirs = [(b, peer["decode_tok_s"][model][context][b]) for b in BATCHES]
            for points, style, who in ((ours, "-", "gptoss-trt"), (theirs, ":", "vLLM")):
                if points:
                    x, y = zip(*((price / speed, speed / int(b)) for b, speed in points), strict=True)
                    axes.plot(x, y, style, marker=marker, color=color, label=f"{who}, {_label(model, context)}")
            if ours and (model, context) == (MODELS[0], CONTEXTS[0]):
                for b, speed in ours:
                    words = f"batch {b}" if b == BATCHES[0] else b
                    place = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center"}
                    axes.annotate(words, (price / speed, speed / int(b)), fontsize=7, **place)
    axes.margins(0.07)
    hour = price * 3600 / 1e6
    axes.set(xscale="log", yscale="log", ylabel="tokens/s of one user")
    axes.set_xlabel(f"USD for a million output tokens, a GPU at {hour:.2f} USD an hour")
    _plain_ticks(axes.xaxis, [0.05, 0.1, 0.2, 0.5, 1, 2])
    _plain_ticks(axes.yaxis, [30, 50, 100, 200, 500])


def _plain_ticks(axis: Any, values: list[float]) -> None:
    """Numbers as people write them on a logarithmic axis, at these places only."""
    axis.set_ticks(values, labels=[f"{value:g}" for value in values])
    axis.set_ticks([], minor=True)


def _label(model: str, context: str) -> str:
    return f"{model.removeprefix('gpt-oss-')} {int(context) // 1024}k"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, default=RESULTS / "h200.jsonl")
    parser.add_argument("--readme", type=Path, help="file whose tables are replaced")
    parser.add_argument("--plots", type=Path, help="folder for the two plots")
    options = parser.parse_args()
    found = cells(options.results)
    peer = json.loads((RESULTS / "vllm_h200.json").read_text(encoding="utf-8"))
    tables = {"h200": rows(found, peer), "triton": served_rows(RESULTS / "triton_h200.jsonl")}
    tables["trace"] = trace_rows(RESULTS / "trace_h200.jsonl")
    if options.readme is None:
        print("\n\n".join("\n".join(lines) for lines in tables.values()))
    else:
        text = options.readme.read_text(encoding="utf-8")
        for name, lines in tables.items():
            text = put_into(text, name, lines)
        options.readme.write_text(text, encoding="utf-8")
    if options.plots is not None:
        plots(found, peer, options.plots)


if __name__ == "__main__":
    main()
