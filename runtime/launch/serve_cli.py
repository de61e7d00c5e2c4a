"""`gptoss-trt serve`: starts tritonserver over an engine, prints where it is, drains on SIGTERM.

Invariant: what it prints first was answered by a real request. The life after that is serving.py's.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from gptoss_trt.client.protocol import did_you_mean
from gptoss_trt.runtime.engine.core import EngineLoadError
from gptoss_trt.runtime.engine.options import EngineOptions
from gptoss_trt.runtime.launch import settings
from gptoss_trt.runtime.launch.addresses import is_loopback, literal_address
from gptoss_trt.runtime.launch.gateway import (
    NEEDED_MODELS,
    ApiOptions,
    check_api,
    gateway_port,
    start_api,
    wants_gateway,
)
from gptoss_trt.runtime.launch.server_binary import OLDEST_TO_EXPOSE, LaunchError, find_server
from gptoss_trt.runtime.launch.serving import Serving, Signals, StartInterruptedError
from gptoss_trt.runtime.launch.tritonserver import ServerOptions, TritonServer, describe, start_server

API_NAMES = ("served_model_name", "api_key_file", "api_workers", "ssl_certfile", "ssl_keyfile", "cors_origin")
PORT = click.IntRange(0, 65535)
EXPORTER = "opentelemetry.exporter.otlp.proto.http"
EPILOG = """\b
Examples:
  gptoss-trt serve engine/
  gptoss-trt serve engine/ --http-port 9000 --model ensemble --model chat
  gptoss-trt serve engine/ --engine-option max_batch=128
  gptoss-trt serve engine/ --address 0.0.0.0   # behind your own proxy

