"""The Grafana dashboard's panels, drawn from its own queries: `python tests/perf/dashboard_picture.py --out FILE`.

Asks a Prometheus (--prometheus URL) every query of every panel over the last --minutes, with `$model` and
`$__rate_interval` filled in as Grafana does, and draws the panels on the dashboard's own grid, with its titles, units
and legends (needs matplotlib; without --out it only asks). Exits with 1 and names each panel with a query that fails or
returns nothing; a query that ends in `> 0` shows only what happens, so it may. `tests/perf/dashboard_demo.sh` makes the
README's picture: server, load, Prometheus.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).parents[2] / "docker" / "grafana" / "dashboards" / "gptoss-trt.json"
TIMEOUT_S = 20.0
MAX_POINTS = 600  # of a query, about a point a pixel of a panel
LABEL_VALUES = re.compile(r"label_values\((?P<metric>.+), *(?P<label>\w+)\)")
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
SHOWS_EVENTS = re.compile(r"> 0$")
PALETTE = ("#56A64B", "#E0B400", "#3274D9", "#FF780A", "#E02F44", "#8F3BB8", "#00A3A3", "#8C6D46")
LEGEND_INCHES = 0.15  # a row
DOTS_PER_INCH = 130
TICKS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 86400)
COLUMNS, COLUMN_INCHES, ROW_INCHES, GAP_INCHES = 24, 0.5, 0.25, 0.04
PAGE, INK, FAINT, EDGE = "#F4F5F5", "#24292E", "#6E7176", "#DDDFE2"


class QueryError(Exception):
    """A query that Prometheus refused, or whose variable cannot be filled in."""


@dataclass(frozen=True)
class Window:
    """What Grafana derives from the dashboard's time range and the data source's scrape interval, in seconds."""

    start: float
    end: float
    step: float
    rate: float

    @classmethod
    def last(cls, minutes: float, scrape_s: float, end: float) -> Window:
        """`$__interval` is at least the scrape interval, `$__rate_interval` at least four of those."""
        step = max(scrape_s, math.ceil(minutes * 60 / MAX_POINTS))
        end -= end % step
        return cls(end - minutes * 60, end, step, max(step + scrape_s, 4 * scrape_s))

    def times(self) -> list[float]:
        return [self.start + index * self.step for index in range(round((self.end - self.start) / self.step) + 1)]


@dataclass(frozen=True)
class Line:
    """One series; NaN where it has no value at a step."""

    legend: str
    values: list[float]


class Prometheus:
    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def _get(self, path: str, **parameters: Any) -> Any:
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise QueryError(error.read().decode("utf-8", "replace")[:300]) from error
        except (OSError, ValueError, KeyError) as error:
            raise QueryError(f"{self._url}: {error}") from error

    def label_values(self, query: str, window: Window) -> list[str]:
        """Of a template variable's query. Raises QueryError for one that is not label_values(metric, label)."""
        match = LABEL_VALUES.fullmatch(query)
        if match is None:
            raise QueryError(f"a variable asks {query!r}, which is not label_values(metric, label)")
        series = self._get("series", **{"match[]": match["metric"], "start": window.start, "end": window.end})
        return sorted({labels[match["label"]] for labels in series if match["label"] in labels})

    def lines(self, expression: str, legend: str, window: Window) -> list[Line]:
        """The series of `expression` over `window` that have a value."""
        span = {"start": window.start, "end": window.end, "step": window.step}
        found = []
        for series in self._get("query_range", query=expression, **span)["result"]:
            at = {round((float(moment) - window.start) / window.step): float(v) for moment, v in series["values"]}
            values = [at.get(index, math.nan) for index in range(len(window.times()))]
            if any(map(math.isfinite, values)):
                found.append(Line(legend_of(legend, series["metric"]), values))
        return found


def legend_of(form: str, labels: dict[str, str]) -> str:
    """`{{label}}` filled in. Without a form, Grafana's own: the labels."""
    if form:
        return re.sub(r"\{\{ *(\w+) *\}\}", lambda match: labels.get(match[1], ""), form)
    return ", ".join(f"{name}={value}" for name, value in labels.items()) or "Value"


def variables(dashboard: dict[str, Any], prometheus: Prometheus, window: Window) -> dict[str, str]:
    """What stands for each variable in a query: the first value of a template variable, and the rate's interval."""
    found = {"__rate_interval": f"{window.rate:g}s", "__interval": f"{window.step:g}s"}
    for variable in dashboard["templating"]["list"]:
        if variable["type"] != "query":
            continue
        values = prometheus.label_values(variable["query"]["query"], window)
        if not values:
            raise QueryError(f"the variable {variable['name']} has no value: {variable['query']['query']}")
        found[variable["name"]] = values[0]
    return found


