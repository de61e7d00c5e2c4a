"""The chat's parts: chunks to events and messages, the conversation's rules, the loop, what is shown."""

import io
import json

import pytest
from rich.console import Console

from gptoss_trt.client.chat.conversation import Conversation, Settings, load_tools
from gptoss_trt.client.chat.events import Answer, Content, Finish, Reasoning, ToolArguments, ToolCall
from gptoss_trt.client.chat.loop import ChatLoop
from gptoss_trt.client.chat.show import JsonDisplay, PlainDisplay, TerminalDisplay, printable
from gptoss_trt.client.errors import ServerError


def chunk(finish=None, usage=None, **delta):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], "usage": usage}


def call_chunk(index, *, name=None, arguments=None):
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    entry = {"index": index, "function": function}
    return chunk(tool_calls=[entry | ({"id": f"c{index}", "type": "function"} if name else {})])


WEATHER = [
    chunk(role="assistant", content=""),
    chunk(reasoning_content="Need ", reasoning="Need "),
    chunk(reasoning="data."),
    call_chunk(0, name="get_weather", arguments=""),
    call_chunk(0, arguments='{"city":'),
    call_chunk(0, arguments=' "Oslo"}'),
    chunk(finish="tool_calls"),
    {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}},
]


def test_chunks_become_events_and_one_message():
    answer = Answer()
    events = [event for part in WEATHER for event in answer.push(part)]
    assert events == [
        Reasoning("Need "),
        Reasoning("data."),
        ToolCall(0, "c0", "get_weather"),
        ToolArguments(0, '{"city":'),
        ToolArguments(0, ' "Oslo"}'),
    ]
    assert answer.finish() == Finish("tool_calls", {"prompt_tokens": 9, "completion_tokens": 5})
    message = answer.message()
    assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    assert (message["content"], message["reasoning_content"]) == (None, "Need data.")
    assert answer.message(with_calls=False) is None


def test_other_choices_are_not_mixed_in():
    answer = Answer()
    other = {"choices": [{"index": 1, "delta": {"content": "no"}}, {"index": 0, "delta": {"content": "yes"}}]}
    assert list(answer.push(other)) == [Content("yes")]


def test_a_call_without_a_result_is_taken_back_with_its_turn():
    conversation = Conversation(Settings())
    conversation.add_user("one")
    conversation.add_answer({"role": "assistant", "content": "1"})
    conversation.add_user("weather?")
    call = {"id": "c0", "type": "function", "function": {"name": "w", "arguments": "{}"}}
    conversation.add_answer({"role": "assistant", "content": None, "tool_calls": [call, call]})
    conversation.add_tool_result("{}")
    conversation.add_user("never mind")
    assert [message["content"] for message in conversation.messages] == ["one", "1", "never mind"]


def test_the_body_carries_what_is_set_and_nothing_else():
    plain = Conversation(Settings())
    plain.add_user("hi")
    assert set(plain.body()) == {"model", "messages", "stream", "stream_options"}
    tool = {"type": "function", "function": {"name": "w"}}
    full = Conversation(Settings("m", "be brief", "high", 0.5, 0.9, 3, 10, [tool]))
    full.add_user("hi")
    body = full.body()
    assert body["messages"][0] == {"role": "system", "content": "be brief"}
    assert (body["reasoning_effort"], body["max_completion_tokens"], body["tools"]) == ("high", 10, [tool])
    assert full.messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("content", ['[{"name": "w"}]', '{"tools": [{"type": "function", "function": {"name": "w"}}]}'])
def test_tools_files(tmp_path, content):
    path = tmp_path / "tools.json"
    path.write_text(content)
    assert load_tools(path) == [{"type": "function", "function": {"name": "w"}}]


@pytest.mark.parametrize(
    ("content", "message"), [("{", "no JSON"), ("3", "no list"), ("[{}]", "tool 0 has no function")]
)
def test_bad_tools_files(tmp_path, content, message):
    path = tmp_path / "tools.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_tools(path)


