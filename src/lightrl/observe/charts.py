"""Charts as inline SVG text: no library in the page, colours from its style sheet, values for the pointer beside.

`Series` hold one value a step; None and NaN leave a gap. Long runs are drawn through bucket means.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from statistics import fmean
from typing import Any

MAX_POINTS = 600
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 10, 24
Value = float | None


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve: `values[i]` at step `steps[i]`."""

    name: str
    steps: Sequence[int]
    values: Sequence[Value]
    color: int = 0
    """Number in the page's palette."""
    style: str = "line"
    """`line`, `faint` (the raw values behind a smoothed line) or `points`."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Maps data to the pixels of one SVG."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    width: int = 370
    height: int = 190
    ticks: list[float] = field(default_factory=list)

    def x(self, value: float) -> float:
        low, high = self.x_range
        share = 0.5 if high == low else (value - low) / (high - low)
        return round(_LEFT + share * (self.width - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return round(self.height - _BOTTOM - (value - low) / (high - low) * (self.height - _TOP - _BOTTOM), 1)


def line_chart(series: Sequence[Series], *, width: int = 370, height: int = 190, zero: bool = False) -> str:
    """Curves over steps; empty text when there is nothing finite to draw. `zero` puts 0 on the axis."""
    drawn = [thinned(s) for s in series if any(_finite(v) for v in s.values)]
    if not drawn:
        return ""
    values = [float(v) for s in drawn for v in s.values if v is not None and _finite(v)]
    frame = _frame([x for s in drawn for x in s.steps], values, width, height, zero)
    order = {"faint": 0, "line": 1, "points": 2}
    marks = "".join(_curve(s, frame) for s in sorted(drawn, key=lambda s: order[s.style]))
    return _svg(frame, marks, drawn)


def stacked_chart(series: Sequence[Series], *, width: int = 370, height: int = 190) -> str:
    """Areas on top of each other, as of stage times; a missing value is 0. All series share their steps."""
    drawn = [thinned(s) for s in series if any(_finite(v) for v in s.values)]
    if not drawn:
        return ""
    steps = list(drawn[0].steps)
    tops, base = [], [0.0] * len(steps)
    for one in drawn:
        heights = [max(0.0, v) if v is not None and _finite(v) else 0.0 for v in one.values]
        base = [a + b for a, b in zip(base, heights, strict=True)]
        tops.append(base)
    frame = _frame(steps, base, width, height, True)
    marks, below = "", [0.0] * len(steps)
    for one, top in zip(drawn, tops, strict=True):
        marks += _area(one, steps, below, top, frame)
        below = top
    return _svg(frame, marks, drawn)


def histogram(groups: Sequence[tuple[str, Sequence[float]]], *, width: int = 370, height: int = 190) -> str:
    """Shares of each group's values, bars side by side. Few different values get a bar each, many are binned."""
    groups = [(name, [v for v in values if _finite(v)]) for name, values in groups]
    groups = [(name, values) for name, values in groups if values]
    if not groups:
        return ""
    labels, counts = _bins([values for _, values in groups])
    shares = [[n / len(values) for n in row] for row, (_, values) in zip(counts, groups, strict=True)]
    top, ticks = _nice(0.0, max(max(row) for row in shares))[1:]
    frame = Frame(x_range=(0, len(labels)), y_range=(0.0, top), width=width, height=height, ticks=ticks)
    slot = (width - _LEFT - _RIGHT) / len(labels)
    bar = slot * 0.84 / len(groups)
    marks = ""
    for number, ((name, values), row, tally) in enumerate(zip(groups, shares, counts, strict=True)):
        for i, share in enumerate(row):
            if not share:
                continue
            x, y = _LEFT + slot * (i + 0.08) + bar * number, frame.y(share)
            marks += (
                f'<rect class="fill c{number}" x="{x:.1f}" y="{y}" width="{max(1.0, bar - 1):.1f}" '
                f'height="{frame.y(0) - y:.1f}" rx="1.5"><title>{escape(name)} · {escape(labels[i])}: '
                f"{share:.1%} ({tally[i]} of {len(values)})</title></rect>"
            )
    every = math.ceil(len(labels) * max(len(x) for x in labels) * 6.5 / (width - _LEFT - _RIGHT))
    for i in range(0, len(labels), every):
        marks += _text(_LEFT + slot * (i + 0.5), height - 7, labels[i], "middle")
    return _shell(frame, _grid(frame, percent=True) + marks)