def filled_in(expression: str, values: dict[str, str]) -> str:
    """Raises QueryError for a variable that the dashboard does not have."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in values:
            raise QueryError(f"there is no variable {name}")
        return values[name]

    return VARIABLE.sub(value, expression)


def ask(dashboard: dict[str, Any], prometheus: Prometheus, window: Window) -> tuple[dict[int, list[Line]], list[str]]:
    """The series of each panel by its id, and what is wrong, a line a panel's query. Raises QueryError when the
    variables have no values: then no query can be asked."""
    values = variables(dashboard, prometheus, window)
    found: dict[int, list[Line]] = {}
    problems = []
    for panel in dashboard["panels"]:
        name = f"panel {panel['id']}, {panel['title']}"
        if unit_of(panel) not in UNITS:
            problems.append(f"{name}: the unit {unit_of(panel)} is not known")
        lines = found[panel["id"]] = []
        for target in panel["targets"]:
            try:
                fresh = prometheus.lines(filled_in(target["expr"], values), target["legendFormat"], window)
            except QueryError as error:
                problems.append(f"{name}: query {target['refId']} failed: {error}")
                continue
            if not fresh and not SHOWS_EVENTS.search(target["expr"]):
                problems.append(f"{name}: query {target['refId']} returned nothing: {target['expr']}")
            lines += fresh
    return found, problems


def unit_of(panel: dict[str, Any]) -> str:
    return str(panel["fieldConfig"]["defaults"].get("unit", "none"))


def _scaled(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    factor, suffix = next((step for step in steps if abs(value) >= step[0]), steps[-1])
    return f"{_digits(value / factor)}{suffix}"


def _digits(value: float) -> str:
    """Three significant digits, none behind the point from 100 on."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


_SECONDS = ((3600.0, " hours"), (60.0, " mins"), (1.0, " s"), (1e-3, " ms"), (1e-6, " µs"))
_SHORT = ((1e9, " Bil"), (1e6, " Mil"), (1e3, " K"), (1.0, ""))
_BYTES = ((2.0**40, " TiB"), (2.0**30, " GiB"), (2.0**20, " MiB"), (2.0**10, " KiB"), (1.0, " B"))
UNITS = {  # Grafana's unit ids, as it writes their values
    "none": _digits,
    "short": lambda value: _scaled(value, _SHORT),
    "s": lambda value: "0 s" if value == 0 else _scaled(value, _SECONDS),
    "ms": lambda value: "0 ms" if value == 0 else _scaled(value / 1e3, _SECONDS),
    "bytes": lambda value: _scaled(value, _BYTES),
    "percentunit": lambda value: f"{_digits(value * 100)}%",
    "reqps": lambda value: f"{_digits(value)} req/s",
}


