"""Contract tests for a hook of the user's own: `lightrl check-hook KIND package.module:function`.

A hook is called with small made-up inputs, as a run would call it, and what comes back is checked as a run would.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from lightrl import hooks
from lightrl.config.schema import RewardConfig
from lightrl.data.mapping import row_fault
from lightrl.engine.base import Completion, Engine, EngineLostError, GenerateRequest, SamplingParams
from lightrl.errors import UserError
from lightrl.inspect.made_up import MadeUpEngine, made_up_group, made_up_sample
from lightrl.rewards import Scorer
from lightrl.rollout.collect import run_async
from lightrl.rollout.filters import verdict_of
from lightrl.rollout.hooked import GenerateTask, HookRun, generate_fault, samples_fault
from lightrl.training.hooks import StepInfo, metrics_fault, on_step_fault
from lightrl.types import Prompt, Sample, Status

KINDS = ("generate", "reward", "filter", "map", "on_step")
_KEYS = {
    "generate": "rollout.generate",
    "reward": "reward.type",
    "filter": "rollout.filter",
    "map": "data.map",
    "on_step": "run.on_step",
}


@dataclass(frozen=True)
class Check:
    """One line of the outcome. `fault` is None where it holds."""

    what: str
    fault: str | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the config would say beside the hook."""

    label: str = "4"
    row: Mapping[str, Any] | None = None
    key: str | None = None
    batched: bool = False
    timeout: float = 30.0


def check_hook(kind: str, path: str, settings: Settings) -> Iterator[Check]:
    """The checks of a hook, one after the other. One that cannot be loaded fails the first, and has no others."""
    key = _KEYS[kind]
    try:
        function = hooks.load(path, key)
    except UserError as error:
        yield Check("it can be loaded", str(error).removeprefix(f"{key} = {path!r}: "))
        return
    yield Check("it can be loaded, and called with one argument")
    checks: dict[str, Callable[[Any, Settings], Iterator[Check]]] = {
        "generate": _generate,
        "reward": _reward,
        "filter": _filter,
        "map": _map,
        "on_step": _on_step,
    }
    yield from checks[kind](function, settings)


# ---- generate


def _generate(function: Any, settings: Settings) -> Iterator[Check]:
    fault = generate_fault(function)
    yield Check("it is an async function", fault)
    if fault is not None:
        return
    first, asked, fault = _rollout(function, settings, MadeUpEngine())
    yield Check("it answers a prompt, and its samples fit training", fault, _described(first))
    if fault is not None:
        return
    assert first is not None
    yield Check("it asks for answers with seeds of their own", _seeds_fault(asked))
    yield Check("tokens it trains are tokens the engine gave, with their log-probs", _given_fault(first, asked))
    again, _, fault = _rollout(function, settings, MadeUpEngine())
    if fault is None and again != first:
        fault = "the same prompt gave other samples: a run cannot be repeated; draw by task.ask alone"
    yield Check("called again, it gives the same", fault)
    for status in (Status.TRUNCATED, Status.FAILED):
        _, _, fault = _rollout(function, settings, MadeUpEngine(status=status))
        yield Check(f"it copes with answers that are {status.value}", fault)
    yield Check("an engine that dies is left to the run", _death_fault(function, settings))
    yield Check("it ends when its group is not needed any more", _drop_fault(function, settings))


def _task(engine: MadeUpEngine, group: int = 3) -> GenerateTask:
    prompt = Prompt(index=5, tokens=[11, 12, 13], text="2 + 2 =", label="4", source="made-up.jsonl:6")
    return GenerateTask(
        prompt=prompt,
        group_index=group,
        num_samples=4,
        sampling=SamplingParams(max_new_tokens=8),
        is_evaluation=False,
        decode=lambda ids: " ".join(map(str, ids)),
        engine=cast(Engine, engine),
        seed=0,
        stream="train",
    )


def _rollout(
    function: Any, settings: Settings, engine: MadeUpEngine
) -> tuple[list[Sample] | None, list[tuple[GenerateRequest, list[Completion]]], str | None]:
    """(samples, what was asked and answered, what went wrong)."""

    async def limited() -> list[Sample] | None:
        async with asyncio.timeout(settings.timeout):
            return await HookRun(task=_task(engine)).samples(function)

    try:
        samples = run_async(limited())
    except TimeoutError:
        return None, engine.asked, f"not done after {settings.timeout:g} s (--timeout)"
    except UserError as error:
        return None, engine.asked, _short(error)
    return samples, engine.asked, samples_fault(samples, _task(engine))


