"""What a server writes down: no prompt, no answer, no key, whatever goes wrong with a request."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gptoss_trt.runtime.launch.gateway import ApiOptions, start_api

KEY = "sk-Zanzibar-key"
WORD = "Zanzibar"  # in everything that a client sends here


@pytest.fixture(scope="module")
def served(launch: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, httpx.Client]]:
    """A server of its own, whose folder holds only what these tests made it write, behind a gateway that asks for a
    key."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY)
    triton = launch()
    gateway = start_api(triton.server, ApiOptions(port=0, api_key_file=keys))
    with httpx.Client(base_url=gateway.url, timeout=30, headers={"authorization": f"Bearer {KEY}"}) as client:
        yield triton, client
    gateway.stop()


def bodies() -> list[tuple[str, Any]]:
    message = {"role": "user", "content": f"{WORD} is where I live"}
    tool = {"type": "function", "function": {"name": "f", "description": WORD, "parameters": {"title": WORD}}}
    chat = {"messages": [message], "max_tokens": 3}
    return [
        ("/v1/chat/completions", {**chat, "stop": [WORD], "tools": [tool], "user": WORD, "cache_salt": WORD}),
        ("/v1/chat/completions", {**chat, "stream": True}),
        ("/v1/chat/completions", {**chat, WORD: 1}),
        ("/v1/chat/completions", {**chat, "temperature": WORD}),
        ("/v1/chat/completions", {**chat, "model": WORD}),
        ("/v1/chat/completions", {**chat, "guided_regex": f"({WORD}"}),
        ("/v1/chat/completions", {**chat, "messages": [{**message, "tool_calls": WORD}]}),
        ("/v1/chat/completions", {**chat, "logit_bias": {WORD: 1}}),
        ("/v1/chat/completions", {**chat, "max_tokens": 10**9}),
        ("/v1/chat/completions", f'{{"messages": "{WORD}'),
        ("/v1/chat/completions", {**chat, "messages": [{"role": "user", "content": f"{WORD} \ud800"}]}),
        ("/v1/completions", {"prompt": WORD, "max_tokens": 2, "echo": True, "logprobs": 1}),
        ("/v1/completions", {"prompt": [WORD, ""]}),
        ("/v1/responses", {"input": WORD, "instructions": WORD, "metadata": {WORD: WORD}, "max_output_tokens": 2}),
        ("/v1/responses", {"input": WORD, "previous_response_id": f"{WORD}\ud800"}),
        ("/tokenize", {"prompt": WORD}),
        ("/detokenize", {"tokens": WORD}),
        (f"/{WORD}", {}),
    ]


def test_requests_and_keys_are_not_written_down(served: tuple[Any, httpx.Client], words: Any) -> None:
    triton, client = served
    for path, body in bodies():
        data = body if isinstance(body, str) else json.dumps(body)
        answer = client.post(path, content=data, headers={"content-type": "application/json"})
        assert answer.status_code < 500, (path, answer.text)
        assert client.post(path, content=data, headers={"authorization": f"Bearer {KEY}x"}).status_code == 401
    triton.ask("ensemble", words.text_tensors(f"{WORD}, {words.GREETING}", max_tokens=3, stop_words=[WORD]))
    triton.ask("chat", words.json_tensors({"messages": [{"role": "user", "content": f"{WORD} {words.CALLS_TOOL}"}]}))
    triton.refusal("chat", words.json_tensors(f'{{"messages": "{WORD}'.encode()))
    triton.refusal("ensemble", words.text_tensors(WORD, guided_decoding_guide_type=WORD))
    assert triton.post("ensemble/generate", {"text_input": WORD, "max_tokens": 2, WORD: 1})[0] < 600

    def crash() -> None:
        call = triton.open("tensorrt_llm", words.token_tensors(words.CRASHES, streaming=True, max_tokens=99))
        with pytest.raises(Exception, match="not available"):
            call.rest()
        call.close()

    crash()
    logs = [
        path for path in Path(triton.server.folder).rglob("*") if path.is_file() and path.suffix in (".log", ".json")
    ]
    assert {path.name for path in logs} >= {"tritonserver.log", "gateway.log", "engine.log"}
    texts = {path.name: path.read_text(encoding="utf-8", errors="replace") for path in logs}
    assert all(texts[name] for name in ("tritonserver.log", "gateway.log", "engine.log")), "something is written"
    for name, text in texts.items():
        assert WORD not in text, (name, [line for line in text.splitlines() if WORD in line][:3])
        assert triton.server.admin_key not in text, name
