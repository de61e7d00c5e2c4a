"""Which models the launcher takes for dead, from the stubs that live and the files of who serves an instance."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gptoss_trt.runtime.launch.stub_watch import Stub, StubWatch
from gptoss_trt.runtime.launch.tritonserver import ServerOptions, TritonServer, _take_folder
from gptoss_trt.runtime.triton_models.succession import FOLDER, holders

SERVER = 77


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / FOLDER).mkdir()
    return tmp_path


@pytest.fixture
def watch(folder: Path) -> StubWatch:
    server: Any = SimpleNamespace(folder=folder, process=SimpleNamespace(pid=SERVER))
    return StubWatch(server, lambda _model: None)


def stub(pid: int, started: float, model: str = "chat", number: int = 0) -> Stub:
    return Stub(model, f"{model}_{number}_0", pid, started)


def serves(folder: Path, instance: str, pid: int, since: float) -> None:
    file = folder / FOLDER / f"{SERVER}-{instance}"
    file.write_text(str(pid))
    os.utime(file, (since, since))


def test_a_stub_that_vanished(watch: StubWatch, folder: Path) -> None:
    serves(folder, "chat_0_0", 1, 100.5)
    both = [stub(1, 100.0), stub(2, 100.0, "preprocessing")]
    assert watch.dead_models(both) == []
    assert watch.dead_models(both[1:]) == ["chat"]
    assert watch.dead_models([]) == ["preprocessing", "chat"], "one without a file, and one that is still not healed"


def test_a_reload_is_no_death(watch: StubWatch, folder: Path) -> None:
    serves(folder, "chat_0_0", 1, 100.5)
    assert watch.dead_models([stub(1, 100.0)]) == []
    assert watch.dead_models([stub(1, 100.0), stub(2, 200.0)]) == [], "the new one loads, the old one serves"
    serves(folder, "chat_0_0", 2, 200.5)
    assert watch.dead_models([stub(1, 100.0), stub(2, 200.0)]) == []
    assert watch.dead_models([stub(2, 200.0)]) == [], "the old one has ended its streams"
    (folder / FOLDER / f"{SERVER}-chat_0_0").unlink()
    assert watch.dead_models([stub(2, 200.0), stub(3, 300.0)]) == []


def test_one_that_died_between_two_looks_beside_an_older_one(watch: StubWatch, folder: Path) -> None:
    serves(folder, "chat_0_0", 1, 100.5)
    assert watch.dead_models([stub(1, 100.0)]) == []
    serves(folder, "chat_0_0", 2, 200.5)  # which nobody saw alive
    assert watch.dead_models([stub(1, 100.0)]) == ["chat"]
    assert watch.dead_models([stub(1, 100.0), stub(3, 300.0)]) == [], "its successor loads"


def test_files_of_other_servers_and_half_written_ones_do_not_count(folder: Path) -> None:
    serves(folder, "tensorrt_llm_0_3", 5, 10.0)
    (folder / FOLDER / f"{SERVER}-tensorrt_llm_0_3.6").write_text("")
    (folder / FOLDER / f"{SERVER + 1}-chat_0_0").write_text("9")
    assert holders(folder / FOLDER, SERVER) == {"tensorrt_llm_0_3": (5, 10.0)}
    assert holders(folder / "none", SERVER) == {}


def test_files_of_an_earlier_server_with_the_same_process_id_do_not_count(tmp_path: Path) -> None:
    options = ServerOptions(tmp_path / "engine", state_dir=tmp_path)
    folder, lock = _take_folder(options, 8000)
    (folder / FOLDER).mkdir()
    serves(folder, "chat_0_1", 5, 10.0)  # that server was killed; the next one has one instance
    lock.close()
    folder, lock = _take_folder(options, 8000)
    server = TritonServer(options, folder, lock, (8000, 8001, 8002))
    server.process = SimpleNamespace(pid=SERVER)  # type: ignore[assignment]
    assert StubWatch(server, lambda _model: None).dead_models([stub(9, 100.0)]) == []
    lock.close()
