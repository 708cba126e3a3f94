"""The endpoint of a rank: which request belongs to which session, and who may ask."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lightrl.config.schema import EndpointConfig
from lightrl.errors import UserError
from lightrl.rollout.conversation import ChatTemplate
from lightrl.rollout.endpoint.http import Head, HttpServer, Reply
from lightrl.rollout.endpoint.protocol import (
    ApiError,
    ChatRequest,
    answer_message,
    chunks_of,
    parse_chat,
    parse_json,
    parse_reward,
)
from lightrl.rollout.endpoint.session import Answer, Said, Session
from lightrl.types import Status

R = TypeVar("R")
SESSION_HEADER = "lightrl-session"
_METHODS = {"chat/completions": "POST", "models": "GET", "reward": "POST", "end": "POST"}
_WILDCARDS = ("", "0.0.0.0", "::")


@dataclass(frozen=True, kw_only=True)
class Access:
    """What an agent needs to talk to its session."""

    session: str
    base_url: str
    """For OpenAI's clients; `/reward` and `/end` are below it too."""
    api_key: str = field(repr=False)


class Endpoint:
    """Sessions by their id, behind a server on a thread of its own. `key` opens all of them.

    UserError where the address cannot be listened on.
    """

    def __init__(
        self, config: EndpointConfig, template: ChatTemplate, *, model: str, key: str | None = None, rank: int = 0
    ) -> None:
        self._template, self._model = template, model
        self._key = key or secrets.token_urlsafe(32)
        self._sessions: dict[str, Session] = {}
        port = config.port + rank if config.port else 0
        try:
            self._http = HttpServer(
                config.host, port, check=self._check, answer=self._answer, max_body=config.max_body_mib << 20
            )
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            text = f"endpoint.port = {config.port}: cannot listen on {config.host}:{port}: {reason}"
            raise UserError(f"{text}; choose another port, or 0, or another endpoint.host") from error
        host = config.address or (socket.gethostname() if config.host in _WILDCARDS else config.host)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._http.port}"
        self._http.start()

    def open(self, session: Session, name: str | None = None) -> Access:
        """Let an agent in. From any thread. The session's name is made up where none is given."""
        name = name or secrets.token_hex(8)
        self._sessions[name] = session
        return Access(session=name, base_url=f"{self.url}/v1/sessions/{name}", api_key=self._key_of(name))

    def drop(self, access: Access) -> None:
        """Requests to it are from now on to an unknown session."""
        self._sessions.pop(access.session, None)

    def close(self) -> None:
        """End all connections; idempotent."""
        self._http.close()

    # ---- requests, on the server's thread

    def _check(self, head: Head) -> None:
        """Before a body is read: a path there is, its method, a right key and a session."""
        name, action = self._route(head)
        if head.method != _METHODS[action]:
            raise ApiError(405, f"{head.method} is not served here, {_METHODS[action]} is", code="method_not_allowed")
        scheme, _, given = head.headers.get("authorization", "").partition(" ")
        right = [self._key] + ([self._key_of(name)] if name is not None else [])
        matches = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in right]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        self._check_session(name, action)

    def _check_session(self, name: str | None, action: str) -> None:
        """ApiError 404 where a request needs a session that is not there."""
        if name is not None and name not in self._sessions:
            raise ApiError(404, f"there is no session {name[:64]!r}, or it has ended", code="session_not_found")
        if name is None and action != "models":
            text = f"no session: use the base URL of one, or send its id as the header {SESSION_HEADER}"
            raise ApiError(404, text, code="session_not_found")

    async def _find(self, name: str | None, request: ChatRequest | None = None) -> Session:
        """The session of a request, which may have ended since its head was read."""
        session = self._sessions.get(name or "")
        if session is None:
            raise ApiError(404, f"there is no session {name!r}, or it has ended", code="session_not_found")
        return session

    def _route(self, head: Head) -> tuple[str | None, str]:
        parts = head.path.strip("/").split("/")
        name = head.headers.get(SESSION_HEADER)
        if parts[:2] == ["v1", "sessions"] and len(parts) > 3:
            name, action = parts[2], "/".join(parts[3:])
        else:
            action = "/".join(parts[1:]) if parts[0] == "v1" else ""
        if action not in _METHODS:
            raise ApiError(404, f"there is nothing at {head.path[:100]!r}", code="unknown_url")
        return name, action

    def _key_of(self, name: str) -> str:
        return hmac.new(self._key.encode(), name.encode(), hashlib.sha256).hexdigest()

    async def _answer(self, head: Head, body: bytes) -> Reply:
        name, action = self._route(head)
        try:
            if action == "models":
                model = {"id": self._model, "object": "model", "created": 0, "owned_by": "lightrl"}
                return Reply(body={"object": "list", "data": [model]})
            if action == "chat/completions":
                request = parse_chat(body)
                return await self._chat(await self._find(name, request), request)
            session = await self._find(name)
            if action == "reward":
                reward, info = parse_reward(body)
                await self._there(session, lambda: session.set_reward(reward, info))
                return Reply(body={"session": name, "reward": reward})
            if body:
                parse_json(body)
            await self._there(session, session.end)
            return Reply(body={"session": name})
        except ApiError:
            raise
        except Exception as error:  # a server that answers is better than one that hangs up
            raise ApiError(500, f"{type(error).__name__}: {error}"[:300], code="internal_error") from error

    async def _chat(self, session: Session, request: ChatRequest) -> Reply:
        session.check()
        session.validate(request)
        about = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": self._model}
        had: list[Said] = []

        def lost() -> None:
            _soon(session, lambda: session.withdraw(had))

        async def answer() -> Answer:
            found = await self._there(session, lambda: session.chat(request))
            had.extend(found.said)
            return found

        if request.stream:
            return Reply(events=self._events(answer, request, about), on_lost=lost)
        found = await answer()
        return Reply(body=about | {"object": "chat.completion"} | self._written(found, request), on_lost=lost)

    async def _events(
        self, answer: Callable[[], Coroutine[Any, Any, Answer]], request: ChatRequest, about: dict[str, Any]
    ) -> AsyncIterator[str]:
        """A turn is sampled whole: its first event says that the request was taken, the next ones bring all of it."""
        about = about | {"object": "chat.completion.chunk"}
        first = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        yield json.dumps(about | {"choices": [first | {"index": i} for i in range(request.n)]})
        try:
            written = self._written(await answer(), request)
        except ApiError as error:
            yield json.dumps(error.body())
            return
        for choice in chunks_of(written["choices"]):
            yield json.dumps(about | {"choices": [choice]})
        if request.include_usage:
            yield json.dumps(about | {"choices": [], "usage": written["usage"]})
        yield "[DONE]"

    async def _there(self, session: Session, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Run it on the session's loop. The caller's cancellation ends it there."""
        coroutine = work()
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, session.loop)
        except RuntimeError:  # that loop is closed
            coroutine.close()
            raise ApiError(404, "the session has ended", code="session_ended") from None
        return await asyncio.wrap_future(future)

    def _written(self, answer: Answer, request: ChatRequest) -> dict[str, Any]:
        count = sum(len(said.completion.tokens) for said in answer.said)
        usage = {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": count,
            "total_tokens": answer.prompt_tokens + count,
        }
        choices = [self._choice(i, said, request.logprobs) for i, said in enumerate(answer.said)]
        return {"choices": choices, "usage": usage}

    def _choice(self, index: int, said: Said, with_logprobs: bool) -> dict[str, Any]:
        ended = "tool_calls" if said.calls else "stop"
        return {
            "index": index,
            "message": answer_message(said.content, said.calls),
            "logprobs": {"content": self._logprobs(said), "refusal": None} if with_logprobs else None,
            "finish_reason": ended if said.completion.status is Status.COMPLETED else "length",
        }

    def _logprobs(self, said: Said) -> list[dict[str, Any]]:
        """Of all tokens that were sampled, the one that ended the turn included."""
        found = []
        for token, logprob in zip(said.completion.tokens, said.completion.logprobs, strict=True):
            text = self._template.text([token], special=True)
            found.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
        return found


def _soon(session: Session, call: Callable[[], None]) -> None:
    try:
        session.loop.call_soon_threadsafe(call)
    except RuntimeError:  # its loop is closed: the session is over
        return
