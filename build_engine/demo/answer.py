"""What a user would see of the model's tokens: the final text or the tool call.

Invariant: of several messages the last one counts; a message cut short by the token limit is what it is. Knows no
engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gptoss_trt.build_engine.demo.codec import SPECIAL_IDS, Codec
from gptoss_trt.build_engine.demo.conversation import Step

STOPS = (SPECIAL_IDS["return"], SPECIAL_IDS["call"], SPECIAL_IDS["endoftext"])


@dataclass(frozen=True)
class Visible:
    """The visible message: `header` is `final` or `functions.<name>`; `text` the answer or the arguments."""

    header: str
    text: str


def expected(step: Step) -> Visible:
    """The visible message of a step as it should be."""
    if step.call is not None:
        return Visible(f"functions.{step.call.name}", step.call.arguments)
    return Visible("final", step.final or "")


def visible(ids: Sequence[int], codec: Codec) -> Visible:
    """The visible message in what the model wrote after `<|start|>assistant`."""
    body = [i for i in ids if i not in STOPS]
    starts = [index for index, i in enumerate(body) if i == SPECIAL_IDS["start"]]
    last = body[starts[-1] + 1 :] if starts else body
    if SPECIAL_IDS["message"] not in last:
        return Visible("", codec.decode(list(last)))
    cut = last.index(SPECIAL_IDS["message"])
    header, text = codec.decode(list(last[:cut])), codec.decode(list(last[cut + 1 :]))
    if "to=" in header:
        return Visible(header.split("to=", 1)[1].split("<|", 1)[0].strip(), text)
    return Visible(header.rsplit("<|channel|>", 1)[-1], text)
