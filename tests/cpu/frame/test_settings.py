"""The registry of environment variables: few, parsed when asked for, and loud about what it cannot parse."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptoss_trt.runtime.engine.core import EngineLoadError
from gptoss_trt.runtime.launch import settings
from gptoss_trt.runtime.launch.serve_cli import parse_engine_options


def test_there_are_at_most_eight_and_each_says_what_for() -> None:
    assert len(settings.VARIABLES) <= 8
    assert all(name.startswith("GPTOSS_TRT_") and variable.purpose for name, variable in settings.VARIABLES.items())


def test_defaults() -> None:
    assert settings.read("GPTOSS_TRT_ENGINE", {}) is None
    assert settings.read("GPTOSS_TRT_THREADS", {}) == 2
    assert settings.read("GPTOSS_TRT_LOG_LEVEL", {}) == "INFO"


@pytest.mark.parametrize(
    ("name", "text"),
    [("GPTOSS_TRT_THREADS", "two"), ("GPTOSS_TRT_THREADS", "0"), ("GPTOSS_TRT_LOG_LEVEL", "loud")],
)
def test_a_value_that_does_not_parse_names_the_variable_and_the_value(name: str, text: str) -> None:
    with pytest.raises(settings.SettingsError, match=f"{name}='{text}'"):
        settings.read(name, {name: text})


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(KeyError):
        settings.read("GPTOSS_TRT_NO_SUCH", {})


def test_the_state_folder_is_private(tmp_path: Path) -> None:
    folder = settings.state_dir(tmp_path / "state")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(settings.SettingsError, match="mode 777"):
        settings.state_dir(folder)


def test_the_state_folder_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server, which is told of it, works in another folder."""
    monkeypatch.chdir(tmp_path)
    assert settings.state_dir(Path("here")) == tmp_path / "here"
    assert settings.state_dir(Path()) == tmp_path


def test_a_state_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        with pytest.raises(settings.SettingsError, match=str(path)):
            settings.state_dir(path)


@pytest.mark.parametrize(
    ("texts", "name", "value"),
    [((), "threads", 0), (("max_batch=8",), "max_batch", 8), (("prefix_cache=false",), "prefix_cache", False)],
)
def test_engine_options_of_serve(texts: tuple[str, ...], name: str, value: object) -> None:
    assert getattr(parse_engine_options(texts), name) == value


@pytest.mark.parametrize(
    "text",
    [
        "max_batch",
        "max_bath=8",
        "max_batch=99999",
        "max_batch=eight",
        "max_batch=\u0663",
        "device=tpu",
        "prefix_cache=2",
    ],
)
def test_a_wrong_engine_option_is_named(text: str) -> None:
    with pytest.raises(EngineLoadError, match=text.partition("=")[0]):
        parse_engine_options((text,))
