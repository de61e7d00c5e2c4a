"""Addresses as the listeners want them, and ports that cannot be had."""

from __future__ import annotations

import socket

import pytest

from gptoss_trt.runtime.launch.addresses import (
    for_triton_http,
    in_url,
    is_loopback,
    literal_address,
    take_port,
    take_ports,
)
from gptoss_trt.runtime.launch.server_binary import LaunchError


@pytest.mark.parametrize(
    ("address", "literal", "url", "http", "loopback"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1", "127.0.0.1", True),
        ("localhost", "127.0.0.1", "127.0.0.1", "127.0.0.1", True),
        ("0.0.0.0", "0.0.0.0", "0.0.0.0", "0.0.0.0", False),
        ("::1", "::1", "[::1]", "ipv6:::1", True),
        ("[0:0:0:0:0:0:0:1]", "::1", "[::1]", "ipv6:::1", True),
        ("::", "::", "[::]", "ipv6:::", False),
        ("2001:db8::7", "2001:db8::7", "[2001:db8::7]", "ipv6:2001:db8::7", False),
    ],
)
def test_an_address_for_each_listener(address: str, literal: str, url: str, http: str, loopback: bool) -> None:
    assert literal_address(address) == literal_address(literal) == literal
    assert (in_url(literal), for_triton_http(literal), is_loopback(literal)) == (url, http, loopback)


@pytest.mark.parametrize("address", ["", "no.such.host.invalid", "fe80::1%lo", "[::1", "1.2.3.4.5", "a" * 300])
def test_an_address_that_is_none_is_named(address: str) -> None:
    with pytest.raises(LaunchError, match="address"):
        literal_address(address)


def test_a_name_of_a_link_is_refused_as_its_address_is(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1%eth0", 0, 0, 2))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers)
    with pytest.raises(LaunchError, match="names an interface"):
        literal_address("printer.local")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_port_that_is_taken_is_told(address: str) -> None:
    try:
        taken = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    except OSError:  # a machine without IPv6
        with pytest.raises(LaunchError, match=f"HTTP port 0 of {address}"):
            take_ports(address, [("HTTP", 0)])
        return
    with taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"gRPC port {port} of {address}: Address already in use"):
            take_ports(address, [("HTTP", 0), ("gRPC", port)])
    with take_port(address, port, "gRPC") as listener:
        assert listener.getsockname()[1] == port


def test_two_listeners_cannot_share_a_port() -> None:
    with pytest.raises(LaunchError, match="HTTP and metrics port are both 7"):
        take_ports("127.0.0.1", [("HTTP", 7), ("gRPC", 0), ("metrics", 7)])
    assert len(set(take_ports("127.0.0.1", [("HTTP", 0), ("gRPC", 0)]))) == 2
