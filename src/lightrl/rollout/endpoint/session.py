"""One session: an episode that an agent outside plays, as a tree of the turns that were sampled for it.

A request is a whole conversation as text. Where its messages are those of a turn in the tree, the answer to it, and new
ones, the ids of that turn are kept as they were sampled and only the new messages are encoded behind them. Everything
else is encoded whole, and begins a conversation of its own.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lightrl.engine.base import Completion, EngineLostError, SamplingParams
from lightrl.rollout.conversation import ChatTemplate, Message, TemplateError
from lightrl.rollout.endpoint.protocol import ApiError, ChatRequest, message_key
from lightrl.rollout.episode import Conversation, Episode
from lightrl.rollout.tools import Parser
from lightrl.types import Prompt, Status

Foreign = Literal["refuse", "ignore", "follow"]
"""What becomes of a `temperature` or `top_p` other than the run's."""

_CALL = "<tool_call>"


class SessionError(Exception):
    """A session that gives no sample to train on: no reward, nothing asked for, or an agent that failed."""


@dataclass(eq=False, kw_only=True)
class Said:
    """One turn of the model."""

    parent: Said | None
    prompt: Prompt
    """Of its conversation's first turn."""
    told: list[Message]
    """Messages between the parent and this; for a first turn they are in the prompt."""
    given: list[int]
    completion: Completion
    text: str
    content: str
    """What the client was told: the text up to a call, or to a string of `stop`."""
    calls: list[dict[str, Any]]
    stop: tuple[str, ...]
    end: int
    """Tokens, prompt included, after which its conversation has no room."""
    children: list[Said] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """All of the conversation up to this, prompt included."""
        before = self.prompt.tokens if self.parent is None else self.parent.tokens + self.given
        return before + self.completion.tokens


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Turns that were sampled for a request, one for each choice."""

    said: list[Said]
    prompt_tokens: int


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a request goes on in the tree."""

    parent: Said | None
    prompt: Prompt
    told: list[Message]
    given: list[int]
    tokens: list[int]
    end: int
    key: str
    """Of the request's conversation; with an answer's key behind it, of that turn."""


