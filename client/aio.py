"""The asyncio clients, gRPC and HTTP: the same calls, sources and errors as the synchronous ones.

Invariant: a cancelled task leaves no request running. Must not know what a model answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any, TypeVar

import grpc
import httpx
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gptoss_trt.client.answers import Record
from gptoss_trt.client.api import AsyncClient
from gptoss_trt.client.errors import ServerError
from gptoss_trt.client.grpc_client import (
    CHANNEL_OPTIONS,
    HEALTH_TIMEOUT_S,
    StreamProgress,
    error_of_rpc,
    metadata_of,
)
from gptoss_trt.client.http_client import (
    error_of_response,
    error_of_transport,
    generate_path,
    record_of_event,
    timeouts,
)
from gptoss_trt.client.requests import Call
from gptoss_trt.client.sse import EventReader
from gptoss_trt.client.tensors import encode_request, generate_body

T = TypeVar("T")


class AsyncGrpcSource:
    """One ModelStreamInfer call."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._responses = aiter(call)
        self._closed = False
        self._progress = StreamProgress()

    async def receive(self) -> Record | None:
        try:
            return self._progress.accept(await anext(self._responses))
        except StopAsyncIteration:
            self._progress.finish()
            return None
        except grpc.RpcError as error:
            raise error_of_rpc(error) from error
        except asyncio.CancelledError:
            # grpc.aio raises this both for a cancelled task and for a call cancelled by close().
            if self._closed:
                return None
            raise

    async def close(self) -> None:
        self._closed = True
        self._call.cancel()


class AsyncGrpcClient(AsyncClient):
    """A client for `host:port`; make it inside the event loop that uses it."""

    def __init__(
        self,
        target: str = "127.0.0.1:8001",
        *,
        headers: Mapping[str, str] | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, options=CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._metadata = metadata_of(headers)

    def open(self, call: Call) -> AsyncGrpcSource:
        requests = iter([encode_request(call)])
        return AsyncGrpcSource(self._stub.ModelStreamInfer(requests, metadata=self._metadata, timeout=call.timeout_s))

    async def ready(self, model: str | None = None) -> bool:
        try:
            if model is None:
                answer = await self._stub.ServerReady(
                    service_pb2.ServerReadyRequest(), metadata=self._metadata, timeout=HEALTH_TIMEOUT_S
                )
            else:
                answer = await self._stub.ModelReady(
                    service_pb2.ModelReadyRequest(name=model), metadata=self._metadata, timeout=HEALTH_TIMEOUT_S
                )
        except grpc.RpcError as error:
            raise error_of_rpc(error) from error
        return bool(answer.ready)

    async def close(self) -> None:
        await self._channel.close()


class AsyncHttpSource:
    """One POST to /generate or /generate_stream, sent when the first record is asked for."""

    def __init__(self, client: httpx.AsyncClient, call: Call) -> None:
        path = generate_path(call)
        self._client = client
        self._streamed = path.endswith("_stream")
        self._request = client.build_request("POST", path, json=generate_body(call), timeout=timeouts(call.timeout_s))
        self._deadline = None if call.timeout_s is None else time.monotonic() + call.timeout_s
        self._response: httpx.Response | None = None
        self._records: AsyncIterator[Record] | None = None

    async def receive(self) -> Record | None:
        if self._records is None:
            self._records = self._read()
        try:
            return await self._before_deadline(anext(self._records))
        except StopAsyncIteration:
            return None
        except (httpx.TransportError, httpx.StreamError) as error:
            raise error_of_transport(error) from error

    async def _before_deadline(self, record: Awaitable[T]) -> T:
        if self._deadline is None:
            return await record
        try:
            return await asyncio.wait_for(record, max(0.0, self._deadline - time.monotonic()))
        except asyncio.TimeoutError as error:
            raise ServerError("DEADLINE_EXCEEDED", "the request's time ran out") from error

    async def _read(self) -> AsyncIterator[Record]:
        self._response = response = await self._client.send(self._request, stream=True)
        if response.status_code != httpx.codes.OK or not self._streamed:
            text = (await response.aread()).decode("utf-8", "replace")
            if response.status_code != httpx.codes.OK:
                raise error_of_response(response.status_code, text)
            yield record_of_event(text)
            return
        reader = EventReader()
        async for data in response.aiter_bytes():
            for event in reader.push(data):
                yield record_of_event(event)
        for event in reader.finish():
            yield record_of_event(event)

    async def close(self) -> None:
        if self._response is not None:
            await self._response.aclose()


class AsyncHttpClient(AsyncClient):
    """A client for a base URL; `transport` replaces the network in tests."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        headers: Mapping[str, str] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.AsyncClient(base_url=url, headers=dict(headers or {}), transport=transport, limits=limits)

    def open(self, call: Call) -> AsyncHttpSource:
        return AsyncHttpSource(self._client, call)

    async def ready(self, model: str | None = None) -> bool:
        path = "/v2/health/ready" if model is None else f"/v2/models/{model}/ready"
        try:
            answer = await self._client.get(path, timeout=HEALTH_TIMEOUT_S)
        except httpx.TransportError as error:
            raise error_of_transport(error) from error
        return answer.status_code == httpx.codes.OK

    async def close(self) -> None:
        await self._client.aclose()
