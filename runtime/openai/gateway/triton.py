"""Requests to the Triton models over gRPC: JSON in, the texts of JSON objects out as they come.

Owns the channel. Invariant: one ModelStreamInfer call for each request, so cancelling it ends that generation and no
other. Errors are read in band: with the header that turns them into statuses, tritonserver 2.51 dies when a client
cancels while its error is on the way. Must not know HTTP.
"""

from __future__ import annotations

import asyncio
import json
import logging
import struct
import weakref
from collections.abc import AsyncIterator
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gptoss_trt.runtime.openai.errors import RequestError

log = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 5.0
_CHANNEL_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_TRUE, _FALSE = b"\x01", b"\x00"
_LOST = RequestError(
    503, None, "the model's process died with this request in it; it is being restarted", "unavailable"
)


class Answer:
    """The responses to one request, each a list of JSON texts."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._lost = False
        self.closed = False

    async def batches(self) -> AsyncIterator[list[bytes]]:
        """The texts of each response. Ends early after `close`; raises RequestError for the server's error and after
        `lose`."""
        try:
            async for message in self._call:
                if message.error_message:
                    raise error_of_text(message.error_message)
                texts = _texts(message.infer_response)
                if texts:
                    yield texts
        except grpc.RpcError as error:
            if self._lost:
                raise _LOST from error
            if not self.closed:
                raise _error_of_rpc(error) from error
        except asyncio.CancelledError:
            # grpc.aio raises this both for a cancelled task and for a call that `close` or `lose` cancelled.
            if self._lost and not self.closed:
                raise _LOST from None
            if not self.closed:
                self.close()
                raise

    def lose(self) -> None:
        """The model's process died with this request in it: no more responses will come."""
        if not self.closed:
            self._lost = True
            self._call.cancel()

    def close(self) -> None:
        """Cancels what is still running. Safe after the end and more than once."""
        if not self.closed:
            self.closed = True
            self._call.cancel()


class TritonModels:
    """A channel to one server. Made inside the event loop that uses it."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._open: dict[str, weakref.WeakSet[Answer]] = {}  # by model

    def ask(self, model: str, body: bytes, *, stream: bool, request_id: str = "") -> Answer:
        """Sends a JSON body to `model`; `stream` goes before the body's own."""
        request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
        request.inputs.add(name="request", datatype="BYTES", shape=[1])
        request.inputs.add(name="stream", datatype="BOOL", shape=[1])
        request.raw_input_contents.append(struct.pack("<I", len(body)) + body)
        request.raw_input_contents.append(_TRUE if stream else _FALSE)
        answer = Answer(self._stub.ModelStreamInfer(iter([request])))
        self._open.setdefault(model, weakref.WeakSet()).add(answer)
        return answer

    def lose(self, model: str) -> None:
        """Fails the requests that are in `model`, whose process died: Triton would let them wait for ever."""
        answers = [answer for answer in self._open.pop(model, ()) if not answer.closed]
        log.error("the process of model %s died with %d requests in it", model, len(answers))
        for answer in answers:
            answer.lose()

    async def is_ready(self, model: str) -> bool:
        """Whether the server says that it serves `model`; it says so of a model whose process has died, too."""
        try:
            reply = await self._stub.ModelReady(service_pb2.ModelReadyRequest(name=model), timeout=HEALTH_TIMEOUT_S)
        except grpc.RpcError:
            return False
        return bool(reply.ready)

    async def parameter(self, model: str, name: str) -> str:
        """A parameter in a model's configuration; empty when it has none. Raises RequestError."""
        try:
            reply = await self._stub.ModelConfig(service_pb2.ModelConfigRequest(name=model), timeout=HEALTH_TIMEOUT_S)
        except grpc.RpcError as error:
            raise _error_of_rpc(error) from error
        return str(reply.config.parameters[name].string_value)

    async def close(self) -> None:
        await self._channel.close()


def error_of_text(text: str | bytes) -> RequestError:
    """The error that a model's JSON says, or a 503 with the text where the server itself speaks."""
    try:
        error = json.loads(text)["error"]
        return RequestError(error["status"], error["param"], error["message"], error["code"])
    except (ValueError, KeyError, TypeError):
        shown = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return RequestError(503, None, f"the server does not answer this request: {shown}", "unavailable")


def _error_of_rpc(error: Any) -> RequestError:
    status = error.code()
    log.warning("gRPC %s: %s", status.name, error.details())  # the details name addresses: not for clients
    code = {grpc.StatusCode.RESOURCE_EXHAUSTED: 429, grpc.StatusCode.DEADLINE_EXCEEDED: 504}.get(status, 503)
    return RequestError(
        code, None, f"the server behind the gateway cannot be reached: {status.name}", status.name.lower()
    )


def _texts(response: Any) -> list[bytes]:
    """The elements of the one BYTES output: each is its length (uint32, little endian) and its bytes."""
    if not response.raw_output_contents:
        return []
    data = response.raw_output_contents[0]
    texts, place = [], 0
    while place < len(data):
        (size,) = struct.unpack_from("<I", data, place)
        texts.append(data[place + 4 : place + 4 + size])
        place += 4 + size
    return texts
