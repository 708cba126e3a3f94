"""A rollout function of the user's own, `rollout.generate`: one prompt in, the samples of its group out."""

from __future__ import annotations

import asyncio
import inspect
import math
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightrl import hooks
from lightrl.engine.base import Completion, Engine, EngineLostError, GenerateRequest, SamplingParams
from lightrl.errors import LostError, UserError
from lightrl.rewards.values import BadReward, checked
from lightrl.rollout.seeds import sample_seed
from lightrl.types import Prompt, Sample, Status


@dataclass(frozen=True, kw_only=True)
class GenerateTask:
    """What a `generate` hook is given: a prompt, the engine, and how to sample. Many are under way at once.

    `await task.ask(tokens, index)` samples, `task.sample(index, …)` makes the record that training takes.
    """

    prompt: Prompt
    group_index: int
    num_samples: int
    """As `rollout.group_size`; a hook may return more or fewer."""
    sampling: SamplingParams
    is_evaluation: bool
    decode: Callable[[list[int]], str]
    """Token ids to text, special tokens left out."""
    engine: Engine
    """For requests of your own; ids must be unique in the run and begin with `task.id + "/"`."""
    seed: int
    stream: str
    watch: Callable[[str, int, Sequence[int], float, float], None] | None = None
    """Told of each turn, for `log.timeline_steps`."""
    context_length: int = sys.maxsize
    """Most tokens of a sample, prompt and response together."""
    vocab_size: int = sys.maxsize
    """Token ids are below it."""
    _flying: dict[str, asyncio.Task[list[Completion]]] = field(default_factory=dict, repr=False)
    _asked: set[str] = field(default_factory=set, repr=False)
    _lost: list[EngineLostError] = field(default_factory=list, repr=False)

    @property
    def id(self) -> str:
        return f"{self.stream}/{self.group_index}"

    async def ask(self, tokens: list[int], index: int, turn: int = 0, **sampling: Any) -> Completion:
        """One answer to these token ids, for sample `index`; `sampling` changes fields of `task.sampling`.

        Each (index, turn) is asked for once. It is drawn with a seed of its own: a run that is repeated, or resumed,
        gets the same answer, and the first turn the one that a run without the hook would get.
        """
        stream = self.stream if turn == 0 else f"{self.stream}/turn{turn}"
        request = GenerateRequest(
            id=f"{self.id}/{index}/{turn}",
            tokens=list(tokens),
            sampling=replace(self.sampling, **sampling),
            seeds=(sample_seed(self.seed, stream, self.group_index, index),),
        )
        if request.id in self._asked:
            raise ValueError(f"sample {index} has asked for turn {turn} already: number the turns")
        self._asked.add(request.id)
        call = self._flying[request.id] = asyncio.ensure_future(self.engine.generate(request))
        call.add_done_callback(lambda _: self._flying.pop(request.id, None))
        start = time.perf_counter()
        try:
            (completion,) = await asyncio.shield(call)
        except EngineLostError as error:
            self._lost.append(error)
            raise
        if self.watch is not None:
            self.watch(f"turn {turn + 1}", self.group_index, [index], start, time.perf_counter())
        return completion

    def sample(self, index: int, *parts: Completion | list[int], **fields: Any) -> Sample:
        """The sample of these parts, one after the other behind the prompt: answers of the engine, and token ids given
        in between (tool output …), which carry no loss and have log-prob 0. `fields` are set besides.

        Status and policy versions are those of the answers: the last one's status, versions in the order of tokens.
        """
        answers = [part for part in parts if isinstance(part, Completion)]
        response: list[int] = []
        mask: list[int] = []
        logprobs: list[float | None] = []
        for part in parts:
            given = not isinstance(part, Completion)
            ids = part if isinstance(part, list) else part.tokens
            response += ids
            mask += [int(not given)] * len(ids)
            logprobs += [0.0] * len(ids) if isinstance(part, list) else part.logprobs
        versions = _versions(parts)
        made: dict[str, Any] = {
            "response": self.decode(response),
            "loss_mask": None if all(mask) else mask,
            "policy_versions": [version for version, _ in versions],
            "version_tokens": [count for _, count in versions] if len(versions) > 1 else None,
            "status": answers[-1].status if answers else Status.FAILED,
        }
        if len(parts) == 1 and answers:
            made["rollout_top_ids"] = answers[0].top_ids or None
            made["rollout_top_logprobs"] = answers[0].top_logprobs or None
        last = parts[-1] if parts else None
        if isinstance(last, Completion) and last.routing is not None:  # of all that it was given, earlier turns too
            is_whole = len(last.routing) == len(self.prompt.tokens) + len(response) - 1
            made["rollout_routing"] = last.routing if is_whole else None
        errors = [answer.error for answer in answers if answer.error is not None]
        if errors:
            made["metadata"] = {"failure": errors[-1]}
        return Sample(
            prompt=self.prompt,
            group_index=self.group_index,
            index=index,
            tokens=self.prompt.tokens + response,
            response_length=len(response),
            rollout_logprobs=logprobs,
            **{**made, **fields},
        )


