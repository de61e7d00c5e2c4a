"""Every parser case of tests/data/harmony_cases.jsonl."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from gptoss_trt.runtime.harmony import HarmonyStream

CASES_FILE = Path(__file__).parents[2] / "data" / "harmony_cases.jsonl"
CASES = {case["id"]: case for case in map(json.loads, CASES_FILE.read_text(encoding="utf-8").splitlines())}
PARSER_CASES = [case for case in CASES.values() if case["kind"] in ("completion", "stream")]


@pytest.mark.parametrize("chunk", [1, 2, 4, None])
@pytest.mark.parametrize("case", PARSER_CASES, ids=[case["id"] for case in PARSER_CASES])
def test_case(case, chunk, parse):
    expected = case["expected"]
    result = parse(case["token_ids_o200k_harmony"], case["declared_tools"], chunk, **(case.get("opts") or {}))
    assert result["content"] == expected["content"]
    parts = expected.get("reasoning_parts", [expected["reasoning"] or ""])
    assert (result["reasoning"] or "") == "".join(parts)
    assert result["calls"] == [[call["name"], call["arguments"]] for call in expected["tool_calls"]]
    assert result["finish"] == (expected["finish_reason"], expected["error"])
    shown = json.dumps([result["content"], result["reasoning"], result["calls"]], ensure_ascii=False)
    assert not [text for text in case.get("must_not_appear_in_user_text", ()) if text in shown]


def test_h_reuse_01_interleaved(joined):
    case = CASES["h-reuse-01"]
    one, two = HarmonyStream([]), HarmonyStream([])
    first: list = []
    second: list = []
    for token_id in case["token_ids_o200k_harmony"]:
        first += one.push([token_id])
        second += two.push([token_id])
    assert first + one.finish("stop") == second + two.finish("stop")
    assert joined([*first, ("finish", "stop", None)])["content"] == case["expected"]["content"]


def test_h_utf8_01_gives_one_delta(parse):
    assert parse(CASES["h-utf8-01"]["token_ids_o200k_harmony"], chunk=1)["parts"] == [("content", "😀")]


def test_h_stop_03_nothing_after_a_terminal(parse):
    """ignore_eos must not push text past a terminal: whatever an engine sends then, the parser has ended."""
    ids = CASES["h-base-01"]["token_ids_o200k_harmony"]
    assert parse([*ids, *ids], reason="length") == parse(ids)


def test_no_case_is_left_out():
    kinds = Counter(case["kind"] for case in CASES.values())
    assert kinds == {"completion": 41, "stream": 5, "render": 13, "request": 7, "engine": 1}
