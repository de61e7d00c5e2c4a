"""The conversation's loop: read a turn, send it, show the answer, ask for tool results, obey slash commands.

Invariant: a cancelled or failed turn leaves the session usable and the conversation one that a server accepts. Must not
know how anything is drawn.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Generator
from pathlib import Path

from gptoss_trt.client.api import Client
from gptoss_trt.client.chat.conversation import EFFORTS, Conversation, load_tools
from gptoss_trt.client.chat.events import Answer, Content, Event, Finish
from gptoss_trt.client.chat.inputs import Inputs
from gptoss_trt.client.chat.relay import relayed
from gptoss_trt.client.chat.show import Display
from gptoss_trt.client.errors import ServerError
from gptoss_trt.client.protocol import did_you_mean
from gptoss_trt.client.requests import Sampling

COMMANDS = {
    "/reset": "forget the conversation",
    "/effort": "low, medium or high: how much the model reasons",
    "/system": "set the system prompt; without text, remove it",
    "/tools": "list the tools, or load them from a JSON file",
    "/help": "this list",
    "/quit": "leave (so does Ctrl-D)",
}
RAW_MAX_TOKENS = 512


class ChatLoop:
    """Runs until the inputs end. `raw` sends each line to `ensemble` as it is, without history."""

    def __init__(
        self, client: Client, conversation: Conversation, inputs: Inputs, display: Display, *, raw: bool = False
    ) -> None:
        self._client = client
        self._conversation = conversation
        self._inputs = inputs
        self._display = display
        self._raw = raw
        self.failures = 0

    def run(self) -> int:
        """Gives the number of turns that failed. Raises KeyboardInterrupt when a pipe's session is interrupted."""
        while True:
            try:
                line = self._next_line()
            except KeyboardInterrupt:
                self._interrupted_prompt()
                continue
            if line is None or (self._is_command(line) and line.split()[0] == "/quit"):
                return self.failures
            if self._is_command(line):
                self._command(line)
            elif line.strip():
                self._turn(line)

    def _interrupted_prompt(self) -> None:
        if not self._inputs.interactive:
            raise KeyboardInterrupt
        if self._conversation.open_calls:
            self._conversation.take_back()
            self._display.notice("tool call dropped")

    def _is_command(self, line: str) -> bool:
        """A pipe has no commands; a tool's result may begin with a slash unless it is one of them."""
        if not self._inputs.interactive or not line.startswith("/"):
            return False
        return not self._conversation.open_calls or line.split(maxsplit=1)[0] in COMMANDS

    def _next_line(self) -> str | None:
        calls = self._conversation.open_calls
        return self._inputs.read(f"result of {calls[0]['function']['name']}> " if calls else "> ")

    def _turn(self, line: str) -> None:
        if self._raw:
            self._display.asked(line)
            self._answer(self._raw_events(line))
        elif self._is_tool_result(line):
            self._conversation.add_tool_result(line)
            self._display.asked(line)
            if not self._conversation.open_calls:
                self._chat_answer()
        else:
            self._conversation.add_user(line)
            self._display.asked(line)
            self._chat_answer()

    def _is_tool_result(self, line: str) -> bool:
        """In a terminal the prompt asks for the result; in a pipe a line of JSON is one, any other line a new turn."""
        if not self._conversation.open_calls:
            return False
        if self._inputs.interactive:
            return True
        try:
            json.loads(line)
        except json.JSONDecodeError:
            return False
        return True

    def _chat_answer(self) -> None:
        answer = Answer()
        complete = self._answer(self._chat_events(answer))
        # What was said before a cancellation stays; half a tool call does not.
        self._conversation.add_answer(answer.message(with_calls=complete))

    def _answer(self, events: Generator[Event, None, None]) -> bool:
        """Shows an answer; False when it was cancelled or failed."""
        try:
            with contextlib.closing(events):
                for event in events:
                    self._display.event(event)
        except KeyboardInterrupt:
            self._display.cancelled()
            if not self._inputs.interactive:
                raise
            return False
        except ServerError as error:
            self.failures += 1
            self._display.failed(error)
            return False
        return True

    def _chat_events(self, answer: Answer) -> Generator[Event, None, None]:
        with self._client.stream_chat(self._conversation.body()) as chunks:
            for chunk in relayed(chunks):
                yield from answer.push(chunk)
        yield answer.finish()

    def _raw_events(self, prompt: str) -> Generator[Event, None, None]:
        settings = self._conversation.settings
        # Raw models are greedy unless top_p (or top_k) is set: a temperature alone means the whole vocabulary.
        top_p = 1.0 if settings.top_p is None and settings.temperature else settings.top_p
        sampling = Sampling(temperature=settings.temperature, top_p=top_p, seed=settings.seed)
        reason, usage = None, {}
        with self._client.stream_text(prompt, settings.max_tokens or RAW_MAX_TOKENS, sampling) as pieces:
            for piece in relayed(pieces):
                reason = piece.finish_reason or reason
                if piece.input_tokens is not None:
                    usage["prompt_tokens"] = piece.input_tokens
                if piece.output_tokens is not None:
                    usage["completion_tokens"] = piece.output_tokens
                if piece.text:
                    yield Content(piece.text)
        yield Finish(reason, usage)

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        actions: dict[str, Callable[[str], str]] = {
            "/reset": self._reset,
            "/effort": self._effort,
            "/system": self._system,
            "/tools": self._tools,
            "/help": self._help,
        }
        if name in actions:
            self._display.notice(actions[name](argument.strip()))
        else:
            self._display.notice(f"no command {name}{did_you_mean(name, COMMANDS)} (/help lists them)")

    def _reset(self, _argument: str) -> str:
        self._conversation.reset()
        return "conversation forgotten"

    def _effort(self, argument: str) -> str:
        if argument and argument not in EFFORTS:
            return f"effort {argument!r}; allowed: {', '.join(EFFORTS)}"
        if argument:
            self._conversation.settings.effort = argument
        return f"effort: {self._conversation.settings.effort or 'as the server has it'}"

    def _system(self, argument: str) -> str:
        self._conversation.settings.system = argument or None
        return f"system prompt: {argument or 'none'}"

    def _tools(self, argument: str) -> str:
        if argument:
            try:
                self._conversation.settings.tools = load_tools(Path(argument).expanduser())
            except (OSError, ValueError) as error:
                return str(error)
        names = [tool["function"]["name"] for tool in self._conversation.settings.tools]
        return f"tools: {', '.join(names) or 'none'}"

    def _help(self, _argument: str) -> str:
        return "\n".join(f"{name:8} {purpose}" for name, purpose in COMMANDS.items())