def _versions(parts: Sequence[Completion | list[int]]) -> list[tuple[int, int]]:
    """Which policy version gave how many tokens, in their order. Given tokens count to the answer before them."""
    found: list[tuple[int, int]] = []
    given = 0  # before the first answer
    for part in parts:
        if isinstance(part, list) or not part.policy_versions:
            count = len(part) if isinstance(part, list) else len(part.tokens)
            if found:
                found[-1] = found[-1][0], found[-1][1] + count
            else:
                given += count
            continue
        for version, count in zip(part.policy_versions, part.version_tokens or [len(part.tokens)], strict=True):
            before = found.pop()[1] if found and found[-1][0] == version else 0
            found.append((version, before + count + given))
            given = 0
    return found


Generate = Callable[[GenerateTask], Awaitable[Sequence[Sample]]]
"""A `generate` hook: `async def f(task) -> list[Sample]`. Samples with a reward keep it; the others are scored."""


def load_generate(name: str, given: Generate | None = None) -> Generate | None:
    """What `rollout.generate` names, or the function given in its place; None for `none`."""
    function = given
    if function is None and name != "none":
        function = hooks.load(name, "rollout.generate")
    if function is None:
        return None
    if (fault := generate_fault(function)) is not None:
        raise UserError(f"rollout.generate{f' = {name!r}' if given is None else ''}: {fault}")
    return function


def generate_fault(function: Callable[..., Any]) -> str | None:
    """Why a function cannot be a `generate` hook, as far as its signature tells; else None."""
    if not callable(function):
        return f"a {type(function).__name__} is no function"
    call = function if inspect.isfunction(function) or inspect.ismethod(function) else type(function).__call__
    if not (inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)):
        return "it would hold up all other prompts while it waits: write `async def`"
    return hooks.call_fault(function)


@dataclass(kw_only=True, eq=False)
class HookRun:
    """One call of a `generate` hook, which may be dropped."""

    task: GenerateTask
    _running: asyncio.Task[Any] | None = None
    _is_dropped: bool = False

    async def samples(self, function: Generate) -> list[Sample] | None:
        """What it returned, checked; None if it was dropped meanwhile. The engine has none of its requests afterwards.

        What it raises, and samples that training could not take, are a UserError with the prompt's place; an engine
        that is lost stays an EngineLostError.
        """
        self._running = asyncio.ensure_future(_called(function, self.task))
        try:
            returned = await self._running
        except asyncio.CancelledError:
            if self._is_dropped:
                return None
            if not _is_cancelling():
                raise UserError("rollout.generate: the function cancelled itself: it must return, or raise") from None
            raise
        except (LostError, UserError):
            raise
        except Exception as error:
            where = self.task.prompt.source or f"prompt {self.task.prompt.index}"
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            failure = UserError(f"rollout.generate: {where}: {reason}; return a sample with Status.FAILED to go on")
            failure.add_note("".join(traceback.format_exception(error)).rstrip())
            raise failure from error
        finally:
            if self.task._flying:
                self.abort()
                await asyncio.gather(*self.task._flying.values(), return_exceptions=True)
        if self.task._lost:  # the function went on without: its samples would be those of an engine that died
            raise self.task._lost[0]
        if (fault := samples_fault(returned, self.task)) is not None:
            where = self.task.prompt.source or f"prompt {self.task.prompt.index}"
            raise UserError(f"rollout.generate: {where}: {fault}")
        return list(returned)

    def abort(self) -> None:
        for name in list(self.task._flying):
            self.task.engine.abort(name)

    def drop(self) -> None:
        """End it: its requests and the function itself."""
        self._is_dropped = True
        self.abort()
        if self._running is not None:
            self._running.cancel()


