"""One tritonserver process: its options, its command line, its life from start to drained end.

Invariant: everything that a server writes lies in its own folder of the state folder (mode 0700), and nothing of it is
left in /dev/shm when `stop` returns. Closed by default: loopback addresses, and repository control, shared memory,
trace and log settings behind a random key. Must not know requests, tokens or weights.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal

import psutil
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from gptoss_trt.build_engine.spec import Manifest, SpecError
from gptoss_trt.client.protocol import did_you_mean
from gptoss_trt.runtime.engine.location import EngineHome
from gptoss_trt.runtime.engine.options import EngineOptions
from gptoss_trt.runtime.engine.script import SCRIPT_NAME
from gptoss_trt.runtime.launch import settings
from gptoss_trt.runtime.launch.addresses import for_triton_http, in_url, literal_address, take_ports
from gptoss_trt.runtime.launch.repository import assemble_repository
from gptoss_trt.runtime.launch.server_binary import (
    LaunchError,
    ServerBinary,
    assemble_backends,
    check_stub,
    find_server,
    server_environment,
)
from gptoss_trt.runtime.triton_models.pbtxt import model_names
from gptoss_trt.runtime.triton_models.succession import FOLDER as INSTANCES

ADMIN_HEADER = "gptoss-admin-key"
RESTRICTED_APIS = ("model-repository", "shared-memory", "trace", "logging")
FOREVER_S = 10**6  # tritonserver crashes (status 139) when its own exit timeout passes; ours ends it cleanly before
KILL_GRACE_S = 5.0
PR_SET_PDEATHSIG = 1  # linux/prctl.h
POLL_S = 0.1
SHM_FOLDER = Path("/dev/shm")
SHM_RECORD = "shm-prefix"
# What the python backend logs when it will wait for a stub for ever.
ENGINE_MODULE = "gptoss_trt.runtime.engine.process"
STUB_FAILURES = ("Failed to preinitialize Python stub", "error while loading shared libraries")


@dataclass(frozen=True)
class ServerOptions:
    """What a launch may choose. Port 0 takes a free one. `models` None loads every model of the repository."""

    engine_dir: Path
    state_dir: Path | None = None
    address: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    models: tuple[str, ...] | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)  # written into every model's config.pbtxt
    decoupled: bool = True
    instances: int = 1  # processes of each model that talks to the engine
    drain_s: float = 30.0
    verbose: int = 0
    server_arguments: tuple[str, ...] = ()
    otlp_url: str = ""  # where server and engine send their spans (OTLP over HTTP)
    trace_rate: int = 1  # one request of so many is traced
    engine: EngineOptions = field(default_factory=EngineOptions)


class TritonServer:
    """A running tritonserver. Made by `start_server`."""

    def __init__(self, options: ServerOptions, folder: Path, lock: IO[str], ports: tuple[int, int, int]) -> None:
        self.options = options
        self.folder = folder
        self.admin_key = secrets.token_urlsafe(24)
        self.http_port, self.grpc_port, self.metrics_port = ports
        self.log_path = folder / "tritonserver.log"
        self._lock = lock
        self._shm_prefix = f"gptoss_{os.getpid()}_{secrets.token_hex(4)}_"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def http_url(self) -> str:
        return f"http://{in_url(self.options.address)}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"{in_url(self.options.address)}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        return f"http://{in_url(self.options.address)}:{self.metrics_port}/metrics"

    def command(self, binary: ServerBinary, repository: Path, backends: Path) -> list[str]:
        """The command line of the server."""
        restricted = f"{','.join(RESTRICTED_APIS)}:{ADMIN_HEADER}={self.admin_key}"
        options = self.options
        loads = ["*"] if options.models is None else list(options.models)
        return [
            str(binary.path),
            f"--model-repository={repository}",
            f"--backend-directory={backends}",
            f"--backend-config=python,shm-region-prefix-name={self._shm_prefix}",
            "--model-control-mode=explicit",
            *(f"--load-model={name}" for name in loads),
            "--disable-auto-complete-config",
            f"--exit-timeout-secs={FOREVER_S}",
            f"--http-address={for_triton_http(options.address)}",
            f"--http-port={self.http_port}",
            f"--grpc-address={in_url(options.address)}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-address={for_triton_http(options.address)}",
            f"--metrics-port={self.metrics_port}",
            f"--http-restricted-api={restricted}",
            f"--grpc-restricted-protocol={restricted}",
            f"--log-verbose={options.verbose}",
            *self._trace_arguments(),
            *options.server_arguments,
        ]

    def _trace_arguments(self) -> list[str]:
        if not self.options.otlp_url:
            return []
        settings = ("mode=opentelemetry", "level=TIMESTAMPS", f"rate={self.options.trace_rate}")
        return [*(f"--trace-config={text}" for text in settings),
                f"--trace-config=opentelemetry,url={self.options.otlp_url}"]  # fmt: skip

    def start(self, binary: ServerBinary) -> None:
        """Assembles the folder and starts the process; its output goes to `log_path`."""
        backends = assemble_backends(binary, self.folder / "backends")
        parameters = {
            "engine_dir": str(self.options.engine_dir.resolve()),
            "state_dir": str(self.folder),
            **self.options.parameters,
        }
        repository = assemble_repository(
            self.folder / "models", parameters, decoupled=self.options.decoupled, instances=self.options.instances
        )
        (self.folder / SHM_RECORD).write_text(self._shm_prefix, encoding="ascii")
        key_file = self.folder / "admin.key"
        key_file.touch(mode=0o600)
        key_file.write_text(self.admin_key, encoding="ascii")
        self.options.engine.write(EngineHome.of(self.options.engine_dir, self.folder).options)
        environment = server_environment(binary)
        environment["GPTOSS_TRT_STATE_DIR"] = str(self.folder)
        if self.options.otlp_url:
            environment["GPTOSS_TRT_OTLP_URL"] = self.options.otlp_url
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self.command(binary, repository, backends),
                env=environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a terminal's Ctrl-C reaches the launcher alone, which drains
                preexec_fn=end_with_parent,  # noqa: PLW1509 - one system call, which takes no lock
            )

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Waits until the server answers its readiness endpoint. Raises LaunchError with the log's end when the server
        ends first, a stub cannot start or the time is up."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._raise_if_dead()
            try:
                with urllib.request.urlopen(f"{self.http_url}/v2/health/ready", timeout=2) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass  # not listening yet: that is what is waited for
            time.sleep(POLL_S)
        raise LaunchError(f"tritonserver was not ready after {timeout_s:.0f} s; {self.log_tail()}")

    def first_answer(self, timeout_s: float = 120.0) -> float:
        """Asks for one token through `ensemble` and waits for the answer; returns the seconds it took. Raises
        LaunchError with the server's words when it fails."""
        body = json.dumps({"text_input": "Hello", "max_tokens": 1, "stream": False}).encode()
        request = urllib.request.Request(
            f"{self.http_url}/v2/models/ensemble/generate", body, {"content-type": "application/json"}
        )
        start = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                answer.read()
        except urllib.error.HTTPError as error:
            raise LaunchError(f"the first request failed: {error.read().decode(errors='replace')[:1000]}") from error
        except OSError as error:
            raise LaunchError(f"the first request failed: {error}; {self.log_tail()}") from error
        return time.monotonic() - start

    def control(self, model: str, action: Literal["load", "unload"], timeout_s: float = 60.0) -> None:
        """Asks for `action` ("load" or "unload") of `model` with the key, over gRPC: a reload asked for over HTTP can
        lose responses of other HTTP streams (seen on 2.51). Raises LaunchError with the server's words."""
        headers = {f"triton-grpc-protocol-{ADMIN_HEADER}": self.admin_key}
        client = grpcclient.InferenceServerClient(self.grpc_url)
        try:
            if action == "load":
                client.load_model(model, headers=headers, client_timeout=timeout_s)
            else:
                client.unload_model(model, headers=headers, client_timeout=timeout_s)
        except InferenceServerException as error:
            raise LaunchError(f"{action} {model}: {error.message()}") from error
        finally:
            client.close()

    def claims_ready(self, model: str, timeout_s: float = 5.0) -> bool:
        """Whether the server says that it serves `model`, which it says of one whose stub has died, too. False for a
        model that is unloaded, being loaded, or when the server does not answer."""
        client = grpcclient.InferenceServerClient(self.grpc_url)
        try:
            return bool(client.is_model_ready(model, client_timeout=timeout_s))
        except InferenceServerException:
            return False
        finally:
            client.close()

    def stop(self, drain_s: float | None = None) -> int:
        """Drains: SIGTERM, then after `drain_s` (the options' unless given) what is left is cancelled by ending the
        engine. Removes the shared memory and returns 0, or the server's own status if it had died before."""
        process = self.process
        if process is None:
            return 0
        status = process.poll()
        if status is None:
            process.send_signal(signal.SIGTERM)
            if not self._wait(self.options.drain_s if drain_s is None else drain_s):
                self._end_engine()
                if not self._wait(KILL_GRACE_S):
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            status = 0
        self.clean()
        if self.options.http_port == 0:
            shutil.rmtree(self.folder, ignore_errors=True)  # named by a port that nobody will ask for again
        return status

    def clean(self) -> None:
        """Ends what the server left behind (stubs, engine) and removes its shared-memory regions; idempotent."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):  # the whole group is gone, as it should be
                os.killpg(self.process.pid, signal.SIGKILL)
        self._end_engine()
        _remove_regions(self.folder)
        self._lock.close()  # and with it the lock

    def log_tail(self, lines: int = 15) -> str:
        """The end of the server's log, for an error message."""
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return f"{self.log_path} ends:\n" + "\n".join(text.splitlines()[-lines:])

    def _raise_if_dead(self) -> None:
        assert self.process is not None
        status = self.process.poll()
        if status is not None:
            raise LaunchError(f"tritonserver ended with status {status}; {self.log_tail()}")
        for line in self.log_path.read_text(errors="replace").splitlines():
            if any(failure in line for failure in STUB_FAILURES):
                raise LaunchError(f"a model's stub does not start: {line.strip()} (log: {self.log_path})")

    def _wait(self, timeout_s: float) -> bool:
        assert self.process is not None
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _end_engine(self) -> None:
        """Asks the engine processes of this server's folder to end; their streams then end with an error."""
        homes = str(self.folder / "engines")
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it ended between the listing and the look
                words = process.cmdline()
                if ENGINE_MODULE in words and any(word.startswith(homes) for word in words):
                    process.terminate()