def sparkline(values: Sequence[Value], width: int = 110, height: int = 22) -> str:
    """A curve without axes."""
    one = thinned(Series(name="", steps=list(range(len(values))), values=values), 110)
    finite = [v for v in one.values if v is not None and _finite(v)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    span, last = (high - low) or 1.0, max(1, one.steps[-1])
    points: list[tuple[float, float] | None] = [
        (round(2 + s / last * (width - 4), 1), round(height - 3 - (v - low) / span * (height - 6), 1))
        if v is not None and _finite(v)
        else None
        for s, v in zip(one.steps, one.values, strict=True)
    ]
    return f'<svg class="spark" viewBox="0 0 {width} {height}">{_paths(points, "line c0")}</svg>'


def smoothed(values: Sequence[Value], window: int) -> list[Value]:
    """Means over `window` values around each, fewer at the ends: no lag. Gaps stay gaps and are not counted.

    >>> smoothed([1.0, None, 0.0, 2.0], window=3)
    [1.0, None, 1.0, 1.0]
    """
    half = window // 2
    sums, counts = [0.0], [0]  # running totals: the cost does not grow with the window
    for value in values:
        known = value is not None and math.isfinite(value)
        sums.append(sums[-1] + (value if known and value is not None else 0.0))
        counts.append(counts[-1] + known)
    result: list[Value] = []
    for i in range(len(values)):
        first, end = max(0, i - half), min(len(values), i + half + 1)
        known = counts[i + 1] > counts[i]
        result.append((sums[end] - sums[first]) / (counts[end] - counts[first]) if known else None)
    return result


def thinned(series: Series, limit: int = MAX_POINTS) -> Series:
    """The series with at most `limit` points: means of equal buckets, each at its last step."""
    size = math.ceil(len(series.steps) / limit)
    if size <= 1 or series.style == "points":
        return series
    steps, values = [], []
    for start in range(0, len(series.steps), size):
        finite = [v for v in series.values[start : start + size] if v is not None and _finite(v)]
        steps.append(series.steps[min(start + size, len(series.steps)) - 1])
        values.append(fmean(finite) if finite else None)
    return Series(name=series.name, steps=steps, values=values, color=series.color, style=series.style)


def number(value: Value) -> str:
    """A value for a person: four significant digits at most."""
    if value is None or math.isnan(value):
        return "–"
    if value == int(value) and abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.4g}"


def _finite(value: Value) -> bool:
    return value is not None and math.isfinite(value)


def _frame(steps: Sequence[float], values: Sequence[float], width: int, height: int, zero: bool) -> Frame:
    low, high, ticks = _nice(min([*values, 0.0] if zero else values), max(values))
    return Frame(x_range=(min(steps), max(steps)), y_range=(low, high), width=width, height=height, ticks=ticks)


def _nice(low: float, high: float, parts: int = 4) -> tuple[float, float, list[float]]:
    """A range of round numbers around the values, and its ticks: steps of 1, 2, 2.5 or 5, about `parts` of them."""
    if high - low <= 1e-12 * max(abs(low), abs(high)):  # flat: room on both sides
        room = abs(high) * 0.5 or 1.0
        low, high = (0.0 if low == 0 else low - room), high + room
    rough = (high - low) / parts
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(m * power for m in (1.0, 2.0, 2.5, 5.0, 10.0) if m * power >= rough * 0.999)
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    ticks = [float(f"{i * size:.12g}") for i in range(first, last + 1)]
    return ticks[0], ticks[-1], ticks


def _svg(frame: Frame, marks: str, series: Sequence[Series]) -> str:
    grid = _grid(frame)
    low, high = frame.x_range
    for step in _nice(low, high, 5)[2] if high > low else [low]:
        if low <= step <= high and step == int(step):
            grid += _text(frame.x(step), frame.height - 7, f"{step:.0f}", "middle")
    return _shell(frame, grid + marks + '<line class="cursor" y1="0" y2="0"/>', _hover(frame, series))


