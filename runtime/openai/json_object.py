"""A request's JSON text as an object, the same from HTTP and from a tensor.

Invariant: no text makes `parse_object` raise anything but RequestError. Must not know what an object means.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from gptoss_trt.runtime.openai.errors import RequestError

MAX_DIGITS = 1000  # of an integer; Python itself stops at 4,300 with a text about Python


def parse_object(data: bytes | str) -> dict[str, Any]:
    """JSON text as an object. Raises RequestError 400."""
    try:
        body = json.loads(data, parse_constant=_no_constant, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(400, None, f"the body is not JSON: {reason}", "invalid_json") from error
    if not isinstance(body, dict):
        raise RequestError(400, None, f"the body is {type(body).__name__}, not a JSON object", "invalid_type")
    return body


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"it has an integer of {len(text)} digits; the limit is {MAX_DIGITS}")
    return int(text)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
