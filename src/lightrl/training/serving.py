"""A model behind the endpoint, without training: `lightrl serve`."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from lightrl.config.schema import AgentConfig, Config
from lightrl.distributed.mesh import World
from lightrl.engine.base import Engine
from lightrl.errors import UserError, end
from lightrl.models import context, load
from lightrl.rollout.agent import Agent, AgentSampler
from lightrl.rollout.conversation import ChatTemplate, TemplateError
from lightrl.rollout.endpoint import read_key
from lightrl.rollout.endpoint.service import Service, Sessions, Unscored
from lightrl.rollout.tools import ToolBox, load_parser
from lightrl.sync.weights import sync_weights
from lightrl.training import setup
from lightrl.training.checkpoint import Checkpointer
from lightrl.training.engines import build_engine
from lightrl.training.policy import Policy
from lightrl.training.probe import rollout_writer
from lightrl.types import SampleGroup

_FOR_GOOD = 1e7  # seconds that a session may take as long as it is used


def serve(
    config: Config, *, checkpoint: Path | None = None, record: Path | None = None, say: Callable[[str], None] = print
) -> None:
    """Serve the model at `model.path`, or with the weights of a run's `checkpoint`, until SIGINT or SIGTERM.

    With `[agent]` conversations have the limits of the run; without, that of the model's context. Each session that
    ended is written to the dump `record`. `say` is told where to ask. EngineLostError where the engine dies.
    """
    setup.check_engine(config.engine)
    world = setup.join_world(config)
    if world.size > 1:
        raise UserError("lightrl serve runs in one process: start it without torchrun")
    with ExitStack() as held:
        model = config.model
        hf_config, tokenizer = load.load_config_and_tokenizer(
            model.path, model.revision, model.tokenizer, model.trust_remote_code
        )
        context_length = context.context_length(hf_config) or setup.UNKNOWN_CONTEXT
        limits = _limits(config)
        end_ids = load.eos_token_ids(model.path, hf_config, tokenizer, model.revision)
        template = _template(config, tokenizer, end_ids)
        service = Service(
            config.endpoint,
            limits,
            template,
            model=model.path,
            idle=config.agent.episode_timeout,
            key=read_key(config.endpoint),
            record=_recorder(config, world, record),
        )
        held.callback(end, service.close)
        agent = Agent(
            config=limits,
            environment=Sessions(service),
            tools=ToolBox(),
            template=template,
            parser=load_parser(limits, []),
            context_length=context_length,
        )
        held.callback(end, agent.close)
        engine = _engine(config, world, tokenizer, context_length, checkpoint, held)
        most = config.rollout.max_response_tokens if config.agent.enabled else context_length
        sampler = AgentSampler(
            agent=agent,
            together=False,
            engine=engine,
            sampling=replace(setup.training_samples(config), max_new_tokens=most),
            group_size=1,
            scorer=Unscored(),
            decode=template.text,
            seed=config.run.seed,
            stream="serve",
        )
        where = f"{model.path}" if checkpoint is None else f"{checkpoint}"
        say(f"serving {where} (engine.kind = {config.engine.kind!r}, {world.device.type}); Ctrl-C ends it")
        say(f"export OPENAI_BASE_URL={service.url}/v1")
        named = config.endpoint.key_env
        say(f"export OPENAI_API_KEY={service.key if named is None else f'${named}'}")
        if record is not None:
            say(f"sessions are written to {record} as they end")
        asyncio.run(_until_stopped(service, sampler))


async def _until_stopped(service: Service, sampler: AgentSampler) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, service.stop)
    await service.serve(sampler)


def _limits(config: Config) -> AgentConfig:
    """Of a session: time is what it was not used for, and without `[agent]` any number of turns will do."""
    turns = config.agent.max_turns if config.agent.enabled else 1 << 30
    return replace(config.agent, max_turns=turns, episode_timeout=_FOR_GOOD)


def _template(config: Config, tokenizer: object, end_ids: list[int]) -> ChatTemplate:
    try:
        return ChatTemplate(tokenizer, kwargs=config.data.chat_template_kwargs, end_ids=end_ids, roles=["user"])
    except TemplateError as error:
        raise UserError(f"model.tokenizer: {error}") from error


def _recorder(config: Config, world: World, record: Path | None) -> Callable[[SampleGroup], None]:
    """Writes each session as a step of its own, by its number from 1 on."""
    if record is None:
        return lambda group: None
    writer = rollout_writer(record, config, world)

    def write(group: SampleGroup) -> None:
        writer.write(group.group_index + 1, [group])

    return write


def _engine(
    config: Config, world: World, tokenizer: object, context_length: int, checkpoint: Path | None, held: ExitStack
) -> Engine:
    """With the weights in it, ready to generate. What must be closed is `held`."""
    version, run_dir = 0, Path(config.run.dir).expanduser()
    if checkpoint is None:
        policy = Policy.load(config.model, world, frozen=True)
    else:
        policy = setup.load_policy(config, world)
        folder = Checkpointer(run_dir / "checkpoints", config.checkpoint, timeout=world.timeout)
        version = int(folder.load(checkpoint, policy.module, None, rng=False)["policy_version"])
    state = setup.training_state(config.parallel, policy, None, None)
    held.callback(end, state.close)
    engine = build_engine(
        config.engine,
        policy,
        tokenizer,
        context_length,
        config.model.trust_remote_code,
        sync=config.sync,
        world=world,
        run_dir=run_dir / "serve",
        seed=config.run.seed,
        state=state,
    )
    held.callback(end, engine.close)
    sync_weights(policy, engine, version, state)
    return engine
