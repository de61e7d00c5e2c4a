"""Between Triton's Python module and numpy: request tensors in, response tensors and errors out.

Invariant: nothing is asked of a request's response sender once its last response is on the way, because the server
frees what the sender points to. Importable in the python backend's stub only. Must not know models or engines.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from gptoss_trt.client.protocol import Model, did_you_mean
from gptoss_trt.runtime.triton_models.answers import Arrays
from gptoss_trt.runtime.triton_models.inputs import RefusalError

# What Triton's protocols define as request parameters of their own; /generate passes the request's id as one, and the
# stop request of upstream's inflight_batcher_llm_client carries `Streaming`.
SERVER_PARAMETERS = frozenset(
    {"id", "sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "Streaming"}
)
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def request_arrays(request: Any) -> Arrays:
    """The request's input tensors by name."""
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def refuse_unknown_parameters(model: Model, request: Any) -> None:
    """Raises RefusalError for a request parameter that nothing reads: HTTP's /generate makes one of every key that is
    no input, and a misspelled option must not be dropped in silence."""
    given = json.loads(request.parameters() or "{}")
    unknown = [name for name in given if name not in SERVER_PARAMETERS and not name.startswith("triton_")]
    if unknown:
        names = [tensor.name for tensor in model.inputs]
        raise RefusalError(f"{model.name} has no input {unknown[0]!r}{did_you_mean(unknown[0], names)}")


def response(arrays: Mapping[str, Any]) -> Any:
    """An InferenceResponse of these tensors."""
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in arrays.items()])


def trace_parent(request: Any) -> str:
    """The W3C traceparent of the span that the server opened for this request; empty when it traces nothing."""
    context = request.trace().get_context()  # JSON of propagation headers in OpenTelemetry mode, else None
    return str(json.loads(context).get("traceparent", "")) if context else ""


def error_response(error: RefusalError) -> Any:
    """An InferenceResponse that carries the error with its Triton code."""
    return pb_utils.InferenceResponse(
        [], error=pb_utils.TritonError(str(error), getattr(pb_utils.TritonError, error.code))
    )


def parameters(model: Model, arguments: Mapping[str, str]) -> dict[str, str | bool]:
    """The parameters of a model instance's config. Raises ProtocolError for an unknown or malformed one."""
    config = json.loads(arguments["model_config"])
    return model.parse_parameters({key: value["string_value"] for key, value in config.get("parameters", {}).items()})


def is_decoupled(arguments: Mapping[str, str]) -> bool:
    """Whether a request may get several responses."""
    return bool(pb_utils.using_decoupled_model_transaction_policy(json.loads(arguments["model_config"])))


class TritonResponder:
    """Answers one request. `send` and `fail` are called by one thread, `is_cancelled` by another."""

    def __init__(self, request: Any, *, decoupled: bool) -> None:
        self.trace = trace_parent(request)
        self._decoupled = decoupled
        self._sender = request.get_response_sender()
        self._wanted = frozenset(request.requested_output_names())
        self._lock = threading.Lock()
        self._done = False

    def send(self, arrays: Arrays, *, final: bool) -> None:
        """One response with those of the tensors that the client asked for."""
        self._send(response({name: array for name, array in arrays.items() if name in self._wanted}), final)

    def fail(self, error: RefusalError) -> None:
        """An error as the last response. A client that has gone away gets none where none is due: the gRPC front end of
        2.51 can die of a write to a stream that is being cancelled."""
        if error.client_is_gone and self._decoupled:
            self.close()
        else:
            self._send(error_response(error), True)

    def close(self) -> None:
        """Ends the request without tensors: no response where the model is decoupled, an empty one elsewhere."""
        if self._decoupled:
            with self._lock:
                self._done = True
                self._sender.send(flags=FINAL)
        else:
            self._send(response({}), True)

    def _send(self, message: Any, final: bool) -> None:
        if not final:
            self._sender.send(message)
            return
        with self._lock:
            self._done = True
            self._sender.send(message, flags=FINAL)

    def is_cancelled(self) -> bool:
        with self._lock:
            return not self._done and bool(self._sender.is_cancelled())
