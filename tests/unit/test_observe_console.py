"""The terminal: alignment, escaping, silence, stage times."""

from __future__ import annotations

import io
import math
from types import SimpleNamespace

import pytest

from lightrl.config.schema import LogConfig
from lightrl.observe import timing
from lightrl.observe.console import MAX_WIDTH, Console, clean, shorten
from lightrl.types import Prompt, Sample, Status

METRICS = {
    "reward/mean": 0.531,
    "reward/std": 0.42,
    "rollout/length_mean": 6.2,
    "rollout/truncated_share": 0.02,
    "loss/total": -0.0123,
    "optim/grad_norm": 0.83,
    "optim/lr": 4e-5,
    "mismatch/logprob_abs_diff": 0.003,
    "perf/tokens_per_second": 62.3,
    "time/generate": 3.1,
    "time/train": 4.0,
    "time/sync": 0.1,
    "time/total": 7.4,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def printed(**config: object) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(LogConfig(**config), file=file), file  # type: ignore[arg-type]


def test_step_line_says_the_numbers_under_their_titles() -> None:
    console, file = printed()
    console.step(12, 40, METRICS)
    header, line = file.getvalue().splitlines()
    titles = header.split()
    cells = line.split()
    expected = {
        "step": "12/40",
        "reward": "0.531",
        "±std": "0.420",
        "length": "6.2",
        "trunc": "2%",
        "loss": "-0.012",
        "kl": "–",
        "entropy": "–",
        "grad": "0.830",
        "lr": "4.0e-5",
        "diff": "0.003",
        "tok/s": "62",
        "gen": "3.1s",
        "train": "4.0s",
        "sync": "0.1s",
        "total": "7.4s",
        "left": "3m27s",
    }
    assert dict(zip(titles, cells, strict=True)) == expected
    ends = [header.index(f" {title}") + len(title) for title in titles[1:]]
    assert [line[: end + 1].split()[-1] for end in ends] == cells[1:]


def test_lines_stay_aligned_and_narrow_for_extreme_values() -> None:
    console, file = printed()
    extremes = [0.0, -1e-9, 1e-12, -123456.789, 987654321.0, math.nan, math.inf, -math.inf]
    for step, value in enumerate(extremes, start=99990):
        console.step(step, 99999, dict.fromkeys(METRICS, value))
    lines = file.getvalue().splitlines()
    assert len(lines) == 1 + len(extremes)
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= MAX_WIDTH
    assert "nan" in lines[6]


def test_titles_come_again_every_20_steps_and_the_rest_is_estimated_from_ten() -> None:
    console, file = printed()
    for step in range(1, 42):
        console.step(step, 41, {"time/total": 100.0 if step <= 20 else 2.0})
    lines = file.getvalue().splitlines()
    assert [i for i, line in enumerate(lines) if "reward" in line] == [0, 21, 42]
    assert lines[20].split()[-1] == "35m"  # 21 steps of 100 s
    assert lines[31].split()[-1] == "22s"  # step 30: 11 steps of 2 s
    assert lines[-1].split()[-1] == "–"


def test_only_the_first_rank_speaks() -> None:
    file = io.StringIO()
    console = Console(LogConfig(), enabled=False, file=file)
    console.step(1, 2, METRICS)
    console.warning("w")
    console.samples(1, [sample("x")])
    with console.progress("generating", total=3) as bar:
        bar.advance()
    assert file.getvalue() == ""


def test_progress_bars_only_on_a_terminal_and_when_wanted() -> None:
    for file, wanted, shown in ((io.StringIO(), True, False), (Terminal(), False, False), (Terminal(), True, True)):
        with Console(LogConfig(progress=wanted), file=file).progress("generating", total=4) as bar:
            for _ in range(4):
                bar.advance()
            bar.describe("done")
        assert ("4/4" in file.getvalue()) is shown


def sample(response: str, **changes: object) -> Sample:
    prompt = Prompt(index=0, tokens=[1], text="What is [bold]2 + 2[/bold]?\nAnswer:", label="4")
    values = {"tokens": [1, 2, 3], "response_length": 2, "reward": 1.0} | changes
    return Sample(prompt=prompt, group_index=3, index=1, response=response, **values)  # type: ignore[arg-type]


def test_samples_cannot_drive_the_terminal() -> None:
    file = Terminal()
    Console(LogConfig(), file=file).samples(1, [sample("\x1b[2J\x1b]0;title\x07[red]4[/red] \u202eevil \ud800")])
    text = file.getvalue()
    assert "\x1b[2J" not in text
    assert "\x07" not in text
    assert "\u202e" not in text
    assert "\\x1b[2J\\x1b]0;title\\x07[red]4[/red] \\u202eevil \\ud800" in text
    assert "[bold]2 + 2[/bold]?" in text


def test_samples_show_reward_status_label_and_come_when_due() -> None:
    console, file = printed(print_samples=1, print_every=10)
    several = [sample("four", status=Status.TRUNCATED, reward=None), sample("second")]
    for step in (1, 2, 10):
        console.samples(step, several)
    text = file.getvalue()
    assert text.count("sample  step") == 2
    assert "step 10  group 3.1  reward –  truncated  2 tokens" in text
    assert "  response  | four" in text
    assert "            | Answer:" in text
    assert "  label     | 4" in text
    assert "second" not in text


def test_evaluation_and_notices() -> None:
    console, file = printed()
    console.evaluation(20, {"eval/held/out/avg@4": 0.9, "eval/held/out/truncated_share": 0.025, "reward/mean": 1.0})
    console.notice("resumed\nfrom step 3")
    console.warning("3 samples failed")
    console.settings("LightRL", {"model": "m", "device": "cpu"})
    assert file.getvalue().splitlines() == [
        "eval  held/out  step 20  avg@4 0.900  truncated_share 2%",
        "note  resumed",
        "from step 3",
        "warning  3 samples failed",
        "LightRL",
        "  model   m",
        "  device  cpu",
    ]


def test_steps_that_teach_nothing_are_told_once_and_then_every_ten() -> None:
    console, file = printed()
    stuck = {"reward/zero_spread_share": 1.0, "reward/min": 0.0, "reward/max": 0.0}
    for step in range(1, 13):
        console.step(step, 20, METRICS | stuck | ({"reward/zero_spread_share": 0.9} if step == 11 else {}))
    console.step(22, 30, METRICS | stuck | {"reward/max": 1.0})
    first, second, third = [line for line in file.getvalue().splitlines() if line.startswith("warning")]
    assert first.startswith("warning  step 1: every answer got reward 0, so nothing is learned from rewards; look at")
    assert second.startswith("warning  step 12: every answer")
    assert third.startswith("warning  step 22: to each prompt all answers got the same reward, so nothing is learned")


def test_failed_samples_are_counted_and_told_at_most_every_ten_steps() -> None:
    console, file = printed()
    shares = {3: 0.5, 4: 0.25, 6: 0.125, 13: 0.25, 40: 0.125}
    for step in range(1, 41):
        console.step(step, 40, {"rollout/samples": 8.0, "rollout/failed_share": shares.get(step, 0.0)})
    assert [line for line in file.getvalue().splitlines() if line.startswith("warning")] == [
        "warning  step 3: 4 of 8 samples failed and were left out; "
        "`failure` in samples/step_000003.rank*.jsonl.gz says why",
        "warning  steps 4 to 13: 5 of 80 samples failed and were left out; "
        "`failure` in samples/step_000013.rank*.jsonl.gz says why",
        "warning  step 40: 1 of 8 samples failed and were left out; "
        "`failure` in samples/step_000040.rank*.jsonl.gz says why",
    ]
    console, file = printed(save_samples=False)
    console.step(1, 2, {"rollout/samples": 8.0, "rollout/failed_share": 1.0})
    assert "8 of 8 samples failed and were left out; log.save_samples keeps" in file.getvalue()


def test_steps_without_an_update_and_skipped_updates_are_told() -> None:
    console, file = printed()
    masked = {"rollout/samples": 8.0, "rollout/truncated_share": 1.0}
    console.step(1, 40, masked)
    console.step(2, 40, masked)
    console.step(12, 40, masked | {"optim/lr": 1e-5})  # cut, but trained on
    console.step(13, 40, masked | {"critic/lr": 1e-5})  # the critic alone
    console.step(14, 40, METRICS | {"optim/skipped_updates": 2.0, "critic/skipped_updates": 0.0})
    console.step(15, 40, METRICS | {"optim/skipped_updates": 2.0})
    console.step(30, 40, METRICS | {"optim/skipped_updates": 0.0, "critic/skipped_updates": 1.0})
    assert [line.split(";")[0] for line in file.getvalue().splitlines() if line.startswith("warning")] == [
        "warning  step 1: every answer was cut by its length and left out of the loss (rollout.truncated), so nothing "
        "is trained",
        "warning  step 14: gradients were not finite, so updates were skipped (optim/skipped_updates 2)",
        "warning  step 30: gradients were not finite, so updates were skipped (critic/skipped_updates 1)",
    ]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(59.4, "59s"), (59.6, "1m00s"), (119.7, "2m00s"), (599.7, "10m"), (3569.4, "59m"), (3570, "1.0h"), (2e5, "2d")],
)
def test_what_is_left_is_rounded_before_it_is_split(seconds: float, shown: str) -> None:
    console, file = printed()
    console.step(1, 2, {"time/total": seconds})
    assert file.getvalue().split()[-1] == shown


