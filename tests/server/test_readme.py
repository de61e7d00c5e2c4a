"""Every command in the README runs: here against the demo checkpoint under the README's names, or where it says.

The README's ports may be taken on the machine of a test: they are replaced by free ones, in the text and by options.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SERVE = "gptoss-trt serve engine/"
README_PORTS = ("8000", "8001", "8002", "8080")
STANDARD_INPUT = {"gptoss-trt chat": "What is 17 + 25?\n"}
# Commands that cannot run inside a test, and the file that runs them.
ELSEWHERE = {"make demo": ".ci/run", "make test": ".ci/run", "make library": ".ci/run"}
# Commands that need a Docker engine or the card: what of them was run is said in the README beside them.
NOT_RUN = re.compile(r"docker (build|run|compose) |tests/perf/|ENGINE_DIR=|--tune")


@functools.cache
def our_ports() -> dict[str, str]:
    """A free port for each of the README's, looked for when the first one is needed and below the range from which the
    system hands out ports, so that nobody takes it in between."""
    found: list[str] = []
    while len(found) < len(README_PORTS):
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found += [str(port)] if str(port) not in found else []
    return dict(zip(README_PORTS, found, strict=True))


def serve_options() -> list[str]:
    ports = our_ports()
    return ["--http-port", ports["8000"], "--grpc-port", ports["8001"], "--metrics-port", ports["8002"],
            "--openai-port", ports["8080"]]  # fmt: skip


def address_of(command: str) -> str:
    """What the README leaves to defaults, said to commands that would look at the default port."""
    ports = our_ports()
    grpc = f" --url grpc://127.0.0.1:{ports['8001']}"
    addresses = {
        "gptoss-trt chat": grpc,
        "gptoss-trt bench serve": grpc,
        "gptoss-trt top": f" --url http://127.0.0.1:{ports['8002']}/metrics",
    }
    return next((more for name, more in addresses.items() if command.startswith(name)), "")


def on_our_ports(text: str) -> str:
    for port, ours in our_ports().items():
        text = re.sub(rf"(127\.0\.0\.1|localhost):{port}\b", rf"\g<1>:{ours}", text)
    return text


def blocks(language: str) -> list[str]:
    return [on_our_ports(block) for block in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)]


def commands() -> list[str]:
    """Command lines of all sh blocks, comments and continuation lines resolved."""
    text = "\n".join(blocks("sh")).replace("\\\n", " ")
    lines = [re.sub(r"\s+#\s.*$", "", line).strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def runnable() -> list[str]:
    return [line for line in commands() if line not in ELSEWHERE and not NOT_RUN.search(line)]


def test_there_are_commands_and_the_server_is_started_first() -> None:
    assert SERVE in runnable()
    assert len(runnable()) >= 6


@pytest.mark.parametrize("command", sorted(ELSEWHERE))
def test_what_runs_elsewhere_stands_there(command: str) -> None:
    assert re.search(rf"\b{re.escape(command)}\b", (ROOT / ELSEWHERE[command]).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, demo_checkpoint: Path) -> Path:
    """A folder in which the README's names exist: gpt-oss-20b/ is the demo checkpoint."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "gpt-oss-20b").symlink_to(demo_checkpoint)
    return folder


@pytest.fixture(scope="module")
def shell(place: Path) -> Iterator[dict[str, str]]:
    """The environment of the README's commands; the server that `serve` starts is stopped at the end."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "GPTOSS_TRT_STATE_DIR": str(place / "state"),
    }
    yield environment
    for server in SERVERS:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


SERVERS: list[subprocess.Popen[str]] = []


def start_server(place: Path, environment: dict[str, str]) -> None:
    """Starts the README's serve command in the background and waits for its line to try."""
    log = place / "serve.out"
    with log.open("w") as out:
        command = [*SERVE.split(), *serve_options()]
        SERVERS.append(subprocess.Popen(command, cwd=place, env=environment, stdout=out, stderr=out, text=True))
    deadline = time.monotonic() + 180
    while "try: curl" not in log.read_text():
        assert SERVERS[-1].poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


@pytest.mark.timeout(900)
def test_every_command_runs_in_order(place: Path, shell: dict[str, str]) -> None:
    for command in runnable():
        if command == SERVE:
            start_server(place, shell)
            continue
        result = subprocess.run(
            command + address_of(command), shell=True, cwd=place, env=shell, input=STANDARD_INPUT.get(command, ""),
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        # doctor's status 1 says that something is missing on this machine, which is an answer.
        allowed = {0, 1} if command.startswith("gptoss-trt doctor") else {0}
        assert result.returncode in allowed, f"{command}\n{result.stdout}\n{result.stderr}"
        if command.startswith("gptoss-trt chat"):
            assert "42" in result.stdout
        if command.startswith("curl"):
            assert "error" not in result.stdout, result.stdout


def test_every_python_block_runs(place: Path, shell: dict[str, str]) -> None:
    assert SERVERS and SERVERS[-1].poll() is None, "the commands run first: they start the server"
    for block in blocks("python"):
        result = subprocess.run(
            [sys.executable, "-c", block],
            cwd=place,
            env=shell,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert result.returncode == 0, f"{block}\n{result.stdout}\n{result.stderr}"
        assert result.stdout.strip()