def _described(samples: Sequence[Sample] | None) -> str:
    if not samples:
        return ""
    lengths = ", ".join(str(s.response_length) for s in samples)
    return f"{len(samples)} samples for 4 asked, of {lengths} tokens"


def _seeds_fault(asked: Sequence[tuple[GenerateRequest, list[Completion]]]) -> str | None:
    if not asked:
        return "it asked the engine for nothing"
    seeds = [seed for request, _ in asked for seed in request.seeds or ()]
    if any(request.seeds is None for request, _ in asked):
        return "a request has no seeds: a run that is repeated would draw others; use task.ask"
    if len(set(seeds)) < len(seeds):
        return "two answers share a seed, and will be the same: use task.ask with the sample's index and turn"
    if len({request.id for request, _ in asked}) < len(asked):
        return "two requests share an id"
    return None


def _given_fault(samples: Sequence[Sample], asked: Sequence[tuple[GenerateRequest, list[Completion]]]) -> str | None:
    """Each trained token was sampled by the engine, in this order, with this log-prob."""
    given = {pair for _, answers in asked for a in answers for pair in zip(a.tokens, a.logprobs, strict=True)}
    for sample in samples:
        if sample.status is Status.FAILED:
            continue
        if not sample.policy_versions:
            return f"sample {sample.index} has no policy_versions: take those of the answers"
        logprobs = sample.rollout_logprobs or [0.0] * sample.response_length
        for token, logprob, counts in zip(sample.response_tokens, logprobs, sample.mask, strict=True):
            if counts and (token, logprob) not in given:
                return (
                    f"sample {sample.index}: token {token} with log-prob {logprob:g} is trained (loss_mask 1), but the "
                    "engine did not give it: mask it with 0, or keep the engine's ids and log-probs"
                )
    return None


def _death_fault(function: Any, settings: Settings) -> str | None:
    engine = MadeUpEngine(dies_after=0)

    async def limited() -> None:
        async with asyncio.timeout(settings.timeout):
            await HookRun(task=_task(engine)).samples(function)

    try:
        run_async(limited())
    except EngineLostError:
        return None
    except (UserError, TimeoutError) as error:
        return f"EngineLostError did not come through, but {_short(error)}"
    return "it caught EngineLostError: let it through, the run restarts the engine and calls again"


def _drop_fault(function: Any, settings: Settings) -> str | None:
    engine = MadeUpEngine(hangs=True)

    async def dropped() -> str | None:
        run = HookRun(task=_task(engine))
        running = asyncio.ensure_future(run.samples(function))
        for _ in range(200):
            await asyncio.sleep(0.005)
            if engine.running or running.done():
                break
        run.drop()
        done, _ = await asyncio.wait([running], timeout=min(settings.timeout, 5.0))
        if not done:
            running.cancel()
            return "it was still running 5 s after it was cancelled: let CancelledError through"
        running.exception()
        return "it left requests with the engine" if engine.running else None

    return run_async(dropped())


# ---- reward


def _reward(function: Any, settings: Settings) -> Iterator[Check]:
    cases = {
        "a right answer": made_up_sample(f"The answer is {settings.label}", settings.label),
        "a wrong answer": made_up_sample("I do not know", settings.label, index=1),
        "an empty response": replace(
            made_up_sample("", settings.label, index=2), tokens=[11, 12], response_length=0, rollout_logprobs=[]
        ),
        "one cut by its length": made_up_sample("so we first have to", settings.label, Status.TRUNCATED, 3),
        "odd characters": made_up_sample("\u0000 \ufffd 𝟜 \\boxed{", settings.label, index=4),
        "a response of 100,000 characters": made_up_sample("word " * 20_000, settings.label, index=5),
    }
    if settings.batched:
        yield from _reward_batch(function, settings, list(cases.values()))
        return
    rewards = []
    for what, sample in cases.items():
        made, fault = _scored(function, settings, [sample])
        rewards.append(made[0].reward)
        yield Check(f"{what}: a finite number", fault, "" if made[0].reward is None else f"{made[0].reward:g}")
        if fault is None and (changed := _changed(sample, made[0])) is not None:
            yield Check(f"{what}: the sample stays as it is", changed)
    if None not in rewards:
        yield from _repeats(function, settings, list(cases.values()), rewards)


def _reward_batch(function: Any, settings: Settings, samples: list[Sample]) -> Iterator[Check]:
    made, fault = _scored(function, settings, samples)
    rewards = [sample.reward for sample in made]
    yield Check(f"a group of {len(samples)}: a list of as many finite numbers", fault, _numbers(rewards))
    if fault is not None:
        return
    alone, fault = _scored(function, settings, samples[:1])
    yield Check("a group of one: a list of one", fault, _numbers([s.reward for s in alone]))
    yield from _repeats(function, settings, samples, rewards)


