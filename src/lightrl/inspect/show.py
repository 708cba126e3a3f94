"""Samples of a dump on a terminal: a table, or one in colour."""

from __future__ import annotations

import heapq
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from lightrl.errors import UserError
from lightrl.inspect.pieces import Decode, pieces, visible
from lightrl.types import Sample

_COLOURS = ((-0.1, "green"), (-0.7, "yellow"), (-2.3, "dark_orange"), (-float("inf"), "red"))
"""From this log-prob on: 0.9, 0.5, 0.1 of probability, less."""
_GIVEN, _PROMPT = "italic on grey23", "dim"
_PREVIEW, _LEAST = 120, 12  # characters of a response in the table: most, and at least, whatever the terminal's width
_COLUMNS = ("step", "sample", "prompt", "status", "reward", "length", "logprob", "version")
_Key = tuple[float, ...]
_ORDERS: dict[str, Callable[[int, Sample], _Key]] = {
    "step": lambda step, s: (step, s.group_index, s.index),
    "reward": lambda step, s: (float("-inf") if s.reward is None else s.reward, step, s.group_index, s.index),
    "length": lambda step, s: (s.response_length, step, s.group_index, s.index),
}


@dataclass
class _Row:
    """What the table needs of a sample: the rest is let go of."""

    key: _Key
    cells: tuple[str, ...]

    def __lt__(self, other: _Row) -> bool:
        return self.key < other.key


def table(samples: Iterable[tuple[int, Sample]], console: Console, *, sort: str = "step", limit: int = 30) -> int:
    """Print the first `limit` samples by `sort` (`-` before it: from the other end), and of all what they come to.

    Returns how many there are.
    """
    order = _ORDERS.get(sort.removeprefix("-"))
    if order is None:
        raise UserError(f"inspect: --sort {sort}: choose {', '.join(_ORDERS)}, with - before it for the other end")
    kept, facts = _Best(limit, sort.startswith("-")), _Facts()
    for step, sample in samples:
        facts.add(sample)
        kept.add(_Row(order(step, sample), _cells(step, sample)))
    rows = kept.rows()
    grid = Table(box=None, pad_edge=False, header_style="bold")
    room = console.width
    for i, name in enumerate(_COLUMNS):
        width = max([len(name), *(len(row.cells[i]) for row in rows)])
        grid.add_column(name, justify="left" if name == "status" else "right", no_wrap=True, min_width=width)
        room -= width + 2
    grid.add_column("response", no_wrap=True, min_width=_LEAST)
    for row in rows:
        response = Text(row.cells[-1])
        response.truncate(max(room, _LEAST), overflow="ellipsis")  # it gives way, and not what is beside it
        grid.add_row(*(Text(cell) for cell in row.cells[:-1]), response)
    console.print(grid, crop=False)
    console.print(Text(facts.line(min(limit, facts.count))))
    return facts.count


class _Best:
    """The `limit` rows with the lowest keys, or the highest; no more are held."""

    def __init__(self, limit: int, highest: bool) -> None:
        self._limit, self._highest, self._rows = limit, highest, list[_Row]()

    def add(self, row: _Row) -> None:
        self._rows.append(row)
        if len(self._rows) > 4 * self._limit + 1000:
            self._rows = self.rows()

    def rows(self) -> list[_Row]:
        pick = heapq.nlargest if self._highest else heapq.nsmallest
        return pick(self._limit, self._rows)


class _Facts:
    """What all samples come to."""

    def __init__(self) -> None:
        self.count = self._tokens = 0
        self._rewards: list[float] = []
        self._statuses: Counter[str] = Counter()

    def add(self, sample: Sample) -> None:
        self.count += 1
        self._tokens += sample.response_length
        self._statuses[sample.status.value] += 1
        if sample.reward is not None:
            self._rewards.append(sample.reward)

    def line(self, shown: int) -> str:
        parts = [f"{shown} of {self.count} samples"]
        if self._rewards:
            spread = statistics.pstdev(self._rewards)
            parts.append(f"reward {statistics.fmean(self._rewards):.4g} ± {spread:.4g}")
        if self.count:
            parts.append(f"length {self._tokens / self.count:.4g}")
        parts += [f"{count} {status}" for status, count in sorted(self._statuses.items())]
        return ", ".join(parts)


