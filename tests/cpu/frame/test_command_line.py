"""The command table: help without imports, examples everywhere, clear errors for what is missing or misspelled."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from gptoss_trt.client.cli import COMMANDS, CommandEntry, gptoss_trt, main


def test_top_level_help_imports_no_command() -> None:
    code = "import sys; from gptoss_trt.client.cli import main; main(['--help'])\n"
    code += "heavy = {'torch', 'tritonclient', 'rich', 'psutil'} & set(sys.modules); assert not heavy, heavy"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert all(name in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_each_command_has_help_with_examples(name: str) -> None:
    result = CliRunner().invoke(gptoss_trt, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert "Examples:" in result.output
    assert f"gptoss-trt {name}" in result.output


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
