"""The sha256 of a file while it is written in pieces and in any order.

Invariant: only bytes before the first gap have been hashed, each once and in order, and they are read while the page
cache still holds them. Must not know what the file is.
"""

from __future__ import annotations

import hashlib
import heapq
import os
import threading
from pathlib import Path

READ_BYTES = 4 << 20


class PrefixHash:
    """One thread per file follows the writers. `finish` after the last piece, or `abandon`."""

    def __init__(self, path: Path, total: int) -> None:
        """`path` exists with its full length `total`."""
        self._total = total
        self._digest = hashlib.sha256()
        self._ahead: list[tuple[int, int]] = []  # written spans behind a gap, a heap
        self._complete = 0  # bytes before the first gap
        self._stopped = False
        self._failure: OSError | None = None
        self._changed = threading.Condition()
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._follow, name=f"hash {path.name}", daemon=True)
        self._thread.start()

    def written(self, start: int, stop: int) -> None:
        """Bytes [start, stop) are in the file and will not change."""
        with self._changed:
            heapq.heappush(self._ahead, (start, stop))
            while self._ahead and self._ahead[0][0] <= self._complete:
                self._complete = max(self._complete, heapq.heappop(self._ahead)[1])
            self._changed.notify()

    def finish(self) -> str:
        """Waits for the thread and returns the hexadecimal digest. Raises OSError where reading failed, and ValueError
        while bytes are missing."""
        if self._complete != self._total:
            self.abandon()
            raise ValueError(f"{self._total - self._complete} bytes behind byte {self._complete} were not written")
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._digest.hexdigest()

    def abandon(self) -> None:
        """Stops the thread; safe to call twice and after `finish`."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def _follow(self) -> None:
        buffer = memoryview(bytearray(READ_BYTES))
        done = 0
        try:
            while done < self._total:
                complete = self._wait_beyond(done)
                if complete is None:
                    return
                view = buffer[: min(READ_BYTES, complete - done)]
                count = os.preadv(self._descriptor, [view], done)
                if count == 0:
                    raise OSError(f"the file ended at byte {done} of {self._total}")
                self._digest.update(view[:count])
                done += count
        except OSError as error:
            self._failure = error
        finally:
            os.close(self._descriptor)

    def _wait_beyond(self, done: int) -> int | None:
        """The bytes before the first gap, once there are more than `done`; None when stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._complete > done)
            return None if self._stopped else self._complete
