"""The terminal: one aligned line a step, progress bars, printed samples, notices. Quiet on all ranks but the first."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Protocol

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from lightrl.observe.notices import StepNotices
from lightrl.types import Sample

if TYPE_CHECKING:
    from lightrl.config.schema import LogConfig

HEADER_EVERY = 20
MAX_WIDTH = 140
Columns = tuple[tuple[str, int, str, str], ...]
"""Of a step's line: title, width, metric, kind of number."""
RL_COLUMNS: Columns = (
    ("reward", 7, "reward/mean", "fixed"),
    ("±std", 6, "reward/std", "fixed"),
    ("length", 6, "rollout/length_mean", "fixed1"),
    ("trunc", 5, "rollout/truncated_share", "share"),
    ("loss", 8, "loss/total", "fixed"),
    ("kl", 7, "loss/kl", "fixed"),
    ("entropy", 7, "rollout/entropy", "fixed"),
    ("grad", 6, "optim/grad_norm", "fixed"),
    ("lr", 7, "optim/lr", "power"),
    ("diff", 6, "mismatch/logprob_abs_diff", "fixed"),
    ("tok/s", 6, "perf/tokens_per_second", "fixed0"),
    ("gen", 6, "time/generate", "seconds"),
    ("train", 6, "time/train", "seconds"),
    ("sync", 6, "time/sync", "seconds"),
    ("total", 6, "time/total", "seconds"),
)
SFT_COLUMNS: Columns = (
    ("epoch", 6, "sft/epoch", "fixed"),
    ("loss", 8, "loss/total", "fixed"),
    ("entropy", 7, "loss/entropy", "fixed"),
    ("grad", 6, "optim/grad_norm", "fixed"),
    ("lr", 7, "optim/lr", "power"),
    ("tokens", 7, "sft/tokens", "fixed0"),
    ("trained", 7, "sft/trained_tokens", "fixed0"),
    ("tok/s", 6, "perf/tokens_per_second", "fixed0"),
    ("total", 6, "time/total", "seconds"),
)


def preference_columns(command: str) -> Columns:
    """Of `lightrl dpo` and `lightrl rm`."""
    return (
        ("epoch", 6, f"{command}/epoch", "fixed"),
        ("loss", 8, "loss/total", "fixed"),
        ("chosen", 7, "rewards/chosen", "fixed"),
        ("rejected", 8, "rewards/rejected", "fixed"),
        ("margin", 7, "rewards/margins", "fixed"),
        ("right", 6, "rewards/accuracies", "fixed"),
        ("grad", 6, "optim/grad_norm", "fixed"),
        ("lr", 7, "optim/lr", "power"),
        ("tokens", 7, f"{command}/tokens", "fixed0"),
        ("tok/s", 6, "perf/tokens_per_second", "fixed0"),
        ("total", 6, "time/total", "seconds"),
    )


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
_COUNTS = ("prompts", "conversations", "pairs", "trained_tokens")
_STATUS_STYLE = {"completed": "green", "truncated": "yellow", "aborted": "yellow", "failed": "red"}


class Bar(Protocol):
    """A progress bar, or nothing."""

    def advance(self, amount: float = 1) -> None:
        """One more done."""

    def describe(self, text: str) -> None:
        """Change the words before the bar."""


class _NoBar:
    def advance(self, amount: float = 1) -> None:
        pass

    def describe(self, text: str) -> None:
        pass


class _RichBar:
    def __init__(self, progress: Progress, description: str, total: float | None) -> None:
        self._progress = progress
        self._task = progress.add_task(description, total=total)

    def advance(self, amount: float = 1) -> None:
        self._progress.advance(self._task, amount)

    def describe(self, text: str) -> None:
        self._progress.update(self._task, description=text)