def _cells(step: int, sample: Sample) -> tuple[str, ...]:
    logprobs = [
        lp for lp, counts in zip(sample.rollout_logprobs or (), sample.mask, strict=False) if counts and lp is not None
    ]
    versions = sorted(set(sample.policy_versions))
    return (
        str(step),
        f"{sample.group_index}/{sample.index}",
        str(sample.prompt.index),
        sample.status.value,
        "–" if sample.reward is None else f"{sample.reward:.4g}",
        str(sample.response_length),
        f"{statistics.fmean(logprobs):.3f}" if logprobs else "–",
        "–" if not versions else str(versions[0]) if len(versions) == 1 else f"{versions[0]}-{versions[-1]}",
        preview(sample.response),
    )


def preview(text: str, limit: int = _PREVIEW) -> str:
    """The beginning of a text, on one line."""
    return visible(" ".join(text[: 4 * limit].split()))[:limit]


def one(step: int, sample: Sample, decode: Decode | None, console: Console, *, tokens: bool = False) -> None:
    """Print a sample: what is known of it, then its text, each response token in the colour of its log-prob.

    With `tokens` also a line a token: place, id, text, log-prob, mask.
    """
    console.print(_about(step, sample))
    parts = pieces(sample.tokens, decode)
    head = sample.prompt_length
    text = Text()
    text.append("".join(visible(part) for part in parts[:head]), style=_PROMPT)
    logprobs = sample.rollout_logprobs
    for place, (part, counts) in enumerate(zip(parts[head:], sample.mask, strict=True)):
        logprob = None if logprobs is None else logprobs[place]
        text.append(visible(part), style=_GIVEN if not counts else _colour(logprob))
    console.print(Group(_legend(), Text(""), text))
    if tokens:
        console.print(_token_table(sample, parts[head:]))


def _about(step: int, sample: Sample) -> Table:
    grid = Table(box=None, show_header=False, pad_edge=False)
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    facts: dict[str, Any] = {
        "sample": f"step {step}, group {sample.group_index}, number {sample.index}; prompt {sample.prompt.index}"
        + (f" ({sample.prompt.source})" if sample.prompt.source else ""),
        "status": sample.status.value,
        "reward": sample.reward,
        "advantage": sample.advantage if not isinstance(sample.advantage, list) else "of each token",
        "label": sample.prompt.label,
        "tokens": f"{sample.prompt_length} of the prompt, {sample.response_length} of the response, "
        f"{sum(sample.mask)} of them trained",
        "policy versions": _versions(sample),
        "metadata": sample.metadata or None,
        "prompt's metadata": sample.prompt.metadata or None,
    }
    for name, value in facts.items():
        if value is not None:
            grid.add_row(name, Text(visible(str(value))))
    return grid


def _versions(sample: Sample) -> str:
    """How many tokens each of several gave."""
    if sample.version_tokens is None:
        return ", ".join(map(str, sample.policy_versions))
    parts = zip(sample.policy_versions, sample.version_tokens, strict=True)
    return ", ".join(f"{version} ({count} tokens)" for version, count in parts)


def _legend() -> Text:
    legend = Text()
    legend.append("prompt ", style=_PROMPT)
    for (_, style), name in zip(_COLOURS, ("p ≥ 0.9", "≥ 0.5", "≥ 0.1", "< 0.1"), strict=True):
        legend.append(f" {name} ", style=style)
    legend.append(" given, not trained ", style=_GIVEN)
    return legend


def _colour(logprob: float | None) -> str:
    if logprob is None:
        return ""
    return next(style for least, style in _COLOURS if logprob >= least or least == -float("inf"))


def _token_table(sample: Sample, parts: list[str]) -> Table:
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("place", "id", "logprob", "mask"):
        grid.add_column(name, justify="right")
    grid.add_column("text")
    for place, (token, part, counts) in enumerate(zip(sample.response_tokens, parts, sample.mask, strict=True)):
        logprob = None if sample.rollout_logprobs is None else sample.rollout_logprobs[place]
        shown = "–" if logprob is None else f"{logprob:.4f}"
        style = _GIVEN if not counts else _colour(logprob)
        grid.add_row(str(place), str(token), shown, str(counts), Text(repr(part), style=style))
    return grid
