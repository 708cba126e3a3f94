"""Which of the groups that are drawn make up a step. Bookkeeping alone, and the same on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightrl.errors import UserError
from lightrl.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of one group."""

    keep: bool
    reason: str = ""
    """Why it was not kept; names a metric."""
    reward_sum: float = 0.0
    num_scored: int = 0


class Selection:
    """The first `wanted` groups that pass, by their number, whichever are done first.

    So neither the number of ranks nor the speed of an answer decides what is trained on, and prompts are used up in
    their order: those behind the last group that was needed were not looked at, and can be dealt again. `more` deals
    the prompts of a further draw when those so far have too few that pass; at most `max_draws` are made, the `first`
    counted. `peek` shows the prompts that it would deal next.

    >>> a, b, c = (Prompt(index=i, tokens=[1], text="") for i in range(3))
    >>> selection = Selection([a, b, c], start=10, wanted=1)
    >>> [number for number, _ in selection.draw()]
    [10, 11, 12]
    >>> selection.note({11: Verdict(keep=True)}); selection.end  # 10 may pass yet
    >>> selection.note({10: Verdict(keep=False, reason="zero_std")}); selection.end, selection.kept
    (2, [11])
    """

    def __init__(
        self,
        first: Sequence[Prompt],
        *,
        start: int,
        wanted: int,
        more: Callable[[], Sequence[Prompt]] | None = None,
        max_draws: int = 1,
        peek: Callable[[int], Sequence[Prompt]] | None = None,
    ) -> None:
        self.wanted = wanted
        self.num_draws = 0
        self.num_drawn = 0
        self.kept: list[int] = []
        """Numbers of the groups to train on, so far."""
        self._first = first
        self.start = start
        self._peek = peek
        self._more = more
        self._max_draws = 1 if more is None else max_draws
        self._verdicts: dict[int, Verdict] = {}
        self._seen = 0  # groups from the first on whose verdicts are known and count

    @property
    def end(self) -> int | None:
        """How many groups, from the first on, were looked at; None while more verdicts or draws are needed."""
        full = len(self.kept) == self.wanted
        exhausted = self._seen == self.num_drawn and self.num_draws >= self._max_draws
        return self._seen if full or exhausted else None

    @property
    def num_unused(self) -> int:
        """Groups that were drawn and, so far, not looked at."""
        return self.num_drawn - self._seen

    @property
    def needs_draw(self) -> bool:
        """Whether too few can pass, whatever becomes of those that are under way."""
        passing = sum(v.keep for v in self._verdicts.values())
        possible = passing + self.num_drawn - len(self._verdicts)
        return possible < self.wanted and self.num_draws < self._max_draws

    def draw(self) -> list[tuple[int, Prompt]]:
        """Numbered prompts of the next draw."""
        assert self.num_draws == 0 or self._more is not None
        prompts = self._more() if self._more is not None and self.num_draws else self._first
        numbered = list(enumerate(prompts, start=self.start + self.num_drawn))
        self.num_draws += 1
        self.num_drawn += len(numbered)
        return numbered

    def ahead(self, end: int) -> list[tuple[int, Prompt]]:
        """Numbered prompts that are not drawn yet, up to number `end`: those of steps to come."""
        first = self.start + self.num_drawn
        if self._peek is None or end <= first:
            return []
        return list(enumerate(self._peek(end - first), start=first))

    def note(self, verdicts: Mapping[int, Verdict]) -> None:
        """Take in verdicts by group number, in any order."""
        self._verdicts.update(verdicts)
        while len(self.kept) < self.wanted and (verdict := self._verdicts.get(self.start + self._seen)) is not None:
            if verdict.keep:
                self.kept.append(self.start + self._seen)
            self._seen += 1

    def shortage(self) -> str | None:
        """What to tell where fewer passed than are wanted. UserError where none did."""
        if len(self.kept) == self.wanted:
            return None
        text = (
            f"rollout.filter: {len(self.kept)} of {self.num_drawn} prompts in {self.num_draws} draws passed, "
            f"{self.wanted} are wanted"
        )
        if not self.kept:
            raise UserError(f"{text}: nothing to train on; look at the samples' rewards, or raise rollout.max_draws")
        return f"{text}; raise rollout.max_draws or oversample_prompts"

    def record(self) -> dict[str, Any]:
        """All that `replay` needs, as JSON."""
        return {
            "start": self.start,
            "draws": self.num_draws,
            "drawn": self.num_drawn,
            "verdicts": {str(number): asdict(verdict) for number, verdict in sorted(self._verdicts.items())},
        }

    def replay(self, record: Mapping[str, Any], what: str) -> None:
        """Draw, and take in verdicts, as the selection of that `record` did. UserError, beginning with `what`, where
        this one stands elsewhere or draws others."""
        if record["start"] != self.start:
            raise UserError(
                f"{what} begins with group {record['start']}, this run stands at {self.start}: keep [rollout] as it "
                "was, and start with the step that the dump starts with"
            )
        while self.num_draws < record["draws"] and (self._more is not None or self.num_draws == 0):
            self.draw()
        if self.num_drawn != record["drawn"]:
            raise UserError(
                f"{what} was made of {record['drawn']} prompts, [rollout] draws {self.num_drawn}: set "
                "prompts_per_step, oversample_prompts and filter as they were"
            )
        self.note({int(number): Verdict(**verdict) for number, verdict in record["verdicts"].items()})
        if self.end is None:
            raise UserError(f"{what} has fewer groups than rollout.prompts_per_step = {self.wanted}: set it as it was")

    def metrics(self) -> dict[str, float]:
        """Counts of the groups looked at, `filter/…`; names and meanings are in docs/metrics.md."""
        looked_at = [self._verdicts[self.start + i] for i in range(self._seen)]
        dropped = Counter(v.reason for v in looked_at if not v.keep)
        counts: dict[str, float] = {
            "filter/drawn": self._seen,
            "filter/kept": len(self.kept),
            "filter/returned": self.num_unused,
            "filter/draws": self.num_draws,
        }
        counts.update({f"filter/dropped_{reason}": count for reason, count in sorted(dropped.items())})
        if scored := sum(v.num_scored for v in looked_at):
            counts["filter/reward_mean"] = sum(v.reward_sum for v in looked_at) / scored
        return counts
