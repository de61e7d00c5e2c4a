"""Harmony: render, tokenise, parse and stream.

Owns everything between a chat request and token ids, and between generated ids and reasoning, content and tool calls.
Invariant: one tokenizer and one vocabulary per process, no network. Must not know HTTP, Triton or the engine.

Where openai-harmony 0.0.8 and this package differ, and why. Its parser takes well-formed output as its documentation
describes it and raises on the rest; models write the rest often enough to be the largest class of bug reports about
servers of gpt-oss, so here nothing raises and every byte has one place. "Library" is what it does, strict or lenient.

| completion | library | here |
|---|---|---|
| a stray word in a header | raises | dropped: `<\\|message\\|>` confirms the header |
| `<\\|constrain\\|> json` with a blank; type first | raises | read in any order |
| `final <\\|constrain\\|>json` without recipient | the type becomes the recipient | content of the final channel |
| `to=functions.get_weatherjson` | an unknown tool | repaired, only if that gives a declared name |
| recipient `assistant`, `user`, `all` | a recipient like any other | no tool: the channel decides |
| bare text (a refusal) | raises; lenient: no channel | content; reasoning if a proper message follows it |
| `<\\|channel\\|>analysis We refuse.<\\|end\\|>` | words become recipient and type | text of that channel |
| `<\\|start\\|>` or `<\\|end\\|>` missing, or both | raises, or markup in the text | a marker begins a message |
| text between messages | raises | dropped; content if nothing has answered and nothing follows |
| `assistantassistant`, `assistantfinal` | raises, or a recipient | a doubled role; a channel without its marker |
| `<\\|start\\|>user`, a tool's result | parsed as that author's message | the turn ends: it is not the assistant's |
| anything after `<\\|call\\|>`, `<\\|return\\|>` | raises or parses on | ignored: the model made it up |
| an unknown channel | a message of that channel | never shown |
| nothing, or a header cut short | raises | no event but the finish |

| prompt | library | here |
|---|---|---|
| analysis of earlier turns while a tool loop is open | all kept | kept only behind the last final answer |
| anyOf, $ref, const, integer enums, objects without `type` | `any`, or lost | written out, within bounds |
| second line of a property's description | outside its comment | a comment of its own |
| titles in schemas | printed | left out: generators repeat the property's name |
| special-token text in content | ordinary | ordinary, in names, schemas and formats too |
| system message, built-in tools | | the library's own rendering is used |
| encoding 200,000 letters in a row | 26 s | 0.07 s (tiktoken) |
"""

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