\b
Engine options (default):
  """ + "\n  ".join(EngineOptions.help_lines())


@click.command(epilog=EPILOG)
@click.argument("engine_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--address", default="127.0.0.1", show_default=True, help="Address to bind to.")
@click.option("--http-port", default=8000, type=PORT, show_default=True, help="0 takes a free port.")
@click.option("--grpc-port", default=8001, type=PORT, show_default=True, help="Likewise.")
@click.option("--metrics-port", default=8002, type=PORT, show_default=True, help="Likewise, of Prometheus' page.")
@click.option("--model", "models", multiple=True, help="Load only this model (repeatable). Default: all.")
@click.option("--chat-mode", is_flag=True, help="text_input is one user turn; text_output is the final channel only.")
@click.option("--keep-special-tokens", is_flag=True, help="text_output keeps the text of special tokens.")
@click.option("--unary", is_flag=True, help="Non-decoupled models, for clients that only do unary infer.")
@click.option(
    "--instances",
    default=1,
    type=click.IntRange(1, 64),
    show_default=True,
    help="Processes of each model; more send to more streams at once.",
)
@click.option("--openai-port", default=8080, type=PORT, show_default=True, help="Port of the OpenAI API.")
@click.option("--no-openai", is_flag=True, help="Start no OpenAI gateway.")
@click.option("--served-model-name", multiple=True, default=("gpt-oss",), show_default=True,
              help="Model name in the OpenAI API (repeatable).")  # fmt: skip
@click.option("--api-key-file", type=click.Path(path_type=Path), help="Keys of the OpenAI API, one a line.")
@click.option(
    "--api-workers", default=1, type=click.IntRange(1, 256), show_default=True, help="Processes of the OpenAI gateway."
)
@click.option("--ssl-certfile", type=click.Path(path_type=Path), help="TLS for the OpenAI API.")
@click.option("--ssl-keyfile", type=click.Path(path_type=Path), help="Key of --ssl-certfile.")
@click.option("--cors-origin", multiple=True, help="Origin that browsers may call the OpenAI API from (repeatable).")
@click.option(
    "--drain-seconds",
    default=30,
    type=click.IntRange(0, 86400),
    show_default=True,
    help="How long streams may finish after SIGTERM.",
)
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    help="Sockets, logs and the assembled repository.  [default: ~/.local/state/gptoss-trt]",
)
@click.option(
    "--engine-option",
    "engine_options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Option of the engine process, listed below (repeatable).",
)
@click.option("--otlp-url", default="", help="Send traces there (OTLP over HTTP, as http://HOST:4318/v1/traces).")
@click.option(
    "--trace-rate", default=1, type=click.IntRange(1), show_default=True, help="Trace one request in so many."
)
@click.option("--verbose", default=0, type=click.IntRange(0), show_default=True, help="tritonserver's --log-verbose.")
@click.option("--json", "as_json", is_flag=True, help="Print the addresses as one JSON line.")
def serve(
    engine_dir: Path,
    as_json: bool,
    chat_mode: bool,
    keep_special_tokens: bool,
    unary: bool,
    models: tuple[str, ...],
    drain_seconds: int,
    engine_options: tuple[str, ...],
    no_openai: bool,
    openai_port: int,
    **chosen: Any,
) -> int:
    """Serve ENGINE_DIR from tritonserver until SIGTERM or Ctrl-C."""
    logging.basicConfig(level=settings.read("GPTOSS_TRT_LOG_LEVEL"), format="%(asctime)s %(levelname)s %(message)s")
    own = {name: chosen.pop(name) for name in API_NAMES}
    api = ApiOptions(port=openai_port, **own)
    parameters = {
        "served_model_name": ",".join(api.served_model_name),
        "chat_mode": str(chat_mode).lower(),
        "skip_special_tokens": str(not keep_special_tokens).lower(),
    }
    options = ServerOptions(
        engine_dir=engine_dir,
        models=models or None,
        parameters=parameters,
        decoupled=not unary,
        drain_s=drain_seconds,
        **chosen,
    )
    try:
        options = replace(options, engine=parse_engine_options(engine_options))
    except EngineLoadError as error:
        raise click.UsageError(str(error)) from error
    _check_tracing(options.otlp_url)
    signals = Signals()
    start = time.monotonic()
    try:
        options = replace(options, address=literal_address(options.address))
        _warn_of_exposure(options)
        if not no_openai and wants_gateway(options):
            check_api(options, api)
        server = start_server(options)
    except (LaunchError, settings.SettingsError) as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:  # a full disk, a folder that cannot be written to
        raise click.ClickException(f"cannot start: {error}") from error
    except StartInterruptedError as interruption:
        click.echo(f"{interruption} while starting: ended", err=True)
        return 128 + signal.Signals[str(interruption)].value
    signals.starting = False
    gateway = None
    try:
        if not no_openai and wants_gateway(options):
            gateway = start_api(server, api)
        elif not no_openai:
            click.echo(f"no OpenAI API: it needs the streaming models {' and '.join(NEEDED_MODELS)}", err=True)
        _announce(server, None if gateway is None else f"{gateway.url}/v1", api, as_json, start)
    except LaunchError as error:
        Serving(server, signals, gateway, lambda: start_api(server, api)).stop_gateway(time.monotonic())
        server.stop(drain_s=0)
        raise click.ClickException(str(error)) from error
    bound = replace(api, port=gateway_port(gateway)) if gateway is not None else api
    status = Serving(server, signals, gateway, lambda: start_api(server, bound)).run(partial(click.echo, err=True))
    signals.ignore()
    return status


def parse_engine_options(texts: Sequence[str]) -> EngineOptions:
    """Engine options from `name=value` texts. Raises EngineLoadError for an unknown name or a value that the option
    cannot have."""
    known = {option.name: option for option in fields(EngineOptions)}
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise EngineLoadError(f"engine option {text!r} is not NAME=VALUE")
        if name not in known:
            hint = did_you_mean(name, known)
            raise EngineLoadError(f"unknown engine option {name!r}{hint}; there are: {', '.join(known)}")
        default = known[name].default
        if isinstance(default, bool):
            if value not in ("true", "false"):
                raise EngineLoadError(f"engine option {name} is {value!r}; allowed: true, false")
            values[name] = value == "true"
        else:
            values[name] = int(value) if isinstance(default, int) and value.isascii() and value.isdecimal() else value
    return EngineOptions(**values)


def _check_tracing(url: str) -> None:
    if not url:
        return
    if not url.startswith(("http://", "https://")):
        raise click.UsageError(f"--otlp-url is {url!r}; it must begin with http:// or https://")
    try:  # the API alone often comes with another package
        found = importlib.util.find_spec(EXPORTER)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise click.UsageError(f"--otlp-url needs the Python package {EXPORTER!r}: pip install 'gptoss-trt[trace]'")


def _warn_of_exposure(options: ServerOptions) -> None:
    if is_loopback(options.address):
        return
    if find_server().source == "pypi":
        click.echo(
            f"warning: the tritonserver from PyPI is of 2024 and has known holes; {options.address} exposes it. Expose "
            f"release {OLDEST_TO_EXPOSE} or newer, from NVIDIA's image.",
            err=True,
        )


def _announce(server: TritonServer, api_url: str | None, api: ApiOptions, as_json: bool, start: float) -> None:
    asked = server.options.models
    if asked is None or "ensemble" in asked:
        server.first_answer()
    ready_s = time.monotonic() - start
    if as_json:
        openai = {} if api_url is None else {"openai": api_url}
        click.echo(json.dumps({**describe(server), **openai, "ready_s": round(ready_s, 3)}))
    else:
        click.echo(f"ready after {ready_s:.1f} s")
        click.echo(f"  HTTP     {server.http_url}\n  gRPC     {server.grpc_url}\n  metrics  {server.metrics_url}")
        if api_url is not None:
            click.echo(f"  OpenAI   {api_url}")
        click.echo(f"  log      {server.log_path}")
        click.echo(f"try: {line_to_try(server.http_url, api_url, with_key=api.api_key_file is not None)}")
    sys.stdout.flush()


def line_to_try(server_url: str, api_url: str | None, *, with_key: bool) -> str:
    """A command that asks the chat model, or `ensemble` where there is no OpenAI API."""
    if api_url is None:
        return f"""curl -s {server_url}/v2/models/ensemble/generate -d '{{"text_input": "Hello", "max_tokens": 16}}'"""
    key = " -H 'Authorization: Bearer KEY'" if with_key else ""
    return f"""curl -s {api_url}/chat/completions{key} -d '{{"messages": [{{"role": "user", "content": "Hello"}}]}}'"""
