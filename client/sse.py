"""Server-sent events, incrementally: bytes in, the data of whole events out.

Invariant: the events do not depend on how the bytes were cut. Must not know what the data means. Lines end at LF or CR
LF only: text libraries also cut at U+2028 and the like, which stand unescaped in JSON strings.
"""

from __future__ import annotations


class EventReader:
    """Feeds on bytes of any size. Comments and fields but `data` are skipped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def push(self, data: bytes) -> list[str]:
        """The data of the events that these bytes complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [event for line in lines if (event := self._line(line.removesuffix(b"\r"))) is not None]

    def finish(self) -> list[str]:
        """The last event's data where the text ended without an empty line; none for a cut or absent event."""
        return self.push(b"\n\n")

    def _line(self, line: bytes) -> str | None:
        if not line:
            data, self._data = self._data, []
            return b"\n".join(data).decode("utf-8", "replace") if data else None
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
        return None
