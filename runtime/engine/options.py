"""Options of an engine process that belong to a deployment, not to the engine directory: cache size, batch, threads.

Invariant: an options file with an unknown key or an impossible value stops the engine with a text that names it. Every
client of an engine shares them, because the process reads them from its home at start. Must not know their effect.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gptoss_trt.runtime.engine.core import EngineLoadError

MAX_DRAFT_TOKENS = 32
# By how tokens are drafted, the most in a step unless chosen: n-grams cost nothing, a draft model or head a pass each.
DRAFT_TOKENS = {"none": 0, "ngram": 8, "draft": 4, "eagle3": 3}
MOST_GIB = 1 << 20
NEED_DRAFT_ENGINE = ("draft", "eagle3")


T = TypeVar("T")


def _option(default: T, purpose: str) -> T:
    """A field with its purpose, for `serve --help`."""
    return dataclasses.field(default=default, metadata={"purpose": purpose})


@dataclass(frozen=True)
class EngineOptions:
    """Counts unless a name says bytes. 0 and empty mean: chosen by the engine. `serve --help` shows the purposes."""

    block_tokens: int = _option(0, "tokens of a KV block, at most 64 (GPU: 64, CPU: 16)")
    kv_bytes: int = _option(0, "memory of the KV cache (GPU: what steps leave free)")
    max_batch: int = _option(0, "sequences in one step (GPU: 256, CPU: 64)")
    max_queue: int = _option(1024, "requests that may wait (1024)")
    step_tokens: int = _option(0, "tokens in one step, of all sequences (GPU: 2048, CPU: 128)")
    max_context: int = _option(0, "tokens of a sequence (the model's)")
    threads: int = _option(0, "torch's CPU threads")
    device: str = _option("", "cpu or cuda (cuda where there is one)")
    step_timeout_s: int = _option(0, "seconds until a step counts as hung (120)")
    prefix_cache: bool = _option(True, "reuse the KV blocks of equal prefixes (true)")
    run_ahead: bool = _option(True, "launch a step ahead of the last one's tokens (true)")
    one_launch: bool = _option(True, "decode of one sequence as one kernel, where it can (true)")
    deterministic: bool = _option(False, "bits that do not depend on the batch, on a GPU (false)")
    prefill_weights: str = _option("auto", "FP8 copies of experts for prompts: none, GiB (auto)")
    speculation: str = _option("none", "who drafts tokens: ngram, draft, eagle3 (none)")
    draft_engine: str = _option("", "the draft engine's or the head's directory")
    draft_tokens: int = _option(0, "most tokens of a draft (ngram: 8, draft: 4, eagle3: 3)")
    kv_events: str = _option("", "ZeroMQ endpoint that tells routers which prefixes are held")
    kv_events_replay: str = _option("", "ZeroMQ endpoint that repeats what a router missed")

    def __post_init__(self) -> None:
        ranges = {
            "block_tokens": (0, 64),
            "kv_bytes": (0, 1 << 50),
            "max_batch": (0, 4096),
            "max_queue": (1, 1 << 20),
            "step_tokens": (0, 1 << 20),
            "max_context": (0, 1 << 30),
            "threads": (0, 1024),
            "step_timeout_s": (0, 86400),
            "draft_tokens": (0, MAX_DRAFT_TOKENS),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise EngineLoadError(f"engine option {name} is {value!r}; it must be an integer in {low}..{high}")
        if 0 < self.step_tokens < self.max_batch:
            raise EngineLoadError(f"engine option max_batch is {self.max_batch}, over step_tokens, {self.step_tokens}")
        if self.device not in ("", "cpu", "cuda"):
            raise EngineLoadError(f"engine option device is {self.device!r}; allowed: cpu, cuda")
        if self.kv_events_replay and not self.kv_events:
            raise EngineLoadError(
                f"engine option kv_events_replay is {self.kv_events_replay!r}, but kv_events is empty"
            )
        if self.kv_events and not self.prefix_cache:
            raise EngineLoadError(f"engine option kv_events is {self.kv_events!r}, but prefix_cache is off")
        self._check_prefill_weights()
        self._check_speculation()

    def _check_prefill_weights(self) -> None:
        if self.prefill_weights in ("auto", "none"):
            return
        try:
            gib = float(self.prefill_weights)
        except (TypeError, ValueError):
            gib = -1.0
        if not 0 <= gib <= MOST_GIB:
            raise EngineLoadError(
                f"engine option prefill_weights is {self.prefill_weights!r}; allowed: auto, none, GiB up to {MOST_GIB}"
            )

    def _check_speculation(self) -> None:
        if self.speculation not in DRAFT_TOKENS:
            near = difflib.get_close_matches(str(self.speculation), DRAFT_TOKENS, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise EngineLoadError(
                f"engine option speculation is {self.speculation!r}; allowed: {', '.join(DRAFT_TOKENS)}{hint}"
            )
        if self.speculation in NEED_DRAFT_ENGINE and not self.draft_engine:
            raise EngineLoadError(f"engine option speculation is {self.speculation!r}, which needs draft_engine=PATH")
        if self.speculation not in NEED_DRAFT_ENGINE and self.draft_engine:
            raise EngineLoadError(
                f"engine option draft_engine is {self.draft_engine!r}, but speculation is {self.speculation!r}; only "
                f"{' and '.join(NEED_DRAFT_ENGINE)} read one"
            )
        if self.speculation == "none" and self.draft_tokens:
            raise EngineLoadError(f"engine option draft_tokens is {self.draft_tokens}, but speculation is 'none'")
        if self.draft_engine:  # the engine process has another working directory
            object.__setattr__(self, "draft_engine", str(Path(self.draft_engine).absolute()))

    def resolved(self, device: str) -> EngineOptions:
        """These options with the engine's choices for `device` in place of 0. Raises EngineLoadError.

        A CPU reads prompts no faster in large chunks (330 tokens/s in steps of 64 or 512 tokens, measured on the demo's
        sizes), and everybody waits for a step, so its steps are short.
        """
        block_tokens, max_batch, step_tokens = (64, 256, 2048) if device == "cuda" else (16, 64, 128)
        max_batch = self.max_batch or min(max_batch, self.step_tokens or max_batch)
        return dataclasses.replace(
            self,
            block_tokens=self.block_tokens or block_tokens,
            max_batch=max_batch,
            step_tokens=self.step_tokens or max(step_tokens, max_batch),
            draft_tokens=self.draft_tokens or DRAFT_TOKENS[self.speculation],
        )

    @classmethod
    def help_lines(cls) -> list[str]:
        """A line for each option: its name, and what it is for (in brackets what the engine chooses)."""
        return [f"{option.name:17} {option.metadata['purpose']}" for option in dataclasses.fields(cls)]

    @classmethod
    def read(cls, path: Path) -> EngineOptions:
        """The options in a JSON file; the defaults when it does not exist. Raises EngineLoadError."""
        if not path.exists():
            return cls()
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise EngineLoadError(f"{path}: {error}") from error
        if not isinstance(raw, dict):
            raise EngineLoadError(f"{path} holds {raw!r:.40}, not an object of engine options")
        names = [field.name for field in dataclasses.fields(cls)]
        for key in raw:
            if key not in names:
                near = difflib.get_close_matches(key, names, 1)
                hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(names)}"
                raise EngineLoadError(f"unknown engine option {key!r}{hint}")
        return cls(**raw)

    def write(self, path: Path) -> None:
        """Writes the file that the next start reads (whole or not at all)."""
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(dataclasses.asdict(self), indent=1), encoding="utf-8")
        fresh.replace(path)
