"""From a URL to a client: grpc://host:port (or just host:port), grpcs://, http:// or https://.

Invariant: a URL that cannot be used is an error that names it. Must not know what the client is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

import grpc

from gptoss_trt.client.aio import AsyncGrpcClient, AsyncHttpClient
from gptoss_trt.client.api import AsyncClient, Client
from gptoss_trt.client.grpc_client import GrpcClient
from gptoss_trt.client.http_client import HttpClient

DEFAULT_URL = "grpc://127.0.0.1:8001"
DEFAULT_PORTS = {"grpc": 8001, "grpcs": 8001, "http": 8000, "https": 8000}


def split_url(url: str) -> tuple[str, str]:
    """Scheme and host:port. Raises ValueError for another scheme, no host, or a path."""
    text = url if "://" in url else f"grpc://{url}"
    parts = urlsplit(text)
    if parts.scheme not in DEFAULT_PORTS:
        raise ValueError(f"{url!r}: scheme {parts.scheme!r}; allowed: {', '.join(DEFAULT_PORTS)}")
    if not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise ValueError(f"{url!r} is no server's address; like: {DEFAULT_URL}")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return parts.scheme, f"{host}:{parts.port or DEFAULT_PORTS[parts.scheme]}"


def connect(url: str = DEFAULT_URL, *, headers: Mapping[str, str] | None = None) -> Client:
    """A synchronous client for the URL; nothing is sent yet. Raises ValueError for a URL that cannot be used."""
    scheme, target = split_url(url)
    if scheme.startswith("http"):
        return HttpClient(f"{scheme}://{target}", headers=headers)
    return GrpcClient(target, headers=headers, credentials=_credentials(scheme))


def connect_async(url: str = DEFAULT_URL, *, headers: Mapping[str, str] | None = None) -> AsyncClient:
    """An asyncio client for the URL; call it inside the event loop that uses the client."""
    scheme, target = split_url(url)
    if scheme.startswith("http"):
        return AsyncHttpClient(f"{scheme}://{target}", headers=headers)
    return AsyncGrpcClient(target, headers=headers, credentials=_credentials(scheme))


def _credentials(scheme: str) -> grpc.ChannelCredentials | None:
    return grpc.ssl_channel_credentials() if scheme == "grpcs" else None
