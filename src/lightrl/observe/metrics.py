"""Metrics that reduce over ranks: every rank tallies its own samples, tallies merge, the result is one flat dict.

Merging carries sums and counts, never means, so two ranks with 5 and 1 samples give the mean of the 6.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Literal

from lightrl.types import Sample, SampleGroup, Status

Kind = Literal["mean", "sum", "min", "max", "std"]


class Tally:
    """Named running statistics.

    >>> a, b = Tally(), Tally()
    >>> a.extend("length", [4, 6, 8]); b.add("length", 2)
    >>> Tally.merged([a.to_dict(), b.to_dict()]).result()
    {'length': 5.0}
    """

    def __init__(self) -> None:
        # mean: [sum of weights, weighted sum]; std: [weight, mean, sum of squared deviations]; others: [value]
        self._entries: dict[str, tuple[Kind, list[float]]] = {}

    def add(self, name: str, value: float, weight: float = 1.0, kind: Kind = "mean") -> None:
        """Count one value. `weight` matters for means and deviations; weight 0 counts nothing."""
        if weight < 0:
            raise ValueError(f"metric {name!r}: negative weight {weight}")
        if weight == 0:
            return
        value = float(value)
        states: dict[Kind, list[float]] = {"mean": [weight, weight * value], "std": [weight, value, 0.0]}
        self._combine(name, kind, states.get(kind, [value]))

    def extend(self, name: str, values: Iterable[float], kind: Kind = "mean") -> None:
        """Count many values of weight 1."""
        for value in values:
            self.add(name, value, kind=kind)

    def merge(self, others: Iterable[Tally]) -> Tally:
        """Take in other tallies, in order; returns itself."""
        for other in others:
            for name, (kind, state) in other._entries.items():
                self._combine(name, kind, list(state))
        return self

    def result(self) -> dict[str, float]:
        """The metrics, in the order they were first added; names nothing was counted for are left out."""
        return {name: _finish(kind, state) for name, (kind, state) in self._entries.items()}

    def to_dict(self) -> dict[str, list[float | str]]:
        """Plain lists `name -> [kind, numbers…]`: what ranks exchange."""
        return {name: [kind, *state] for name, (kind, state) in self._entries.items()}

    @classmethod
    def merged(cls, states: Iterable[Mapping[str, Sequence[float | str]]]) -> Tally:
        """One tally from what `to_dict` gave on every rank; the same on every rank when given in rank order."""
        tally = cls()
        for state in states:
            for name, (kind, *numbers) in state.items():
                tally._combine(name, kind, [float(n) for n in numbers])  # type: ignore[arg-type]
        return tally

    def _combine(self, name: str, kind: Kind, new: list[float]) -> None:
        if name not in self._entries:
            self._entries[name] = (kind, new)
            return
        known, old = self._entries[name]
        if known != kind:
            raise ValueError(f"metric {name!r} is tallied as {known!r} and as {kind!r}")
        self._entries[name] = (kind, _combined(kind, old, new))


def _combined(kind: Kind, a: list[float], b: list[float]) -> list[float]:
    if kind in ("mean", "sum"):
        return [x + y for x, y in zip(a, b, strict=True)]
    if kind in ("min", "max"):
        if math.isnan(a[0]) or math.isnan(b[0]):  # min() and max() would lose it, depending on the order
            return [math.nan]
        return [min(a[0], b[0]) if kind == "min" else max(a[0], b[0])]
    # Chan, Golub, LeVeque 1979: squared deviations about the joint mean; no cancellation as with sums of squares.
    weight, delta = a[0] + b[0], b[1] - a[1]
    return [weight, a[1] + delta * b[0] / weight, a[2] + b[2] + delta * delta * a[0] * b[0] / weight]


def _finish(kind: Kind, state: list[float]) -> float:
    if kind == "mean":
        return state[1] / state[0]
    if kind == "std":
        return math.sqrt(state[2] / state[0]) if not math.isnan(state[2]) else math.nan
    return state[0]


def rollout_metrics(groups: Iterable[SampleGroup], max_response_tokens: int, *, compares: bool = True) -> Tally:
    """Rewards and lengths of this rank's groups; names and meanings are in docs/metrics.md.

    Rewards are of scored samples, lengths of all that did not fail, shares of all samples. `reward/std` divides by the
    number of samples; a group's deviation is the unbiased one that GRPO divides by, 0 for a group of one; with several
    agents it is of each one's samples. `compares`: a group without spread teaches nothing.
    """
    tally = Tally()
    for group in groups:
        rewards = [float(s.reward) for s in group.scored if s.reward is not None]
        for kind in ("mean", "std", "max", "min"):
            tally.extend(f"reward/{kind}", rewards, kind=kind)
        for sample in group.scored:
            _add_parts(tally, sample)
        for part in group.compared:
            compared = [float(s.reward) for s in part if s.reward is not None]
            tally.add("reward/group_std_mean", stdev(compared) if len(compared) > 1 else 0.0)
            if compares:
                tally.add("reward/zero_spread_share", float(all(r == compared[0] for r in compared)))
        for sample in group.samples:
            tally.add("rollout/samples", 1, kind="sum")
            tally.add("rollout/truncated_share", sample.status is Status.TRUNCATED)
            tally.add("rollout/aborted_share", sample.status is Status.ABORTED)
            tally.add("rollout/failed_share", sample.status is Status.FAILED)
            tally.add("rollout/missing_think_share", bool(sample.metadata.get("missing_think", False)))
            tally.add("rollout/grading_limit_share", "grading_limit" in sample.metadata)
            tally.add("rollout/prompt_length_mean", sample.prompt_length)
            if sample.status is Status.FAILED:
                continue
            for kind in ("mean", "max", "min"):
                tally.add(f"rollout/length_{kind}", sample.response_length, kind=kind)  # type: ignore[arg-type]
            tally.add("rollout/response_tokens", sample.response_length, kind="sum")
            if logprobs := [p for p in sample.rollout_logprobs or () if p is not None]:
                tally.add("rollout/entropy", -fmean(logprobs), weight=len(logprobs))
            tally.add("rollout/budget_used", sample.response_length / max_response_tokens)
    return tally


def agent_metrics(groups: Iterable[SampleGroup]) -> Tally:
    """Turns and tool calls of this rank's episodes, all their conversations together; empty without an agent."""
    tally = Tally()
    for group in groups:
        episodes: dict[int, list[Sample]] = {}
        for sample in group.samples:
            if "episode" in sample.metadata:
                episodes.setdefault(sample.metadata["episode"], []).append(sample)
        for samples in episodes.values():
            about = [s.metadata for s in samples]
            cuts = [m.get("cut_by") for m in about]
            tally.add("agent/episodes", 1, kind="sum")
            tally.add("agent/turns", sum(m["turns"] for m in about))
            tally.add("agent/conversations", len(samples))
            tally.add("agent/tool_calls", sum(m["tool_calls"] for m in about))
            tally.add("agent/given_tokens", sum(m["given_tokens"] for m in about))
            tally.add("agent/context_exhausted", "context" in cuts)
            tally.add("agent/turns_exhausted", "turns" in cuts)
            tally.add("agent/time_exhausted", "time" in cuts)
            tally.add("agent/failed", any(s.status is Status.FAILED for s in samples))
            for kind, count in (pair for m in about for pair in m.get("tool_failures", {}).items()):
                tally.add(f"agent/tool_failures_{kind}", count, kind="sum")
    return tally


