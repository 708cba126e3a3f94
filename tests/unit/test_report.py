"""The report: charts against hand-worked coordinates, and a page that survives every kind of run."""

from __future__ import annotations

import json
import re
import struct
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lightrl.errors import UserError
from lightrl.observe import rundata
from lightrl.observe.charts import Series, histogram, line_chart, smoothed, sparkline, stacked_chart, thinned
from lightrl.observe.dumps import SampleWriter
from lightrl.observe.environment import write_environment
from lightrl.observe.report import embedded_json, write_report
from lightrl.types import Prompt, Sample, Status

EVIL = '</script><script>alert(1)</script> & <b>"\u2028 [bold] \x00'
VOID = {"meta", "input"}


class Page(HTMLParser):
    """Checks that elements close in order; keeps text, scripts and attributes that could reach the network."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif not self.open or self.open[-1] != "style":
            self.text += data + "\n"

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(next(text for attrs, text in self.scripts if attrs.get("id") == "data"))


def write_run(folder: Path, rows: list[dict[str, Any]], config: str = "[run]\nsteps = 9\n") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.toml").write_text(config)
    return folder


def make_sample(step: int, index: int, response: str = "4", **changes: Any) -> Sample:
    prompt = Prompt(index=0, tokens=[1], text=f"<|user|>2 + {index % 2} =", label="4")
    values = {"reward": float(index % 2), "rollout_logprobs": [-0.5, -1.5]} | changes
    return Sample(
        prompt=prompt, group_index=step, index=index, tokens=[1, 2, 3], response_length=2, response=response, **values
    )


def test_full_run(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"step": 0, "time": 1.0, "eval/dev/avg@2": 0.1, "eval/dev/pass@2": 0.2}]
    for step in range(1, 13):
        times = {"time/generate": 2.0, "time/train": 1.0, "time/total": 3.5}
        rows.append(
            {"step": step, "time": 2.0, "reward/mean": step / 12, "loss/total": None, "odd/metric": 7.0, **times}
        )
    rows[-1] |= {"eval/dev/avg@2": 0.9, "eval/dev/pass@2": 1.0}
    run = write_run(tmp_path / "run<1>", rows, '[run]\nsteps = 12\n\n[model]\npath = "org/<model>"\n')
    write_environment(run)
    writer = SampleWriter(run)
    for step in range(1, 13):
        writer.write(step, [make_sample(step, i, EVIL, metadata={"why": EVIL}) for i in range(4)])
    writer.write(12, [make_sample(12, 0, "x" * 9000)], eval_name="dev")

    page_path, png_path = write_report(run)
    assert (page_path, png_path) == (run / "report.html", run / "reward.png")
    png = png_path.read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", png[16:24]) == (1600, 900)

    page = Page(page_path.read_text(encoding="utf-8"))
    assert page.links == []
    assert len(page.scripts) == 2
    assert "default-src 'none'" in page_path.read_text(encoding="utf-8")
    for text in ("run<1>", "org/<model>", "12 / 12", "0.25 → 0.833", "first and last 5 steps · ×3.3", "0.1 → 0.9"):
        assert text in page.text
    assert "odd/metric" in page.text
    assert "42 s" in page.text  # 12 steps of 3.5 s
    samples = page.data["samples"]
    assert len(samples) == 49
    assert samples[0]["response"] == EVIL
    assert (samples[1]["reward"], samples[1]["logprob"], samples[1]["set"]) == (1.0, -1.0, "train")
    assert page.data["prompts"] == ["<|user|>2 + 0 =", "<|user|>2 + 1 ="]
    assert samples[-1]["set"] == "dev"
    assert len(samples[-1]["response"]) < 4100
    assert "characters left out" in samples[-1]["response"]


def test_one_step_without_samples_config_or_environment(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run", [{"step": 1, "reward/mean": 0.5, "time/total": 2.0, "time/train": 1.0}], "[broken"
    )
    with (run / "metrics.jsonl").open("a") as torn:
        torn.write('{"step": 2, "reward')
    page_path, _ = write_report(run)
    page = Page(page_path.read_text(encoding="utf-8"))
    assert "mean of the only step" in page.text
    assert "log.save_samples" in page.text


def test_nothing_but_nulls(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"step": s, "reward/mean": None, "loss/total": None} for s in (1, 2)])
    Page(write_report(run)[0].read_text(encoding="utf-8"))


def test_values_beyond_drawing(tmp_path: Path) -> None:
    """A run that blew up: nothing overflows on the way to the page."""
    rows = [
        {"step": i, "reward/mean": value, "time/total": 1.0} for i, value in enumerate([1e308, -1e308, 1e-320, 1.0])
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page, curve = write_report(tmp_path)
    assert "mean reward" in Page(page.read_text(encoding="utf-8")).text
    assert curve.is_file()


def test_the_page_stays_small_whatever_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundata, "MAX_SAMPLES", 12)
    monkeypatch.setattr(rundata, "MAX_DUMPS", 4)
    run = write_run(tmp_path / "run", [{"step": s, "reward/mean": 0.0} for s in range(1, 11)])
    for step in range(1, 11):
        SampleWriter(run).write(step, [make_sample(step, i) for i in range(8)])
    (run / "samples" / "step_000004.rank0.jsonl.gz").write_bytes(b"no gzip")
    page = Page(write_report(run, tmp_path / "out" / "page.html")[0].read_text(encoding="utf-8"))
    assert sorted({s["step"] for s in page.data["samples"]}) == [1, 7, 10]  # 4 of 10, one of them damaged
    assert len(page.data["samples"]) == 9
    assert "step_000004.rank0.jsonl.gz: damaged" in page.text
    assert "Samples of 4 of 10 dumps" in page.text
    assert "9 of their 24 samples" in page.text
    assert (tmp_path / "out" / "page.png").exists()
    assert write_report(run, tmp_path / "folder")[0] == tmp_path / "folder" / "report.html"


def test_errors_say_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere: no such folder: name the folder of a run \(run\.dir\)"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"metrics\.jsonl: no such file"):
        write_report(tmp_path)
    with pytest.raises(UserError, match="no step is logged yet"):
        write_report(write_run(tmp_path / "empty", []))
    run = write_run(tmp_path / "run", [{"step": 1, "reward/mean": 0.0}])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the report"):
        write_report(run, tmp_path / "file" / "page.html")


def test_failed_samples_are_no_reward_of_the_histogram(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"step": s, "reward/mean": 0.0} for s in (1, 2)])
    failed = make_sample(1, 2, reward=None, status=Status.FAILED)
    SampleWriter(run).write(1, [make_sample(1, 0), make_sample(1, 1), failed])
    SampleWriter(run).write(2, [make_sample(2, 1), make_sample(2, 3)])
    titles = re.findall(r"<title>(step.*?)</title>", write_report(run)[0].read_text(encoding="utf-8"))
    assert titles[:3] == ["step 1 · 0: 50.0% (1 of 2)", "step 1 · 1: 50.0% (1 of 2)", "step 2 · 1: 100.0% (2 of 2)"]


def test_line_chart_coordinates_by_hand() -> None:
    # 370 x 190 with the plot from (46, 10) to (360, 166): x = 46 + 314 * step / 2, y = 166 - 156 * value
    svg = line_chart([Series(name="a", steps=[0, 1, 2], values=[0.0, 1.0, 0.5])])
    assert 'd="M46.0,166.0 203.0,10.0 360.0,88.0"' in svg
    gap = line_chart([Series(name="a", steps=[0, 1, 2, 3, 4], values=[0.0, 1.0, None, float("nan"), 1.0])])
    assert 'd="M46.0,166.0 124.5,10.0"' in gap
    assert 'cx="360.0" cy="10.0"' in gap
    assert line_chart([Series(name="a", steps=[0, 1], values=[None, float("inf")])]) == ""
    assert sparkline([None]) == ""


def test_values_under_the_pointer() -> None:
    svg = line_chart([Series(name='<"a">', steps=[1, 2, 3], values=[1.23456, None, 3.0], color=2)])
    raw = re.search(r'data-hover="(.*?)"', svg)
    assert raw is not None
    hover = json.loads(raw[1].replace("&quot;", '"').replace("&lt;", "<").replace("&gt;", ">"))
    assert hover["series"] == [{"name": '<"a">', "color": 2, "points": [[1, 1.235], [3, 3.0]]}]
    assert (hover["range"], hover["left"], hover["right"]) == ([1, 3], 46.0, 360.0)


def test_stacked_chart_by_hand() -> None:
    series = [
        Series(name="a", steps=[0, 1], values=[1.0, 2.0], color=0),
        Series(name="b", steps=[0, 1], values=[3.0, None], color=1),
    ]  # tops 1, 2 and 4, 2 on an axis from 0 to 4: 39 pixels a unit
    svg = stacked_chart(series)
    assert 'd="M46.0,127.0 360.0,88.0 360.0,166.0 46.0,166.0Z"' in svg
    assert 'd="M46.0,10.0 360.0,88.0 360.0,88.0 46.0,127.0Z"' in svg
    assert '<rect class="fill c0"' in stacked_chart([Series(name="a", steps=[5], values=[1.0])])


def test_histogram_bins_hold_every_value_once() -> None:
    svg = histogram([("early", list(range(100))), ("late", [99, 99, float("nan")])])
    bars = [(title, int(count)) for title, count in re.findall(r"<title>(early|late).*?\((\d+) of", svg)]
    assert sum(n for name, n in bars if name == "early") == 100
    assert {n for name, n in bars if name == "early"} == {5}  # whole numbers: 20 bins of 5, none favoured
    assert [n for name, n in bars if name == "late"] == [2]
    few = histogram([("all", [0.0, 0.5, 0.5, 1.0])])
    assert re.findall(r"<title>(.*?)</title>", few) == [
        "all · 0: 25.0% (1 of 4)",
        "all · 0.5: 50.0% (2 of 4)",
        "all · 1: 25.0% (1 of 4)",
    ]
    assert histogram([("none", [])]) == ""
    floats = histogram([("x", [i / 7 for i in range(50)])])
    assert sum(int(n) for n in re.findall(r"\((\d+) of 50\)", floats)) == 50


def test_long_runs_are_drawn_through_bucket_means() -> None:
    series = Series(name="a", steps=range(1, 11), values=[1.0, 3.0, None, 5.0, None, None, 2.0, 2.0, 8.0, 9.0])
    thin = thinned(series, limit=5)
    assert (thin.steps, thin.values) == ([2, 4, 6, 8, 10], [2.0, 5.0, None, 2.0, 8.5])
    assert smoothed([0.0, 3.0, 6.0, None, 9.0], window=3) == [1.5, 3.0, 4.5, None, 9.0]


def test_embedded_json_cannot_leave_its_script() -> None:
    text = embedded_json({"x": EVIL})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"x": EVIL}
