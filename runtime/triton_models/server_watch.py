"""Ends a model's stub when its server has died.

Invariant: a stub without its server is gone within a second, and with it the connection that keeps the engine. The
python backend's own check can wait for ever for Python's lock (seen on 2.51: the stub and the engine stayed). Must not
know requests or engines.
"""

from __future__ import annotations

import logging
import os
import threading

log = logging.getLogger(__name__)

PERIOD_S = 0.1  # below the 0.3 s of the backend's own check, which may leave Python's lock held


class ServerWatch:
    """A thread that looks for the process that started this one."""

    def __init__(self) -> None:
        self._server = os.getppid()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._closing.wait(PERIOD_S):
            if os.getppid() != self._server:
                log.error("the server, process %d, has died: leaving", self._server)
                os._exit(1)  # an orderly end would need the server's half of the shared memory
