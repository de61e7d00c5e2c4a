"""The demo from nothing to a server that answers: packed weights -> checkpoint -> engine -> tritonserver.

Invariant: what an earlier run made is used again when it is whole and of this version, and made anew otherwise.
Must not know what is asked or answered.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gptoss_trt import __version__
from gptoss_trt.build_engine.builder import BuildOptions, build_engine
from gptoss_trt.build_engine.demo import PACKED_HEAD, PACKED_WEIGHTS
from gptoss_trt.build_engine.demo.expand import expand_demo_checkpoint
from gptoss_trt.build_engine.demo.head import expand_demo_head
from gptoss_trt.runtime.launch.tritonserver import ServerOptions, TritonServer, start_server

STAMP = "made-by"
Log = Callable[[str], None]


@contextmanager
def _timed(log: Log, what: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    log(f"{what}: {time.monotonic() - start:.1f} s")


def demo_engine(folder: Path, log: Log) -> Path:
    """The demo's engine directory under `folder`, built when it is not there, with its EAGLE-3 head as head/ beside it.
    Returns its path."""
    engine, stamp = folder / "engine", folder / STAMP
    made_of = [path.stat() for path in (PACKED_WEIGHTS, PACKED_HEAD)]
    mark = " ".join([__version__, *(f"{one.st_size} {one.st_mtime_ns}" for one in made_of)]) + "\n"
    if engine.is_dir() and stamp.is_file() and stamp.read_text() == mark:
        log(f"engine: {engine} from an earlier run")
        return engine
    folder.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    for old in (engine, folder / "checkpoint"):
        shutil.rmtree(old, ignore_errors=True)
    with _timed(log, "checkpoint expanded"):
        checkpoint = expand_demo_checkpoint(folder / "checkpoint")
    with _timed(log, "engine built"):
        build_engine(checkpoint, engine, BuildOptions())
    expand_demo_head(folder / "head")
    stamp.write_text(mark)
    return engine


def demo_server(folder: Path, log: Log) -> TritonServer:
    """Starts tritonserver over the demo's engine on free loopback ports. The caller stops it."""
    engine = demo_engine(folder, log)
    options = ServerOptions(engine, http_port=0, grpc_port=0, metrics_port=0, models=("chat", "ensemble"))
    with _timed(log, "tritonserver ready"):
        server = start_server(options)
    with _timed(log, "first answer"):
        try:
            server.first_answer()
        except BaseException:
            server.stop(drain_s=0)
            raise
    return server
