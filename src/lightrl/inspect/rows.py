"""Samples out of a dump, one after the other, and which of them are wanted."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightrl.errors import UserError
from lightrl.observe.dumps import SAMPLES_FOLDER, list_dumps
from lightrl.observe.rollouts import ROLLOUTS_FOLDER, RolloutDump
from lightrl.types import Prompt, Sample, Status


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which samples; None does not ask."""

    step: int | None = None
    group: int | None = None
    status: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_length: int | None = None
    max_length: int | None = None

    def __call__(self, sample: Sample) -> bool:
        """A sample without a reward is in no range of rewards."""
        reward, length = sample.reward, sample.response_length
        return (
            self.group in (None, sample.group_index)
            and self.status in (None, sample.status.value)
            and (self.min_reward is None or (reward is not None and reward >= self.min_reward))
            and (self.max_reward is None or (reward is not None and reward <= self.max_reward))
            and (self.min_length is None or length >= self.min_length)
            and (self.max_length is None or length <= self.max_length)
        )


@dataclass(frozen=True)
class Source:
    """A dump of rollouts, or the samples that every run writes (`log.save_samples`)."""

    where: Path
    eval_name: str | None = None

    def samples(self, wanted: Wanted) -> Iterator[tuple[int, Sample]]:
        """(step, sample), by step and group. Only one step's are in memory at once."""
        if self._run_of_samples is not None:
            yield from self._of_samples(self._run_of_samples, wanted)
            return
        dump = RolloutDump(self.where)
        if wanted.step is not None and wanted.step not in dump.headers:
            fault = dump.faults.get(wanted.step)
            steps = ", ".join(map(str, list(dump.headers)[:12])) or "none"
            raise UserError(f"{self.where}: no step {wanted.step}{f': {fault}' if fault else ''}; it has: {steps}")
        for step in dump.headers if wanted.step is None else (wanted.step,):
            for group in dump.groups(step, lambda number: wanted.group in (None, number)):
                yield from ((step, sample) for sample in group.samples if wanted(sample))

    @property
    def tokenizer(self) -> str | None:
        """Folder or name of the tokenizer that the run used."""
        if self._run_of_samples is None:
            headers = RolloutDump(self.where).headers
            return next((h.get("tokenizer") for h in headers.values()), None)
        try:
            model = tomllib.loads((self._run_of_samples / "config.toml").read_text(encoding="utf-8"))["model"]
        except (OSError, ValueError, KeyError):
            return None
        return model.get("tokenizer") or model.get("path")

    @property
    def _run_of_samples(self) -> Path | None:
        """The run's folder, where there are no rollouts in it, or an evaluation's samples are asked for."""
        folder = self.where.expanduser()
        if self.eval_name is not None or (folder.is_dir() and not (folder / ROLLOUTS_FOLDER).is_dir()):
            for place in (folder, folder.parent):
                if (place / SAMPLES_FOLDER).is_dir() and (place == folder or folder.name == SAMPLES_FOLDER):
                    return place
        return None

    def _of_samples(self, run: Path, wanted: Wanted) -> Iterator[tuple[int, Sample]]:
        dumps = [d for d in list_dumps(run) if d.eval == self.eval_name and wanted.step in (None, d.step)]
        if not dumps:
            names = sorted({d.eval for d in list_dumps(run) if d.eval is not None})
            has = f"; evaluations: {', '.join(names)}" if names else ""
            raise UserError(f"{run / SAMPLES_FOLDER}: no samples of that step and set{has}")
        for dump in dumps:
            records = sorted(dump.samples(), key=lambda r: (r.get("group", 0), r.get("index", 0)))
            for record in records:
                sample = _sample(record, str(run))
                if wanted(sample):
                    yield dump.step, sample


def _sample(record: dict[str, Any], where: str) -> Sample:
    """From a line of `samples/`, whose log-probs are rounded."""
    try:
        tokens, length = record["tokens"], record["response_length"]
        head = len(tokens) - length
        prompt = Prompt(
            index=record["prompt_index"], tokens=tokens[:head], text=record["prompt"], label=record["label"]
        )
        return Sample(
            prompt=prompt,
            group_index=record["group"],
            index=record["index"],
            tokens=tokens,
            response_length=length,
            response=record["response"],
            loss_mask=record.get("loss_mask"),
            rollout_logprobs=record["logprobs"],
            policy_versions=record["policy_versions"],
            version_tokens=record.get("version_tokens"),
            status=Status(record["status"]),
            reward=record["reward"],
            advantage=record["advantage"],
            metadata=record["metadata"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{where}: samples of another version of LightRL ({type(error).__name__}: {error})") from error
