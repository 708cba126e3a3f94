"""`parallel.rollout_ranks`: some ranks train and others generate, in runs like those of engines beside the trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny_run


def noted_run(folder: Path, overrides: dict[str, Any]) -> None:
    """Train, and write what this rank collected to `groups_RANK.json`; nothing on a rank that generates."""
    from lightrl.training.rollout_ranks import serve_rollouts
    from lightrl.training.trainer import Trainer

    config = tiny_run.make_run(folder, **overrides)
    if serve_rollouts(config):
        return
    trainer = Trainer(config)
    found: list[Any] = []
    collect = trainer.collect

    def noting(*given: Any) -> Any:
        groups = collect(*given)
        for sample in (s for g in groups for s in g.samples):
            row = (trainer.policy_version, sample.group_index, sample.prompt.index, sample.index, sample.tokens)
            found.append([*row, sample.rollout_logprobs, sample.policy_versions, sample.version_tokens])
        return groups

    trainer.collect = noting  # type: ignore[method-assign]
    trainer.train()
    (folder / f"groups_{trainer.world.rank}.json").write_text(json.dumps(found))
    trainer.close()


def a_run(folder: str, overrides: str) -> None:
    from lightrl.distributed.mesh import close_world

    noted_run(Path(folder), json.loads(overrides))
    close_world()
