"""The frame of the models that talk to the engine process: set-up, requests in, refusals out, tear-down.

Invariant: `execute` never blocks on the engine, and every request gets an answer or an error. What a request means is
the subclass's. Importable in the python backend's stub only.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gptoss_trt.build_engine.spec import MANIFEST_NAME, Manifest
from gptoss_trt.build_engine.vocabulary import VOCABULARY_SIZE
from gptoss_trt.client import protocol
from gptoss_trt.runtime.engine.client import EngineClient, EngineUnavailableError
from gptoss_trt.runtime.engine.messages import Submit
from gptoss_trt.runtime.engine.options import EngineOptions
from gptoss_trt.runtime.engine.script import ScriptedEngine
from gptoss_trt.runtime.launch import settings
from gptoss_trt.runtime.launch.parent_watch import ParentWatch
from gptoss_trt.runtime.triton_models import succession, triton_io
from gptoss_trt.runtime.triton_models.answers import Answer
from gptoss_trt.runtime.triton_models.delivery import Delivery
from gptoss_trt.runtime.triton_models.inputs import RefusalError
from gptoss_trt.runtime.triton_models.metrics import MetricsPublisher
from gptoss_trt.runtime.triton_models.succession import Succession, leave_process
from gptoss_trt.runtime.triton_models.triton_io import TritonResponder

log = logging.getLogger(__name__)

# Five threads share Python's lock, and the one that starts requests must not wait 5 ms for it: the first token of the
# last of 64 streams came after 57 ms instead of 158 (scripted engine, steps of 5 ms, 2 busy cores).
LOCK_SWITCH_S = 0.0005

Jobs = list[tuple[Submit, Sequence[Answer]]]


class EngineModel(ABC):
    """One instance of a Triton model over an engine process. `spec_name` is the model's name in the wire table."""

    def __init__(self, spec_name: str, arguments: Mapping[str, str]) -> None:
        logging.basicConfig(level=settings.read("GPTOSS_TRT_LOG_LEVEL"), format="%(levelname)s %(name)s: %(message)s")
        sys.setswitchinterval(LOCK_SWITCH_S)
        self.spec = protocol.model(spec_name)
        self.parameters = triton_io.parameters(self.spec, arguments)
        self.decoupled = triton_io.is_decoupled(arguments)
        self.engine_dir = _engine_dir(str(self.parameters["engine_dir"]))
        self.vocab_size = _vocab_size(self.engine_dir)
        state_dir = settings.state_dir(
            Path(str(self.parameters["state_dir"])) if self.parameters["state_dir"] else None
        )
        self.client = EngineClient(self.engine_dir, state_dir=state_dir)
        self.delivery = Delivery(self.client)
        self._metrics = None
        if self.parameters["metrics"] and arguments["model_instance_name"].endswith("_0_0"):  # one instance of several
            self._metrics = MetricsPublisher(self.client.stats, arguments["model_name"], arguments["model_version"])
        self._server_watch = ParentWatch(os.getppid())  # no grace: an orderly end would need the server
        self._succession = Succession(
            state_dir / succession.FOLDER, arguments["model_instance_name"], self.delivery.is_idle, leave_process
        )
        self._unique = f"{secrets.token_hex(6)}-"
        self._count = itertools.count()

    @abstractmethod
    def start(self, request: Any, responder: TritonResponder) -> None:
        """Reads one request and starts it. Raises RefusalError for one that is not run."""

    def execute(self, requests: Sequence[Any]) -> None:
        """Starts every request; the answers come from the delivery's thread, through each one's response sender."""
        for request in requests:
            responder = self.responder(request)
            try:
                triton_io.refuse_unknown_parameters(self.spec, request)
                self.start(request, responder)
            except RefusalError as error:
                responder.fail(error)
            except Exception as error:
                log.exception("request %r could not be started", request.request_id())
                responder.fail(RefusalError(f"{self.spec.name} failed: {error}", "INTERNAL"))

    def responder(self, request: Any) -> TritonResponder:
        """The way back to a request."""
        return TritonResponder(request, decoupled=self.decoupled)

    def finalize(self) -> None:
        """Ends what is open and the connection; the engine leaves when its last connection has gone."""
        if self._metrics is not None:
            self._metrics.close()
        self.client.close()
        self.delivery.close()
        self._server_watch.close()
        self._succession.close()

    def engine_id(self, triton_id: str = "") -> str:
        """An id for one request to the engine: the Triton request's while it is free, so that a stop request which
        reaches another model's instance finds it; else one that nobody can guess."""
        if triton_id and not self.delivery.is_open(triton_id):
            return triton_id
        return f"{self._unique}{next(self._count)}"

    def require_one_response(self, batch_size: int, sequences: int, streaming: bool) -> None:
        """Raises RefusalError where a model that is not decoupled would have to answer more than once."""
        if self.decoupled:
            return
        if streaming:
            raise RefusalError(
                f"{self.spec.name} is served without streaming here (it is not decoupled)", "UNSUPPORTED"
            )
        if batch_size * sequences != 1:
            raise RefusalError(
                f"{batch_size} prompts x {sequences} sequences need {batch_size * sequences} responses; "
                f"{self.spec.name} gives one, as it is not decoupled here",
                "UNSUPPORTED",
            )


def context_tokens(engine_dir: Path, client: EngineClient) -> int:
    """Tokens that prompt and answer of one request may have together: the smallest of the model's context, the options'
    and what the KV cache holds. Asks the engine; raises RefusalError while it does not answer."""
    if (engine_dir / MANIFEST_NAME).is_file():
        limits = [Manifest.read(engine_dir).model.max_context]
    else:
        limits = [ScriptedEngine.read(engine_dir).max_context]
    limits.append(EngineOptions.read(client.home.options).max_context or limits[0])
    try:
        pool = client.stats()["kv"]["full"]
    except EngineUnavailableError as error:
        raise RefusalError(str(error), "UNAVAILABLE") from error
    return int(min(*limits, pool["max"] * pool["tokens_per"]))


def _engine_dir(parameter: str) -> Path:
    if parameter:
        return Path(parameter)
    path = settings.read("GPTOSS_TRT_ENGINE")
    if path is None:
        raise RefusalError(
            "no engine is named: set the parameter engine_dir in config.pbtxt or the environment variable "
            "GPTOSS_TRT_ENGINE"
        )
    assert isinstance(path, Path)
    return path


def _vocab_size(engine_dir: Path) -> int:
    """Ids of the engine's vocabulary; a scripted engine, which has no manifest, takes Harmony's."""
    return Manifest.read(engine_dir).model.vocab_size if (engine_dir / MANIFEST_NAME).is_file() else VOCABULARY_SIZE
