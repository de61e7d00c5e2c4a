"""`gptoss-trt chat` as a process: pipes, JSON lines, failures, and a terminal (a pty) with Ctrl-C."""

import contextlib
import json
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest


def delta(text, **more):
    return {"response": [json.dumps({"choices": [{"index": 0, "delta": {"content": text} | more}]})]}


def ending(reason="stop"):
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
    return {"response": [json.dumps(last), json.dumps({"choices": [], "usage": {"completion_tokens": 2}})]}


def echo_script(inputs):
    """Answers with the last message's text and the number of messages, after some reasoning."""
    body = json.loads(inputs["request"][1][0])
    yield delta("", reasoning_content="thinking")
    yield delta(f"{body['messages'][-1]['content']} ")
    yield delta(str(len(body["messages"])))
    yield ending()


@pytest.fixture
def served(triton):
    triton.scripts["chat"] = echo_script
    triton.ready_models = {"chat", "ensemble"}
    return triton


def chat(target, lines, *options):
    command = [sys.executable, "-m", "gptoss_trt", "chat", "--url", f"grpc://{target}", *options]
    return subprocess.run(command, input=lines, capture_output=True, text=True, timeout=60, check=False)


def test_each_line_of_a_pipe_is_a_turn_and_stdout_the_conversation(served):
    done = chat(served.target, "hi é\n\nmore\n")
    assert (done.stdout, done.stderr, done.returncode) == ("hi é 1\nmore 3\n", "", 0)


CONVERSE = "import sys; from gptoss_trt.runtime.launch.demo_cli import converse; sys.exit(converse(sys.argv[1]))"


@pytest.mark.parametrize("way", [["-m", "gptoss_trt", "chat", "--url"], ["-c", CONVERSE]], ids=["chat", "demo"])
def test_bytes_that_are_no_text_are_replaced(served, way):
    command = [sys.executable, *way, f"grpc://{served.target}"]
    done = subprocess.run(command, input=b"caf\xe9 \xff\nmore\n", capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode() == "caf\ufffd \ufffd 1\nmore 3\n"


def test_the_demo_says_why_its_chat_ended_early():
    command = [sys.executable, "-c", CONVERSE, "grpc://127.0.0.1:1"]
    done = subprocess.run(command, input=b"line\n" * 100_000, capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    assert b"Is a server there?" in done.stderr and b"Traceback" not in done.stderr


def test_options_reach_the_request(served, tmp_path):
    tools = tmp_path / "tools.json"
    tools.write_text('[{"name": "w"}]')
    options = ["--reasoning", "high", "--system", "s", "--temperature", "0.5", "--tools", str(tools), "--seed", "7"]
    assert chat(served.target, "x\n", *options).returncode == 0
    body = json.loads(served.seen[0][1]["request"][1][0])
    assert (body["reasoning_effort"], body["temperature"], body["seed"]) == ("high", 0.5, 7)
    assert body["tools"][0]["function"]["name"] == "w"


def test_json_lines(served):
    done = chat(served.target, "hi\n", "--json")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in events] == ["user", "reasoning", "content", "content", "finish"]


def test_raw_prompts_go_to_ensemble_as_they_are(served):
    answer = {"text_output": ["out"], "finish_reason": ["stop"], "num_output_tokens": [[3]], "num_input_tokens": [[2]]}
    served.scripts["ensemble"] = lambda _inputs: iter([answer])
    done = chat(served.target, "<|start|>user\n", "--raw", "--temperature", "0.5", "--json")
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["usage"], last["reason"]) == ({"prompt_tokens": 2, "completion_tokens": 3}, "stop")
    inputs = served.seen[0][1]
    assert inputs["text_input"][1].tolist() == [[b"<|start|>user"]]
    assert inputs["max_tokens"][1].tolist() == [[512]]
    assert inputs["top_p"][1].tolist() == [[1.0]]


def test_a_failed_turn_is_an_exit_status_and_a_line_on_stderr(served):
    served.scripts["chat"] = lambda _inputs: iter([("error", "engine died")])
    done = chat(served.target, "a\n")
    assert (done.stdout, done.returncode) == ("", 1)
    assert "engine died" in done.stderr


def test_no_server_is_one_clear_line():
    done = chat("127.0.0.1:9", "a\n", "--wait", "0.2")
    assert (done.stdout, done.returncode) == ("", 1)
    assert "grpc://127.0.0.1:9" in done.stderr and "gptoss-trt serve" in done.stderr
    assert "Traceback" not in done.stderr


PROMPT = r"\x1b\[0m>.*\x1b\[\?25h"


class Terminal:
    """A process on a pty: `send` types, `expect` waits for a pattern in what was shown since the last match."""

    # A shell's background jobs ignore SIGINT, and so would what they start.
    TAKE_TERMINAL = (
        "import fcntl, os, signal, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "signal.signal(signal.SIGINT, signal.SIG_DFL); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )

    def __init__(self, command):
        self.fd, terminal = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.TAKE_TERMINAL, *command],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"},
        )
        os.close(terminal)
        self.text = ""

    def send(self, text):
        os.write(self.fd, text.encode())

    def expect(self, pattern, seconds=20.0):
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.text, re.DOTALL)):
            wait = deadline - time.monotonic()
            assert wait > 0, f"no {pattern!r} in {self.text!r}"
            if select.select([self.fd], [], [], wait)[0]:
                data = os.read(self.fd, 4096).decode("utf-8", "replace")
                if "\x1b[6n" in data:  # prompt_toolkit asks where the cursor is; a real terminal answers
                    os.write(self.fd, b"\x1b[1;1R")
                self.text += data
        shown, self.text = self.text[: match.end()], self.text[match.end() :]
        return shown

    def close(self):
        """Ends the process if it still runs; gives its exit status."""
        deadline = time.monotonic() + 20
        try:
            while self.process.poll() is None and time.monotonic() < deadline:
                if select.select([self.fd], [], [], 0.05)[0]:  # a terminal that is not read keeps the process waiting
                    with contextlib.suppress(OSError):  # EIO once the other side has closed
                        os.read(self.fd, 4096)
            return self.process.wait(timeout=1)
        finally:
            self.process.kill()
            self.process.wait()
            os.close(self.fd)


def test_a_terminal_session(served, until):
    def script(inputs):
        body = json.loads(inputs["request"][1][0])
        if body["messages"][-1]["content"] == "slow":
            yield delta("begun")
            yield 20.0
        yield from echo_script(inputs)

    served.scripts["chat"] = script
    terminal = Terminal([sys.executable, "-m", "gptoss_trt", "chat", "--url", served.target])
    assert f"gpt-oss at {served.target}" in terminal.expect("/help lists the commands")
    terminal.expect(PROMPT)
    terminal.send("hello\r")
    assert "\x1b[2;3mthinking" in terminal.expect("hello 1")
    terminal.expect(PROMPT)
    terminal.send("slow\r")
    terminal.expect("begun")
    terminal.send("\x03")
    terminal.expect("cancelled")
    until(lambda: len(served.cancelled) == 1)
    terminal.expect(PROMPT)
    terminal.send("again\r")
    terminal.expect("again 5")
    terminal.send("/effort low\r")
    terminal.expect("effort: low")
    terminal.expect(PROMPT)
    terminal.send("\x04")
    assert terminal.close() == 0