class Console:
    """What the first rank prints. With `enabled=False` (the other ranks) every method does nothing.

    `columns` are those of a step's line; `file` replaces standard output. Text of models and users is never read as
    markup, and its control characters are shown, not sent to the terminal.
    """

    def __init__(
        self,
        config: LogConfig,
        enabled: bool = True,
        file: IO[str] | None = None,
        *,
        columns: Columns = RL_COLUMNS,
    ) -> None:
        self._config = config
        self._columns = columns
        self._rich = RichConsole(file=file, quiet=not enabled, highlight=False, soft_wrap=True)
        self._bars = enabled and config.progress and self._rich.is_terminal
        self._lines = 0
        self._step_seconds: list[float] = []
        self._notices = StepNotices(config.save_samples)

    def step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a step, its column titles every 20 lines, and what in it is worth a look.

        A dash: not measured in this run.
        """
        seconds = metrics.get("time/total")
        if seconds is not None:
            self._step_seconds = [*self._step_seconds[-9:], seconds]
        left = math.nan
        if self._step_seconds and step < total:
            left = (total - step) * sum(self._step_seconds) / len(self._step_seconds)
        digits = len(str(total))
        if self._lines % HEADER_EVERY == 0:
            self._print(Text(_header(digits, self._columns), style="bold dim"))
        self._lines += 1
        line = Text(f"{step:>{digits}}/{total}".rjust(_step_width(digits)))
        for title, width, name, kind in self._columns:
            cell = _number(metrics.get(name), kind, width)
            line.append(f" {cell:>{width}}", style=_cell_style(title, cell))
        line.append(f" {_duration(left):>6}", style="dim")
        self._print(line)
        for text in self._notices.after(step, metrics):
            self.warning(text)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print a line for each evaluation set in `eval/NAME/METRIC` metrics."""
        sets: dict[str, list[str]] = {}
        for name, value in metrics.items():
            if name.startswith("eval/") and name.count("/") >= 2:
                set_name, _, metric = name.removeprefix("eval/").rpartition("/")
                sets.setdefault(set_name, []).append(f"{metric} {_number(value, _eval_kind(metric), 8)}")
        for set_name, parts in sets.items():
            self._print(
                Text.assemble(("eval  ", "bold magenta"), f"{clean(set_name)}  step {step}  " + "  ".join(parts))
            )

    def settings(self, title: str, rows: Mapping[str, object]) -> None:
        """Print a small block of facts, as at the start of a run."""
        self._print(Text(clean(title), style="bold"))
        width = max((len(name) for name in rows), default=0)
        for name, value in rows.items():
            self._print(Text.assemble((f"  {clean(name):<{width}}  ", "dim"), clean(str(value))))

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Print some samples of the step when it is one of those (`log.print_every`, and the first step)."""
        if not self._config.print_samples or not (step == 1 or step % self._config.print_every == 0):
            return
        for sample in samples[: self._config.print_samples]:
            self._sample(step, sample)

    def notice(self, text: str) -> None:
        """Something to know."""
        self._print(Text.assemble(("note  ", "bold cyan"), clean(text)))

    def warning(self, text: str) -> None:
        """Something to look at."""
        self._print(Text.assemble(("warning  ", "bold yellow"), clean(text)))

    def restarted(self, count: int, why: str) -> None:
        """So many engines died."""
        engines = "an engine died and is" if count == 1 else f"{count} engines died and are"
        reason = f": {why}" if why else ""
        self.warning(f"{engines} started anew; answers that were lost are sampled again{reason}")

    @contextmanager
    def progress(self, description: str, total: float | None = None) -> Iterator[Bar]:
        """A bar while the block runs: `with console.progress("generating", total=64) as bar: bar.advance()`.

        Only on a terminal and with `log.progress`; gone when the block ends. `total=None`: unknown.
        """
        if not self._bars:
            yield _NoBar()
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._rich, transient=True) as progress:
            yield _RichBar(progress, clean(description), total)

    def _sample(self, step: int, sample: Sample) -> None:
        head = Text.assemble(
            ("sample  ", "bold blue"), f"step {step}  group {sample.group_index}.{sample.index}  reward "
        )
        head.append("–" if sample.reward is None else f"{sample.reward:.3g}", style="bold")
        head.append(f"  {sample.status.value}", style=_STATUS_STYLE[sample.status.value])
        head.append(f"  {sample.response_length} tokens")
        self._print(head)
        label = sample.prompt.label
        rows = [("prompt", sample.prompt.text), ("response", sample.response)]
        rows += [] if label is None else [("label", str(label))]
        for name, text in rows:
            for number, part in enumerate(shorten(clean(text), 800).split("\n")):
                self._print(Text.assemble((f"  {name if number == 0 else '':<9} | ", "dim"), part))

    def _print(self, text: Text) -> None:
        self._rich.print(text)


def clean(text: str) -> str:
    """Control characters (escape sequences, bidirectional overrides …) as `\\x1b`, so that no text drives the terminal.

    Line feeds and tabs stay; lone surrogates, which cannot be printed, become escapes too.
    """
    text = text.replace("\r\n", "\n")
    text = _CONTROL.sub(lambda m: m[0].encode("unicode_escape").decode(), text)
    return text.encode("utf-8", errors="backslashreplace").decode()


def shorten(text: str, limit: int) -> str:
    """The text with its middle cut out when it is longer than `limit` characters; says how much is missing.

    >>> shorten("abcdefghij" * 10, 60)
    'abcdefghijabcdefghij … 60 characters left out … abcdefghijabcdefghij'
    """
    if len(text) <= limit:
        return text
    kept = max(2, limit - 20)
    head, tail = (kept + 1) // 2, kept // 2
    return f"{text[:head]} … {len(text) - head - tail} characters left out … {text[-tail:]}"


def _step_width(digits: int) -> int:
    return max(4, 2 * digits + 1)


def _header(digits: int, columns: Columns) -> str:
    titles = "".join(f" {title:>{width}}" for title, width, _, _ in columns)
    return f"{'step':>{_step_width(digits)}}{titles} {'left':>6}"


def _cell_style(title: str, cell: str) -> str:
    if cell.strip() in ("–", "nan"):
        return "dim" if cell.strip() == "–" else "bold red"
    return "bold green" if title == "reward" else ""


def _number(value: float | None, kind: str, width: int) -> str:
    """The value in at most `width` characters, with an exponent where it would not fit or would vanish."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(float(value))
    decimals = {"fixed0": 0, "fixed1": 1}.get(kind, 3)
    text = f"{value:.{decimals}f}"
    if kind == "share":
        text = f"{value:.0%}"
    elif kind == "seconds":
        text = f"{value:.1f}s" if value < 1000 else _duration(value)
    elif kind == "power" or (kind == "fixed" and value != 0 and abs(value) < 0.0005):
        text = _power(value)
    return next((t for t in (text, _power(value)) if len(t) <= width), _power(value, decimals=0))


def _power(value: float, decimals: int = 1) -> str:
    """`4.0e-5`: an exponent without padding."""
    mantissa, exponent = f"{value:.{decimals}e}".split("e")
    return "0" if value == 0 else f"{mantissa}e{int(exponent)}"


def _duration(seconds: float) -> str:
    if math.isnan(seconds):
        return "–"
    seconds = round(min(max(seconds, 0.0), 99_999 * 86_400))  # six characters at most
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3570:  # rounds to less than 60 minutes
        return f"{seconds // 60}m{seconds % 60:02}s" if seconds < 600 else f"{seconds / 60:.0f}m"
    return f"{seconds / 3600:.1f}h" if seconds < 172800 else f"{seconds / 86400:.0f}d"


def _eval_kind(metric: str) -> str:
    return "share" if metric.endswith("_share") else "fixed0" if metric in _COUNTS else "fixed"