async def _called(function: Generate, task: GenerateTask) -> Any:
    return await function(task)


def _is_cancelling() -> bool:
    """Whether the task that waits for the hook is itself asked to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def samples_fault(samples: Any, task: GenerateTask) -> str | None:
    """Why training cannot take what a `generate` hook returned; None if it can."""
    if not isinstance(samples, Sequence) or isinstance(samples, str | bytes):
        return f"it returned a {type(samples).__name__}, not a list of Sample"
    if not samples:
        return "it returned no samples: return one with Status.FAILED for an answer that could not be had"
    seen: set[int] = set()
    for place, sample in enumerate(samples):
        if not isinstance(sample, Sample):
            return f"item {place} is a {type(sample).__name__}, not a Sample"
        if (fault := _fault(sample, task)) is not None:
            return f"sample {sample.index}: {fault}"
        if sample.index in seen:
            return f"two samples have index {sample.index}: number them"
        seen.add(sample.index)
    return None


def _fault(sample: Sample, task: GenerateTask) -> str | None:
    if sample.group_index != task.group_index:
        return f"group_index is {sample.group_index}, not task.group_index = {task.group_index}"
    if not all(type(token) is int and token >= 0 for token in sample.tokens):
        return "tokens must be a list of ids, whole numbers from 0 on"
    if not isinstance(sample.response_length, int) or not 0 <= sample.response_length <= len(sample.tokens):
        return f"response_length is {sample.response_length} of {len(sample.tokens)} tokens"
    if sample.response_length == len(sample.tokens):
        return "no prompt before the response: the first response token could not be predicted from anything"
    if (largest := max(sample.tokens)) >= task.vocab_size:
        return f"token {largest} is none of the model's {task.vocab_size}"
    if len(sample.tokens) > task.context_length:
        return f"{len(sample.tokens)} tokens are more than the model's context of {task.context_length}"
    length = sample.response_length
    for name, values in (("loss_mask", sample.loss_mask), ("rollout_logprobs", sample.rollout_logprobs)):
        if values is not None and len(values) != length:
            return f"{name} has {len(values)} entries for {length} response tokens"
    if sample.loss_mask is not None and not all(value in (0, 1) for value in sample.loss_mask):
        return "loss_mask holds other values than 0 and 1"
    if sample.rollout_logprobs is None and length:
        return "no rollout_logprobs: give those of the engine, 0.0 for tokens that were given"
    logprobs: Sequence[Any] = sample.rollout_logprobs or ()
    for logprob, counts in zip(logprobs, sample.mask, strict=True):
        if logprob is None and not counts:  # of a token that was given
            continue
        if not isinstance(logprob, float | int) or not math.isfinite(logprob) or logprob > 1e-3:
            return f"rollout_logprobs holds {logprob!r}: log-probs are numbers of at most 0"
    if not isinstance(sample.status, Status):
        return f"status is {sample.status!r}, not a Status"
    reward = sample.reward
    if reward is not None and not isinstance(reward, float | int):
        return f"reward is {reward!r}, not a finite number (None: it is scored)"
    try:
        checked(float(reward or 0.0), "reward")
    except (BadReward, OverflowError) as error:
        return f"{error} (None: it is scored)"
    return None
