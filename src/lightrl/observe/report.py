"""`lightrl report RUN`: one self-contained HTML page about a run, and its reward curve as a PNG."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from html import escape
from pathlib import Path
from statistics import fmean, median
from typing import Any

from lightrl.errors import UserError
from lightrl.observe.charts import Series, histogram, line_chart, number, smoothed, sparkline, stacked_chart
from lightrl.observe.jsonl import json_safe, write_whole
from lightrl.observe.page import SAMPLE_BROWSER, SCRIPT, STYLE
from lightrl.observe.rundata import Run, load_run, number_of

NUM_COLORS = 8
# Title, metrics it takes (the first panel that wants one gets it), note, whether 0 is on the axis.
_PANELS: tuple[tuple[str, tuple[str, ...], str, bool], ...] = (
    ("Evaluation", ("eval/*/avg@*", "eval/*/pass@*"), "", False),
    ("Loss of held-out sets", ("eval/*/loss",), "nats a token", False),
    ("Response length", ("rollout/length_mean", "rollout/length_max"), "tokens", True),
    ("Cut and failed samples", ("rollout/*_share",), "share of samples", True),
    ("Groups without spread", ("reward/zero_spread_share",), "share of groups", True),
    ("Loss", ("loss/total", "loss/policy"), "", False),
    ("KL to the reference", ("loss/kl*", "*/kl"), "nats a token", False),
    ("Distance to the teacher", ("distill/reverse_kl", "distill/divergence"), "nats a token", True),
    ("Entropy", ("*/entropy*",), "nats a token", True),
    ("Gradient norm", ("optim/grad_norm",), "before clipping", True),
    ("Engine against trainer", ("mismatch/logprob_abs_diff",), "mean log-prob difference", True),
    ("Importance ratio", ("policy/ratio_*",), "now to before the update", False),
    ("Clipped tokens", ("*/clip*",), "share", True),
    ("Learning rate", ("optim/lr",), "", True),
    ("Throughput", ("perf/*tokens_per_second",), "tokens a second", True),
)


def write_report(run_dir: Path, out: Path | None = None) -> tuple[Path, Path]:
    """Write the page and the curve; returns their paths.

    `out`: a folder, or the name of the page (the PNG gets the same name); default: `report.html` and `reward.png`
    (`loss.png` of a run without rewards) in the run's folder. A folder that holds no run is a UserError.
    """
    run_dir = Path(run_dir)
    run = load_run(run_dir)
    folder = run_dir if out is None else Path(out)
    page, curve = folder / "report.html", folder / f"{_subject(run)}.png"
    if out is not None and Path(out).suffix.lower() in (".html", ".htm"):
        page, curve = Path(out), Path(out).with_suffix(".png")
    try:
        write_whole(page, render(run).encode("utf-8", errors="replace"))
        write_whole(curve, curve_png(run))
    except OSError as error:
        raise UserError(f"{page}: cannot write the report ({error}): name another place with --out") from error
    return page, curve


def render(run: Run) -> str:
    """The page."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    body = [
        _header(run),
        _tiles(run),
        _reward_card(run),
        _panels(run),
        _distributions(run),
        _samples(run),
        _tables(run),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.name)} · LightRL</title><style>{STYLE}</style></head><body><main>"
        + "\n".join(part for part in body if part)
        + f'</main><div id="tip"></div><script>{SCRIPT}</script></body></html>\n'
    )


def _subject(run: Run) -> str:
    """What the run is about: `reward`, or `loss` where nothing was rewarded (`lightrl sft`)."""
    return "reward" if run.finite("reward/mean") or not run.finite("loss/total") else "loss"


