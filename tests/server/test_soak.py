"""The soak's 60 s form: 64 streams on a scripted engine, disturbed; and that its checks see a wrong answer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SOAK = Path(__file__).parents[1] / "soak"


@pytest.fixture
def soak() -> Iterator[Any]:
    """The module `load` of tests/soak, which is a folder of scripts and no package."""
    sys.path.insert(0, str(SOAK))
    import load  # type: ignore[import-not-found]

    yield load
    sys.path.remove(str(SOAK))


@pytest.mark.timeout(240)
def test_nothing_is_lost_or_mixed_in_a_disturbed_minute(tmp_path: Path) -> None:
    output = tmp_path / "soak.jsonl"
    command = [sys.executable, str(SOAK / "run.py"), "--engine", "scripted", "--seconds", "45", "--streams", "64"]
    ended = subprocess.run(
        [*command, "--deadline", "45", "--output", str(output)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stderr + ended.stdout
    record = json.loads(output.read_text(encoding="utf-8"))
    assert ended.stdout.splitlines()[-1] == record["line"]
    assert record["lost"] == record["mixed"] == 0
    assert record["answered"] > 200 and record["cancelled"] > 20 and record["refused"] > 5
    assert record["restarts"] >= 1 and record["reloads"] >= 1
    assert (
        sum(record[name] for name in ("answered", "mixed", "lost", "cancelled", "refused", "interrupted"))
        == (record["requests"])
    )


def test_another_answer_a_cut_one_and_a_late_error_are_seen(soak: Any) -> None:
    question = soak.Question("text", {"stream": True}, "one two three")
    seen = soak.Seen(question)
    seen.take({"text_output": ["one two"]})
    assert seen.begins_right() and not seen.finished and seen.answer != question.answer
    seen.take({"text_output": [" three"], "finish_reason": ["stop"]})
    assert seen.finished and seen.answer == question.answer
    other = soak.Seen(question)
    other.take({"text_output": ["one four"]})
    assert not other.begins_right()


def test_a_chat_is_compared_by_reasoning_and_content(soak: Any) -> None:
    question = soak.Question("chat", {"stream": True}, "thought|said")
    seen = soak.Seen(question)
    for delta in ({"reasoning_content": "thought"}, {"content": "sa"}):
        seen.take({"response": [json.dumps({"choices": [{"delta": delta, "finish_reason": None}]})]})
    assert seen.begins_right() and seen.answer == "thought|sa"
    seen.take({"response": [json.dumps({"choices": [{"delta": {"content": "id"}, "finish_reason": "stop"}]})]})
    assert seen.finished and seen.answer == question.answer


def test_errors_are_excused_by_a_disturbance_of_their_own_model_only(soak: Any) -> None:
    windows = soak.Windows()
    kill = windows.open()
    kill.start, kill.end = 10.0, 20.0
    reload = windows.open("chat")
    reload.start, reload.end = 30.0, 40.0
    text = "UNAVAILABLE the engine is not available"
    assert windows.excuse("ensemble", 5.0, 11.0, text) and windows.excuse("chat", 19.0, 50.0, text)
    assert not windows.excuse("ensemble", 21.0, 29.0, text), "no disturbance"
    assert not windows.excuse("ensemble", 31.0, 33.0, text), "another model's reload"
    assert windows.excuse("chat", 31.0, 33.0, "Request for unknown model: 'chat' has no available versions")
    assert not windows.excuse("chat", 31.0, 33.0, "INTERNAL chat failed: list index out of range")
