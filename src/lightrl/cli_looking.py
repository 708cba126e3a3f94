"""Commands that look: `lightrl inspect`, `replay-reward`, `check-hook`. Thin, as those of `cli.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lightrl.errors import UserError


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(inspect)
    app.command("replay-reward")(replay_reward)
    app.command("check-hook")(check_hook)


def inspect(
    dump: Annotated[Path, typer.Argument(help="A run's folder, its rollouts/ or samples/, or a file of rollouts.")],
    step: Annotated[int | None, typer.Option(help="Only this step.")] = None,
    group: Annotated[int | None, typer.Option(help="Only this group.")] = None,
    status: Annotated[
        Literal["completed", "truncated", "aborted", "failed"] | None, typer.Option(help="Only samples that ended so.")
    ] = None,
    min_reward: Annotated[float | None, typer.Option(help="Only rewards from here on.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Only rewards up to here.")] = None,
    min_length: Annotated[int | None, typer.Option(help="Only responses of at least so many tokens.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Only responses of at most so many tokens.")] = None,
    sort: Annotated[str, typer.Option(help="step, reward or length; -reward: the highest first.")] = "step",
    limit: Annotated[int, typer.Option(help="Most lines of the table.", min=1)] = 30,
    sample: Annotated[str | None, typer.Option(help="Show this one in colour: GROUP/NUMBER.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="With --sample: also a line a token.")] = False,
    tokenizer: Annotated[str | None, typer.Option(help="Its folder; default: that of the run.")] = None,
    eval_name: Annotated[str | None, typer.Option("--eval", help="Samples of this evaluation set.")] = None,
) -> None:
    """Look at the samples of a run: a table, or one in colour. Needs no model."""
    from rich.console import Console

    from lightrl.inspect.pieces import load_decoder
    from lightrl.inspect.rows import Source, Wanted
    from lightrl.inspect.show import one, table

    source = Source(dump, eval_name)
    number = None if sample is None else _sample_number(sample)
    wanted = Wanted(
        step=step,
        group=group if number is None else number[0],
        status=status,
        min_reward=min_reward,
        max_reward=max_reward,
        min_length=min_length,
        max_length=max_length,
    )
    console = Console()
    if number is None:
        table(source.samples(wanted), console, sort=sort, limit=limit)
        return
    found = next(((s, it) for s, it in source.samples(wanted) if it.index == number[1]), None)
    if found is None:
        raise UserError(f"inspect: --sample: {dump} has no sample {sample} among those asked for")
    name = tokenizer or source.tokenizer
    if (decode := load_decoder(name)) is None:
        console.print(f"no tokenizer at {name}: ids are shown; name its folder with --tokenizer", markup=False)
    one(*found, decode, console, tokens=tokens)


def replay_reward(
    dump: Annotated[Path, typer.Argument(help="A run's folder, its rollouts/, or a file of rollouts.")],
    reward: Annotated[str, typer.Option(help="As reward.type: a rule, or package.module:function.")],
    step: Annotated[int | None, typer.Option(help="Only this step.")] = None,
    key: Annotated[str | None, typer.Option(help="As reward.key.")] = None,
    batched: Annotated[bool, typer.Option("--batched", help="As reward.batched.")] = False,
    timeout: Annotated[float, typer.Option(help="As reward.timeout.", min=0.001)] = 30.0,
    limit: Annotated[int, typer.Option(help="Changed samples to show.", min=0)] = 20,
    out: Annotated[Path | None, typer.Option(help="Write the dump with the new rewards to this folder.")] = None,
) -> None:
    """Score a dump by another reward, and compare. Needs no model."""
    from lightrl.rewards import registry

    if (fault := registry.fault(reward)) is not None:
        raise UserError(f"replay-reward: --reward: {fault}")
    from rich.console import Console

    from lightrl.config.schema import RewardConfig
    from lightrl.inspect.rewards import replay_reward as replay

    config = RewardConfig(type=reward, key=key, batched=batched, timeout=timeout)
    replay(dump, config, step=step, limit=limit, out=out, console=Console())
    if out is not None:
        print(f"wrote {out}")


def check_hook(
    kind: Annotated[Literal["generate", "reward", "filter", "map", "on_step"], typer.Argument(help="What it is for.")],
    function: Annotated[str, typer.Argument(help="package.module:function")],
    label: Annotated[str, typer.Option(help="reward: label of the made-up samples.")] = "4",
    row: Annotated[str | None, typer.Option(help="map: a row of your own, as JSON.")] = None,
    key: Annotated[str | None, typer.Option(help="reward: as reward.key.")] = None,
    batched: Annotated[bool, typer.Option("--batched", help="reward: as reward.batched.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds a call may take.", min=0.001)] = 30.0,
) -> None:
    """Call a hook with small made-up inputs, as a run would, and check what it returns. A line a check; status 2 when
    one fails."""
    from lightrl.inspect.hook_checks import Settings
    from lightrl.inspect.hook_checks import check_hook as checks_of

    settings = Settings(label=label, row=_row(row), key=key, batched=batched, timeout=timeout)
    failed = total = 0
    for check in checks_of(kind, function, settings):
        total, failed = total + 1, failed + (check.fault is not None)
        print(f"{'ok  ' if check.fault is None else 'FAIL'}  {check.what}", end="", flush=True)
        print(f": {check.fault or check.note}" if check.fault or check.note else "", flush=True)
    if failed:
        raise UserError(f"check-hook: {failed} of {total} checks failed")


def _row(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        row = json.loads(text)
    except ValueError as error:
        raise UserError(f"check-hook: --row: not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise UserError("check-hook: --row: a row is a JSON object")
    return row


def _sample_number(text: str) -> tuple[int, int]:
    """`12/3` -> (12, 3)."""
    if (match := re.fullmatch(r"(\d+)/(\d+)", text)) is None:
        raise UserError(f"inspect: --sample {text}: write GROUP/NUMBER as the table shows them, such as 12/3")
    return int(match[1]), int(match[2])
