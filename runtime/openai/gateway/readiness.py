"""Whether the whole way to the engine works, and what the engine's context is.

Invariant: ready means that a token came out of the engine a moment ago, for a user or for the probe: the server says
that it is ready even when the process behind a model has died. Must not know HTTP.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from pathlib import Path

from gptoss_trt.build_engine.spec import MANIFEST_NAME, Manifest, SpecError
from gptoss_trt.runtime.engine.core import EngineLoadError
from gptoss_trt.runtime.engine.script import ScriptedEngine
from gptoss_trt.runtime.openai.errors import RequestError
from gptoss_trt.runtime.openai.gateway.options import GatewayOptions
from gptoss_trt.runtime.openai.gateway.triton import TritonModels

FRESH_S = 5.0  # how long a sign of life counts
PROBE_TIMEOUT_S = 10.0
PROBE = json.dumps({"prompt": [13], "max_tokens": 1, "temperature": 0}).encode()


class Readiness:
    """Probes with one token, at most once in FRESH_S, and not at all while answers flow."""

    def __init__(self, models: TritonModels, options: GatewayOptions) -> None:
        self._models = models
        self._options = options
        self._lock = asyncio.Lock()
        self._alive_at = -math.inf
        self._failed_at = -math.inf
        self._reason = "nothing has been asked yet"
        self._max_model_len = options.max_model_len

    def alive(self) -> None:
        """The engine has answered somebody."""
        self._alive_at = time.monotonic()

    def doubt(self) -> None:
        """Somebody was told that the engine cannot be had: the next look asks it, whoever was answered before."""
        self._alive_at = -math.inf

    async def reason_against(self) -> str:
        """Why requests cannot be served; empty when they can."""
        async with self._lock:
            now = time.monotonic()
            if now - self._alive_at < FRESH_S:
                return ""
            if now - self._failed_at >= 1.0:
                self._reason = await self._probe()
                if self._reason:
                    self._failed_at = time.monotonic()
                else:
                    self.alive()
            return self._reason

    async def max_model_len(self) -> int | None:
        """Tokens of prompt and answer together; None where the engine's directory cannot be read from here."""
        if not self._max_model_len:
            folder = await self._models.parameter(self._options.chat_model, "engine_dir")
            self._max_model_len = await asyncio.to_thread(_context, Path(folder)) if folder else 0
        return self._max_model_len or None

    async def _probe(self) -> str:
        if not await self._models.is_ready(self._options.chat_model):
            return f"the server does not serve {self._options.chat_model!r}"
        answer = self._models.ask(self._options.completions_model, PROBE, stream=False)
        try:
            await asyncio.wait_for(_first(answer.batches()), PROBE_TIMEOUT_S)
        except RequestError as error:
            return error.message
        except asyncio.TimeoutError:
            return f"no token came within {PROBE_TIMEOUT_S:.0f} s"
        finally:
            answer.close()
        return ""


async def _first(batches: object) -> None:
    async for _ in batches:  # type: ignore[attr-defined]
        return
    raise RequestError(503, None, "the model ended without an answer", "unavailable")


def _context(engine_dir: Path) -> int:
    try:
        if (engine_dir / MANIFEST_NAME).is_file():
            return Manifest.read(engine_dir).model.max_context
        return ScriptedEngine.read(engine_dir).max_context
    except (SpecError, EngineLoadError):
        return 0
