"""openai-harmony, loaded without a network.

Owns the library's encoding object and the environment variable it needs while it loads. Invariant: the environment is
the same after the load as before. Must not know requests or streams.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gptoss_trt.build_engine import vocabulary

_load_lock = threading.Lock()


@contextmanager
def _encodings_base(folder: str) -> Iterator[None]:
    name = vocabulary.TIKTOKEN_VARIABLE
    before = os.environ.get(name)
    os.environ[name] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def harmony_encoding() -> Any:
    """The process's `openai_harmony.HarmonyEncoding`, made on the first call (about 0.4 s)."""
    with _load_lock:
        return _load()


@functools.lru_cache(maxsize=1)
def _load() -> Any:
    import openai_harmony

    with _encodings_base(str(vocabulary.ensure_tiktoken_dir())):
        return openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
