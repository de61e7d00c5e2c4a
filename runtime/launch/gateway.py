"""The OpenAI gateway beside a server: which options it gets, when it starts, how it ends.

Invariant: the gateway starts after the server is ready and ends before the server drains, so that it never answers for
a server that is not there. Must not know routes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from urllib.parse import urlsplit

from gptoss_trt.build_engine.spec import MANIFEST_NAME, Manifest
from gptoss_trt.runtime.launch.addresses import take_port
from gptoss_trt.runtime.launch.server_binary import LaunchError
from gptoss_trt.runtime.launch.tritonserver import ServerOptions, TritonServer, end_with_parent
from gptoss_trt.runtime.openai.gateway.files import check_files
from gptoss_trt.runtime.openai.gateway.options import GatewayOptions, OptionsError
from gptoss_trt.runtime.openai.gateway.process import GatewayError, GatewayProcess, start_gateway

NEEDED_MODELS = ("chat", "completions")


@dataclass(frozen=True)
class ApiOptions:
    """What a launch may choose of the gateway. Port 0 takes a free one."""

    port: int = 8080
    served_model_name: tuple[str, ...] = ("gpt-oss",)
    api_key_file: Path | None = None
    api_workers: int = 1
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    cors_origin: tuple[str, ...] = ()


def wants_gateway(options: ServerOptions) -> bool:
    """Whether the server's models can serve the API: both of NEEDED_MODELS are loaded and stream."""
    loaded = options.models is None or all(model in options.models for model in NEEDED_MODELS)
    return loaded and options.decoupled


def context_of(options: ServerOptions) -> int:
    """The context that /v1/models tells; 0 (not told) for an engine without a manifest."""
    if not (options.engine_dir / MANIFEST_NAME).is_file():
        return 0
    own = Manifest.read(options.engine_dir).model.max_context
    return min(own, options.engine.max_context or own)


def check_api(options: ServerOptions, api: ApiOptions) -> None:
    """Tries what the gateway will need, so that a wrong option ends the launch before the server starts. Raises
    LaunchError that names the option."""
    try:
        check_files(_gateway_options(options, api))
    except OptionsError as error:
        raise LaunchError(str(error)) from error
    for name in ("http_port", "grpc_port", "metrics_port"):
        if api.port and getattr(options, name) == api.port:
            raise LaunchError(f"the OpenAI API's port and {name} are both {api.port}; choose another one")
    if api.port:
        listener = take_port(options.address, api.port, "the OpenAI API's")
        listener.close()


def start_api(server: TritonServer, api: ApiOptions) -> GatewayProcess:
    """Starts the gateway over a ready server. Raises LaunchError with what the gateway said."""
    try:
        options = replace(
            _gateway_options(server.options, api),
            grpc_url=server.grpc_url,
            max_model_len=context_of(server.options),
            server_metrics_url=server.metrics_url,
        )
        return start_gateway(options, server.folder / "gateway.log", before=end_with_parent)
    except (GatewayError, OptionsError) as error:
        raise LaunchError(str(error)) from error


def _gateway_options(options: ServerOptions, api: ApiOptions) -> GatewayOptions:
    own = {field.name: getattr(api, field.name) for field in fields(ApiOptions)}
    return GatewayOptions(host=options.address, **own)


def gateway_port(gateway: GatewayProcess) -> int:
    """The port that the gateway bound, for starting it again under the same address."""
    port = urlsplit(gateway.url).port
    assert port is not None, gateway.url
    return port