def step_metrics(tally: Tally, times: Mapping[str, float], num_updates: int) -> dict[str, float]:
    """Of one step, from the tally of all ranks: losses are those of an update, rates by the `time/STAGE` of `times`."""
    metrics = with_sample_size(tally.result())
    for name in ("loss/total", "loss/policy", "critic/loss"):
        if name in metrics:
            metrics[name] /= num_updates
    tokens = metrics.get("rollout/response_tokens", 0.0)
    for name, stage in (("tokens", "total"), ("generated_tokens", "generate"), ("trained_tokens", "train")):
        if times.get(f"time/{stage}"):
            metrics[f"perf/{name}_per_second"] = tokens / times[f"time/{stage}"]
    return metrics


def with_sample_size(metrics: dict[str, float]) -> dict[str, float]:
    """With `mismatch/ess`, the effective sample size of the step's importance ratios r as a share of its tokens:
    (sum r)² / (n sum r²), 1 where all are equal.

    >>> with_sample_size({"mismatch/ratio_mean": 2.0, "mismatch/chi2": 4.0})["mismatch/ess"]  # ratios 1 and 3
    0.8
    """
    if "mismatch/chi2" in metrics:
        metrics["mismatch/ess"] = metrics["mismatch/ratio_mean"] ** 2 / (1.0 + metrics["mismatch/chi2"])
    return metrics


def _add_parts(tally: Tally, sample: Sample) -> None:
    """Numbers that a dict reward held beside the one that is trained on."""
    parts = sample.metadata.get("reward")
    for name, value in parts.items() if isinstance(parts, dict) else ():
        if isinstance(value, int | float) and abs(value) < 1e300:  # finite, and no integer beyond float
            tally.add(f"reward/parts/{name}", float(value))


def eval_metrics(name: str, groups: Iterable[SampleGroup], k: int, threshold: float) -> Tally:
    """Metrics of one evaluation set, a prompt's samples in each group.

    `avg@k` is the mean over prompts of the mean reward of their scored samples. `pass@j`, for the powers of two up to
    `k` and `k` itself, is the chance that one of j answers has a reward above `threshold`; a failed sample passes not.
    """
    tally = Tally()
    ranks = sorted({2**i for i in range(k.bit_length()) if 2**i <= k} | {k})
    for group in groups:
        rewards = [float(s.reward) for s in group.scored if s.reward is not None]
        tally.add(f"eval/{name}/prompts", 1, kind="sum")
        if rewards:
            tally.add(f"eval/{name}/avg@{k}", fmean(rewards))
        passed = sum(r > threshold for r in rewards)
        for j in ranks:
            if j <= len(group.samples):
                tally.add(f"eval/{name}/pass@{j}", pass_at_k(len(group.samples), passed, j))
        for sample in group.samples:
            tally.add(f"eval/{name}/truncated_share", sample.status is Status.TRUNCATED)
            tally.add(f"eval/{name}/failed_share", sample.status is Status.FAILED)
            tally.add(f"eval/{name}/grading_limit_share", "grading_limit" in sample.metadata)
            if sample.status is not Status.FAILED:
                tally.add(f"eval/{name}/length_mean", sample.response_length)
    return tally


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Unbiased chance that at least one of `k` answers passes (Chen et al. 2021, arXiv 2107.03374, eq. 1).

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 0 < k <= num_samples or not 0 <= num_passed <= num_samples:
        raise ValueError(f"pass@{k} of {num_passed} passes in {num_samples} samples is undefined")
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)
