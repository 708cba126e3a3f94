"""An engine that says what a script tells it, on byte-level tokens; and an agent around it, without a model."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import chat_templates as templates

from lightrl.config.schema import AgentConfig, SandboxConfig
from lightrl.engine.base import Completion, EngineLostError, GenerateRequest
from lightrl.rollout.agent import Agent, AgentSampler, load_agent
from lightrl.rollout.collect import Work, run_async
from lightrl.types import Prompt, Sample, SampleGroup, Status

Script = Callable[[str, int], str]
"""(what was said so far, seed) -> the next turn, without its end."""


class ScriptedEngine:
    """Ends each turn with `end`, cuts it at the limit, and dies in its requests `deaths`, counted through its lives."""

    def __init__(
        self, tokenizer: Any, script: Script, *, end: str = "<|im_end|>", deaths: tuple[int, ...] = ()
    ) -> None:
        self.policy_version, self.lost = 3, False
        self.requests: list[GenerateRequest] = []
        self.running: set[str] = set()
        self._tokenizer, self._script, self._end, self._deaths = tokenizer, script, end, deaths
        self._aborted: set[str] = set()

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        if self.lost:
            raise EngineLostError("the engine died")
        assert request.id not in self.running
        assert request.seeds is not None
        self.requests.append(request)
        number = len(self.requests)
        self.running.add(request.id)
        try:
            for _ in range(1 + request.seeds[0] % 3):
                await asyncio.sleep(0)
            if self.lost or number in self._deaths:
                self.lost = True
                raise EngineLostError("the engine died")
            return [await self._answer(request, seed) for seed in request.seeds]
        finally:
            self.running.remove(request.id)

    async def _answer(self, request: GenerateRequest, seed: int) -> Completion:
        said = self._script(self._tokenizer.decode(request.tokens), seed)
        while said == "wait" and request.id not in self._aborted:
            await asyncio.sleep(0.01)
        ids = self._tokenizer(said + self._end, add_special_tokens=False)["input_ids"]
        status = Status.COMPLETED
        if request.id in self._aborted:
            status, ids = Status.ABORTED, ids[:2]
        elif len(ids) > request.sampling.max_new_tokens:
            status, ids = Status.TRUNCATED, ids[: request.sampling.max_new_tokens]
        logprobs = [-0.25 - 0.001 * i for i in range(len(ids))]
        return Completion(tokens=ids, logprobs=logprobs, status=status, policy_versions=[self.policy_version])

    def abort(self, request_id: str | None = None) -> None:
        self._aborted |= self.running if request_id is None else {request_id}

    def restart(self) -> None:
        self.lost = False


class LengthScorer:
    """The reward is how long what is graded is."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    async def score(self, samples: list[Sample]) -> None:
        for sample in samples:
            sample.reward = float(len(sample.graded))

    def count_failure(self, sample: Sample, error: Exception) -> None:
        sample.status, sample.reward = Status.FAILED, None
        sample.metadata["failure"] = str(error)
        self.failures.append(str(error))


def make_agent(template: str = templates.CHATML, *, context_length: int = 4096, **keys: Any) -> Agent:
    tokenizer = templates.tokenizer(template)
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "</s>"])
    sandbox = SandboxConfig(**keys.pop("sandbox", {}))
    agent = load_agent(AgentConfig(**keys), sandbox, tokenizer, end_ids=ends, context_length=context_length)
    assert agent is not None
    return agent


def make_prompt(agent: Agent, text: str = "hi", index: int = 0) -> Prompt:
    messages = [{"role": "user", "content": text}]
    written, tokens = agent.template.prompt(messages, agent.definitions or None)
    return Prompt(index=index, tokens=tokens, text=written, messages=messages)


def sampler_for(agent: Agent, engine: Any, *, group_size: int = 2, tokens: int = 200, **more: Any) -> AgentSampler:
    from lightrl.engine.base import SamplingParams

    parts = {"together": True, "scorer": LengthScorer(), "seed": 7} | more
    return AgentSampler(
        agent=agent,
        engine=engine,
        sampling=SamplingParams(max_new_tokens=tokens),
        group_size=group_size,
        decode=lambda ids: agent.template.text(ids),
        **parts,
    )


def play(agent: Agent, script: Script, *, prompts: int = 1, **more: Any) -> list[SampleGroup]:
    """Groups of episodes, all under way at once."""
    engine = more.pop("engine", None) or ScriptedEngine(agent.template.tokenizer, script)
    sampler = sampler_for(agent, engine, **more)

    async def work() -> list[SampleGroup | None]:
        works = [Work(group_index=i, prompt=make_prompt(agent, f"hi {i}", i)) for i in range(prompts)]
        return list(await asyncio.gather(*(sampler.complete(w) for w in works)))

    groups = run_async(work())
    assert not engine.running
    return [g for g in groups if g is not None]


def said_of(agent: Any, sample: Sample) -> str:
    """The response with what was sampled between « and »."""
    text = ""
    for sampled, run in itertools.groupby(
        zip(sample.mask, sample.response_tokens, strict=True), key=lambda pair: pair[0]
    ):
        written = agent.template.text([token for _, token in run], special=True)
        text += f"«{written}»" if sampled else written
    return text