class Picture:
    """The panels on the dashboard's grid, one below the other rows as in Grafana. Owns matplotlib's figure."""

    def __init__(self, dashboard: dict[str, Any], window: Window, caption: str) -> None:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        plt.rcParams.update({"font.size": 7.5, "text.color": INK, "axes.edgecolor": EDGE})
        self._window, self._span = window, window.end - window.start
        rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"]) + 1  # the caption's
        self._inches = (COLUMNS * COLUMN_INCHES, rows * ROW_INCHES)
        self.figure = plt.figure(figsize=self._inches, dpi=DOTS_PER_INCH, facecolor=PAGE)
        where = (0.08 / self._inches[0], 0.4 * ROW_INCHES / self._inches[1])
        self.figure.text(*where, caption, fontsize=7, color=FAINT, va="center")

    def save(self, path: Path) -> None:
        """A PNG of 256 colours, half the bytes: the commonest for the surfaces, and some that cover the rare ones."""
        from PIL import Image

        canvas = self.figure.canvas
        canvas.draw()
        image = Image.frombytes("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())).convert("RGB")
        commonest = sorted(image.getcolors(1 << 24) or [], reverse=True)[:128]
        covering = image.quantize(128, Image.Quantize.MAXCOVERAGE).getpalette() or []
        palette = Image.new("P", (1, 1))
        palette.putpalette([part for _, color in commonest for part in color] + covering[: 3 * 128])
        image.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True)

    def _axes(self, grid: dict[str, int], margins: tuple[float, float, float, float]) -> Any:
        """Axes in the panel at `grid`, `margins` inches from its left, right, lower and upper edges."""
        left, right, low, high = (margin + GAP_INCHES for margin in margins)
        width, height = self._inches
        x, top = grid["x"] * COLUMN_INCHES, height - grid["y"] * ROW_INCHES
        w, h = grid["w"] * COLUMN_INCHES - left - right, grid["h"] * ROW_INCHES - low - high
        return self.figure.add_axes(((x + left) / width, (top - high - h) / height, w / width, h / height))

    def draw(self, panel: dict[str, Any], lines: list[Line]) -> None:
        frame = self._axes(panel["gridPos"], (0, 0, 0, 0))
        frame.set(facecolor="white", xticks=[], yticks=[])
        w, h = panel["gridPos"]["w"] * COLUMN_INCHES, panel["gridPos"]["h"] * ROW_INCHES
        frame.text(0.09 / w, 1 - 0.16 / h, panel["title"], transform=frame.transAxes, weight="bold", va="center")
        if not lines:
            frame.text(0.5, 0.45, "No data", transform=frame.transAxes, ha="center", color=FAINT)
        elif panel["type"] == "stat":
            self._draw_stat(panel, lines[0])
        else:
            self._draw_series(panel, lines)

    def _draw_stat(self, panel: dict[str, Any], line: Line) -> None:
        """The last value, and the series without axes below it."""
        axes = self._axes(panel["gridPos"], (0, 0, 0, 0.55))
        axes.axis("off")
        self._plot(axes, line, PALETTE[0], fill=0.15)
        self._limit(axes, panel)
        last = [value for value in line.values if math.isfinite(value)][-1]
        axes.set_title(UNITS[unit_of(panel)](last), fontsize=17, color=PALETTE[0], pad=3)

    def _draw_series(self, panel: dict[str, Any], lines: list[Line]) -> None:
        from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

        below = self._legend(panel["gridPos"], [line.legend for line in lines])
        axes = self._axes(panel["gridPos"], (0.62, 0.14, below + 0.17, 0.34))
        for index, line in enumerate(lines):
            fill = panel["fieldConfig"]["defaults"]["custom"]["fillOpacity"] / 100
            self._plot(axes, line, PALETTE[index % len(PALETTE)], fill)
        self._limit(axes, panel)
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        if unit_of(panel) == "bytes":
            axes.yaxis.set_major_locator(MultipleLocator(2.0 ** math.floor(math.log2(axes.get_ylim()[1] / 2))))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: UNITS[unit_of(panel)](value)))
        axes.xaxis.set_major_locator(MultipleLocator(next(s for s in TICKS_S if s * 5 >= self._span)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: time.strftime("%H:%M:%S", time.gmtime(at))))
        axes.grid(color=EDGE, linewidth=0.5)
        axes.tick_params(length=0, labelsize=6.5, labelcolor=FAINT)
        axes.spines[["top", "right"]].set_visible(False)

    def _legend(self, grid: dict[str, int], names: list[str]) -> float:
        """Colours and names from left to right, in rows at the panel's lower edge. Returns their height in inches."""
        w, h = grid["w"] * COLUMN_INCHES, grid["h"] * ROW_INCHES
        axes = self._axes(grid, (0, 0, 0, 0))
        axes.set(xlim=(0, w), ylim=(0, h))
        axes.axis("off")
        renderer, x = self.figure.canvas.get_renderer(), 0.1
        rows: list[list[tuple[float, Any]]] = [[]]
        for name in names:
            text = axes.text(0, 0, name, fontsize=6.5, va="center")
            width = 0.22 + text.get_window_extent(renderer).width / self.figure.dpi
            if rows[-1] and x + width > w - 0.2:
                x = 0.1
                rows.append([])
            rows[-1].append((x, text))
            x += width + 0.08
        colors = iter(PALETTE * len(names))
        for row, entries in enumerate(rows):
            y = 0.14 + LEGEND_INCHES * (len(rows) - 1 - row)
            for x, text in entries:
                axes.plot([x, x + 0.13], [y, y], color=next(colors), linewidth=1.6)
                text.set_position((x + 0.18, y))
        return 0.14 + LEGEND_INCHES * len(rows)

    def _plot(self, axes: Any, line: Line, color: str, fill: float) -> None:
        times = self._window.times()
        axes.plot(times, line.values, color=color, linewidth=1.1)
        if fill:
            axes.fill_between(times, line.values, color=color, alpha=fill, linewidth=0)

    def _limit(self, axes: Any, panel: dict[str, Any]) -> None:
        """The time range, and the panel's least and greatest value where it names them."""
        axes.set_xlim(self._window.start, self._window.end)
        limits = panel["fieldConfig"]["defaults"]
        _, high = axes.get_ylim()
        axes.set_ylim(limits.get("min"), limits.get("max", high if high > limits.get("min", -math.inf) else 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="URL")
    parser.add_argument("--dashboard", type=Path, default=DASHBOARD)
    parser.add_argument("--minutes", type=float, default=5.0, help="time range")
    parser.add_argument("--until", type=float, default=time.time(), help="its end, seconds since 1970 (now)")
    parser.add_argument("--scrape-seconds", type=float, default=5.0, help="scrape interval of the data source")
    parser.add_argument("--caption", default="", help="text under the panels")
    parser.add_argument("--out", type=Path, help="a PNG; left out: the queries are only asked")
    options = parser.parse_args()
    dashboard = json.loads(options.dashboard.read_text(encoding="utf-8"))
    window = Window.last(options.minutes, options.scrape_seconds, options.until)
    try:
        found, problems = ask(dashboard, Prometheus(options.prometheus), window)
    except QueryError as error:
        print(error, file=sys.stderr)
        return 1
    for problem in problems:
        print(problem, file=sys.stderr)
    if options.out is not None:
        picture = Picture(dashboard, window, options.caption)
        for panel in dashboard["panels"]:
            picture.draw(panel, found[panel["id"]])
        picture.save(options.out)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
