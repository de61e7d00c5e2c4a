"""The command table: help without imports, examples everywhere, clear errors for what is missing or misspelled."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from gptoss_trt.client.cli import COMMANDS, CommandEntry, gptoss_trt, main
from gptoss_trt.runtime.engine.options import EngineOptions
from gptoss_trt.runtime.launch.serve_cli import line_to_try
from gptoss_trt.runtime.launch.tritonserver import TritonServer


def test_top_level_help_imports_no_command() -> None:
    code = "import sys; from gptoss_trt.client.cli import main; main(['--help'])\n"
    code += "heavy = {'torch', 'tritonclient', 'rich', 'psutil'} & set(sys.modules); assert not heavy, heavy"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert all(name in result.stdout for name in COMMANDS)


def all_commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command below, groups too, with the words that name it."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from all_commands(below, (*path, name))


@pytest.mark.parametrize(("path", "command"), list(all_commands(gptoss_trt)), ids=lambda value: " ".join(value) or "top"
                         if isinstance(value, tuple) else "")  # fmt: skip
def test_help_has_examples_explains_every_option_and_fits_a_terminal(
    path: tuple[str, ...], command: click.Command
) -> None:
    result = CliRunner().invoke(gptoss_trt, [*path, "--help"], terminal_width=80)
    assert result.exit_code == 0, result.output
    assert "Examples:" in result.output and " ".join(("gptoss-trt", *path)) in result.output
    assert [option.opts for option in command.params if isinstance(option, click.Option) and not option.help] == []
    assert [line for line in result.output.splitlines() if len(line) > 80] == []


def test_serve_lists_every_engine_option() -> None:
    output = CliRunner().invoke(gptoss_trt, ["serve", "--help"]).output
    assert all(f"\n    {option.name} " in output for option in fields(EngineOptions))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--served-model-name", "a,b"), "'a,b'; a name has no comma"),
        (("--cors-origin", "app.example"), "'app.example'"),
        (("--ssl-certfile", "none.pem", "--ssl-keyfile", "none.pem"), "ssl_certfile none.pem"),
        (("--api-key-file", "/dev/null"), "/dev/null holds no key"),
        (("--openai-port", "8001"), "grpc_port are both 8001"),
        (("--no-openai", "--http-port", "8001"), "HTTP and gRPC port are both 8001"),
        (("--address", ""), "address"),
        (("--address", "999.1.1.1"), "999.1.1.1"),
        (("--state-dir", "/proc/none"), "the state folder /proc/none cannot be made"),
        (("--otlp-url", "collector:4318"), "'collector:4318'; it must begin with http"),
        (("--verbose", "-1"), "-1 is not in the range"),
        (("--model", "enssemble"), "did you mean 'ensemble'"),
    ],
)
def test_serve_tells_a_wrong_option_before_the_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], words: str
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the server was started")

    monkeypatch.setattr(TritonServer, "start", never)
    (tmp_path / "scripted.json").write_text("{}", encoding="ascii")
    free = ("--http-port", "0", "--metrics-port", "0", "--openai-port", "0")
    result = CliRunner().invoke(gptoss_trt, ["serve", str(tmp_path), *free, *options])
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code != 0 and words in result.output, result.output


def test_traces_without_their_extra_are_refused_before_the_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TritonServer, "start", None)
    for name in [name for name in sys.modules if name.startswith("opentelemetry.exporter.")]:  # of another test
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)  # the API is there without it
    (tmp_path / "scripted.json").write_text("{}", encoding="ascii")
    result = CliRunner().invoke(gptoss_trt, ["serve", str(tmp_path), "--otlp-url", "http://127.0.0.1:4318/v1/traces"])
    assert result.exit_code == 2 and "pip install 'gptoss-trt[trace]'" in result.output, result.output


def test_the_line_to_try_asks_the_api_where_there_is_one() -> None:
    assert "'Authorization: Bearer KEY'" in line_to_try("http://h:8000", "http://h:8080/v1", with_key=True)
    command = line_to_try("http://h:8000", "http://h:8080/v1", with_key=False)
    assert command.startswith('curl -s http://h:8080/v1/chat/completions -d \'{"messages"')
    assert "/v2/models/ensemble/generate" in line_to_try("http://h:8000", None, with_key=False)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(COMMANDS, "chat", CommandEntry("no_such_library.module", "chat", "", "client"))
    assert main(["chat"]) == 1
    assert "pip install 'gptoss-trt[client]'" in capsys.readouterr().err


def test_a_fault_of_our_own_is_not_called_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "chat", CommandEntry("gptoss_trt.client.no_such_module", "chat", "", "client"))
    with pytest.raises(ModuleNotFoundError):
        main(["chat"])


def test_wrong_use_exits_with_2_and_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["biuld"]) == 2
    assert "build" in capsys.readouterr().err
    assert main(["serve", "--no-such-option"]) == 2


def test_version() -> None:
    result = CliRunner().invoke(gptoss_trt, ["--version"], prog_name="gptoss-trt")
    assert result.output.startswith("gptoss-trt, version ")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion(shell: str) -> None:
    environment = {**os.environ, "_GPTOSS_TRT_COMPLETE": f"{shell}_source"}
    command = [sys.executable, "-c", "from gptoss_trt.client.cli import main; main([])"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert "_GPTOSS_TRT_COMPLETE" in result.stdout
