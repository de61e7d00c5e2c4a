"""Harmony: render, tokenise, parse and stream."""

from gptoss_trt.runtime.harmony.conversation import ConversationError
from gptoss_trt.runtime.harmony.render import render_chat
from gptoss_trt.runtime.harmony.stop_matcher import StopMatcher
from gptoss_trt.runtime.harmony.stream import HarmonyEvent, HarmonyStream
from gptoss_trt.runtime.harmony.text_stream import TextStream
from gptoss_trt.runtime.harmony.tokenizer import Tokenizer

__all__ = [
    "ConversationError",
    "HarmonyEvent",
    "HarmonyStream",
    "StopMatcher",
    "TextStream",
    "Tokenizer",
    "render_chat",
]
