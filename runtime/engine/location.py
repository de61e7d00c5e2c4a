"""Where an engine process lives: one private folder per engine directory and state folder.

Invariant: the folder and its parents below the state folder belong to this user with mode 0700, so that the socket in
it is reachable by this user only. Must not know the protocol or how an engine is started.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOCKET_PATH_LIMIT_BYTES = 107  # sizeof(sockaddr_un.sun_path) - 1 on Linux


class LocationError(OSError):
    """A state folder that another user can read or that is not ours."""


@dataclass(frozen=True)
class EngineHome:
    """The files of one engine process. Its name is a hash of the engine directory; the state folder is a server's."""

    folder: Path

    @classmethod
    def of(cls, engine_dir: Path, state_dir: Path) -> EngineHome:
        """The home of the engine for `engine_dir` under `state_dir`, made (0700) if absent. Raises LocationError."""
        key = hashlib.sha256(os.fsencode(engine_dir.resolve())).hexdigest()[:16]
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = state_dir.resolve() / "engines" / key
        for path in (folder.parent, folder):
            _private_folder(path)
        return cls(folder)

    @property
    def socket(self) -> Path:
        return self.folder / "engine.sock"

    @property
    def start_lock(self) -> Path:
        """Held by a client while it starts the engine."""
        return self.folder / "start.lock"

    @property
    def life_lock(self) -> Path:
        """Held by the engine process for its whole life."""
        return self.folder / "life.lock"

    @property
    def starts(self) -> Path:
        """Times of recent starts, for the back-off."""
        return self.folder / "starts.json"

    @property
    def options(self) -> Path:
        """Options for the next start (options.py), written by the launcher; absent means the defaults."""
        return self.folder / "options.json"

    @property
    def log(self) -> Path:
        return self.folder / "engine.log"


def _private_folder(path: Path) -> None:
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid() or mode & 0o077:
        raise LocationError(
            f"{path} belongs to user {status.st_uid} with mode {mode:04o}; the engine needs a folder of user "
            f"{os.geteuid()} with mode 0700"
        )


@contextlib.contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """An address for bind or connect that is never too long.

    A path over the kernel's 107 bytes is reached through an open descriptor of its folder (/proc/self/fd/N/name), so a
    deep state folder needs no second place for its socket.
    """
    if len(os.fsencode(path)) <= SOCKET_PATH_LIMIT_BYTES:
        yield str(path)
        return
    descriptor = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


def peer_uid(connection: socket.socket) -> int:
    """The user id of the process at the other end (SO_PEERCRED: as it was when it connected or listened)."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)


def require_same_user(connection: socket.socket) -> None:
    """Raises LocationError when the peer is another user's process."""
    uid = peer_uid(connection)
    if uid != os.geteuid():
        raise LocationError(f"the peer on the engine's socket is user {uid}, not {os.geteuid()}")
