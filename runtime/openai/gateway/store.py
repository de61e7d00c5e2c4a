"""Stored responses: bounded by count, bytes and age, each readable by its owner only.

Invariant: whatever is stored, the store's size stays within its bounds; somebody else's response looks like one that
does not exist. SQLite, because the workers of one gateway share it. Must not know what a response holds.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

Json = dict[str, Any]
BUSY_TIMEOUT_S = 5.0
_TABLE = """CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, stored REAL NOT NULL, size INTEGER NOT NULL, body TEXT NOT NULL)"""


class ResponseStore:
    """A file of responses. Its methods block for about a millisecond; call them from a thread."""

    def __init__(self, path: Path | None, max_count: int, max_bytes: int, max_age_s: float) -> None:
        self._max_count, self._max_bytes, self._max_age_s = max_count, max_bytes, max_age_s
        self._lock = threading.Lock()
        if path is not None:
            path.touch(mode=0o600)
        self._database = sqlite3.connect(path or ":memory:", timeout=BUSY_TIMEOUT_S, check_same_thread=False)
        with self._lock, self._database:
            self._database.execute(_TABLE)
            self._database.execute("CREATE INDEX IF NOT EXISTS by_age ON responses (stored)")

    def put(self, owner: str, response_id: str, body: Json) -> bool:
        """Stores `body`; the oldest of everybody's make room. False when it is larger than the whole store."""
        text = json.dumps(body)  # ASCII: half a surrogate pair, which JSON can hold, is no text to SQLite
        size = len(text)
        if size > self._max_bytes or self._max_count < 1:
            return False
        now = time.time()
        with self._lock, self._database as database:
            database.execute("BEGIN IMMEDIATE")
            database.execute("DELETE FROM responses WHERE stored < ?", (now - self._max_age_s,))
            count, total = database.execute("SELECT COUNT(*), COALESCE(SUM(size), 0) FROM responses").fetchone()
            while count and (count + 1 > self._max_count or total + size > self._max_bytes):
                oldest, freed = database.execute("SELECT id, size FROM responses ORDER BY stored LIMIT 1").fetchone()
                database.execute("DELETE FROM responses WHERE id = ?", (oldest,))
                count, total = count - 1, total - freed
            database.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?)", (response_id, owner, now, size, text))
        return True

    def get(self, owner: str, response_id: str) -> Json | None:
        """The owner's response of that id; None when there is none (any more)."""
        if not response_id.isascii():  # half a surrogate pair has no UTF-8, and ids that were given out are ASCII
            return None
        query = "SELECT body FROM responses WHERE id = ? AND owner = ? AND stored >= ?"
        with self._lock:
            row = self._database.execute(query, (response_id, owner, time.time() - self._max_age_s)).fetchone()
        if row is None:
            return None
        body: Json = json.loads(row[0])
        return body

    def delete(self, owner: str, response_id: str) -> bool:
        """Deletes it; False when the owner has none of that id."""
        if not response_id.isascii():
            return False
        with self._lock, self._database as database:
            done = database.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (response_id, owner))
            return done.rowcount > 0

    def close(self) -> None:
        with self._lock:
            self._database.close()