def _repeats(function: Any, settings: Settings, samples: list[Sample], rewards: list[float | None]) -> Iterator[Check]:
    batches = [samples] if settings.batched else [[sample] for sample in samples]
    again = [s.reward for batch in batches for s in _scored(function, settings, batch)[0]]
    note = "" if again == rewards else "no: a resumed run will differ"
    yield Check("the same sample gets the same reward (advice)", None, note)


def _scored(function: Any, settings: Settings, samples: list[Sample]) -> tuple[list[Sample], str | None]:
    """As a run scores them: in a thread or on a loop, under the time limit."""
    made = [copy.deepcopy(sample) for sample in samples]
    config = RewardConfig(key=settings.key, batched=settings.batched, timeout=settings.timeout, type="")
    scorer = Scorer(config, custom=function)
    try:
        run_async(scorer.score(made))
        return made, scorer.take_stats().first_failure
    finally:
        scorer.close()


def _changed(before: Sample, after: Sample) -> str | None:
    for name in ("tokens", "response_length", "response", "loss_mask", "rollout_logprobs", "prompt"):
        if getattr(before, name) != getattr(after, name):
            return f"the function changed sample.{name}: return the reward, and leave the sample alone"
    return None


def _numbers(rewards: Sequence[float | None]) -> str:
    return ", ".join("failed" if reward is None else f"{reward:g}" for reward in rewards)


# ---- filter, map, on_step


def _filter(function: Any, settings: Settings) -> Iterator[Check]:
    cases: dict[str, Sequence[float | None]] = {
        "rewards that differ": (0.0, 1.0, 0.0, 1.0),
        "equal rewards": (1.0, 1.0, 1.0, 1.0),
        "a sample that failed": (0.0, None, 1.0, 1.0),
        "no sample that could be scored": (None, None, None, None),
        "a group of one": (0.5,),
    }
    for what, rewards in cases.items():
        group = made_up_group(rewards)
        before = copy.deepcopy(group)
        fault, note = None, ""
        try:
            keep, reason = verdict_of(function(group), "the function")
            note = "kept" if keep else f"dropped ({reason})"
        except UserError as error:
            fault = str(error).partition(": ")[2] or str(error)
        except Exception as error:  # whatever the user's function raises
            fault = _short(error)
        if fault is None and group != before:
            fault = "the function changed the group: return a verdict, and leave it alone"
        yield Check(f"{what}: a bool, or (bool, reason)", fault, note)


def _map(function: Any, settings: Settings) -> Iterator[Check]:
    row = dict(settings.row or {"input": "2 + 2 =", "label": "4", "metadata": {"level": 1}})
    made: list[Any] = []
    for _ in range(2):
        try:
            made.append(function(copy.deepcopy(row)))
        except Exception as error:  # whatever the user's function raises
            hint = "" if settings.row else "; is the made-up row like yours? give one of your own with --row"
            yield Check("a row: a dict, or None to leave it out", f"{_short(error)}{hint}")
            return
    fault = None if made[0] is None else row_fault(made[0])
    note = "left out" if made[0] is None else _shown(made[0])
    yield Check("a row: a dict, or None to leave it out", fault, note)
    if fault is None:
        same = made[0] == made[1]
        text = "other rows make a checkpoint another run's: it must not draw lots, or look at the clock"
        yield Check("the same row gives the same", None if same else text)


def _on_step(function: Any, settings: Settings) -> Iterator[Check]:
    fault = on_step_fault(function)
    yield Check("it is a plain function", fault)
    if fault is not None:
        return
    for what, groups in (("a step", [made_up_group((0.0, 1.0))]), ("a rank without groups", [])):
        info = StepInfo(
            step=1,
            metrics={"reward/mean": 0.5, "loss/total": 0.01},
            groups=groups,
            rank=0,
            world_size=1,
            run_dir=Path("runs/made-up"),
        )
        note = ""
        try:
            returned = function(info)
            fault = metrics_fault(returned)
            note = "" if fault or not returned else _shown(dict(returned))
        except Exception as error:  # whatever the user's function raises
            fault = _short(error)
        yield Check(f"{what}: a dict of numbers, or nothing", fault, note)


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _short(error: BaseException) -> str:
    if isinstance(error, UserError):
        return " ".join(str(error).split())[:400].removeprefix("rollout.generate: made-up.jsonl:6: ")
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]
