"""What an episode is played against: the protocol of environments, and the one that runs tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from lightrl.rollout.conversation import Message
from lightrl.rollout.tools import Call, Called, ToolBox
from lightrl.types import Prompt, Status

if TYPE_CHECKING:
    from lightrl.rollout.episode import Episode


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What the model said in one turn."""

    number: int
    """Within its conversation, from 0."""
    text: str
    """Special tokens left out."""
    raw: str
    """Special tokens included."""
    tokens: list[int]
    """As sampled; the token that ended the turn is the last."""
    status: Status
    """`COMPLETED`, or `TRUNCATED` by length, or `ABORTED` by the episode's time: nothing can follow those."""
    calls: list[Call]
    """Tool calls in it, as `agent.parser` reads them."""
    messages: list[Message]
    """The conversation so far, this turn the last."""
    tokens_left: int
    """Of `rollout.max_response_tokens` and the model's context."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """An environment's answer to a turn."""

    messages: Sequence[Message] = ()
    """What the model is told, such as `{"role": "user", "content": "higher"}`. None ends the episode."""
    done: bool = False
    """The episode is over; `messages` are then not told."""
    reward: float | None = None
    """Added to the episode's."""
    calls: Sequence[Called] = ()
    """Tool calls that were answered, to be counted."""
    info: dict[str, Any] = field(default_factory=dict)
    """Goes into the sample's metadata, under `info`."""


class Environment(Protocol):
    """One instance an episode, made by `Class(**agent.options)`. Methods may be async, or plain: then they run in a
    thread, so that they never block what generates.

    A class that takes `tools` gets the ToolBox of `agent.tools`, one that takes `seed` a number that is the same for
    all episodes of a group. With a class attribute `gives_reward = True` no reward is configured: what `step` gave is
    it, 0 if it gave none. `close()`, if there is one, is called at the end, whatever happened.
    """

    def reset(self, prompt: Prompt) -> Any:
        """Messages that the episode begins with (a sequence), or None: the prompt of the data set as it is."""

    def step(self, turn: Turn) -> Any:
        """A `Step`. Called for the last turn too, though it may be cut off (`turn.status`)."""


class Program(Protocol):
    """In place of `reset` and `step`: an episode of any shape, such as several agents, or a tree of branches."""

    async def run(self, episode: Episode) -> None:
        """Play the whole episode. It runs on the loop that generates: `await asyncio.to_thread(…)` what blocks."""


class ToolEnvironment:
    """The model calls tools until it answers without a call. The default where `agent.tools` is set alone."""

    def __init__(self, tools: ToolBox, role: Literal["tool", "user"] = "tool", timeout: float = 60.0) -> None:
        self._tools, self._role, self._timeout = tools, role, timeout

    def reset(self, prompt: Prompt) -> None:
        return None

    async def step(self, turn: Turn) -> Step:
        if turn.status is not Status.COMPLETED or not turn.calls:
            return Step(done=True)
        called = await self._tools.call_all(turn.calls, self._timeout)
        return Step(messages=results(called, self._role), calls=called)


def results(called: Sequence[Called], role: str = "tool") -> list[Message]:
    """Messages that tell the model what its calls gave."""
    if role == "tool":
        return [{"role": "tool", "name": c.name, "content": c.content} for c in called]
    return [{"role": role, "content": "\n\n".join(f"Result of {c.name or 'the call'}:\n{c.content}" for c in called)}]
