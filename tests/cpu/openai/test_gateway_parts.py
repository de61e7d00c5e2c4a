"""The gateway's parts without a server: options, keys, metrics, workers' refusals, request ids."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import ssl
import subprocess
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from gptoss_trt.runtime.launch.json_log import JsonLines
from gptoss_trt.runtime.launch.parent_watch import PROGRAM
from gptoss_trt.runtime.openai import RequestError
from gptoss_trt.runtime.openai.gateway import __main__ as entry
from gptoss_trt.runtime.openai.gateway.app import create_app
from gptoss_trt.runtime.openai.gateway.files import check_files
from gptoss_trt.runtime.openai.gateway.keys import EVERYBODY, Keys
from gptoss_trt.runtime.openai.gateway.metrics import Metrics
from gptoss_trt.runtime.openai.gateway.options import (
    PURPOSES,
    GatewayOptions,
    OptionsError,
    gateway_command,
    read_options,
)
from gptoss_trt.runtime.openai.gateway.process import GatewayError, start_gateway
from gptoss_trt.runtime.openai.gateway.readiness import Readiness
from gptoss_trt.runtime.openai.gateway.store import ResponseStore
from gptoss_trt.runtime.openai.gateway.workers import KILL_GRACE_S


def test_a_command_line_carries_every_option() -> None:
    options = GatewayOptions(
        grpc_url="h:1", host="::1", port=9, served_model_name=("a", "b c"), api_key_file=Path("/k"), api_workers=3,
        ssl_certfile=Path("c"), ssl_keyfile=Path("d"), cors_origin=("http://x",), keep_alive_s=1.5, store_count=0,
    )  # fmt: skip
    assert read_options(gateway_command(options)[3:]) == options
    assert read_options(gateway_command(GatewayOptions())[3:]) == GatewayOptions()
    assert options.url == "https://[::1]:9"
    assert {field.name for field in fields(GatewayOptions)} == PURPOSES.keys()


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": -1}, {"port": 70000}, {"api_workers": 0}, {"served_model_name": ()}, {"served_model_name": ("",)},
        {"ssl_certfile": Path("c")}, {"keep_alive_s": 0.0}, {"max_body_bytes": 0}, {"served_model_name": ("a,b",)},
        {"served_model_name": (" a",)}, {"cors_origin": ("",)}, {"cors_origin": ("app.example",)}, {"host": ""},
        {"stall_s": 0.0}, {"stall_s": math.nan}, {"stall_s": math.inf}, {"stall_s": 1e9}, {"drain_s": math.nan},
    ],
)  # fmt: skip
def test_impossible_options(wrong: Any) -> None:
    with pytest.raises(OptionsError, match=next(iter(wrong))):
        GatewayOptions(**wrong)


def test_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one\n\n# two\n  three \n")
    keys = Keys.read(path)
    owners = {keys.owner("Bearer one"), keys.owner("bearer  three")}
    assert len(owners) == 2
    assert not any("one" in owner or "three" in owner for owner in owners)
    for header in ("", "Bearer", "Bearer two", "Bearer on", "Basic one", "Bearer one one"):
        with pytest.raises(RequestError) as caught:
            keys.owner(header)
        assert caught.value.status == 401
    assert Keys.read(None).owner("") == EVERYBODY
    path.write_text("# nothing\n")
    for absent in (path, tmp_path / "none"):
        with pytest.raises(OptionsError, match="api_key_file"):
            Keys.read(absent)


def test_files_that_are_no_certificate_are_told_before_the_start(tmp_path: Path) -> None:
    wrong, absent = tmp_path / "wrong.pem", tmp_path / "absent.pem"
    wrong.write_text("no certificate")
    for certificate, name in ((wrong, "wrong.pem"), (absent, "absent.pem"), (tmp_path, "ssl_certfile")):
        with pytest.raises(OptionsError, match=name):
            check_files(GatewayOptions(ssl_certfile=certificate, ssl_keyfile=wrong))
    with pytest.raises(OptionsError, match="api_key_file"):
        check_files(GatewayOptions(api_key_file=tmp_path))
    check_files(GatewayOptions())


@pytest.mark.parametrize("method", ["get", "delete"])
def test_an_id_that_no_response_can_have(method: str) -> None:
    store = ResponseStore(None, 10, 1000, 60.0)
    assert not getattr(store, method)("owner", "resp_\ud800")


def test_metrics_are_cumulative() -> None:
    metrics = Metrics()
    for seconds in (0.001, 0.3, 1e9):
        metrics.request_ended("/v1/models", 200, seconds)
    text = metrics.text()
    assert 'status="200"} 3' in text
    assert 'le="0.5"} 2' in text
    assert 'le="+Inf"} 3' in text


def call(options: GatewayOptions, method: str, path: str, **more: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(options))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.request(method, path, **more)

    return asyncio.run(ask())


def test_request_ids_are_echoed_or_made() -> None:
    assert call(GatewayOptions(), "GET", "/health", headers={"x-request-id": "a-1"}).headers["x-request-id"] == "a-1"
    for strange in ("", "a b", "x" * 200, "é"):
        answer = call(GatewayOptions(), "GET", "/health", headers={"x-request-id": strange.encode("latin-1")})
        assert answer.headers["x-request-id"].startswith("req-")


def test_cors_is_off_unless_asked() -> None:
    headers = {"origin": "http://a", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in call(GatewayOptions(), "GET", "/health", headers=headers).headers
    allowed = call(GatewayOptions(cors_origin=("http://a",)), "OPTIONS", "/v1/models", headers=headers)
    assert allowed.headers["access-control-allow-origin"] == "http://a"
    other = call(GatewayOptions(cors_origin=("http://b",)), "OPTIONS", "/v1/models", headers=headers)
    assert "access-control-allow-origin" not in other.headers


def test_no_api_pages_are_served() -> None:
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert call(GatewayOptions(), "GET", path).status_code == 404


def test_a_defect_is_an_openai_error() -> None:
    """Without its lifespan the application has no channel, which stands for a defect."""

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(GatewayOptions()), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.post("/v1/chat/completions", json={"messages": []})

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")


def test_a_request_s_end_is_logged_by_its_id_and_nothing_of_its_body(caplog: pytest.LogCaptureFixture) -> None:
    caplog.handler.setFormatter(JsonLines())
    caplog.set_level(logging.DEBUG, "gptoss_trt.runtime.openai.gateway.front")

    async def ask() -> None:
        transport = httpx.ASGITransport(create_app(GatewayOptions()), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            await client.get("/health", headers={"x-request-id": "well"})
            body = {"messages": [{"role": "user", "content": "Zanzibar"}], "Zanzibar": 1}
            await client.post("/v1/chat/completions", json=body, headers={"x-request-id": "broken"})

    asyncio.run(ask())
    lines = [json.loads(line) for line in caplog.text.splitlines()]
    ends = {line["request_id"]: line for line in lines if line["message"] == "request ended"}
    assert (ends["well"]["route"], ends["well"]["status"], ends["well"]["level"]) == ("/health", 200, "debug")
    assert (ends["broken"]["route"], ends["broken"]["level"]) == ("/v1/chat/completions", "info")
    assert ends["broken"]["seconds"] >= 0
    (failed,) = (line for line in lines if line["message"] == "request failed")
    assert failed["request_id"] == "broken" and "AttributeError" in failed["traceback"]
    assert "Zanzibar" not in caplog.text


class BrokenModels:
    """Models over an engine that is not there."""

    def ask(self, *_: Any, **__: Any) -> Any:
        return self

    async def batches(self) -> Any:
        raise RequestError(503, None, "the engine is not available", "unavailable")
        yield  # an asynchronous generator

    async def is_ready(self, _model: str) -> bool:
        return True

    def close(self) -> None:
        self.closed = True

    closed = False


@pytest.mark.parametrize("stream", [False, True])
def test_not_ready_once_a_client_was_told_so(stream: bool) -> None:
    """However short ago a token came: the engine may have died since."""

    async def ask() -> list[int]:
        options = GatewayOptions()
        app: Any = create_app(options)
        state = app._app.state
        state.models = BrokenModels()
        state.readiness = Readiness(state.models, options)
        state.readiness.alive()
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            before = await client.get("/ready")
            answer = await client.post("/v1/chat/completions", json={"messages": [], "stream": stream})
            return [before.status_code, answer.status_code, (await client.get("/ready")).status_code]

    assert asyncio.run(ask()) == [200, 503, 503]


def test_tls_with_workers_and_no_server_behind(tmp_path: Path) -> None:
    """An own certificate; what is said of the server that is not there names no address."""
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    line = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {certificate} -days 1 -subj /CN=localhost"
    subprocess.run([*line.split(), "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    options = GatewayOptions(
        grpc_url="127.0.0.1:1", port=0, ssl_certfile=certificate, ssl_keyfile=key, api_workers=2, max_model_len=7
    )
    gateway = start_gateway(options, tmp_path / "log")
    try:
        context = ssl.create_default_context(cafile=str(certificate))
        with httpx.Client(base_url=gateway.url, verify=context, timeout=60) as client:
            assert gateway.url.startswith("https://")
            assert client.get("/health").status_code == 200
            assert client.get("/ready").status_code == 503
            assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 7
            refused = client.post("/v1/chat/completions", json={"messages": []})
    finally:
        assert gateway.stop() == 0
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "127.0.0.1" not in refused.text


def test_workers_go_with_their_parent(tmp_path: Path) -> None:
    """One that drains at once, and one that can do nothing by itself."""
    options = GatewayOptions(grpc_url="127.0.0.1:1", port=0, api_workers=2, drain_s=0)
    gateway = start_gateway(options, tmp_path / "log")
    parent = psutil.Process(gateway.process.pid)
    deadline = time.monotonic() + 60
    watches: list[psutil.Process] = []
    while len(watches) < 2 and time.monotonic() < deadline:
        watches = [child for child in parent.children(recursive=True) if str(PROGRAM) in child.cmdline()]
        time.sleep(0.1)
    quick, stopped = (psutil.Process(watch.ppid()) for watch in watches)
    stopped.suspend()
    gateway.process.kill()
    gateway.process.wait()
    assert not psutil.wait_procs([quick], timeout=KILL_GRACE_S - 1)[1]
    assert stopped.is_running()
    assert not psutil.wait_procs([stopped, *watches], timeout=KILL_GRACE_S + 2)[1]


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    listener = entry._bind(GatewayOptions(port=0))
    port = listener.getsockname()[1]
    assert entry.main([f"--port={port}"]) == 1
    assert f"port {port}" in capsys.readouterr().err
    listener.close()


def test_a_gateway_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(GatewayError, match="api_key_file"):
        start_gateway(GatewayOptions(port=0, api_key_file=tmp_path / "none"), tmp_path / "log")
