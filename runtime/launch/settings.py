"""Every environment variable that the project reads, in one table.

Invariant: a variable is read when it is asked for, never at import; a value that does not parse raises and names the
variable. Must not know who asks. At most eight variables: a deployment's options belong to flags and model parameters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class SettingsError(ValueError):
    """An environment variable whose value cannot be used."""


@dataclass(frozen=True)
class Variable:
    """One environment variable: its default, how its text becomes a value, and what it is for."""

    name: str
    default: str
    parse: Callable[[str], Any]
    purpose: str


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("must be 1 or more")
    return value


def _optional_path(text: str) -> Path | None:
    return Path(text).expanduser() if text else None


def _log_level(text: str) -> str:
    level = text.upper()
    if level not in {"DEBUG", "INFO", "WARNING", "ERROR"}:
        raise ValueError("must be DEBUG, INFO, WARNING or ERROR")
    return level


VARIABLES: Mapping[str, Variable] = {
    variable.name: variable
    for variable in (
        Variable("GPTOSS_TRT_ENGINE", "", _optional_path, "engine directory of a plain `tritonserver` launch"),
        Variable("GPTOSS_TRT_STATE_DIR", "", _optional_path, "folder for sockets, logs and the assembled repository"),
        Variable("GPTOSS_TRT_TRITONSERVER", "", _optional_path, "the tritonserver binary to run"),
        Variable("GPTOSS_TRT_THREADS", "2", _positive, "CPU threads of the engine, less one core for the server"),
        Variable("GPTOSS_TRT_OTLP_URL", "", str, "where the engine sends its spans (OTLP over HTTP); empty: nowhere"),
        Variable("GPTOSS_TRT_LOG_LEVEL", "INFO", _log_level, "how much the engine and the models log"),
    )
}


def read(name: str, environment: Mapping[str, str] | None = None) -> Any:
    """The parsed value of variable `name`, its default when it is unset. Raises SettingsError for a value that does not
    parse and KeyError for a name that is not in the table."""
    variable = VARIABLES[name]
    text = (os.environ if environment is None else environment).get(name, variable.default)
    try:
        return variable.parse(text)
    except ValueError as error:
        raise SettingsError(f"{name}={text!r}: {error} ({variable.purpose})") from error


def state_home() -> Path:
    """Where the state folder lies: GPTOSS_TRT_STATE_DIR, else a folder of this user's under the XDG state home."""
    home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    path = read("GPTOSS_TRT_STATE_DIR") or home / "gptoss-trt"
    assert isinstance(path, Path)
    return path


def state_dir(explicit: Path | None = None) -> Path:
    """The state folder, `explicit` or `state_home()`, absolute, made with mode 0700. Raises SettingsError when it
    cannot be made or somebody else can write to it."""
    path = (explicit or state_home()).absolute()  # the server that uses it has another working directory
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"the state folder {path} cannot be made: {error.strerror}") from error
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise SettingsError(
            f"{path} belongs to uid {status.st_uid} with mode {status.st_mode & 0o777:o}; it must be "
            f"of uid {os.getuid()} and writable by nobody else"
        )
    return path