class Session:
    """Turns of an episode. Its methods belong to the loop the episode is played on, `loop`."""

    def __init__(
        self,
        episode: Episode,
        *,
        parser_of: Callable[[list[dict[str, Any]]], Parser],
        tool_role: str = "tool",
        foreign: Foreign = "refuse",
    ) -> None:
        self.episode, self.loop = episode, asyncio.get_running_loop()
        self.used = time.monotonic()
        """When something was last asked."""
        self.over = asyncio.Event()
        """The agent said so, or nothing more can come of it."""
        self.reward: float | None = None
        self.info: dict[str, Any] = {}
        self.is_closed = False
        self._parser_of, self._tool_role, self._foreign = parser_of, tool_role, foreign
        self._roots: list[Said] = []
        self._by_key: dict[str, list[Said]] = {}
        self._latest: Said | None = None
        self._asked = 0
        self._calls = 0
        self._exhausted = False
        self._tasks: set[asyncio.Task[Any]] = set()

    # ---- what the agent calls

    async def chat(self, request: ChatRequest) -> Answer:
        """The model's next turn. ApiError for what cannot be; cancelled, it leaves nothing."""
        self.check()
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await self._chat(request)
        except asyncio.CancelledError:
            self.check()
            raise
        except EngineLostError as error:
            self.episode.lost = error
            self.over.set()
            raise ApiError(503, "the engine was lost; the session is over", code="engine_lost") from None
        finally:
            self._tasks.discard(task)
            self.used = time.monotonic()

    @property
    def is_busy(self) -> bool:
        """Something is being sampled."""
        return bool(self._tasks)

    def continues(self, request: ChatRequest) -> bool:
        """Whether the request goes on from an answer of this session."""
        return bool(self._known(request)[0])

    async def set_reward(self, reward: float, info: dict[str, Any]) -> None:
        """The last one counts."""
        self.check()
        self.take_reward(reward)
        self.info |= info

    def take_reward(self, reward: float | None) -> None:
        """One that the agent returned, if it did."""
        self.reward = self.reward if reward is None else reward

    async def end(self) -> None:
        self.check()
        self.over.set()

    def check(self) -> None:
        """ApiError where the session has ended."""
        if self.is_closed or self.over.is_set() or self.episode.seconds_left <= 0:
            raise ApiError(404, "the session has ended", code="session_ended")

    def validate(self, request: ChatRequest) -> None:
        """ApiError 400 for what the run cannot sample."""
        if self._foreign != "refuse":
            return
        sampling = self.episode.sampling
        for name in ("temperature", "top_p"):
            asked, ours = getattr(request, name), getattr(sampling, name)
            if asked is not None and asked != ours:
                text = (
                    f"{name} = {asked:g}: the run trains what is sampled at rollout.{name} = {ours:g}; leave it out, "
                    "or set endpoint.foreign_sampling = 'ignore'"
                )
                raise ApiError(400, text, param=name, code="unsupported_value")

    def withdraw(self, said: list[Said]) -> None:
        """Forget turns that their client never got, unless something follows them."""
        if self.is_closed:
            return
        for turn in said:
            siblings = self._roots if turn.parent is None else turn.parent.children
            if turn in siblings and not turn.children:
                siblings.remove(turn)
                for turns in self._by_key.values():
                    if turn in turns:
                        turns.remove(turn)

    # ---- its end

    async def close(self) -> None:
        """End what is under way; nothing is taken any more."""
        self.is_closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def finish(self, *, graded: bool) -> None:
        """Write the tree into the episode, as conversations: a turn's first successor goes on with it, others are
        branches. Without `graded`, a session that got no reward has failed."""
        episode = self.episode
        waiting: list[tuple[Said, Conversation | None]] = [(root, None) for root in self._roots]
        while waiting:
            turn, stem = waiting.pop(0)
            prompt = turn.prompt if turn.parent is None else self._branch_prompt(turn)
            conversation = Conversation(episode, prompt, agent=None, end=turn.end, parent=stem)
            episode.conversations.append(conversation)
            step: Said | None = turn
            while step is not None:
                if step.parent is not None:
                    conversation.tell(step.told, step.given)
                conversation.record(step.completion)
                conversation.tool_calls += len(step.calls)
                if step is self._latest:
                    episode.final = conversation
                waiting += [(other, conversation) for other in step.children[1:]]
                step = step.children[0] if step.children else None
            conversation.reward = self.reward
            conversation.info |= self.info
            if self._exhausted and not conversation.why:
                conversation.why = "turns"
        if not self._roots:
            episode.failure = SessionError("the agent asked for nothing")
        elif self.reward is None and not graded:
            episode.failure = SessionError("the session ended without a reward")

    def _branch_prompt(self, turn: Said) -> Prompt:
        assert turn.parent is not None
        tokens = turn.parent.tokens
        said: list[Message] = []
        step: Said | None = turn.parent
        while step is not None:
            said = [*(step.told if step.parent is not None else []), {"role": "assistant", "content": step.text}, *said]
            step = step.parent
        text = self.episode.template.text(tokens, special=True)
        return replace(turn.prompt, tokens=tokens, text=text, messages=[*(turn.prompt.messages or []), *said])

    # ---- a request

    async def _chat(self, request: ChatRequest) -> Answer:
        episode = self.episode
        limits = episode.limits
        if episode.turns + request.n > limits.max_turns:
            self._exhausted = True
            raise ApiError(400, f"agent.max_turns = {limits.max_turns}: no more turns", code="max_turns")
        place = self._place(request)
        room = place.end - len(place.tokens)
        if room <= 0:
            text = (
                f"this model's conversations have room for {place.end} tokens (the context, or the prompt and "
                f"rollout.max_response_tokens), and the messages are {len(place.tokens)}: shorten them"
            )
            raise ApiError(400, text, param="messages", code="context_length_exceeded")
        room = min(filter(None, (room, limits.max_turn_tokens, request.max_tokens)))
        stop = tuple(dict.fromkeys((*episode.sampling.stop, *request.stop)))
        sampling = replace(episode.sampling, max_new_tokens=room, stop=stop)
        if self._foreign == "follow":
            asked = {k: v for k in ("temperature", "top_p") if (v := getattr(request, k)) is not None}
            sampling = replace(sampling, **asked)
        completions = await self._draw(place.tokens, sampling, request.n)
        said = [self._read(place, request, completion) for completion in completions]
        for turn in said:
            (self._roots if turn.parent is None else turn.parent.children).append(turn)
            answer: Message = {"role": "assistant", "content": turn.content, "tool_calls": turn.calls}
            self._by_key.setdefault(place.key + message_key(answer), []).append(turn)
        self._latest = said[0]
        return Answer(said=said, prompt_tokens=len(place.tokens))

    async def _draw(self, tokens: list[int], sampling: SamplingParams, count: int) -> list[Completion]:
        """`count` answers; none is left under way where one fails or the call is cancelled."""
        first, self._asked = self._asked, self._asked + count
        self.episode.turns += count
        draws = [asyncio.ensure_future(self.episode.draw(tokens, (0, first + i), sampling)) for i in range(count)]
        try:
            completions = await asyncio.gather(*draws)
        except BaseException:
            self.episode.turns -= count  # they were not had
            raise
        finally:
            for draw in draws:
                draw.cancel()
            await asyncio.gather(*draws, return_exceptions=True)
        for completion in completions:
            if completion.status is Status.FAILED:
                self.episode.failure = SessionError(completion.error or "the engine gave no answer")
                self.over.set()
                raise ApiError(500, f"the engine failed: {completion.error}", code="engine_failed")
        if any(completion.status is Status.ABORTED for completion in completions):
            self.over.set()  # by the episode's time: what was sampled is kept, and nothing can follow
        return completions

    def _place(self, request: ChatRequest) -> _Place:
        """Behind the turn that the request goes on from; a new conversation if there is none."""
        episode, template = self.episode, self.episode.template
        known, last, key = self._known(request)
        # of several that said the same, the last that nothing follows yet
        parent = next((turn for turn in reversed(known) if not turn.children), known[-1] if known else None)
        try:
            if parent is None:
                prompt = self._prompt(request)
                end = min(episode.limits.context_length, len(prompt.tokens) + episode.limits.max_response_tokens)
                return _Place(parent=None, prompt=prompt, told=[], given=[], tokens=prompt.tokens, end=end, key=key)
            told = self._written(request.messages[last:])
            raw = template.text(parent.completion.tokens, special=True)
            given = template.between(parent.completion.tokens, raw, told, parent.stop)
        except TemplateError as error:
            raise ApiError(400, f"messages: {error}", param="messages", code="invalid_value") from None
        tokens = parent.tokens + given
        return _Place(
            parent=parent, prompt=parent.prompt, told=told, given=given, tokens=tokens, end=parent.end, key=key
        )

    def _known(self, request: ChatRequest) -> tuple[list[Said], int, str]:
        """Turns that the request may go on from, how many of its messages are up to there, and its own key."""
        keys = [message_key(message) for message in request.messages]
        tools = json.dumps(request.tools, sort_keys=True)
        last = max((i + 1 for i, m in enumerate(request.messages) if m["role"] == "assistant"), default=0)
        known = self._by_key.get("".join((tools, *keys[:last])), []) if last else []
        return [turn for turn in known if turn.completion.status is Status.COMPLETED], last, "".join((tools, *keys))

    def _prompt(self, request: ChatRequest) -> Prompt:
        """The row's own where the agent asks just that; else the request's messages as they are."""
        row = self.episode.prompt
        if request.tools == (row.tools or None) and request.messages == row.messages:
            return row
        messages = self._written(request.messages)
        text, tokens = self.episode.template.prompt(messages, request.tools)
        return replace(row, tokens=tokens, text=text, messages=messages, tools=request.tools)

    def _written(self, messages: list[Message]) -> list[Message]:
        """As they are rendered: nothing that users and tools wrote is a special token; results in `agent.tool_role`."""
        template = self.episode.template
        written: list[Message] = []
        for message in messages:
            if message["role"] != "assistant":
                message = message | {"content": template.harmless(message["content"])}
            if message["role"] == "tool" and self._tool_role != "tool":
                content = f"Result of {message.get('name') or 'the call'}:\n{message['content']}"
                if written and written[-1].get("is_result"):
                    written[-1] = written[-1] | {"content": f"{written[-1]['content']}\n\n{content}"}
                    continue
                message = {"role": self._tool_role, "content": content, "is_result": True}
            written.append(message)
        return [{k: v for k, v in message.items() if k != "is_result"} for message in written]

    def _read(self, place: _Place, request: ChatRequest, completion: Completion) -> Said:
        """A completion as the client sees it."""
        template = self.episode.template
        text, raw = template.text(completion.tokens), template.text(completion.tokens, special=True)
        calls, content = [], text
        if request.reads_calls and request.tools and completion.status is Status.COMPLETED:
            calls = self._calls_in(_without_end(template, completion.tokens, raw), request.tools)
        if calls:
            content = (text if _CALL in text else raw if _CALL in raw else text).partition(_CALL)[0].strip()
        else:
            for ending in request.stop:
                content = content.partition(ending)[0]
        return Said(
            parent=place.parent,
            prompt=place.prompt,
            told=place.told,
            given=place.given,
            completion=completion,
            text=text,
            content=content,
            calls=calls,
            stop=tuple(dict.fromkeys((*self.episode.sampling.stop, *request.stop))),
            end=place.end,
        )

    def _calls_in(self, raw: str, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those that can be read; a turn with none of them is text."""
        found = []
        for call in self._parser_of(tools)(raw):
            if call.error is None:
                function = {"name": call.name, "arguments": call.arguments}
                found.append({"id": f"call_{self._calls}", "type": "function", "function": function})
                self._calls += 1
        return found


def _without_end(template: ChatTemplate, tokens: list[int], raw: str) -> str:
    ended = bool(tokens) and tokens[-1] in template.end_ids
    return raw.removesuffix(template.text(tokens[-1:], special=True)) if ended else raw
