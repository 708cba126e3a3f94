"""`lightrl serve`. Thin, as the commands of `cli.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lightrl import ending
from lightrl.threads import sleep_while_waiting


def register(app: typer.Typer, **options: Any) -> None:
    """Add the command, with the options of those that take a config."""
    app.command(**options)(serve)


def serve(
    ctx: typer.Context,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Serve this checkpoint or Hugging Face folder, not the newest checkpoint of run.dir."),
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Write the sessions there, as a dump that `lightrl inspect` reads.")
    ] = None,
) -> None:
    """Serve a model over the OpenAI-compatible endpoint, to try it with an agent (docs/agents.md#lightrl-serve).

    The newest checkpoint in run.dir, or the model at model.path without one. No prompts and no reward are needed.
    """
    from lightrl import cli, cli_places

    sleep_while_waiting()
    paths, overrides = cli._split(ctx.args)
    overrides += cli_places.overrides_of(checkpoint, "serve")
    config = cli._load(paths, overrides, "serve")
    with cli._placed(paths, overrides), ending.told_when_stopped(lambda: "stopped"), ending.full_disk_told():
        from lightrl.distributed.mesh import close_world
        from lightrl.training.generating import check_out
        from lightrl.training.serving import serve as serve_model

        if record is not None:
            check_out(record, "serve: --record")
        state = cli_places.state_to_evaluate(config, checkpoint, "serve")
        serve_model(config, checkpoint=state, record=record, say=lambda text: print(text, flush=True))
        close_world()