def curve_png(run: Run) -> bytes:
    """The curve of rewards, or of losses, with evaluation points, as a PNG of 1600 x 900 pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # half a second of import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: no global figures, no display
    axes = figure.add_subplot()
    subject = _subject(run)
    title, metric = ("mean reward", "reward/mean") if subject == "reward" else ("loss", "loss/total")
    points = _eval_means(run) if subject == "reward" else [n for n in run.metrics if fnmatch(n, "eval/*/loss")]
    steps, rewards = run.points(metric)
    window, blue = _window(len(rewards)), "#2563eb"
    raw = {"alpha": 0.35, "linewidth": 1.2} if window else {"linewidth": 1.8, "marker": "o"}
    axes.plot(steps, rewards, color=blue, label=title, **raw)
    if window:
        means = [v for v in smoothed(rewards, window) if v is not None]
        axes.plot(steps, means, color=blue, linewidth=2.2, label=f"mean of {window} steps")
    for color, name in enumerate(points, start=1):
        label = name.removeprefix("eval/").replace("$", r"\$")
        axes.plot(*run.points(name), "o--", color=f"C{color}", markersize=6, linewidth=1, label=label)
    axes.set(xlabel="step", ylabel=subject)
    axes.set_title(run.name.replace("$", r"\$"), loc="left", fontweight="bold")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def _header(run: Run) -> str:
    env, versions = run.environment, run.environment.get("versions") or {}
    world = env.get("world_size", 1)
    facts = [
        str((run.config.get("model") or {}).get("path") or ""),
        str(env.get("hardware") or ""),
        f"{world} rank{'s' if world != 1 else ''}" if env else "",
        *(f"{name} {versions[name]}" for name in ("lightrl", "torch", "transformers") if versions.get(name)),
        f"commit {str(env['commit'])[:10]}" if env.get("commit") else "",
    ]
    spans = "".join(f"<span>{escape(fact)}</span>" for fact in facts if fact)
    return (
        f'<header><div><h1>{escape(run.name)}</h1><div class="facts">{spans}</div></div>'
        '<button id="theme" title="dark or light">◐</button></header>'
    )


def _tiles(run: Run) -> str:
    tiles: list[tuple[str, str, str]] = []
    rewards = run.finite("reward/mean")
    if len(rewards) == 1:
        tiles.append(("Reward", f"{rewards[0]:.3g}", "mean of the only step"))
    elif rewards:
        width = min(5, len(rewards) // 2)
        first, last = fmean(rewards[:width]), fmean(rewards[-width:])
        times = f" · ×{last / first:.1f}" if first > 0 and last > 0 else ""
        tiles.append(("Reward", f"{first:.3g} → {last:.3g}", f"first and last {width} steps{times}"))
    for name in _eval_means(run)[:2]:
        values = run.finite(name)
        label = f"{name.removeprefix('eval/')} · best {max(values):.3g}"
        tiles.append(
            ("Evaluation", f"{values[0]:.3g} → {values[-1]:.3g}" if len(values) > 1 else f"{values[0]:.3g}", label)
        )
    planned = (run.config.get("run") or {}).get("steps")
    done = f"{run.steps[-1]}" + (f" / {planned}" if planned else "")
    samples = run.finite("rollout/samples")
    tiles.append(("Steps", done, f"{sum(samples):,.0f} samples" if samples else "logged"))
    seconds = run.finite("time/total")
    if seconds:
        tiles.append(("Time in steps", _clock(sum(seconds)), f"median {median(seconds):.1f} s a step"))
    speed = run.finite("perf/tokens_per_second")
    if speed:
        tiles.append(("Tokens a second", f"{median(speed):,.0f}", "median of steps"))
    parts = ""
    for title, value, note in tiles:
        texts = f"<small>{escape(title)}</small><b>{escape(value)}</b><small>{escape(note)}</small>"
        parts += f'<div class="card tile">{texts}</div>'
    return f'<div class="tiles">{parts}</div>'


def _reward_card(run: Run) -> str:
    values = run.metrics.get("reward/mean", [])
    series = [Series(name="mean reward", steps=run.steps, values=values)]
    window = _window(len(run.finite("reward/mean")))
    if window:
        means = smoothed(values, window)
        series = [
            Series(name="mean reward", steps=run.steps, values=values, style="faint"),
            Series(name=f"mean of {window} steps", steps=run.steps, values=means),
        ]
    for color, name in enumerate(_eval_means(run), start=1):
        steps, points = run.points(name)
        label = name.removeprefix("eval/")
        series.append(Series(name=label, steps=steps, values=points, color=color % NUM_COLORS, style="points"))
    chart = line_chart(series, width=1080, height=300)
    return _card("Reward", "over steps", chart, series, "wide")


def _panels(run: Run) -> str:
    taken: set[str] = set()
    cards = []
    for title, patterns, note, zero in _PANELS:
        names = [
            n for p in patterns for n in run.metrics if fnmatch(n, p) and n not in taken and _worth_drawing(run, n)
        ]
        names = list(dict.fromkeys(names))[:NUM_COLORS]
        taken.update(names)
        style = "points" if title == "Evaluation" else "line"
        series = []
        for color, name in enumerate(names):
            steps, values = run.points(name) if style == "points" else (run.steps, run.metrics[name])
            series.append(Series(name=_label(name), steps=steps, values=values, color=color, style=style))
        cards.append(_card(title, note, line_chart(series, zero=zero), series))
    cards.append(_stages(run))
    cards = [card for card in cards if card]
    return f'<h2>Training</h2><div class="grid">{"".join(cards)}</div>' if cards else ""


def _stages(run: Run) -> str:
    """Stages on top of each other, the longest at the bottom, and what `time/total` holds beside them."""
    timed = [i for i, total in enumerate(run.metrics.get("time/total", [])) if total is not None]
    names = [n for n in run.metrics if n.startswith("time/") and n.count("/") == 1 and n != "time/total"]
    names = sorted(names, key=lambda n: -sum(run.finite(n)))[: NUM_COLORS - 1]
    if not timed or not names:
        return ""
    steps = [run.steps[i] for i in timed]
    values = {n.removeprefix("time/"): [run.metrics[n][i] or 0.0 for i in timed] for n in names}
    totals = [run.metrics["time/total"][i] or 0.0 for i in timed]
    values["other"] = [max(0.0, total - sum(stage)) for total, *stage in zip(totals, *values.values(), strict=True)]
    series = [Series(name=n, steps=steps, values=v, color=i) for i, (n, v) in enumerate(values.items())]
    return _card("Time of a step, by stage", "seconds", stacked_chart(series), series)


def _distributions(run: Run) -> str:
    if not run.early:
        return ""
    rows = [(_step_range(run.early), run.early)] + ([(_step_range(run.late), run.late)] if run.late else [])
    cards = ""
    for title, key, note in (
        ("Rewards", "reward", "share of samples"),
        ("Response lengths", "response_length", "tokens"),
    ):
        groups = [(name, [float(r[key]) for r in records if number_of(r[key]) is not None]) for name, records in rows]
        groups = [(name, values) for name, values in groups if values]
        legend = [Series(name=name, steps=[], values=[], color=i) for i, (name, _) in enumerate(groups)]
        cards += _card(title, note, histogram(groups, width=560, height=220), legend)
    return f'<h2>Early against late</h2><div class="grid">{cards}</div>'


def _samples(run: Run) -> str:
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in run.notes)
    if not run.samples:
        reason = "No samples in the run's folder: they are written with <code>log.save_samples = true</code>."
        return f'<h2>Samples</h2><p class="note">{reason}</p>{notes}'
    prompts = list(dict.fromkeys(s["prompt"] for s in run.samples))
    place = {prompt: i for i, prompt in enumerate(prompts)}
    rows = [{**s, "prompt": place[s["prompt"]]} for s in run.samples]
    data = embedded_json({"prompts": prompts, "samples": rows})
    return f'<h2>Samples</h2>{notes}{SAMPLE_BROWSER}<script type="application/json" id="data">{data}</script>'


def _tables(run: Run) -> str:
    rows = ""
    for name in sorted(run.metrics):
        values = run.finite(name)
        if values:
            numbers = (values[-1], values[0], min(values), max(values))
            cells = "".join(f"<td>{number(v)}</td>" for v in numbers)
            rows += f"<tr><td>{escape(name)}</td>{cells}<td>{sparkline(values)}</td></tr>"
    head = "<tr><th>metric</th><th>last</th><th>first</th><th>min</th><th>max</th><th>curve</th></tr>"
    table = f'<div class="scroll"><table>{head}{rows}</table></div>'
    parts = f'<details class="card wide" open><summary>Every metric</summary>{table}</details>'
    blocks = [("Config", run.config_text)]
    if run.environment:
        blocks.append(("Environment", json.dumps(run.environment, indent=2, ensure_ascii=False)))
    for title, text in blocks:
        if text:
            parts += f'<details class="card wide"><summary>{title}</summary><pre>{escape(text)}</pre></details>'
    return f"<h2>Details</h2>{parts}"


def embedded_json(value: Any) -> str:
    """JSON for a script element: no character in it can end the element or start markup."""
    text = json.dumps(json_safe(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _card(title: str, note: str, chart: str, series: Sequence[Series], css: str = "") -> str:
    if not chart:
        return ""
    legend = ""
    for one in series:
        css_class = f"c{one.color} pale" if one.style == "faint" else f"c{one.color}"
        legend += f'<span><i class="{css_class}"></i>{escape(one.name)}</span>'
    heading = escape(title) + (f' <span class="note">{escape(note)}</span>' if note else "")
    return f'<div class="card {css}"><h3>{heading}</h3><div class="legend">{legend}</div>{chart}</div>'


def _eval_means(run: Run) -> list[str]:
    return [n for n in run.metrics if fnmatch(n, "eval/*/avg@*") and run.finite(n)]


def _worth_drawing(run: Run, name: str) -> bool:
    values = run.finite(name)
    return bool(values) and not (name.endswith("_share") and not any(values))  # a share that was always 0 says nothing


def _window(num_values: int) -> int:
    """Steps a smoothed curve averages over: about a tenth, odd; 0 when there are too few to smooth."""
    return 0 if num_values < 10 else max(3, num_values // 20 * 2 + 1)


def _label(name: str) -> str:
    return name.partition("/")[2] or name


def _step_range(records: Iterable[Mapping[str, Any]]) -> str:
    steps = [r["step"] for r in records]
    return f"step {min(steps)}" if min(steps) == max(steps) else f"steps {min(steps)}–{max(steps)}"


def _clock(seconds: float) -> str:
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    return f"{hours} h {minutes % 60:02d} min" if hours else f"{minutes} min {seconds % 60:02.0f} s"
