"""Parsing of whole completions, for the tests of this folder."""

from __future__ import annotations

import pytest

from gptoss_trt.runtime.harmony import HarmonyStream


def _joined(events):
    """{"content", "reasoning", "calls": [[name, arguments]], "finish", "parts": [(channel, text)]}."""
    result = {"content": None, "reasoning": None, "calls": [], "finish": None, "parts": []}
    for name, *values in events:
        assert result["finish"] is None, "an event after finish"
        if name in ("content", "reasoning"):
            assert values[0], "an empty event"
            result[name] = (result[name] or "") + values[0]
            result["parts"].append((name, values[0]))
        elif name == "tool_name":
            assert values[0] == len(result["calls"])
            result["calls"].append([values[1], ""])
        elif name == "tool_args":
            assert values[0] == len(result["calls"]) - 1
            assert values[1], "an empty event"
            result["calls"][-1][1] += values[1]
        else:
            assert name == "finish"
            result["finish"] = tuple(values)
    assert result["finish"] is not None
    return result


def _parse(ids, tools=(), chunk=None, reason=None, **options):
    stream = HarmonyStream(list(tools), **options)
    size = chunk or max(1, len(ids))
    events = [event for start in range(0, len(ids), size) for event in stream.push(ids[start : start + size])]
    return _joined(events + stream.finish(reason))


@pytest.fixture(scope="session")
def joined():
    return _joined


@pytest.fixture(scope="session")
def parse():
    return _parse
