"""Guided decoding in the real engine on the demo's weights: output always parses, and thinking is left alone."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gptoss_trt.runtime.engine.guides_core import GuidedCore
from gptoss_trt.runtime.engine.guides_llguidance import LlguidanceCompiler
from gptoss_trt.runtime.engine.loop import EngineLoop
from gptoss_trt.runtime.engine.messages import Error, Finished, Guide, Submit, Tokens
from gptoss_trt.runtime.engine.model_core import ModelCore
from gptoss_trt.runtime.engine.options import EngineOptions
from gptoss_trt.runtime.engine.script import ScriptedEngine
from gptoss_trt.runtime.engine.scripted import ScriptedCore
from gptoss_trt.runtime.launch.demo import demo_engine
from gptoss_trt.runtime.model import load_model
from gptoss_trt.runtime.openai.chat_objects import ChatAnswer
from gptoss_trt.runtime.openai.chat_request import prompt_ids, read_chat
from gptoss_trt.runtime.openai.submission import chat_submit

DEMO = Path(__file__).parents[3] / ".cache" / "demo"
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": 20}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "reply", "schema": SCHEMA}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def core() -> Iterator[GuidedCore]:
    torch.set_num_threads(1)
    model = load_model(demo_engine(DEMO, print), device="cpu")
    compiler = LlguidanceCompiler(model.config.vocab_size)
    inner = ModelCore(model, EngineOptions(), kv_bytes=256 << 20, guide_compiler=compiler)
    yield GuidedCore(inner, compiler)


def play(core: GuidedCore, *submits: Submit) -> list[list[Any]]:
    """The events of each submit."""
    for number, submit in enumerate(submits):
        core.submit((number, submit.request_id), submit, time.time_ns())
    events: list[list[Any]] = [[] for _ in submits]
    deadline = time.monotonic() + 120
    while core.has_work():
        assert time.monotonic() < deadline
        for (number, _), event in core.step():
            events[number].append(event)
    return events


def asked(core: GuidedCore, content: str, **more: Any) -> dict[str, Any]:
    """The chat.completion of one user message."""
    body = {"messages": [{"role": "user", "content": content}], "seed": 1, "max_tokens": 160, **more}
    chat = read_chat(body)
    ids = prompt_ids(chat, current_date="2025-06-28")
    answer = ChatAnswer(chat, prompt_tokens=len(ids))
    (events,) = play(core, chat_submit(chat, "r", ids, max_context=2048))
    for event in events:
        assert not isinstance(event, Error), event
        answer.push(event)
    return answer.completion()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_schema_holds_for_every_choice(core: GuidedCore, temperature: float) -> None:
    n = 3 if temperature else 1
    whole = asked(core, "What is 2 + 3?", response_format=FORMAT, n=n, temperature=temperature)
    for choice in whole["choices"]:
        assert choice["finish_reason"] == "stop"
        value = json.loads(choice["message"]["content"])
        assert set(value) == {"answer", "sure"}
        assert isinstance(value["sure"], bool)
        assert len(value["answer"]) <= 20


def test_reasoning_is_the_same_with_and_without_a_schema(core: GuidedCore) -> None:
    """Greedy, and the same prompt: guided_json leaves the prompt alone, where response_format describes itself."""
    plain = asked(core, "What is 2 + 3?", temperature=0)
    guided = asked(core, "What is 2 + 3?", temperature=0, guided_json=SCHEMA)
    assert plain["choices"][0]["message"]["reasoning"]
    assert guided["choices"][0]["message"]["reasoning"] == plain["choices"][0]["message"]["reasoning"]
    assert set(json.loads(guided["choices"][0]["message"]["content"])) == {"answer", "sure"}


def test_choice_and_regex(core: GuidedCore) -> None:
    for seed in range(3):
        whole = asked(core, "Yes or no?", guided_choice=["yes", "no"], seed=seed)
        assert whole["choices"][0]["message"]["content"] in ("yes", "no")
        whole = asked(core, "A date?", guided_regex=r"\d{4}-\d{2}-\d{2}", seed=seed)
        assert whole["choices"][0]["message"]["content"].replace("-", "").isdecimal()


@pytest.mark.parametrize("tools", [[WEATHER], [WEATHER, CLOCK]])
def test_a_forced_call_has_valid_arguments(core: GuidedCore, tools: list[Any]) -> None:
    for seed in range(2):
        whole = asked(core, "Hello there", tools=tools, tool_choice="required", seed=seed)
        (choice,) = whole["choices"]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "get_weather":
            assert set(arguments) == {"city", "unit"}
            assert arguments["unit"] in ("C", "F")
        else:
            assert call["function"]["name"] == "get_time"


def test_a_guide_that_cannot_be_compiled_ends_its_request_only(core: GuidedCore) -> None:
    bad = Submit("bad", (200006, 1428), 4, guides=(Guide("regex", "(a"),))
    good = Submit("good", (200006, 1428), 4)
    (refused,), served = play(core, bad, good)
    assert isinstance(refused, Error)
    assert (refused.code, "regex" in refused.message) == ("INVALID_ARGUMENT", True)
    assert isinstance(served[-1], Finished)
    assert sum(len(event.token_ids) for event in served if isinstance(event, Tokens)) == 4


def test_a_guide_that_outgrows_its_bounds_ends_its_request_with_the_reason(core: GuidedCore) -> None:
    """Compiled, but with more optional properties than the grammar's parser follows: the request's fault, not ours."""
    names = [f"property_{number}" for number in range(1000)]
    # The last is required: else `{}`, one token, is a whole answer, chosen once in six times, and no bound is met.
    schema = {"type": "object", "properties": {key: {"type": "string"} for key in names}, "required": names[-1:]}
    guide = Guide("json_schema", json.dumps(schema))
    ((*_, end),) = play(core, Submit("wide", (200006, 1428), 8, guides=(guide,)))
    assert isinstance(end, Error)
    assert end.code == "INVALID_ARGUMENT"
    assert "guide of kind 'json_schema'" in end.message and "max is 2000" in end.message


def test_cancelled_while_it_waits_for_its_guide(core: GuidedCore) -> None:
    guide = Guide("json_schema", json.dumps({"type": "object", "title": "not compiled before"}))
    submit = Submit("r", (200006, 1428), 4, n=2, guides=(guide,))
    core.submit((7, "r"), submit, time.time_ns())
    core.cancel((7, "r"))
    events = [event for _, event in core.step()]
    assert [(event.sequence, event.reason, event.remaining) for event in events] == [
        (0, "cancelled", 1),
        (1, "cancelled", 0),
    ]
    assert not core.has_work()


def test_mixed_with_unguided_requests_in_one_batch(core: GuidedCore) -> None:
    chat = read_chat({"messages": [{"role": "user", "content": "Hi"}], "guided_choice": ["only this"], "seed": 3})
    ids = prompt_ids(chat, current_date="2025-06-28")
    guided = chat_submit(chat, "guided", ids, max_context=len(ids) + 160)
    free = Submit("free", tuple(ids), 24, stop_ids=())
    events, others = play(core, guided, free)
    answer = ChatAnswer(chat, prompt_tokens=len(ids))
    for event in events:
        answer.push(event)
    assert answer.completion()["choices"][0]["message"]["content"] == "only this"
    assert sum(len(event.token_ids) for event in others if isinstance(event, Tokens)) == 24


def test_the_engine_s_loop_serves_others_while_a_guide_is_compiled() -> None:
    """Over a scripted core: what the loop sees of a slow grammar."""
    compiler = _SlowCompiler(16)
    delivered: list[tuple[Any, Any]] = []
    loop = EngineLoop(
        lambda: GuidedCore(ScriptedCore(ScriptedEngine(step_ms=1.0)), compiler), delivered.extend, pytest.fail
    )
    loop.start()
    loop.submit((1, "guided"), Submit("guided", (7, 8), 2, guides=(Guide("regex", "a"),)))
    loop.submit((1, "free"), Submit("free", (7, 8), 2))
    deadline = time.monotonic() + 20
    while sum(isinstance(event, Finished) for _, event in delivered) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    loop.stop(5.0)
    ends = [key[1] for key, event in delivered if isinstance(event, Finished)]
    assert ends == ["free", "guided"]
    assert compiler.thread != "engine-loop"


class _SlowCompiler(LlguidanceCompiler):
    thread = ""

    def warm(self) -> Any:
        return None

    def compile(self, guides: tuple[Guide, ...]) -> Any:
        time.sleep(0.3)
        self.thread = threading.current_thread().name
        return None