class Script:
    """Inputs, client and display in one: `turns` are lines or exceptions, `answers` lists of chunks and exceptions."""

    def __init__(self, turns, answers, *, interactive=True):
        self.turns, self.answers, self.interactive = list(turns), list(answers), interactive
        self.bodies, self.log, self.prompts, self.closed = [], [], [], 0

    def read(self, prompt):
        self.prompts.append(prompt)
        turn = self.turns.pop(0) if self.turns else None
        if isinstance(turn, BaseException):
            raise turn
        return turn

    def stream_chat(self, body):
        self.bodies.append(json.loads(json.dumps(body)))
        self.parts = iter(self.answers.pop(0))
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_failure):
        self.closed += 1

    def __iter__(self):
        return self

    def __next__(self):
        part = next(self.parts)
        if isinstance(part, BaseException):
            raise part
        return part

    def asked(self, text):
        self.log.append(("asked", text))

    def event(self, event):
        self.log.append(event)

    def cancelled(self):
        self.log.append("cancelled")

    def failed(self, error):
        self.log.append(error.status)

    def notice(self, text):
        self.log.append(("notice", text))


def play(turns, answers, *, interactive=True, settings=None):
    script = Script(turns, answers, interactive=interactive)
    conversation = Conversation(settings or Settings())
    script.failures = ChatLoop(script, conversation, script, script).run()
    return script, conversation


def said(*texts):
    return [*(chunk(content=text) for text in texts), chunk(finish="stop")]


def test_turns_build_a_history():
    script, _ = play(["one", "", "two"], [said("1"), said("2")])
    assert [message["content"] for message in script.bodies[1]["messages"]] == ["one", "1", "two"]
    assert script.closed == 2


def test_a_tool_result_typed_in_the_terminal_goes_back_to_the_model():
    script, _ = play(["weather in Oslo?", "/rain/", "thanks"], [WEATHER, said("Rain."), said("Bye.")])
    assert script.prompts[1] == "result of get_weather> "
    roles = [message["role"] for message in script.bodies[1]["messages"]]
    assert roles == ["user", "assistant", "tool"]
    assert script.bodies[1]["messages"][2] == {"role": "tool", "tool_call_id": "c0", "content": "/rain/"}
    assert script.prompts[2] == "> "


def test_in_a_pipe_json_is_the_result_and_other_text_a_new_turn():
    script, _ = play(
        ["w?", '{"rain": 1}', "w?", "hello"], [WEATHER, said("Rain."), WEATHER, said("Hi.")], interactive=False
    )
    assert script.bodies[1]["messages"][-1]["role"] == "tool"
    assert [message["content"] for message in script.bodies[3]["messages"][-3:]] == ['{"rain": 1}', "Rain.", "hello"]


def test_ctrl_c_in_an_answer_keeps_the_session_and_what_was_said():
    script, conversation = play(
        ["count", "go on"], [[chunk(content="1, 2"), KeyboardInterrupt()], said("3")], settings=Settings()
    )
    assert "cancelled" in script.log
    assert [message["content"] for message in script.bodies[1]["messages"]] == ["count", "1, 2", "go on"]
    assert script.closed == 2
    assert len(conversation.messages) == 4


def test_ctrl_c_before_any_text_takes_the_turn_back():
    script, _ = play(["count", "again"], [[KeyboardInterrupt()], said("1")])
    assert [message["content"] for message in script.bodies[1]["messages"]] == ["again"]


def test_ctrl_c_in_a_tool_call_drops_the_half_call():
    script, _ = play(["w?", "again"], [[*WEATHER[:5], KeyboardInterrupt()], said("1")])
    assert script.prompts[1] == "> "
    assert [message["content"] for message in script.bodies[1]["messages"]] == ["again"]


def test_ctrl_c_at_the_prompt_drops_an_open_call_and_keeps_the_session():
    script, _ = play(["w?", KeyboardInterrupt(), KeyboardInterrupt(), "hi"], [WEATHER, said("1")])
    assert ("notice", "tool call dropped") in script.log
    assert [message["content"] for message in script.bodies[1]["messages"]] == ["hi"]


