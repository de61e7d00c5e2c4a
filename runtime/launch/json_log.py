"""Logs of our own processes as one JSON object a line.

Invariant: a record's `fields` (logging's `extra={"fields": {...}}`) stand beside its message, never inside it, so that
a reader finds a request by its id. Must not know who logs.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from gptoss_trt.runtime.launch import settings


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, pid, message, the record's fields, the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
            **record.__dict__.get("fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_as_json() -> None:
    """Sends this process's log to stderr as JSON lines, at GPTOSS_TRT_LOG_LEVEL. Raises SettingsError."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=settings.read("GPTOSS_TRT_LOG_LEVEL"), handlers=[handler])
