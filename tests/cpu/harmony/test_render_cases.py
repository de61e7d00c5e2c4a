"""Every render case of tests/data/harmony_cases.jsonl."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gptoss_trt.runtime.harmony import Tokenizer, render_chat

CASES_FILE = Path(__file__).parents[2] / "data" / "harmony_cases.jsonl"
CASES = [json.loads(line) for line in CASES_FILE.read_text(encoding="utf-8").splitlines()]
RENDER_CASES = [case for case in CASES if case["kind"] == "render"]
TOKENIZER = Tokenizer.load()


@pytest.mark.parametrize("case", RENDER_CASES, ids=[case["id"] for case in RENDER_CASES])
def test_case(case):
    expected = case["expected"]
    ids = render_chat(case["input_request"], current_date=case["fixed_date"])
    text = TOKENIZER.decode(ids)
    assert text == expected.get("prompt_text", text)
    for name, count in expected.get("special_id_counts", {}).items():
        assert ids.count(TOKENIZER.special_tokens[f"<|{name}|>"]) == count, name
    assert not [part for part in expected.get("prompt_contains", ()) if part not in text]
    assert not [part for part in expected.get("prompt_excludes", ()) if part in text]
