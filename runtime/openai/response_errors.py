"""The chat model's complaints about a /v1/responses body, in the words of that body.

Owns which parameter of a response became which of chat. Invariant: an error names what the client wrote: a parameter of
the Responses API and, for a message, the item that it came from. Must not know HTTP, nor what is checked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from gptoss_trt.runtime.openai.errors import RequestError

NAMES = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "tool_call_id": "call_id",
}
# A quoted text, which is the client's own and stays as it is, or one of the names.
_WORDS = re.compile(
    r"""(?P<quoted>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
    rf"|(?<![\w.])(?P<name>{'|'.join(re.escape(name) for name in NAMES)})(?!\w)"
    r"|(?<![\w.])messages\[(?P<index>\d+)\](?P<rest>(?:\.\w+|\[\d+\])*)"
)


def in_response_terms(error: RequestError, places: Sequence[str]) -> RequestError:
    """`error` with the names of /v1/responses. `places`: where each message of the chat request came from; one that
    ends in `[i]` is an item that is a message itself, whose inner places are the client's too."""

    def spoken(text: str, *, inner: str) -> str:
        """`text` in those names; `inner` shows what is said of a part of a message that several items have made."""

        def word(match: re.Match[str]) -> str:
            if match["quoted"] is not None:
                return match["quoted"]
            if match["name"] is not None:
                return NAMES[match["name"]]
            index, rest = int(match["index"]), match["rest"]
            place = places[index] if index < len(places) else "input"
            if place.endswith("]"):
                return place + rest
            return place + inner.format(rest.rpartition(".")[2]) if rest else place

        return _WORDS.sub(word, text)

    param = None if error.param is None else spoken(error.param, inner="")
    return RequestError(error.status, param, spoken(error.message, inner=" ({})"), error.code)
