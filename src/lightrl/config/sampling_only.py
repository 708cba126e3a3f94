"""The settings of commands that sample with a policy and do not train it: `lightrl eval`, `generate`, `serve`."""

from __future__ import annotations

from dataclasses import replace

from lightrl.config.correction import CorrectionConfig
from lightrl.config.endpoint import OUTSIDE
from lightrl.config.looking import DebugConfig
from lightrl.config.optim import CriticConfig, CriticOptimConfig, OptimConfig
from lightrl.config.schema import AlgorithmConfig, Config, DataConfig, EvalConfig, EvaluatorConfig, RewardConfig
from lightrl.config.teacher import TeacherConfig


def for_evaluation(config: Config) -> Config:
    """Without what only updates need."""
    return _without_updates(config)


def for_generation(config: Config) -> Config:
    """Without what only updates need, and without evaluation. What is sampled, and recorded with it, is the same."""
    given = config.correction
    correction = CorrectionConfig(
        score_centering_top_k=given.score_centering_top_k,
        routing_replay="rollout" if given.routing_replay == "rollout" else "none",
    )
    return replace(_without_updates(config), correction=correction, eval=EvalConfig())


def for_serving(config: Config) -> Config:
    """Without what needs prompts, rewards or a teacher too: conversations come from clients.

    `[agent]` keeps its limits: it is then that of an agent outside.
    """
    config, agent = for_generation(config), config.agent
    environment = OUTSIDE if agent.enabled else ""
    return replace(
        config,
        run=replace(config.run, on_step="none"),
        data=DataConfig(chat_template_kwargs=config.data.chat_template_kwargs),
        reward=RewardConfig(),
        teacher=TeacherConfig(),
        rollout=replace(config.rollout, filter="none", generate="none"),
        agent=replace(agent, environment=environment, options={}, tools=[], search_corpus=None, search_url=None),
        endpoint=replace(config.endpoint, command=[], function="", url=None),
        parallel=replace(config.parallel, rollout_ranks=0),  # a process by itself
    )


def _without_updates(config: Config) -> Config:
    """No reference and no critic are loaded, no evaluator elsewhere is asked; a key that only they or an optimizer read
    has its default.

    `[teacher]` stays, as it may say what an engine tells of each token: `Trainer(only_sample=True)` loads none.
    """
    algorithm = AlgorithmConfig()
    if not config.algorithm.estimator.rewards:  # nothing need be scored; any term will do that gives it a sense
        algorithm = AlgorithmConfig(advantage="none", entropy_coef=1.0)
    return replace(
        config,
        model=replace(config.model, reference_path=None),
        algorithm=algorithm,
        correction=CorrectionConfig(),
        optim=OptimConfig(),
        critic=CriticConfig(),
        critic_optim=CriticOptimConfig(),
        evaluator=EvaluatorConfig(),
        rollout=replace(config.rollout, schedule="sync", max_staleness=None, partial="drop"),  # one policy draws all
        debug=DebugConfig(),
    )