def end_with_parent() -> None:
    """In a child before it runs: asks the kernel for a SIGTERM when the launcher dies, so that a launcher killed with
    -9 leaves no server behind that nobody watches."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def start_server(options: ServerOptions, *, ready_timeout_s: float = 120.0) -> TritonServer:
    """Starts tritonserver over the engine and waits until it is ready. The caller stops it. Raises LaunchError when
    the binary, its libraries, a port or the folder cannot be had, and SettingsError for a bad environment variable."""
    check_engine(options.engine_dir)
    _check_models(options.models)
    binary = find_server()
    check_stub(binary)
    options = replace(options, address=literal_address(options.address))
    wanted = (("HTTP", options.http_port), ("gRPC", options.grpc_port), ("metrics", options.metrics_port))
    http_port, grpc_port, metrics_port = take_ports(options.address, wanted)
    folder, lock = _take_folder(options, http_port)
    server = TritonServer(options, folder, lock, (http_port, grpc_port, metrics_port))
    try:
        server.start(binary)
        server.wait_ready(ready_timeout_s)
    except BaseException:
        server.clean()
        raise
    return server


def check_engine(engine_dir: Path) -> None:
    """Raises LaunchError for an engine that cannot be served, before a server is started that would only repeat it."""
    if (engine_dir / SCRIPT_NAME).is_file():
        return
    try:
        world = Manifest.read(engine_dir).mapping.world
    except SpecError as error:
        raise LaunchError(str(error)) from error
    if world != 1:
        raise LaunchError(
            f"{engine_dir} was built for {world} ranks, and the engine process runs one: "
            "build without --tp, --ep and --dp"
        )


def _check_models(models: tuple[str, ...] | None) -> None:
    for name in models or ():
        if name not in model_names():
            raise LaunchError(
                f"there is no model {name!r}{did_you_mean(name, model_names())}; there are: {', '.join(model_names())}"
            )


def _take_folder(options: ServerOptions, http_port: int) -> tuple[Path, IO[str]]:
    folder = settings.state_dir(options.state_dir) / f"server-{http_port}"
    folder.mkdir(mode=0o700, exist_ok=True)
    lock = (folder / "lock").open("w", encoding="ascii")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise LaunchError(f"{folder} belongs to a server that runs; choose another port or state folder") from error
    _remove_regions(folder)
    # Files of instances too: this server's process id may be that of an earlier one, of other instances.
    for leftover in ("models", "backends", INSTANCES):
        shutil.rmtree(folder / leftover, ignore_errors=True)
    return folder, lock


def _remove_regions(folder: Path) -> None:
    """Removes the shared memory of the server that last used `folder`, one that was killed included."""
    record = folder / SHM_RECORD
    if record.is_file():
        prefix = record.read_text(encoding="ascii")
        for region in SHM_FOLDER.glob(f"{prefix}*") if prefix else ():
            region.unlink(missing_ok=True)
        record.unlink()


def describe(server: TritonServer) -> dict[str, Any]:
    """What `serve --json` prints: the addresses and the folder."""
    return {
        "http": server.http_url,
        "grpc": server.grpc_url,
        "metrics": server.metrics_url,
        "state": str(server.folder),
        "log": str(server.log_path),
        "python": sys.version.split()[0],
    }
