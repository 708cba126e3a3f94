"""One episode: its conversations token by token, and the samples they become."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightrl.engine.base import Completion, EngineLostError, SamplingParams
from lightrl.rewards.values import checked
from lightrl.rollout.conversation import ChatTemplate, Message
from lightrl.rollout.environment import Turn
from lightrl.rollout.rounds import Ask, Rounds
from lightrl.rollout.tools import Called, Parser, ToolBox
from lightrl.types import Prompt, Sample, Status

_UNKNOWN = -1  # version of what was told before the first turn, until that is sampled


class EpisodeOver(Exception):
    """An episode is at one of its limits: its turns, its time, or the room for tokens. `why` is in the metadata."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of an episode."""

    max_turns: int
    max_turn_tokens: int | None
    max_observation_tokens: int
    max_response_tokens: int
    context_length: int
    seconds: float


class Conversation:
    """A prompt and what followed: tokens that were sampled, and tokens that were given in between.

    Made by `Episode.start` and `fork`. It becomes a sample of its own, with `reward`, if anything was sampled in it.
    """

    def __init__(
        self,
        episode: Episode,
        prompt: Prompt,
        *,
        agent: str | None,
        end: int,
        parent: Conversation | None = None,
    ) -> None:
        self.episode, self.prompt, self.agent, self.parent = episode, prompt, agent, parent
        self.number = len(episode.conversations)
        self.messages: list[Message] = list(prompt.messages or [{"role": "user", "content": prompt.text}])
        self.reward: float | None = None
        """Given by the environment; None: scored as `[reward]` says, a mere stem of branches by their mean."""
        self.info: dict[str, Any] = {}
        self.turns = 0
        self.why = ""
        """What ended it, where that was not the environment: `length`, `context`, `turns`, `time`."""
        self.tool_calls = 0
        self.tool_failures: Counter[str] = Counter()
        self.failure: str | None = None
        self._tokens: list[int] = []
        self._mask: list[int] = []
        self._logprobs: list[float | None] = []
        self._versions: list[int] = []  # of each token; one that was told has that of the turn before it
        self._status = Status.COMPLETED
        self._end = end  # tokens, prompt included, after which there is no room
        self._last: tuple[list[int], str] | None = None  # the turn that nothing follows yet
        self._last_text = ""
        self._given = 0
        self._routing: Any = None  # of all that the last turn was given, earlier turns too

    @property
    def tokens(self) -> list[int]:
        """All of them, prompt included."""
        return self.prompt.tokens + self._tokens

    @property
    def tokens_left(self) -> int:
        return self._end - len(self.prompt.tokens) - len(self._tokens)

    async def generate(self, *, max_tokens: int | None = None) -> Turn:
        """The model's next turn. EpisodeOver where a limit allows none."""
        if self._last is not None or self.why:
            raise RuntimeError("the conversation has a last turn already: append messages before the next")
        episode = self.episode
        room = min(filter(None, (self.tokens_left, episode.limits.max_turn_tokens, max_tokens)))
        completion = await episode.sample(self, max(room, 1))
        text, raw = self.record(completion)
        if self.failure is not None:
            raise EpisodeOver("failed")
        return Turn(
            number=self.turns - 1,
            text=text,
            raw=raw,
            tokens=list(completion.tokens),
            status=completion.status,
            calls=episode.parser(self._ended(raw)),
            messages=list(self.messages),
            tokens_left=self.tokens_left,
        )

    def record(self, completion: Completion) -> tuple[str, str]:
        """Take a turn that was sampled behind what is here; its text, without and with special tokens."""
        self._take(completion)
        text = self.episode.template.text(completion.tokens)
        raw = self.episode.template.text(completion.tokens, special=True)
        self._last_text = text
        self.messages.append({"role": "assistant", "content": text})
        self.turns += 1
        if completion.status is Status.COMPLETED:
            self._last = (completion.tokens, raw)
        elif completion.status is Status.TRUNCATED:
            self.why = "context" if self.tokens_left <= 0 else "length"
        elif completion.status is Status.ABORTED:
            self.why = "time"
        else:
            self.failure = completion.error or "the engine gave no answer"
        return text, raw

    def tell(self, messages: Sequence[Message], given: Sequence[int]) -> None:
        """Take messages that the model was told, and their ids, which have no loss."""
        self._tokens += given
        self._mask += [0] * len(given)
        self._logprobs += [None] * len(given)
        self._versions += self._versions[-1:] * len(given) or [_UNKNOWN] * len(given)
        self._given += len(given)
        self.messages += messages
        self._last = None

    def append(self, messages: Sequence[Message]) -> bool:
        """Tell the model something, up to where it answers. False, and nothing is told, if no room for an answer is
        left; then the conversation is over."""
        if self._last is None:
            raise RuntimeError("nothing was said yet, or the last turn was cut off: there is nothing to answer")
        episode = self.episode
        limit = episode.limits.max_observation_tokens
        told = [_checked(message) for message in messages]
        template = episode.template
        told = [m | {"content": template.clipped(template.harmless(m["content"]), limit)} for m in told]
        given = template.between(*self._last, told, episode.sampling.stop)
        if not told or len(given) >= self.tokens_left:
            self.why = "context" if told else self.why
            return False
        self.tell(told, given)
        return True

    def fork(self, agent: str | None = None) -> Conversation:
        """A branch that goes on from here. What is there already is its prompt: it is trained once, in this one."""
        text = self.prompt.text + self.episode.template.text(self._tokens, special=True)
        prompt = replace(self.prompt, tokens=self.tokens, text=text, messages=list(self.messages))
        child = Conversation(self.episode, prompt, agent=agent or self.agent, end=self._end, parent=self)
        child._last, child.why = self._last, self.why
        self.episode.conversations.append(child)
        return child

    async def call_tools(self, turn: Turn) -> list[Called]:
        """Answer the turn's calls; `append(results(called))` tells the model."""
        called = await self.episode.tools.call_all(turn.calls)
        self.count(called)
        return called

    def count(self, called: Sequence[Called]) -> None:
        """Take tool calls into the metadata."""
        self.tool_calls += len(called)
        self.tool_failures.update(c.failure for c in called if c.failure is not None)

    def to_sample(self, group_index: int, index: int) -> Sample:
        """As it is trained: given tokens have no loss and no log-prob."""
        length = max((i + 1 for i, sampled in enumerate(self._mask) if sampled), default=0)
        tokens = self._tokens[:length]  # what was given last, and answered no more, is no part of it
        versions = Counter(self._versions[:length])  # keeps their order
        whole = self._routing is not None and len(self._routing) == len(self.prompt.tokens) + length - 1
        if self.why in ("length", "context"):
            self._status = Status.TRUNCATED
        elif self.why == "time":
            self._status = Status.ABORTED
        return Sample(
            prompt=self.prompt,
            group_index=group_index,
            index=index,
            tokens=self.prompt.tokens + tokens,
            response_length=length,
            response=self.episode.template.text(tokens),
            answer=self._last_text,
            loss_mask=self._mask[:length],
            rollout_logprobs=self._logprobs[:length],
            rollout_routing=self._routing if whole else None,
            policy_versions=list(versions),
            version_tokens=list(versions.values()) if len(versions) > 1 else None,
            status=self._status,
            reward=self.reward,
            metadata=self._metadata(),
        )

    def _metadata(self) -> dict[str, Any]:
        said = self.messages[len(self.prompt.messages or [{}]) :]
        found: dict[str, Any] = {"episode": self.episode.number, "conversation": self.number, "turns": self.turns}
        found |= {"messages": said}
        found |= {"tool_calls": self.tool_calls, "given_tokens": self._given}
        if self.tool_failures:
            found["tool_failures"] = dict(self.tool_failures)
        if self.agent is not None:
            found["agent"] = self.agent
        if self.parent is not None:
            found["parent"] = self.parent.number
        if self.why:
            found["cut_by"] = self.why
        if self.info:
            found["info"] = self.info
        return found

    def _take(self, completion: Completion) -> None:
        self._tokens += completion.tokens
        self._mask += [1] * len(completion.tokens)
        self._logprobs += completion.logprobs
        self._take_routing(completion.routing)
        counts = completion.version_tokens or [len(completion.tokens)]
        sampled = zip(completion.policy_versions, counts, strict=True) if completion.tokens else ()
        versions = [version for version, count in sampled for _ in range(count)]
        if versions and self._versions[-1:] == [_UNKNOWN]:
            self._versions = versions[:1] * len(self._versions)
        self._versions += versions

    def _take_routing(self, routing: Any) -> None:
        """A turn's, which begins with the prompt: what older weights chose for earlier turns stays."""
        if self._routing is not None and routing is not None:
            routing = torch.cat([self._routing, routing[len(self._routing) :]])
        self._routing = self._routing if routing is None else routing

    def _ended(self, raw: str) -> str:
        """A turn's text up to its end token, for parsers."""
        if self._last is not None and self._last[0] and self._last[0][-1] in self.episode.template.end_ids:
            return raw.removesuffix(self.episode.template.text(self._last[0][-1:], special=True))
        return raw