def _hover(frame: Frame, series: Sequence[Series]) -> str:
    """What the page's script needs to show values under the pointer."""
    data: dict[str, Any] = {
        "left": frame.x(frame.x_range[0]),
        "right": frame.x(frame.x_range[1]),
        "range": frame.x_range,
        "top": _TOP,
        "bottom": frame.height - _BOTTOM,
        "series": [],
    }
    for one in series:
        pairs = zip(one.steps, one.values, strict=True)
        points = [[x, float(f"{v:.4g}")] for x, v in pairs if v is not None and _finite(v)]
        data["series"].append({"name": one.name, "color": one.color, "points": points})
    return f' data-hover="{escape(json.dumps(data, separators=(",", ":")))}"'


def _shell(frame: Frame, content: str, attributes: str = "") -> str:
    return f'<svg class="chart" viewBox="0 0 {frame.width} {frame.height}"{attributes}>{content}</svg>'


def _grid(frame: Frame, percent: bool = False) -> str:
    parts = []
    for tick in frame.ticks:
        y = frame.y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{frame.width - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(_text(_LEFT - 7, y + 4, f"{100 * tick:.3g}%" if percent else _tick(tick), "end"))
    return "".join(parts)


def _tick(value: float) -> str:
    if value and (abs(value) >= 1e6 or abs(value) < 1e-4):
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value / 1000:.4g}k" if abs(value) >= 10_000 else f"{value:.4g}"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _curve(series: Series, frame: Frame) -> str:
    points = [
        (frame.x(x), frame.y(v)) if v is not None and _finite(v) else None
        for x, v in zip(series.steps, series.values, strict=True)
    ]
    if series.style != "points":
        return _paths(points, f"{series.style} c{series.color}")
    marks = [f'<circle class="point c{series.color}" cx="{p[0]}" cy="{p[1]}" r="4.5"/>' for p in points if p]
    return _paths([p for p in points if p], f"dash c{series.color}") + "".join(marks)


def _paths(points: Sequence[tuple[float, float] | None], css: str) -> str:
    """Unbroken runs of points as lines, lone points as dots."""
    parts, run = [], []
    for point in [*points, None]:
        if point is not None:
            run.append(point)
            continue
        if len(run) == 1:
            parts.append(f'<circle class="dot {css}" cx="{run[0][0]}" cy="{run[0][1]}" r="2.5"/>')
        elif run:
            parts.append(f'<path class="{css}" d="M{" ".join(f"{x},{y}" for x, y in run)}"/>')
        run = []
    return "".join(parts)


def _area(series: Series, steps: Sequence[int], below: list[float], top: list[float], frame: Frame) -> str:
    if len(steps) == 1:  # one step: a bar
        x, y = frame.x(steps[0]), frame.y(top[0])
        return (
            f'<rect class="fill c{series.color}" x="{x - 20}" y="{y}" width="40" height="{frame.y(below[0]) - y:.1f}"/>'
        )
    upper = [f"{frame.x(s)},{frame.y(v)}" for s, v in zip(steps, top, strict=True)]
    lower = [f"{frame.x(s)},{frame.y(v)}" for s, v in zip(steps, below, strict=True)]
    return f'<path class="fill c{series.color}" d="M{" ".join(upper + lower[::-1])}Z"/>'


def _bins(groups: Sequence[Sequence[float]], most: int = 24) -> tuple[list[str], list[list[int]]]:
    """Labels, and how many values of each group fall under them."""
    distinct = sorted({v for values in groups for v in values})
    if len(distinct) <= 12:
        counters = [Counter(values) for values in groups]
        return [number(v) for v in distinct], [[c[v] for v in distinct] for c in counters]
    low, high = distinct[0], distinct[-1]
    width = (high - low) / most
    if all(v == int(v) for v in distinct):
        width = max(1.0, math.ceil((high - low + 1) / most))  # bins of lengths hold whole numbers, equally many each
    num_bins = max(1, min(most, math.floor((high - low) / width) + 1))
    counts = []
    for values in groups:
        row = [0] * num_bins
        for value in values:
            row[min(num_bins - 1, int((value - low) / width))] += 1
        counts.append(row)
    return [number(low + i * width) for i in range(num_bins)], counts
