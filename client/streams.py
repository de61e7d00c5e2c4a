"""Iterators over a request's answers that cancel the request when they are closed.

Invariant: a stream ends in exactly one way: exhausted, failed with ServerError, or closed by its owner; after the end
it stays ended. Must not know a transport; it pulls records from one and parses them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from gptoss_trt.client.answers import Record
from gptoss_trt.client.errors import ServerError

T = TypeVar("T")
Parse = Callable[[Record], Iterable[T]]


class RecordSource(Protocol):
    """A transport's side of one request. `receive` gives None at a clean end and raises ServerError on failure."""

    def receive(self) -> Record | None: ...

    def close(self) -> None:
        """Cancels what still runs. Safe from any thread, and more than once."""


class AsyncRecordSource(Protocol):
    """The same for asyncio."""

    async def receive(self) -> Record | None: ...

    async def close(self) -> None: ...


class Stream(Generic[T]):
    """A request's answers as they arrive. `close()`, the end of a `with` or garbage collection cancels the rest."""

    def __init__(self, source: RecordSource, parse: Parse[T], request_id: str) -> None:
        self.request_id = request_id
        self._source = source
        self._parse = parse
        self._pending: Iterator[T] = iter(())
        self._ended = False

    def __iter__(self) -> Stream[T]:
        return self

    def __next__(self) -> T:
        while not self._ended:
            try:
                item = next(self._pending, None)
                if item is not None:
                    return item
                record = self._source.receive()
            except ServerError as error:
                self.close()
                raise _with_id(error, self.request_id) from error.__cause__
            if record is None:
                self.close()
            else:
                self._pending = iter(self._parse(record))
        raise StopIteration

    def close(self) -> None:
        """Ends the stream; cancels the request unless it has ended."""
        self._ended = True
        self._source.close()

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._source.close()


class AsyncStream(Generic[T]):
    """`Stream` for asyncio: `async for`, `async with`, `aclose()`. A cancelled task cancels the request."""

    def __init__(self, source: AsyncRecordSource, parse: Parse[T], request_id: str) -> None:
        self.request_id = request_id
        self._source = source
        self._parse = parse
        self._pending: Iterator[T] = iter(())
        self._ended = False

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        while not self._ended:
            try:
                item = next(self._pending, None)
                if item is not None:
                    return item
                record = await self._source.receive()
            except ServerError as error:
                await self.aclose()
                raise _with_id(error, self.request_id) from error.__cause__
            except BaseException:  # a cancelled task, whatever way it was cancelled, must not leave the request running
                await self.aclose()
                raise
            if record is None:
                await self.aclose()
            else:
                self._pending = iter(self._parse(record))
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Ends the stream; cancels the request unless it has ended."""
        self._ended = True
        await self._source.close()

    async def __aenter__(self) -> AsyncStream[T]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _with_id(error: ServerError, request_id: str) -> ServerError:
    return ServerError(error.status, error.message, request_id=error.request_id or request_id, detail=error.detail)
