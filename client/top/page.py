"""A metrics page in Prometheus' text format as numbers by name and labels.

Invariant: a line is either understood or an error that shows it. Must not know which metrics there are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?$")
LABEL = re.compile(r'\s*(?P<name>[A-Za-z_]\w*)="(?P<value>(?:[^"\\]|\\.)*)"\s*(?:,|$)')
ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}

Labels = frozenset[tuple[str, str]]


class PageError(ValueError):
    """A page that is not Prometheus' text format."""


class Page:
    """All samples of one look at a page."""

    def __init__(self, samples: Mapping[tuple[str, Labels], float]) -> None:
        self._samples = samples
        self._names: dict[str, list[tuple[dict[str, str], float]]] = {}
        for (name, labels), value in samples.items():
            self._names.setdefault(name, []).append((dict(labels), value))

    @classmethod
    def parse(cls, text: str) -> Page:
        """Reads a page. Raises PageError for a line that is neither a comment nor a sample."""
        samples: dict[tuple[str, Labels], float] = {}
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            match = SAMPLE.match(line)
            if match is None:
                raise PageError(f"line {number} is no sample: {line[:100]!r}")
            try:
                value = float(match["value"])
            except ValueError as error:
                raise PageError(f"line {number} has no number: {line[:100]!r}") from error
            samples[match["name"], frozenset(_labels(match["labels"] or "", number))] = value
        return cls(samples)

    def value(self, name: str, **labels: str) -> float | None:
        """The one sample of that name with at least these labels; None when there is none."""
        values = [value for found, value in self._names.get(name, ()) if labels.items() <= found.items()]
        return values[0] if values else None

    def total(self, name: str, **labels: str) -> float | None:
        """The sum of the samples of that name with at least these labels; None when there are none."""
        values = [value for found, value in self._names.get(name, ()) if labels.items() <= found.items()]
        return sum(values) if values else None

    def label_values(self, name: str, label: str) -> list[str]:
        """The values of a label among the samples of that name, in order of the page."""
        return list(dict.fromkeys(found[label] for found, _ in self._names.get(name, ()) if label in found))

    def buckets(self, name: str, **labels: str) -> list[tuple[float, float]]:
        """Upper bounds and cumulative counts of a histogram, in order; empty when it is not on the page."""
        found = [
            (float(own["le"]), value)
            for own, value in self._names.get(f"{name}_bucket", ())
            if "le" in own and labels.items() <= own.items()
        ]
        return sorted(found)


def _labels(text: str, number: int) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(text):
        match = LABEL.match(text, position)
        if match is None:
            raise PageError(f"line {number} has broken labels: {text[:100]!r}")
        yield match["name"], re.sub(r"\\.", lambda escape: ESCAPES.get(escape[0], escape[0]), match["value"])
        position = match.end()
