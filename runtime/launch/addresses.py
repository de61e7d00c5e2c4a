"""Where a server listens: an address as each listener wants it written, and ports that can be had.

Invariant: a listener is told a literal address, never a name, and an address that it would not bind is refused:
tritonserver 2.51 says "Started HTTPService at localhost:8000", or at [::1]:8000, and listens nowhere. Must not know
servers or options.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from gptoss_trt.runtime.launch.server_binary import LaunchError


def literal_address(address: str) -> str:
    """The IPv4 or IPv6 address that `address` (a literal, with or without brackets, or a name) stands for; of a name
    with both, the IPv4 one. Raises LaunchError."""
    if not address:
        raise LaunchError("the address is ''; give one to bind to, 0.0.0.0 for all")
    bare = address[1:-1] if address.startswith("[") and address.endswith("]") else address
    try:
        found = ipaddress.ip_address(bare)
    except ValueError:
        return _looked_up(address)
    if isinstance(found, ipaddress.IPv6Address) and found.scope_id is not None:
        raise LaunchError(f"the address {address!r} names an interface, which tritonserver's HTTP cannot bind to")
    return str(found)


def _looked_up(name: str) -> str:
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise LaunchError(f"the address {name!r} is none, and no name that can be looked up: {error}") from error
    found = [str(target[0]) for _, _, _, _, target in answers]
    return literal_address(next((one for one in found if ":" not in one), found[0]))


def is_loopback(literal: str) -> bool:
    return ipaddress.ip_address(literal).is_loopback


def in_url(literal: str) -> str:
    """The address in front of ":port", in URLs and for gRPC."""
    return f"[{literal}]" if ":" in literal else literal


def for_triton_http(literal: str) -> str:
    """The address as tritonserver's HTTP and metrics listeners bind it."""
    return f"ipv6:{literal}" if ":" in literal else literal


def take_ports(address: str, wanted: Sequence[tuple[str, int]]) -> list[int]:
    """The ports for (whose it is, number or 0 for a free one); all could be bound a moment ago. Raises LaunchError."""
    for index, (name, port) in enumerate(wanted):
        for earlier, other in wanted[:index]:
            if port and port == other:
                raise LaunchError(f"{earlier} and {name} port are both {port}; choose another one")
    sockets: list[socket.socket] = []
    try:
        for name, port in wanted:
            sockets.append(take_port(address, port, name))
        return [int(listener.getsockname()[1]) for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()


def take_port(address: str, port: int, name: str) -> socket.socket:
    """A socket bound there, which shows that it can be had; the caller closes it. `name` says whose it is. Raises
    LaunchError."""
    literal = literal_address(address)
    listener = socket.socket(socket.AF_INET6 if ":" in literal else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((literal, port))
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"cannot listen on {name} port {port} of {address}: {error.strerror or error}; "
            f"choose another one or stop what listens there"
        ) from error
    return listener
