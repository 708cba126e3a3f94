"""Requests to one SGLang server: JSON over HTTP, each on a connection of its own, from any thread.

The standard library's client does: beside an answer of seconds, connecting costs nothing; and it takes no proxy from
the environment, which is never wanted between machines of one job.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from lightrl.errors import LostError

T = TypeVar("T")
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each further attempt to connect."""
_CONNECT = 10.0  # seconds
_TEXT = 600  # most characters of a server's own words in an error
_BUSY = (429, 502, 503, 504)  # it, or a proxy before it, may answer later
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}  # a machine that is gone shows in 90 s


class ServerError(LostError):
    """A server did not do what it was asked; the message names it."""


class UnreachableError(ServerError):
    """No connection, or none that lasted until the answer."""


class RefusedError(ServerError):
    """The server answered with an error, whose text is in the message."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """One server at `url`. `key` goes into the header that SGLang's `--api-key` wants, and nowhere else; `key_setting`
    is the config's, for messages.

    Implements `lightrl.sync.peers.Peer`; what the server is like is what it says of itself (`checks.examine`).
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        pauses: Sequence[float] = PAUSES,
        key_setting: str = "engine.api_key_env",
    ) -> None:
        self.url = url.rstrip("/")
        self._key_setting = key_setting
        self.tensor_parallel = 1
        self.weight_sessions = False
        self.pauses = tuple(pauses)
        self._parts = urlsplit(self.url)
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    def __repr__(self) -> str:
        return f"Server({self.url!r})"

    def get(self, path: str, timeout: float = 30.0) -> dict[str, Any]:
        """The answer to a GET, tried again while the server cannot be reached."""
        return self._persist(lambda: self._json("GET", path, None, timeout), again=True)

    def post(self, path: str, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        """The answer to a POST. Tried again only until a connection stands: what was sent may have been done."""
        return self._persist(lambda: self._json("POST", path, body, timeout), again=False)

    def ask(self, path: str, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        """As `get`, a POST that changes nothing: it may be sent again."""
        return self._persist(lambda: self._json("POST", path, body, timeout), again=True)

    def post_once(self, path: str, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        """As `post`, a single attempt."""
        return self._json("POST", path, body, timeout)

    def stream(self, path: str, body: dict[str, Any], timeout: float) -> Iterator[dict[str, Any]]:
        """Server-sent events of one POST, as they come; `timeout` is for the time between two."""
        with self._answer("POST", path, body, timeout) as response, self._reading(timeout):
            for line in response:
                text = line.decode().removeprefix("data:").strip()
                if text == "[DONE]":
                    return
                if text:
                    event = json.loads(text)
                    if "error" in event:
                        raise RefusedError(f"{self.url}{path}: {_words(text)}", int(event["error"].get("code", 400)))
                    yield event
        raise UnreachableError(f"{self.url} broke off in the middle of an answer")

    def _json(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> dict[str, Any]:
        with self._answer(method, path, body, timeout) as response, self._reading(timeout):
            text = response.read().decode(errors="replace")
        try:
            answer = json.loads(text) if text else {}
        except json.JSONDecodeError:
            answer = text
        return answer if isinstance(answer, dict) else {"message": str(answer)}

    @contextlib.contextmanager
    def _answer(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: float
    ) -> Iterator[http.client.HTTPResponse]:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=min(_CONNECT, timeout))
        try:
            try:
                connection.connect()
            except OSError as error:
                raise _NoConnectionError(f"{self.url} cannot be reached: {_reason(error)}") from None
            _keep_alive(connection.sock, timeout)
            with self._reading(timeout):
                data = None if body is None else json.dumps(body).encode()
                connection.request(method, self._parts.path + path, data, self._headers)
                response = connection.getresponse()
                if response.status != 200:
                    raise self._refusal(path, response.status, response.read().decode(errors="replace"))
            yield response
        finally:
            connection.close()

    def _refusal(self, path: str, status: int, text: str) -> ServerError:
        if status in _BUSY:
            return UnreachableError(f"{self.url}{path}: HTTP {status}: {_words(text)}")
        if status in (401, 403):
            return RefusedError(
                f"{self.url}{path}: the server refuses the key (HTTP {status}): set {self._key_setting} to the "
                "environment variable that holds its --api-key (its --admin-api-key, where it has one)",
                status,
            )
        return RefusedError(f"{self.url}{path}: HTTP {status}: {_words(text)}", status)

    @contextlib.contextmanager
    def _reading(self, timeout: float) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise ServerError(f"{self.url}: no answer in {timeout:.0f} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise UnreachableError(f"{self.url} broke off the connection: {_reason(error)}") from None

    def _persist(self, attempt: Callable[[], T], *, again: bool) -> T:
        for pause in self.pauses:
            try:
                return attempt()
            except UnreachableError as error:
                if not (again or isinstance(error, _NoConnectionError)):
                    raise
            time.sleep(pause)
        try:
            return attempt()
        except UnreachableError as error:
            raise UnreachableError(f"{error} ({len(self.pauses) + 1} attempts)") from None


class _NoConnectionError(UnreachableError):
    """Nothing was sent."""


def _keep_alive(sock: socket.socket, timeout: float) -> None:
    sock.settimeout(timeout)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # Linux
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _words(text: str) -> str:
    """What a server says is wrong, from the forms in which SGLang says it, on one line."""
    try:
        answer = json.loads(text)
        error = answer.get("error", answer)
        text = str(error.get("message", text) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        pass
    line = " ".join(text.split())
    return line if len(line) <= _TEXT else line[:_TEXT] + "…"
