"""What a step's numbers say that its line on the console does not: nothing to learn from, what was left out."""

from __future__ import annotations

from collections.abc import Mapping

EVERY = 10  # steps from one notice to the next of its kind


class StepNotices:
    """Watches the metrics of all steps; speaks when something is first seen, and then at most every 10 steps."""

    def __init__(self, samples_saved: bool = True) -> None:
        self._samples_saved = samples_saved
        self._told_spread: int | None = None
        self._told_failed: int | None = None
        self._told_cut: int | None = None
        self._told_skipped: int | None = None
        self._failed = self._samples = 0.0  # since they were told last
        self._since: int | None = None

    def after(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """At most one line a kind for this step, empty for most steps."""
        kinds = (self._without_spread, self._with_failures, self._without_loss_tokens, self._with_skipped_updates)
        return [text for kind in kinds if (text := kind(step, metrics))]

    def _without_spread(self, step: int, metrics: Mapping[str, float]) -> str:
        if metrics.get("reward/zero_spread_share") != 1 or not _due(step, self._told_spread):
            return ""
        self._told_spread = step
        lowest, highest = metrics.get("reward/min"), metrics.get("reward/max")
        if lowest is not None and lowest == highest:
            seen = f"every answer got reward {lowest:g}"
            reason = "the reward does not fit what the model says, or the task is far too hard or too easy for it"
        else:
            seen = "to each prompt all answers got the same reward"
            reason = "each prompt is solved always or never, or answers are too alike (rollout.temperature, group_size)"
        return f"step {step}: {seen}, so nothing is learned from rewards; look at the samples: {reason}"

    def _with_failures(self, step: int, metrics: Mapping[str, float]) -> str:
        samples = metrics.get("rollout/samples", 0.0)
        failed = metrics.get("rollout/failed_share", 0.0) * samples
        if failed and self._since is None:
            self._since = step
        if self._since is not None:
            self._failed, self._samples = self._failed + failed, self._samples + samples
        if self._since is None or not failed or not _due(step, self._told_failed):
            return ""
        steps = f"step {step}" if self._since == step else f"steps {self._since} to {step}"
        text = f"{steps}: {self._failed:.0f} of {self._samples:.0f} samples failed and were left out"
        self._told_failed, self._since, self._failed, self._samples = step, None, 0.0, 0.0
        if not self._samples_saved:
            return f"{text}; log.save_samples keeps the reason of each"
        return f"{text}; `failure` in samples/step_{step:06d}.rank*.jsonl.gz says why"

    def _without_loss_tokens(self, step: int, metrics: Mapping[str, float]) -> str:
        """Samples, but no update: all that did not fail were cut, and `rollout.truncated` masks those."""
        cut = metrics.get("rollout/truncated_share", 0.0)
        if not cut or cut + metrics.get("rollout/failed_share", 0.0) < 1 - 1e-9:
            return ""
        if "optim/lr" in metrics or "critic/lr" in metrics or not _due(step, self._told_cut):
            return ""
        self._told_cut = step
        return (
            f"step {step}: every answer was cut by its length and left out of the loss (rollout.truncated), so nothing "
            "is trained; raise rollout.max_response_tokens, or ask for shorter answers"
        )

    def _with_skipped_updates(self, step: int, metrics: Mapping[str, float]) -> str:
        names = [n for n in ("optim/skipped_updates", "critic/skipped_updates") if metrics.get(n, 0.0) > 0]
        if not names or not _due(step, self._told_skipped):
            return ""
        self._told_skipped = step
        counts = " and ".join(f"{name} {metrics[name]:g}" for name in names)
        return (
            f"step {step}: gradients were not finite, so updates were skipped ({counts}); once is noise, always a fault"
        )


def _due(step: int, told: int | None) -> bool:
    """A smaller step than the last one: another run began."""
    return told is None or not 0 <= step - told < EVERY