def test_text_helpers() -> None:
    assert clean("a\r\nb\tc\x00\x9b") == "a\nb\tc\\x00\\x9b"
    assert shorten("x" * 100, 100) == "x" * 100
    cut = shorten("a" * 500 + "b" * 500, 100)
    assert cut.startswith("a" * 40 + " … 920 characters left out … ")
    assert cut.endswith(" " + "b" * 40)


def test_stage_times_add_up_nest_and_survive_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def wait(seconds: float) -> None:
        now[0] += seconds

    timer = timing.StageTimer()
    wait(30.0)  # loading is no part of the first step
    for seconds in (1.0, 2.0):
        with timer("generate"):
            wait(seconds)

    def fail() -> None:
        with timer("train"):
            wait(4.0)
            with timer("forward"):
                wait(8.0)
                raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    wait(0.5)
    assert timer.seconds("train") == 12.0
    assert timer.metrics() == {
        "time/generate": 3.0,
        "time/train/forward": 8.0,
        "time/train": 12.0,
        "time/total": 15.5,
    }
    wait(2.0)
    assert timer.metrics() == {"time/total": 2.0}


def test_gpu_work_is_timed_in_the_stage_that_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, queued=0.0)

    def synchronize() -> None:
        clock.now, clock.queued = clock.now + clock.queued, 0.0

    def fail() -> None:
        with timer("train"):
            clock.queued += 64.0
            raise RuntimeError

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    cuda = SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)
    monkeypatch.setattr(timing, "torch", SimpleNamespace(cuda=cuda))
    timer = timing.StageTimer()
    clock.queued = 32.0  # of before the first stage
    with timer("sync"):
        clock.queued += 1.0
    with timer("train"):
        clock.queued += 2.0
        with timer("forward"):
            clock.queued += 4.0
    assert timer.metrics() == {"time/sync": 1.0, "time/train/forward": 4.0, "time/train": 6.0, "time/total": 7.0}
    with pytest.raises(RuntimeError):
        fail()
    assert clock.queued == 64.0  # an error is not kept waiting for work that may never end
