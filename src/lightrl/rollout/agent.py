"""Episodes in the place of answers: what `[agent]` configures, and the sampler that plays them.

It has the seam of `Sampler`: a prompt in, a scored group out, on any engine. An episode is one sample, or with several
conversations (agents, branches) one each.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lightrl import hooks
from lightrl.config.schema import AgentConfig, EndpointConfig, SandboxConfig
from lightrl.engine.base import EngineLostError
from lightrl.errors import UserError
from lightrl.rewards.calls import Caller
from lightrl.rewards.values import checked
from lightrl.rollout.collect import Sampler, Work
from lightrl.rollout.conversation import ChatTemplate, TemplateError
from lightrl.rollout.environment import Step, ToolEnvironment
from lightrl.rollout.episode import Conversation, Episode, EpisodeOver, Limits, add_reward
from lightrl.rollout.rounds import Rounds
from lightrl.rollout.seeds import sample_seed
from lightrl.rollout.tools import Parser, ToolBox, load_parser, load_tools
from lightrl.types import Sample, Status

if TYPE_CHECKING:
    from lightrl.rollout.endpoint import OutsideAgents


@dataclass(frozen=True, kw_only=True)
class Agent:
    """What episodes of a run share."""

    config: AgentConfig
    environment: Callable[..., Any] | None
    """A class; None: `ToolEnvironment`."""
    tools: ToolBox
    template: ChatTemplate
    parser: Parser
    context_length: int
    caller: Caller = field(default_factory=Caller)
    outside: OutsideAgents | None = None
    """The environment, where that is `outside`."""

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """Tools that prompts tell the model of; none where it writes code in blocks."""
        return [] if self.config.parser == "code" else self.tools.definitions

    @property
    def gives_reward(self) -> bool:
        """The environment grades by itself."""
        return bool(getattr(self.environment, "gives_reward", False))

    def build(self, seed: int) -> Any:
        """A new environment. Raises what its class raises."""
        if self.environment is None:
            return ToolEnvironment(self.tools, self.config.tool_role, self.config.turn_timeout)
        given = {"tools": self.tools, "seed": seed}
        taken = {name: value for name, value in given.items() if _takes(self.environment, name)}
        return self.environment(**self.config.options, **taken)

    def close(self) -> None:
        """End what tools and environments run; idempotent."""
        if self.outside is not None:
            self.outside.end()
        self.tools.close()
        self.caller.close()


def load_agent(
    config: AgentConfig,
    sandbox: SandboxConfig,
    tokenizer: Any,
    *,
    end_ids: Sequence[int],
    context_length: int,
    template_kwargs: Mapping[str, Any] | None = None,
    endpoint: EndpointConfig | None = None,
    model: str = "",
    graded: bool = False,
    rank: int = 0,
) -> Agent | None:
    """What `[agent]` asks for; None where it is off. Needs a tokenizer, no model.

    For agents outside: `[endpoint]`, the model's name, whether `[reward]` grades sessions without a reward, the rank.
    UserError for an environment, tool or parser that is not there or does not fit, and for a chat template that cannot
    write what they say.
    """
    if not config.enabled:
        return None
    environment = _load_environment(config) if config.environment and not config.is_outside else None
    tools = load_tools(config, sandbox)
    roles = ["user", *([config.tool_role] if config.tools else [])]
    remedy = ": set agent.tool_role = 'user'" if config.tools and config.tool_role == "tool" else ""
    try:
        template = ChatTemplate(tokenizer, kwargs=template_kwargs, end_ids=end_ids, roles=roles, remedy=remedy)
    except TemplateError as error:
        raise UserError(f"agent.tool_role: {error}" if remedy else f"model.tokenizer: {error}") from error
    agent = Agent(
        config=config,
        environment=environment,
        tools=tools,
        template=template,
        parser=load_parser(config, tools.definitions),
        context_length=context_length,
    )
    if not config.is_outside:
        return agent
    from lightrl.rollout.endpoint import OutsideAgents

    settings = endpoint or EndpointConfig()
    outside = OutsideAgents(settings, config, template, agent.caller, model=model, graded=graded, rank=rank)
    return replace(agent, environment=outside, outside=outside)


def sampler_of(agent: Agent | None, *, together: bool, final_only: bool = False, **parts: Any) -> Sampler:
    """A sampler of episodes, or without an agent of plain answers. `parts` are those of `Sampler`."""
    if agent is None:
        return Sampler(**parts)
    return AgentSampler(agent=agent, together=together, final_only=final_only, **parts)


@dataclass(frozen=True, kw_only=True)
class AgentSampler(Sampler):
    """How prompts become groups of episodes. The first turn's draws are those of a plain answer.

    `together`: all turns in rounds (`Rounds`), for engines whose batches must repeat. `final_only`: of each episode
    the final sample alone, as evaluations count them.
    """

    agent: Agent
    together: bool
    final_only: bool = False

    @cached_property
    def _rounds(self) -> Rounds:
        return Rounds(engine=self.engine, stream=self.stream, together=self.together)

    @cached_property
    def _playing(self) -> dict[int, list[asyncio.Task[None]]]:
        return {}

    @cached_property
    def _slots(self) -> dict[asyncio.AbstractEventLoop, asyncio.Semaphore]:
        return {}

    def drop(self, work: Work) -> None:
        """End the episodes of a group that is not needed."""
        work.is_dropped = True
        for task in self._playing.get(work.group_index, ()):
            task.cancel()

    async def _answer(self, work: Work) -> None:
        """Play the episodes that are missing. One whose engine was lost leaves nothing, and is played anew."""
        missing = [i for i in range(self.group_size) if i not in work.episodes]
        for number in missing:
            self._rounds.enter((work.group_index, number))
        tasks = [asyncio.create_task(self._episode(work, number)) for number in missing]
        self._playing[work.group_index] = tasks
        try:
            if tasks:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            errors = [e for t in tasks if t.done() and not t.cancelled() and (e := t.exception()) is not None]
            if errors and all(isinstance(e, EngineLostError) for e in errors):
                await asyncio.wait(tasks)  # the others finish what they can, or lose it as well
            if errors and not work.is_dropped:
                raise errors[0]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for number in missing:  # of those too that were ended before they began
                self._rounds.leave((work.group_index, number))
            self._playing.pop(work.group_index, None)

    async def _episode(self, work: Work, number: int) -> None:
        party = (work.group_index, number)
        episode = self._new_episode(work, number)
        try:
            failure = await self._play(episode)
        finally:
            self._rounds.leave(party)
        if episode.lost is not None:
            raise episode.lost
        work.episodes[number] = (episode, failure)

    def _new_episode(self, work: Work, number: int) -> Episode:
        config, group = self.agent.config, work.group_index

        def seed_of(conversation: int, turn: int) -> int:
            stream = f"{self.stream}/{conversation}/{turn}" if (conversation, turn) != (0, 0) else self.stream
            return sample_seed(self.seed, stream, group, number)

        return Episode(
            prompt=work.prompt,
            number=number,
            group_index=group,
            seed=sample_seed(self.seed, f"{self.stream}/environment", group, 0),
            tools=self.agent.tools,
            limits=Limits(
                max_turns=config.max_turns,
                max_turn_tokens=config.max_turn_tokens,
                max_observation_tokens=config.max_observation_tokens,
                max_response_tokens=self.sampling.max_new_tokens,
                context_length=self.agent.context_length,
                seconds=config.episode_timeout,
            ),
            sampling=self.sampling,
            template=self.agent.template,
            parser=self.agent.parser,
            rounds=self._rounds,
            seed_of=seed_of,
        )

    async def _play(self, episode: Episode) -> Exception | None:
        """The whole episode; what its environment raised, if it did. EngineLostError is in `episode.lost`."""
        environment: Any = None
        try:
            environment = await self._ask(lambda _: self.agent.build(episode.seed), None, episode)
            if hasattr(environment, "run"):
                async with asyncio.timeout(max(episode.seconds_left, 0.0)):
                    await environment.run(episode)
                for conversation in episode.conversations:  # a program sets it as it likes
                    if conversation.reward is not None:
                        conversation.reward = checked(float(conversation.reward), "the environment's reward")
            else:
                await self._converse(episode, environment)
        except (EpisodeOver, EngineLostError):
            return episode.failure
        except Exception as error:
            if isinstance(error, TimeoutError) and episode.seconds_left <= 0:
                for conversation in episode.conversations:
                    conversation.why = conversation.why or "time"
                return episode.failure
            return error
        finally:
            if environment is not None and hasattr(environment, "close"):
                with contextlib.suppress(Exception):  # the episode is over, whatever its environment thinks of it
                    await self._ask(lambda _: environment.close(), None, episode)
        return episode.failure

    async def _converse(self, episode: Episode, environment: Any) -> None:
        """Turns in alternation with `reset` and `step`."""
        config = self.agent.config
        conversation = episode.start(await self._ask(environment.reset, episode.prompt, episode))
        while True:
            turn = await conversation.generate()
            step = await self._ask(environment.step, turn, episode)
            if not isinstance(step, Step):
                raise TypeError(f"the environment's step returned {step!r:.80}, not a Step")
            add_reward(conversation, step.reward)
            conversation.count(step.calls)
            conversation.info |= step.info
            if step.done or not step.messages or turn.status is not Status.COMPLETED:
                return
            if episode.turns >= config.max_turns:
                conversation.why = "turns"
                return
            if not conversation.append(step.messages):
                return

    async def _ask(self, function: Callable[..., Any], argument: Any, episode: Episode) -> Any:
        """Call the environment under its limits, off the loop that generates."""
        loop = asyncio.get_running_loop()
        if loop not in self._slots:
            self._slots[loop] = asyncio.Semaphore(self.agent.config.concurrency)
        async with self._slots[loop]:
            limit = self.agent.config.turn_timeout
            # tools are ended at the limit and tell so; an environment that goes on beyond it fails
            grace = 5.0 if self.agent.environment is None else 0.0
            return await self.agent.caller.call(function, argument, limit + grace)

    # ---- samples

    async def _samples(self, work: Work) -> list[Sample] | None:
        """Of all episodes, by their numbers; with the rewards that environments gave."""
        await self._answer(work)
        if work.is_dropped:
            return None
        samples: list[Sample] = []
        for number in range(self.group_size):
            episode, failure = work.episodes[number]
            samples += self._of_episode(episode, failure, work, len(samples))
        return samples

    async def _score(self, samples: list[Sample]) -> None:
        """A stem of branches without a reward of its own gets their mean, all others what `[reward]` says."""
        branches: dict[tuple[int, int], list[Sample]] = {}
        for sample in samples:
            if (parent := sample.metadata.get("parent")) is not None:
                branches.setdefault((sample.metadata["episode"], parent), []).append(sample)
        open_ = [s for s in samples if s.status is not Status.FAILED and s.reward is None]
        stems = [s for s in open_ if (s.metadata["episode"], s.metadata["conversation"]) in branches]
        others = [s for s in open_ if not any(s is stem for stem in stems)]
        if self.agent.gives_reward:
            for sample in others:
                sample.reward = 0.0
        elif others:
            await self.scorer.score(others)
        for stem in reversed(stems):  # a branch comes after its stem
            found = branches[stem.metadata["episode"], stem.metadata["conversation"]]
            rewards = [b.reward for b in found if b.reward is not None]
            stem.reward = fmean(rewards) if rewards else None
            if stem.reward is None:
                stem.status, stem.metadata["failure"] = Status.FAILED, "no branch has a reward"

    def _kept(self, samples: list[Sample]) -> list[Sample]:
        if not self.final_only:
            return samples
        kept = [s for s in samples if s.metadata.get("final", False)]
        for index, sample in enumerate(kept):
            sample.index = index
        return kept

    def _of_episode(self, episode: Episode, failure: Exception | None, work: Work, first: int) -> list[Sample]:
        """Of each conversation in which anything was sampled. An episode that failed fails them all."""
        said = [c for c in episode.conversations if c.turns and c.failure is None]
        samples = [c.to_sample(work.group_index, first + i) for i, c in enumerate(said)]
        if said:
            final = said.index(episode.final) if episode.final in said else len(said) - 1
            samples[final].metadata["final"] = True
        else:
            conversation = episode.conversations[0] if episode.conversations else self._unsaid(episode)
            sample = conversation.to_sample(work.group_index, first)
            sample.status, sample.reward, sample.metadata["final"] = Status.FAILED, None, True
            sample.metadata["failure"] = conversation.failure or "the prompt leaves no room for an answer"
            samples = [sample]
        if failure is not None:
            self.scorer.count_failure(samples[0], failure)
            for sample in samples[1:]:
                sample.status, sample.reward = Status.FAILED, None
                sample.metadata["failure"] = samples[0].metadata["failure"]
        return samples

    def _unsaid(self, episode: Episode) -> Conversation:
        prompt = replace(episode.prompt)
        return Conversation(episode, prompt, agent=None, end=len(prompt.tokens))


def _load_environment(config: AgentConfig) -> Callable[..., Any]:
    """UserError for a class without the protocol's methods, or with other options."""
    key, name = "agent.environment", config.environment
    found = hooks.load(name, key, arguments=None)
    if inspect.isclass(found) and not (hasattr(found, "run") or (hasattr(found, "reset") and hasattr(found, "step"))):
        raise UserError(f"{key} = {name!r}: the class needs methods reset and step, or run (docs/agents.md)")
    given = dict(config.options) | {n: None for n in ("tools", "seed") if _takes(found, n)}
    if config.tools and inspect.isclass(found) and not hasattr(found, "run") and not _takes(found, "tools"):
        raise UserError(
            f"agent.tools: the class of {key} does not take them: give it an argument `tools`, or drop them"
        )
    try:
        inspect.signature(found).bind(**given)
    except TypeError as error:
        raise UserError(f"agent.options: {name} cannot be made with {sorted(config.options)}: {error}") from error
    except ValueError:  # some of C's have no signature
        return found
    return found


def _takes(function: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except ValueError:
        return False
