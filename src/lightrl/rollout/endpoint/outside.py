"""Agents outside: what `agent.environment = "outside"` plays. Each episode is a session that a program talks to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from lightrl import hooks
from lightrl.config.schema import AgentConfig, EndpointConfig
from lightrl.errors import UserError
from lightrl.rewards.calls import Caller
from lightrl.rewards.values import checked
from lightrl.rollout.conversation import ChatTemplate
from lightrl.rollout.endpoint.server import Access, Endpoint
from lightrl.rollout.endpoint.session import Session, SessionError
from lightrl.rollout.episode import Episode
from lightrl.rollout.tools import load_parser
from lightrl.types import Prompt

_GRACE_SECONDS = 5.0  # for a program to end by itself once it has ended its session
_TAIL = 4096  # bytes of a program's output that are kept, for messages
_LARGEST = 1 << 20  # bytes of a service's answer


@dataclass(frozen=True, kw_only=True)
class OutsideSession(Access):
    """What `endpoint.function` is called with."""

    prompt: Prompt
    """The row of the data set, with its label and metadata."""


class OutsideAgents:
    """Runs the agent of `[endpoint]`, an episode at a time; the environment's class and its instance in one."""

    def __init__(
        self,
        config: EndpointConfig,
        agent: AgentConfig,
        template: ChatTemplate,
        caller: Caller,
        *,
        model: str,
        graded: bool,
        rank: int = 0,
    ) -> None:
        """UserError for a function or key that is not there, and a port that is taken."""
        self.gives_reward = not graded
        self._config, self._agent, self._caller, self._graded = config, agent, caller, graded
        self._function = hooks.load(config.function, "endpoint.function") if config.function else None
        self.endpoint = Endpoint(config, template, model=model, key=read_key(config), rank=rank)

    def __call__(self) -> OutsideAgents:
        return self

    @cached_property
    def _places(self) -> dict[asyncio.AbstractEventLoop, asyncio.Semaphore]:
        return {}

    def end(self) -> None:
        """Close the endpoint; idempotent."""
        self.endpoint.close()

    async def run(self, episode: Episode) -> None:
        """Play the whole episode. Raises what the agent raised."""
        async with self._place(episode):
            session = Session(
                episode,
                parser_of=lambda tools: load_parser(self._agent, tools),
                tool_role=self._agent.tool_role,
                foreign="ignore" if episode.rounds.stream.startswith("eval/") else self._config.foreign_sampling,
            )
            access = self.endpoint.open(session)
            try:
                await self._play(session, access)
            finally:
                self.endpoint.drop(access)
                await session.close()
                session.finish(graded=self._graded)

    async def _play(self, session: Session, access: Access) -> None:
        """Until the agent is done, or its session is over: then it has a moment to end by itself."""
        program = asyncio.ensure_future(self._program(session.episode.prompt, access))
        over = asyncio.ensure_future(session.over.wait())
        try:
            await asyncio.wait({program, over}, return_when=asyncio.FIRST_COMPLETED)
            if session.over.is_set():
                await asyncio.wait({program}, timeout=_GRACE_SECONDS)
                if program.done() and program.exception() is None:  # what it did afterwards is no part of the session
                    session.take_reward(program.result())
                return
            reward = program.result()
            session.take_reward(reward)
            if self._config.url is not None and reward is None and session.reward is None:
                await over  # the service has only begun
        finally:
            for task in (program, over):
                task.cancel()
            await asyncio.gather(program, over, return_exceptions=True)

    async def _program(self, prompt: Prompt, access: Access) -> float | None:
        """Run the agent to its end; the reward that it returned, if it did."""
        given = OutsideSession(session=access.session, base_url=access.base_url, api_key=access.api_key, prompt=prompt)
        if self._function is not None:
            return _number(await self._caller.call(self._function, given, self._agent.episode_timeout))
        if self._config.url is not None:
            url = self._config.url
            body = asdict(access) | _told(prompt)
            return await self._caller.call(lambda b: _post(url, b, self._agent.episode_timeout), body, 1e7)
        await run_command(self._config.command, given)
        return None

    @contextlib.asynccontextmanager
    async def _place(self, episode: Episode) -> AsyncIterator[None]:
        """One of `endpoint.concurrency`. Who waits for one holds up no round."""
        if self._config.concurrency is None:
            yield
            return
        loop = asyncio.get_running_loop()
        places = self._places.setdefault(loop, asyncio.Semaphore(self._config.concurrency))
        if places.locked():
            episode.rounds.leave(episode.party)
        async with places:
            episode.rounds.enter(episode.party)
            yield


def read_key(config: EndpointConfig) -> str | None:
    """The key that `endpoint.key_env` names; UserError where the environment has none."""
    if config.key_env is None:
        return None
    if not (key := os.environ.get(config.key_env, "").strip()):
        raise UserError(f"endpoint.key_env: the environment has no {config.key_env}: export it, or drop this")
    return key


async def run_command(command: list[str], session: OutsideSession) -> None:
    """Start a program and wait for its end. It and all that it started are killed where this is cancelled.

    SessionError, with the end of its output, for one that cannot be started or fails.
    """
    variables = {
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_KEY": session.api_key,
        "LIGHTRL_SESSION": session.session,
    }
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=os.environ | variables,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise SessionError(f"endpoint.command: {command[0]} cannot be started: {error}") from error
    output = bytearray()
    reading = asyncio.ensure_future(_keep_tail(process, output))
    try:
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # one that does not read its input
            process.stdin.write(json.dumps({"session": session.session, **_told(session.prompt)}).encode())
            await process.stdin.drain()
            process.stdin.close()
        status = await process.wait()
    finally:
        with contextlib.suppress(
            ProcessLookupError, PermissionError
        ):  # its children too: they are a session of their own
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await asyncio.wait({reading}, timeout=1.0)  # what left the process group may hold the pipe
        reading.cancel()
    if status != 0:
        tail = output.decode("utf-8", "replace").strip().replace(session.api_key, "***")
        last = tail.splitlines()[-1] if tail else "it printed nothing"
        raise SessionError(f"endpoint.command ended with status {status}: {last[:500]}")


async def _keep_tail(process: asyncio.subprocess.Process, output: bytearray) -> None:
    assert process.stdout is not None
    while data := await process.stdout.read(1 << 16):
        output += data
        del output[:-_TAIL]


def _told(prompt: Prompt) -> dict[str, Any]:
    """The row, for programs: plain JSON."""
    row = {"messages": prompt.messages, "label": prompt.label, "metadata": prompt.metadata, "index": prompt.index}
    return dict(json.loads(json.dumps({"prompt": row}, default=str)))


def _post(url: str, body: dict[str, Any], timeout: float) -> float | None:
    """Hand an episode to a service; the `reward` in its answer, if it holds one."""
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            data = reply.read(_LARGEST)
    except (OSError, urllib.error.URLError, ValueError) as error:
        raise SessionError(f"endpoint.url: {error}"[:500]) from error
    try:
        found = json.loads(data or b"{}")
        return _number(found.get("reward"))
    except (ValueError, AttributeError, TypeError) as error:
        raise SessionError(f"endpoint.url: an answer that is no JSON object with a number 'reward': {error}") from error


def _number(value: Any) -> float | None:
    """A reward, or None; ValueError or TypeError for anything else."""
    if value is None:
        return None
    return checked(float(value), "the agent's reward")


Function = Callable[[OutsideSession], Any]
"""`endpoint.function`: `async def agent(session) -> float | None`, or plain."""
