"""The synchronous gRPC client: one ModelStreamInfer call a request, so that a request's end is its call's end.

Invariant: closing a source cancels its call, which cancels the request on the server. Must not know what a model
answers. The messages and stubs are tritonclient's; its own stream object is not used because it multiplexes requests
over one call, where an error or a cancellation hits them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gptoss_trt.client.answers import Record
from gptoss_trt.client.api import Client
from gptoss_trt.client.errors import ServerError, error_of_text
from gptoss_trt.client.requests import Call
from gptoss_trt.client.tensors import decode_response, encode_request, is_final

# Without this header the server reports a failure as a text inside the stream, without a status code.
STATUS_HEADER = ("triton_grpc_error", "true")
HEALTH_TIMEOUT_S = 5.0
CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 30_000),
]


def metadata_of(headers: Mapping[str, str] | None) -> list[tuple[str, str]]:
    """A caller's headers (for restricted protocols) and the one that asks for status codes, as gRPC metadata."""
    return [STATUS_HEADER, *((name.lower(), value) for name, value in (headers or {}).items())]


def error_of_rpc(error: Any) -> ServerError:
    """The ServerError of a grpc.RpcError (of either flavour: both have code() and details())."""
    code = error.code()
    return error_of_text(code.name if code is not None else "UNKNOWN", error.details() or "no message")


def open_channel(target: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    """A channel to host:port, with TLS where credentials are given."""
    if credentials is None:
        return grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
    return grpc.secure_channel(target, credentials, options=CHANNEL_OPTIONS)


class StreamProgress:
    """What a request's stream has said so far; tells a clean end from one that broke off."""

    def __init__(self) -> None:
        self._responses = 0
        self._marked: bool | None = None

    def accept(self, response: service_pb2.ModelStreamInferResponse) -> Record:
        """The record of a response. Raises ServerError for one that carries an error text."""
        if response.error_message:
            raise error_of_text("UNKNOWN", response.error_message)
        self._responses += 1
        final = is_final(response.infer_response)
        self._marked = self._marked or final if final is not None else self._marked
        return decode_response(response.infer_response)

    def finish(self) -> None:
        """Raises ServerError (DATA_LOSS) when the stream ended before the response that the server marks as final."""
        if self._marked is False or self._responses == 0:
            raise ServerError("DATA_LOSS", f"the stream ended after {self._responses} responses, none of them final")


class GrpcSource:
    """One ModelStreamInfer call."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._closed = False
        self._progress = StreamProgress()

    def receive(self) -> Record | None:
        try:
            return self._progress.accept(next(self._call))
        except StopIteration:
            self._progress.finish()
            return None
        except grpc.RpcError as error:
            if self._closed and error.code() == grpc.StatusCode.CANCELLED:
                return None
            raise error_of_rpc(error) from error

    def close(self) -> None:
        self._closed = True
        self._call.cancel()


class GrpcClient(Client):
    """A client for `host:port`. `headers` go with every call; `credentials` switch TLS on."""

    def __init__(
        self,
        target: str = "127.0.0.1:8001",
        *,
        headers: Mapping[str, str] | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._channel = open_channel(target, credentials)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._metadata = metadata_of(headers)

    def open(self, call: Call) -> GrpcSource:
        requests = iter([encode_request(call)])
        return GrpcSource(self._stub.ModelStreamInfer(requests, metadata=self._metadata, timeout=call.timeout_s))

    def ready(self, model: str | None = None) -> bool:
        try:
            if model is None:
                answer = self._stub.ServerReady(
                    service_pb2.ServerReadyRequest(), metadata=self._metadata, timeout=HEALTH_TIMEOUT_S
                )
            else:
                answer = self._stub.ModelReady(
                    service_pb2.ModelReadyRequest(name=model), metadata=self._metadata, timeout=HEALTH_TIMEOUT_S
                )
        except grpc.RpcError as error:
            raise error_of_rpc(error) from error
        return bool(answer.ready)

    def close(self) -> None:
        self._channel.close()
