"""What a scripted.json says: the tokens, delays, chunk sizes and faults of a scripted engine, as checked dataclasses.

Invariant: a file that `ScriptedEngine.read` accepts has no unknown key and no impossible value. Must not know how it is
played. Example:

    {"step_ms": 5, "max_context": 4096, "full_blocks": 256, "block_tokens": 64,
     "default": {"echo": true, "end": [200002]},
     "scripts": [{"match": [7, 8], "tokens": [1, 2, 3], "cycle": true, "chunk": [1, 4], "first_delay_ms": 50,
                  "fault": {"kind": "crash", "after": 10}}]}

The first script whose `match` ids stand in the prompt one after another is played, else `default`. `echo` plays the
prompt; `tokens` given ids; `cycle` repeats them until max_tokens; `end` ids follow at the end. Faults after `after`
tokens of a sequence: error, crash (kill -9), hang, nan; `refuse` answers the submit itself with `code` and `message`.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from gptoss_trt.build_engine.spec import HARMONY_STOP_IDS
from gptoss_trt.runtime.engine.core import EngineLoadError
from gptoss_trt.runtime.engine.messages import ErrorCode, Prompt

SCRIPT_NAME = "scripted.json"
FaultKind = Literal["error", "crash", "hang", "refuse", "nan"]


@dataclass(frozen=True)
class Fault:
    """What goes wrong, after how many tokens of a sequence."""

    kind: FaultKind
    after: int = 0
    code: ErrorCode = "INTERNAL"
    message: str = "a scripted fault"


@dataclass(frozen=True)
class Script:
    """One answer."""

    match: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    echo: bool = False
    cycle: bool = False
    end: tuple[int, ...] = (HARMONY_STOP_IDS[0],)
    chunk: tuple[int, ...] = (1,)  # tokens a step, round robin
    first_delay_ms: float = 0.0  # before the first token, in whole steps
    fault: Fault | None = None

    def token(self, index: int, prompt: Prompt) -> int | None:
        """Token `index` of the answer; None when the answer is over."""
        body = prompt if self.echo else self.tokens
        if self.cycle and body:
            return body[index % len(body)]
        if index < len(body):
            return body[index]
        return self.end[index - len(body)] if index - len(body) < len(self.end) else None


@dataclass(frozen=True)
class ScriptedEngine:
    """A whole scripted.json. Sizes are counts of requests, tokens or blocks."""

    step_ms: float = 5.0
    load_ms: float = 0.0
    load_error: str = ""  # loading fails with this text
    vocab_size: int = 201088
    max_context: int = 131072
    max_batch: int = 256
    max_queue: int = 1024
    block_tokens: int = 64
    full_blocks: int = 16384
    default: Script = field(default_factory=lambda: Script(echo=True))
    scripts: tuple[Script, ...] = ()

    def script_for(self, prompt: Prompt) -> Script:
        return next(
            (script for script in self.scripts if script.match and _contains(prompt, script.match)), self.default
        )

    @classmethod
    def read(cls, engine_dir: Path) -> ScriptedEngine:
        """Reads engine_dir/scripted.json. Raises EngineLoadError for bad JSON, unknown keys or impossible values."""
        path = engine_dir / SCRIPT_NAME
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise EngineLoadError(f"{path}: {error}") from error
        values = dict(_keys(cls, raw, SCRIPT_NAME))
        if "default" in values:
            values["default"] = _script(values["default"], "default")
        values["scripts"] = tuple(
            _script(entry, f"scripts[{index}]") for index, entry in enumerate(values.get("scripts", ()))
        )
        plan = cls(**values)
        for name in ("vocab_size", "max_context", "max_batch", "max_queue", "block_tokens", "full_blocks"):
            if type(getattr(plan, name)) is not int or getattr(plan, name) < 1:
                raise EngineLoadError(
                    f"{SCRIPT_NAME}: {name} is {getattr(plan, name)!r}; it must be a positive integer"
                )
        return plan


def _script(raw: Any, where: str) -> Script:
    values: dict[str, Any] = {}
    for key, value in _keys(Script, raw, where).items():
        values[key] = tuple(value) if isinstance(value, list) else value
    if values.get("fault") is not None:
        values["fault"] = _fault(values["fault"], f"{where}.fault")
    script = Script(**values)
    if not script.chunk or min(script.chunk) < 1:
        raise EngineLoadError(f"{where}.chunk is {list(script.chunk)}; it must hold positive numbers")
    return script


def _fault(raw: Any, where: str) -> Fault:
    fault = Fault(**_keys(Fault, raw, where))
    for name, words in (("kind", get_args(FaultKind)), ("code", get_args(ErrorCode))):
        if getattr(fault, name) not in words:
            raise EngineLoadError(f"{where}.{name} is {getattr(fault, name)!r}; allowed: {', '.join(words)}")
    return fault


def _keys(cls: type, raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise EngineLoadError(f"{where} is {type(raw).__name__}, not an object")
    names = {f.name for f in dataclasses.fields(cls)}
    if unknown := sorted(set(raw) - names):
        raise EngineLoadError(f"{where}: unknown keys {unknown}; allowed: {sorted(names)}")
    return raw


def _contains(prompt: Prompt, part: tuple[int, ...]) -> bool:
    ids = tuple(prompt)
    return any(ids[start : start + len(part)] == part for start in range(len(prompt) - len(part) + 1))