@dataclass(eq=False, kw_only=True)
class Episode:
    """One episode, as a `Program` sees it: `start` conversations, `fork` them, `generate`, set rewards."""

    prompt: Prompt
    """The row of the data set."""
    number: int
    """Within its group."""
    group_index: int
    seed: int
    """The same for all episodes of the group."""
    tools: ToolBox
    limits: Limits
    sampling: SamplingParams
    template: ChatTemplate
    parser: Parser
    rounds: Rounds
    seed_of: Callable[[int, int], int]
    """(conversation, turn) -> seed of its draws."""
    conversations: list[Conversation] = field(default_factory=list)
    final: Conversation | None = None
    """The one whose reward counts in an evaluation; default: the last that sampled anything."""
    lost: EngineLostError | None = None
    failure: Exception | None = None
    """Set by a program: what fails the whole episode, though it may have ended by its time."""
    began: float = field(default_factory=time.monotonic)
    turns: int = 0
    _tools_given: bool = False

    def start(self, messages: Sequence[Message] | None = None, *, agent: str | None = None) -> Conversation:
        """A new conversation: from `messages`, or from the row's prompt. `agent` names who speaks: samples are compared
        with those of the same name. EpisodeOver for a prompt that leaves no room."""
        prompt = self.prompt
        if messages is not None:
            said = [_checked(message) for message in messages]
            text, tokens = self.template.prompt(said, prompt.tools)
            prompt = replace(prompt, tokens=tokens, text=text, messages=said)
        length, limits = len(prompt.tokens), self.limits
        if length >= limits.context_length:
            raise EpisodeOver("context")
        end = min(limits.context_length, length + limits.max_response_tokens)
        conversation = Conversation(self, prompt, agent=agent, end=end)
        self.conversations.append(conversation)
        return conversation

    @property
    def party(self) -> tuple[int, int]:
        """Who it is in `rounds`."""
        return self.group_index, self.number

    @property
    def seconds_left(self) -> float:
        return self.began + self.limits.seconds - time.monotonic()

    async def sample(self, conversation: Conversation, max_tokens: int) -> Completion:
        """One turn's tokens; what was sampled when the episode's time is up is all of it."""
        if self.turns >= self.limits.max_turns:
            conversation.why = "turns"
            raise EpisodeOver("turns")
        if self.seconds_left <= 0:
            conversation.why = "time"
            raise EpisodeOver("time")
        self.turns += 1
        place = (conversation.number, conversation.turns)
        return await self.draw(conversation.tokens, place, replace(self.sampling, max_new_tokens=max_tokens))

    async def draw(self, tokens: list[int], place: tuple[int, int], sampling: SamplingParams) -> Completion:
        """As `sample`, behind any ids; `place` is (conversation, turn), of its draws and its order in a round."""
        ask = Ask(party=self.party, place=place, tokens=tokens, sampling=sampling, seed=self.seed_of(*place))
        timer = asyncio.get_running_loop().call_later(self.seconds_left, self.rounds.abort, ask)
        try:
            return await self.rounds.generate(ask)
        except EngineLostError as error:
            self.lost = error  # a program may catch it
            raise
        finally:
            timer.cancel()


def add_reward(conversation: Conversation, reward: Any) -> None:
    """ValueError for what is no number, or none that can be trained on."""
    if reward is not None:
        value = float(reward) + (conversation.reward or 0.0)
        conversation.reward = checked(value, "the environment's reward")


def _checked(message: Any) -> Message:
    """A message with text. ValueError for anything else."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"a message is {{'role': …, 'content': …}}, not {message!r:.80}")
    content = message.get("content")
    if not isinstance(content, str):
        raise ValueError(f"a message's content is text, not {content!r:.80}")
    return message | {"content": content.encode("utf-8", "replace").decode()}
