"""Evaluation sets: avg@k and pass@k with their own sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lightrl.config.schema import Config, DataConfig, EvalSetConfig, RewardConfig
from lightrl.data import PromptSet, load_prompts
from lightrl.data.mapping import RowMap
from lightrl.distributed.mesh import World, deal
from lightrl.engine.base import SamplingParams
from lightrl.observe.console import Console
from lightrl.observe.dumps import SampleWriter
from lightrl.observe.metrics import Tally, eval_metrics
from lightrl.rewards import Scorer, check_labels
from lightrl.rollout.agent import Agent, sampler_of
from lightrl.rollout.hooked import Generate
from lightrl.rollout.selection import Selection
from lightrl.training.rollouts import Rollouts


@dataclass(kw_only=True)
class EvalSet:
    """One of `[[eval.sets]]`, read and ready to be sampled."""

    config: EvalSetConfig
    prompts: PromptSet
    scorer: Scorer
    sampling: SamplingParams


def load_eval_sets(
    config: Config,
    tokenizer: Any,
    context_length: int,
    custom_reward: Callable[..., Any] | None,
    scorer: Scorer | None = None,
    row_map: RowMap | None = None,
    agent: Agent | None = None,
) -> list[EvalSet]:
    """Read every set; keys left out come from `[data]`, `[reward]` and `[rollout]`. Errors before any model loads.

    `scorer`, that of training, shares its workers with the sets'. `row_map` stands in for `data.map`.
    """
    sets = []
    for spec in config.eval.sets:
        limit = spec.max_response_tokens or config.rollout.max_response_tokens
        data = set_data(config.data, spec)
        prompts = load_prompts(
            data,
            tokenizer,
            context_length=context_length,
            max_response_tokens=limit,
            row_map=row_map if spec.map is None else None,
            tools=[] if agent is None else agent.definitions,
        )
        reward = _reward_config(config.reward, spec)
        custom = custom_reward if spec.reward is None else None
        own_scorer = Scorer(reward, custom=custom, shared=scorer)
        if custom is None and not (agent is not None and agent.gives_reward):
            check_labels(prompts, reward)
        sampling = SamplingParams(
            max_new_tokens=limit,
            temperature=spec.temperature,
            top_p=spec.top_p,
            top_k=spec.top_k,
            stop=tuple(config.rollout.stop),
            stop_token_ids=tuple(config.rollout.stop_token_ids),
        )
        sets.append(EvalSet(config=spec, prompts=prompts, scorer=own_scorer, sampling=sampling))
    return sets


def set_data(data: DataConfig, spec: EvalSetConfig) -> DataConfig:
    """`[data]` for a set: what it does not say itself is as in training."""
    names = ("split", "input_key", "label_key", "apply_chat_template", "system_prompt", "map")
    given = {n: getattr(spec, n) for n in names if getattr(spec, n) is not None}
    return replace(data, path=spec.path, shuffle=False, **given)


def _reward_config(reward: RewardConfig, spec: EvalSetConfig) -> RewardConfig:
    """`reward.batched` is about functions, `reward.key` about what `reward.type` returns: other rules have neither."""
    if spec.reward is None:
        return reward
    if ":" in spec.reward:
        return replace(reward, type=spec.reward)
    key = reward.key if spec.reward == reward.type else None
    return replace(reward, type=spec.reward, batched=False, key=key)


def evaluate(
    rollouts: Rollouts,
    sets: Sequence[EvalSet],
    *,
    world: World,
    decode: Callable[[list[int]], str],
    seed: int,
    step: int,
    version: int,
    console: Console,
    writer: SampleWriter | None,
    generate: Generate | None = None,
    agent: Agent | None = None,
    together: bool = True,
) -> dict[str, float]:
    """Metrics of all sets, equal on every rank. The weights, of that `version`, are in the engine.

    The same seed draws the same samples at every step, so curves are not shaken by luck of the draw.
    """
    metrics: dict[str, float] = {}
    for eval_set in sets:
        spec = eval_set.config
        prompts = list(eval_set.prompts)
        total = len(deal(world, prompts, rollouts.ranks_per_engine)) * spec.samples_per_prompt
        with console.progress(f"evaluating {spec.name}", total=total) as bar:
            groups = rollouts.evaluation(
                partial(
                    sampler_of,
                    agent,
                    together=together,
                    final_only=True,
                    sampling=eval_set.sampling,
                    group_size=spec.samples_per_prompt,
                    scorer=eval_set.scorer,
                    decode=decode,
                    seed=seed,
                    stream=f"eval/{spec.name}",
                    generate=generate,
                ),
                selection=Selection(prompts, start=0, wanted=len(prompts)),
                on_group=lambda group: bar.advance(len(group.samples)),
                on_restart=console.restarted,
            ).run(partial(rollouts.renew, version))
        eval_set.scorer.check_failures(world.gather(eval_set.scorer.take_stats()))
        if writer is not None:
            writer.write(step, [s for g in groups for s in g.samples], eval_name=spec.name)
        tally = eval_metrics(spec.name, groups, spec.samples_per_prompt, spec.pass_threshold)
        metrics |= Tally.merged(world.gather(tally.to_dict())).result()
    return metrics
