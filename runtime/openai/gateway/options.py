"""What a gateway may be told: one dataclass that makes the command line, and is made by it.

Invariant: `read_options(gateway_command(options)[3:]) == options`. Must not know what an option does.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

MODULE = "gptoss_trt.runtime.openai.gateway"

_origin = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", re.IGNORECASE)

LOST_SIGNALS = {"chat": signal.SIGUSR1, "completions": signal.SIGUSR2}
"""What tells a gateway that the process of the model behind a kind of route died: Triton tells its clients nothing."""


PURPOSES = {
    "grpc_url": "host:port of tritonserver's gRPC",
    "host": "address to bind to",
    "port": "port to bind to; 0 takes a free one",
    "served_model_name": "name that a request's model may have (repeatable); the first one is the default",
    "max_model_len": "tokens of prompt and answer for /v1/models; 0 reads them from the engine",
    "chat_model": "Triton model behind the chat routes",
    "completions_model": "Triton model behind /v1/completions",
    "api_key_file": "file with one API key a line; without it no key is asked for",
    "api_workers": "processes that share the port",
    "ssl_certfile": "certificate chain (PEM); with --ssl-keyfile, HTTPS",
    "ssl_keyfile": "private key (PEM)",
    "cors_origin": "origin that browsers may call from (repeatable); none by default",
    "max_body_bytes": "largest request body",
    "max_concurrency": "requests that a worker serves at once; more are answered with 429",
    "keep_alive_s": "a stream that is silent for so long gets a comment",
    "stall_s": "a client that takes nothing of its answer for so long is cut off",
    "drain_s": "how long streams may finish after SIGTERM",
    "server_metrics_url": "tritonserver's /metrics, to be appended to the gateway's own",
    "store_file": "SQLite file of stored responses; by default one that goes with the process",
    "store_count": "stored responses at most",
    "store_bytes": "bytes of stored responses at most",
    "store_age_s": "age of a stored response at most",
}
"""What each option is for, as the command line says it."""


class OptionsError(ValueError):
    """An option with a value that cannot be used."""


MOST_STALL_S = 24 * 3600  # the kernel counts milliseconds in 32 bits


@dataclass(frozen=True)
class GatewayOptions:
    """Defaults are those of the command line. Sizes in bytes, times in seconds."""

    grpc_url: str = "127.0.0.1:8001"
    host: str = "127.0.0.1"
    port: int = 8080
    served_model_name: tuple[str, ...] = ("gpt-oss",)
    max_model_len: int = 0
    chat_model: str = "chat"
    completions_model: str = "completions"
    api_key_file: Path | None = None
    api_workers: int = 1
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    cors_origin: tuple[str, ...] = ()
    max_body_bytes: int = 8 << 20
    max_concurrency: int = 1024
    keep_alive_s: float = 10.0
    stall_s: float = 60.0
    drain_s: float = 30.0
    server_metrics_url: str = ""
    store_file: Path | None = None
    store_count: int = 10_000
    store_bytes: int = 256 << 20
    store_age_s: float = 24 * 3600.0

    def __post_init__(self) -> None:
        self._check_names()
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise OptionsError("ssl_certfile and ssl_keyfile go together; only one is given")
        least = {"port": 0, "max_model_len": 0, "api_workers": 1, "max_body_bytes": 1, "max_concurrency": 1,
                 "keep_alive_s": 0.1, "stall_s": 0.1, "drain_s": 0, "store_count": 0, "store_bytes": 0,
                 "store_age_s": 0}  # fmt: skip
        for name, low in least.items():
            if not getattr(self, name) >= low:  # nor may it be no number
                raise OptionsError(f"{name} is {getattr(self, name)}; it must be at least {low}")
        if self.stall_s > MOST_STALL_S:
            raise OptionsError(f"stall_s is {self.stall_s}; it must be at most {MOST_STALL_S}")
        if self.port > 65535 or self.api_workers > 256:
            raise OptionsError(f"port is {self.port} (0 to 65535) and api_workers {self.api_workers} (1 to 256)")

    def _check_names(self) -> None:
        if not self.served_model_name or not all(self.served_model_name):
            raise OptionsError(f"served_model_name is {self.served_model_name!r}; at least one name is needed")
        for name in self.served_model_name:  # the Triton models take them as one comma-separated parameter
            if "," in name or name != name.strip():
                raise OptionsError(f"served_model_name is {name!r}; a name has no comma and no blanks around it")
        for origin in self.cors_origin:
            if origin != "*" and not _origin.fullmatch(origin):
                raise OptionsError(f"cors_origin is {origin!r}; allowed: * or an origin as https://app.example:8443")
        if not self.host:
            raise OptionsError("host is ''; give the address to bind to, 0.0.0.0 for all")

    @property
    def url(self) -> str:
        """Where clients find the API."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.ssl_certfile else 'http'}://{host}:{self.port}"


def gateway_command(options: GatewayOptions) -> list[str]:
    """The command line that starts a gateway with these options."""
    line = [sys.executable, "-m", MODULE]
    for option in fields(options):
        value = getattr(options, option.name)
        if value == option.default:
            continue
        for one in value if isinstance(value, tuple) else (value,):
            line.append(f"--{option.name.replace('_', '-')}={one}")
    return line


def read_options(arguments: Sequence[str] | None = None) -> GatewayOptions:
    """The options of a command line. Exits with a usage message for one that cannot be read."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    for option in fields(GatewayOptions):
        flag, purpose = f"--{option.name.replace('_', '-')}", PURPOSES[option.name]
        shown = "" if option.default in (None, "", ()) else f" (default: {option.default})"
        kind = Path if option.default is None else type(option.default)
        if kind is tuple:
            parser.add_argument(flag, action="append", metavar="TEXT", help=purpose + shown)
        else:
            parser.add_argument(flag, type=kind, metavar=kind.__name__.upper(), help=purpose + shown)
    given: dict[str, Any] = {
        name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None
    }
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    try:
        return GatewayOptions(**values)
    except OptionsError as error:
        parser.error(str(error))


def with_port(options: GatewayOptions, port: int) -> GatewayOptions:
    """The same options with the port that was bound."""
    return dataclasses.replace(options, port=port)
