"""A server and its gateway from ready to drained: waits for a signal, heals what dies, ends everything.

Invariant: status 0 means that every stream was finished or cancelled and nothing of the server is left. Must not know
the command line.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from types import FrameType

import psutil

from gptoss_trt.runtime.launch.server_binary import LaunchError
from gptoss_trt.runtime.launch.stub_watch import StubWatch
from gptoss_trt.runtime.launch.tritonserver import TritonServer
from gptoss_trt.runtime.openai.gateway.options import LOST_SIGNALS
from gptoss_trt.runtime.openai.gateway.process import GatewayProcess

POLL_S = 0.1
GATEWAY_RESTART_S = 1.0
# How long a draining server may take to unload its models when nobody is connected. 2.51 never unloads a model to which
# a gRPC stream sent a tensor of the wrong type or shape last (the request is kept, nobody waits for it).
LONELY_S = 10.0
LOOK_S = 1.0  # between two looks at the machine's connections

log = logging.getLogger(__name__)


class StartInterruptedError(Exception):
    """A signal came before the server was ready."""


class Signals:
    """Counts SIGTERM, SIGINT and SIGHUP (a terminal that closes; not under nohup): the first one drains, the second
    one ends. While starting, one raises instead."""

    def __init__(self) -> None:
        self.count = 0
        self.starting = True
        hangs_up = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
        self._numbers = (signal.SIGTERM, signal.SIGINT, *((signal.SIGHUP,) if hangs_up else ()))
        for number in self._numbers:
            signal.signal(number, self._note)

    def ignore(self) -> None:
        """No signal changes the exit status once all is done: the interpreter would put the default handlers back."""
        for number in self._numbers:
            signal.signal(number, signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.starting:
            self.starting = False
            raise StartInterruptedError(signal.Signals(number).name)


class Serving:
    """A ready server with its gateway, if it has one."""

    def __init__(
        self,
        server: TritonServer,
        signals: Signals,
        gateway: GatewayProcess | None,
        restart_gateway: Callable[[], GatewayProcess],
    ) -> None:
        assert server.process is not None
        self._server = server
        self._process = server.process
        self._signals = signals
        self._gateway = gateway
        self._restart_gateway = restart_gateway

    def run(self, tell: Callable[[str], None]) -> int:
        """Serves until a signal comes or the server ends by itself; returns the exit status."""
        watch = StubWatch(self._server, self._tell_gateway)
        watch.start()
        while self._process.poll() is None and not self._signals.count:
            self._heal_gateway()
            time.sleep(POLL_S)
        watch.stop()
        if self._process.poll() is not None:
            tell(f"tritonserver ended by itself; {self._server.log_tail()}")
            self.stop_gateway(time.monotonic())
            return self._server.stop() or 1
        drain_s = self._server.options.drain_s
        tell(f"draining for at most {drain_s:.0f} s; a second signal ends at once")
        return self._drain(time.monotonic() + drain_s)

    def stop_gateway(self, deadline: float) -> None:
        """Ends the gateway, which lets its streams finish until `deadline` (monotonic seconds) or a second signal."""
        if self._gateway is None:
            return
        process = self._gateway.process
        if process.poll() is None:
            process.terminate()
        while process.poll() is None and time.monotonic() < deadline and self._signals.count < 2:
            time.sleep(POLL_S)
        if process.poll() is None:
            process.kill()
        process.wait()

    def _tell_gateway(self, model: str) -> None:
        """Requests in a stub that died would wait for ever: the gateway fails those that are its own."""
        number = LOST_SIGNALS.get(model)
        if number is not None and self._gateway is not None and self._gateway.process.poll() is None:
            self._gateway.process.send_signal(number)

    def _heal_gateway(self) -> None:
        if self._gateway is None or self._gateway.process.poll() is None:
            return
        log.error("the gateway ended with status %s: starting it again", self._gateway.process.returncode)
        time.sleep(GATEWAY_RESTART_S)
        try:
            self._gateway = self._restart_gateway()
        except LaunchError as error:
            log.error("%s", error)

    def _drain(self, deadline: float) -> int:
        self.stop_gateway(deadline)
        self._process.send_signal(signal.SIGTERM)
        looked_at = lonely_since = time.monotonic()
        while self._process.poll() is None and time.monotonic() < deadline and self._signals.count < 2:
            time.sleep(POLL_S)
            if (now := time.monotonic()) - looked_at < LOOK_S:
                continue
            looked_at = now
            if self._has_clients():
                lonely_since = now
            elif now - lonely_since > LONELY_S:
                log.warning("tritonserver keeps a model though nobody is connected: ending it")
                break
        if self._process.poll() is None:
            return self._server.stop(drain_s=0)
        self._server.clean()
        return 0

    def _has_clients(self) -> bool:
        """Whether somebody is connected to the server."""
        ports = (self._server.http_port, self._server.grpc_port)
        try:
            connections = psutil.net_connections("tcp")
        except (psutil.Error, OSError):
            return True
        return any(
            one.pid == self._process.pid and one.status == psutil.CONN_ESTABLISHED and one.laddr.port in ports
            for one in connections
            if one.laddr
        )
