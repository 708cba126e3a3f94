"""A small HTTP/1.1 server on a thread of its own: asyncio's streams, and h11 for the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import h11

from lightrl.rollout.endpoint.protocol import ApiError

_READ = 1 << 16
_REQUEST_SECONDS = 60.0  # between two pieces of a request
_IDLE_SECONDS = 900.0  # between two requests of a connection
_DISCARDED = 64 << 20  # of a body that is refused: a client reads the answer only when it has sent what it wants


@dataclass(frozen=True, kw_only=True)
class Head:
    """A request without its body."""

    method: str
    path: str
    headers: dict[str, str]
    """Names in lower case."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An answer: JSON, or events one by one (SSE)."""

    body: Any = None
    status: int = 200
    events: AsyncIterator[str] | None = None
    on_lost: Callable[[], None] = field(default=lambda: None)
    """Called where the client was gone before it had all of it."""


class HttpServer:
    """Listens from the start and answers from `start` to `close`.

    `check` looks at a request's head before its body is read and raises ApiError; so does `answer`, which is cancelled
    when the client hangs up.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        check: Callable[[Head], None],
        answer: Callable[[Head, bytes], Coroutine[Any, Any, Reply]],
        max_body: int,
    ) -> None:
        """OSError where the address cannot be listened on."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=1024)
        self.port = int(self._socket.getsockname()[1])
        self._check, self._answer, self._max_body = check, answer, max_body
        self._loop = asyncio.new_event_loop()
        self._connections: set[asyncio.Task[None]] = set()
        self._thread: threading.Thread | None = None
        self._stopping = asyncio.Event()

    def start(self) -> None:
        """Begin to answer."""
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="lightrl-endpoint", daemon=True)
        self._thread.start()
        started.result()

    def close(self) -> None:
        """End all connections and free the port; idempotent."""
        if self._thread is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(timeout=10.0)
            self._thread = None
        elif not self._loop.is_closed():
            self._loop.close()
        self._socket.close()

    def _run(self, started: Future[None]) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve(started))
        finally:
            self._loop.close()

    async def _serve(self, started: Future[None]) -> None:
        server = await asyncio.start_server(self._accept, sock=self._socket, backlog=1024)
        started.set_result(None)
        await self._stopping.wait()
        server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._connection(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await _Connection(reader, writer, self._check, self._answer, self._max_body).run()
        except (OSError, TimeoutError, h11.ProtocolError):  # the client is gone, or too slow
            return
        finally:
            writer.close()


class _Connection:
    """One client: its requests one after the other."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        check: Callable[[Head], None],
        answer: Callable[[Head, bytes], Coroutine[Any, Any, Reply]],
        max_body: int,
    ) -> None:
        self._reader, self._writer = reader, writer
        self._check, self._answer, self._max_body = check, answer, max_body
        self._http = h11.Connection(h11.SERVER)

    async def run(self) -> None:
        while await self._exchange():
            self._http.start_next_cycle()

    async def _exchange(self) -> bool:
        """One request and its answer; whether another may follow."""
        try:
            request = await self._next(_IDLE_SECONDS)
            if not isinstance(request, h11.Request):
                return False
            names = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in request.headers}
            path = request.target.decode("latin-1").partition("?")[0]
            head = Head(method=request.method.decode("ascii"), path=path, headers=names)
            self._check(head)
            body = await self._body(head)
        except ApiError as error:
            await self._refuse(error)
            return False
        except h11.RemoteProtocolError as error:
            status = error.error_status_hint
            await self._refuse(ApiError(status, f"this is no HTTP request: {error}", code="invalid_http"))
            return False
        await self._while_connected(self._respond(head, body))
        return self._http.our_state is h11.DONE and self._http.their_state is h11.DONE

    async def _next(self, seconds: float = _REQUEST_SECONDS) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            if self._http.they_are_waiting_for_100_continue:
                await self._send(h11.InformationalResponse(status_code=100, headers=[]))
            async with asyncio.timeout(seconds):
                self._http.receive_data(await self._reader.read(_READ))
        return event

    async def _body(self, head: Head) -> bytes:
        too_long = ApiError(413, f"the body is longer than {self._max_body} bytes", code="request_too_large")
        length = head.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_body:
            raise too_long
        parts, size = [], 0
        while isinstance(event := await self._next(), h11.Data):
            parts.append(bytes(event.data))
            size += len(event.data)
            if size > self._max_body:
                raise too_long
        return b"".join(parts)

    async def _respond(self, head: Head, body: bytes) -> None:
        try:
            reply = await self._answer(head, body)
        except ApiError as error:
            reply = Reply(body=error.body(), status=error.status)
        try:
            if reply.events is None:
                await self._write(reply.status, json.dumps(reply.body).encode())
            else:
                await self._stream(reply.events)
        except (OSError, asyncio.CancelledError):
            reply.on_lost()
            raise

    async def _while_connected(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it, or cancel it when the client hangs up. What it sends meanwhile is its next request."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                watch = asyncio.ensure_future(self._reader.read(_READ))
                try:
                    await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
                    if not watch.done():
                        break
                    if not (data := watch.result()):
                        raise ConnectionResetError("the client hung up")
                    self._http.receive_data(data)
                    if len(self._http.trailing_data[0]) > self._max_body:
                        raise ConnectionResetError("the client sends without waiting for answers")
                finally:
                    watch.cancel()
                    await asyncio.gather(watch, return_exceptions=True)
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _stream(self, events: AsyncIterator[str]) -> None:
        headers = [("Content-Type", "text/event-stream"), ("Cache-Control", "no-cache")]
        await self._send(h11.Response(status_code=200, headers=headers))
        async for event in events:
            await self._send(h11.Data(data=f"data: {event}\n\n".encode()))
        await self._send(h11.EndOfMessage())

    async def _write(self, status: int, body: bytes, *more: tuple[str, str]) -> None:
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), *more]
        if status == 401:
            headers.append(("WWW-Authenticate", "Bearer"))
        await self._send(h11.Response(status_code=status, headers=headers))
        await self._send(h11.Data(data=body))
        await self._send(h11.EndOfMessage())

    async def _refuse(self, error: ApiError) -> None:
        """Answer a request that is not read to its end, and let the client read that before the connection ends."""
        await self._write(error.status, json.dumps(error.body()).encode(), ("Connection", "close"))
        with contextlib.suppress(OSError):
            self._writer.write_eof()
        left = _DISCARDED
        async with asyncio.timeout(_REQUEST_SECONDS):
            while left > 0 and (data := await self._reader.read(_READ)):
                left -= len(data)

    async def _send(self, event: Any) -> None:
        if data := self._http.send(event):
            self._writer.write(data)
            await self._writer.drain()