def test_ctrl_c_in_a_pipe_ends_the_session_and_closes_the_stream():
    script = Script(["a", "b"], [[chunk(content="x"), KeyboardInterrupt()]], interactive=False)
    with pytest.raises(KeyboardInterrupt):
        ChatLoop(script, Conversation(Settings()), script, script).run()
    assert script.closed == 1


def test_a_failed_turn_is_counted_and_the_next_one_works():
    script, _ = play(["a", "b"], [[ServerError("UNAVAILABLE", "gone")], said("1")], interactive=False)
    assert (script.failures, "UNAVAILABLE" in script.log) == (1, True)
    assert [message["content"] for message in script.bodies[1]["messages"]] == ["b"]


def test_slash_commands(tmp_path):
    tools = tmp_path / "tools.json"
    tools.write_text('[{"name": "w"}]')
    turns = [
        "/effort high",
        "/effort huge",
        f"/tools {tools}",
        "/system be brief",
        "/efort",
        "/help",
        "a",
        "/reset",
        "b",
    ]
    script, conversation = play([*turns, "/quit", "never"], [said("1"), said("2")])
    assert (conversation.settings.effort, conversation.settings.system) == ("high", "be brief")
    notices = [entry[1] for entry in script.log if isinstance(entry, tuple) and entry[0] == "notice"]
    assert "effort 'huge'; allowed: low, medium, high" in notices
    assert "no command /efort; did you mean '/effort'? (/help lists them)" in notices
    assert [message["content"] for message in script.bodies[1]["messages"]] == ["be brief", "b"]
    assert script.turns == ["never"]


def test_commands_are_text_in_a_pipe():
    script, _ = play(["/quit"], [said("1")], interactive=False)
    assert script.bodies[0]["messages"][0]["content"] == "/quit"


EVENTS = [Reasoning("think "), Reasoning("hard"), ToolCall(0, "c0", "w"), ToolArguments(0, "{}"), Content("Hi\x1b[31m")]


def test_plain_text_is_the_conversation_only():
    out, errors = io.StringIO(), io.StringIO()
    display = PlainDisplay(out, errors)
    display.asked("q")
    for event in [*EVENTS, Finish("stop", {"completion_tokens": 3})]:
        display.event(event)
    display.failed(ServerError("INTERNAL", "x"))
    assert out.getvalue() == "call w {}\nHi\x1b[31m\n"
    assert errors.getvalue() == "INTERNAL: x\n"


def test_plain_text_with_reasoning():
    out = io.StringIO()
    display = PlainDisplay(out, io.StringIO(), show_reasoning=True)
    for event in [*EVENTS, Finish("stop")]:
        display.event(event)
    assert out.getvalue().startswith("reasoning: think hard\ncall w {}\n")


def test_a_terminal_gets_dimmed_reasoning_and_no_control_characters():
    out = io.StringIO()
    display = TerminalDisplay(Console(file=out, force_terminal=True, color_system="standard", width=40))
    display.asked("q")
    for event in [*EVENTS, Content(" " + "word " * 20), Finish("length", {"prompt_tokens": 2, "completion_tokens": 3})]:
        display.event(event)
    text = out.getvalue()
    assert "\x1b[2;3mthink \x1b[0m" in text
    assert "Hi\ufffd[31m" in text
    assert "word " * 20 in text.replace("\x1b[0m", "")
    assert "2 tokens in, 3 out; first text after" in text and "; cut at the token limit" in text


def test_json_lines_name_every_event():
    out = io.StringIO()
    display = JsonDisplay(out, io.StringIO())
    display.asked("é")
    for event in [*EVENTS, Finish("stop", {"completion_tokens": 3})]:
        display.event(event)
    display.failed(ServerError("INTERNAL", "x", request_id="r"))
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    names = ["user", "reasoning", "reasoning", "tool_call", "tool_arguments", "content", "finish", "error"]
    assert [line["event"] for line in lines] == names
    assert (lines[3]["name"], lines[6]["usage"], lines[7]["request_id"]) == ("w", {"completion_tokens": 3}, "r")


def test_printable_keeps_text_and_layout():
    assert printable("a\tb\nc é 🙂\x00\x07\x1b\x9b") == "a\tb\nc é 🙂" + "\ufffd" * 4
