"""What every benchmark shares: rows of results, the JSON file around them, and workers that take turns."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import IO, Any, Literal

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
ROW_KEYS = ("case", "unit", "ours", "peer", "peer_name", "limit", "ratio", "goal", "note")


def result_row(
    case: str,
    unit: str,
    ours: Sequence[float],
    peer: Sequence[float] = (),
    *,
    better: Literal["lower", "higher"],
    peer_name: str | None = None,
    limit: float | None = None,
    goal: float | None = None,
    note: str = "",
) -> dict[str, Any]:
    """One measured case. `ours` and `peer` are repeated measurements: the row holds medians, and [least, most].

    `ratio` is how many times better than the peer we are, null without one; `goal` the ratio to reach; `limit` the
    physical floor or ceiling where one is known, or what must be kept.

    >>> result_row("step", "s", [2.0, 1.0, 4.0], [4.0], better="lower", peer_name="p")["ratio"]
    2.0
    """
    if not ours:
        raise ValueError(f"{case}: nothing was measured")
    row: dict[str, Any] = dict.fromkeys(ROW_KEYS)
    row |= {"case": case, "unit": unit, "ours": _round(statistics.median(ours)), "ours_spread": _spread(ours)}
    if peer:
        row |= {"peer": _round(statistics.median(peer)), "peer_spread": _spread(peer), "peer_name": peer_name}
        row["ratio"] = _round(times_better(statistics.median(ours), statistics.median(peer), better))
    return row | {"limit": limit, "goal": goal, "note": note, "repeats": len(ours)}


def times_better(ours: float, other: float, better: Literal["lower", "higher"]) -> float:
    """Above 1: ours is better."""
    return other / ours if better == "lower" else ours / other


def _spread(values: Sequence[float]) -> list[float]:
    return [_round(min(values)), _round(max(values))]


def _round(value: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}")


def report(
    op: str, rows: Sequence[dict[str, Any]], *, command: str, packages: Iterable[str] = (), date: str | None = None
) -> dict[str, Any]:
    """The content of a result file; ValueError for a row that lacks a key. `packages` are the peers', for versions."""
    from lightrl.observe.environment import environment  # takes a second: imports torch

    for row in rows:
        if missing := [key for key in ROW_KEYS if key not in row]:
            raise ValueError(f"{op}: row {row.get('case')!r} lacks {', '.join(missing)}")
    facts = environment(ROOT)
    versions = dict(facts["versions"])
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "op": op,
        "date": date or time.strftime("%Y-%m-%d"),
        "hardware": facts["hardware"],
        "commit": facts["commit"],
        "command": command,
        "versions": {"python": facts["python"], **versions},
        "rows": list(rows),
    }


def write_report(result: dict[str, Any], folder: Path) -> Path:
    """Write `folder/OP.json` whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['op']}.json"
    partial = path.with_suffix(".json.partial")
    partial.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def print_report(result: dict[str, Any], console: Console | None = None) -> None:
    """A table of the rows; notes below it."""
    console = console or Console()
    table = Table(title=f"{result['op']} on {result['hardware']}", title_justify="left")
    names = {row["peer_name"] for row in result["rows"] if row["peer_name"]}
    peer_title = names.pop() if len(names) == 1 else "peer"  # one peer is named once
    for name in ("case", "unit", "ours", peer_title, "times better", "goal", "limit"):
        table.add_column(name, justify="left" if name in ("case", "unit") else "right", overflow="fold")
    for row in result["rows"]:
        peer = _figure(row, "peer")
        if peer_title == "peer" and row["peer_name"]:
            peer += f" {row['peer_name']}"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        if row["ratio"] is not None and row["goal"] is not None:
            ratio = f"[{'green' if row['ratio'] >= row['goal'] else 'red'}]{ratio}[/]"
        table.add_row(
            row["case"], row["unit"], _figure(row, "ours"), peer, ratio, _text(row["goal"]), _text(row["limit"])
        )
    console.print(table)
    for row in result["rows"]:
        if row["note"]:
            console.print(f"{row['case']}: {row['note']}", highlight=False, markup=False)


def _figure(row: dict[str, Any], who: str) -> str:
    """`1.2 (1.1-1.4)`: median and spread."""
    spread = row.get(f"{who}_spread")
    return _text(row[who]) + (f" ({_text(spread[0])}-{_text(spread[1])})" if spread and spread[0] != spread[1] else "")


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


class Worker:
    """A process that measures when asked, so that two libraries alternate without sharing a process.

    The script is started with `arguments`; it says `{"ready": …}` on its standard output once it has set up, then
    answers each line it reads with one line of JSON (`serve`). While it waits it uses no CPU.
    """

    def __init__(self, name: str, script: Path, arguments: Sequence[str], *, threads: int, log: Path) -> None:
        self.name, self.log = name, log
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "passive",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(script), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                cwd=ROOT,
                text=True,
            )
        self.facts: dict[str, Any] = {}

    def wait_ready(self) -> dict[str, Any]:
        """Block until it has set up; returns what it says of itself."""
        self.facts = self._read()["ready"]
        return self.facts

    def ask(self, request: str = "go") -> dict[str, Any]:
        """One measurement."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(request + "\n")
            stdin.flush()
        except BrokenPipeError:
            self._fail()
        return self._read()

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._fail()
        return dict(json.loads(line))

    def _fail(self) -> None:
        code = self._process.wait()
        tail = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-15:]
        raise RuntimeError(f"{self.name} ended with code {code}; the end of {self.log}:\n" + "\n".join(tail))


class Turns:
    """The worker's side. Prints of libraries go to standard error, so that only answers are on standard output.

    Raises EOFError when the parent has no more turns to give.
    """

    def __init__(self) -> None:
        self._out: IO[str] = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def ready(self, **facts: Any) -> None:
        self._say({"ready": facts})

    def wait(self) -> str:
        """Block until the parent asks."""
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.strip()

    def answer(self, **measured: Any) -> None:
        self._say(measured)

    def _say(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()


def run_ranks(script: Path, settings: Mapping[str, Any], ranks: int, *, log: Path, limit: float) -> None:
    """Run a script under torchrun, with its settings as JSON. RuntimeError with the reason where it fails, or is not
    over after `limit` seconds."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(script), json.dumps(settings)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        code = process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        _end(process)
    if code == 0:
        return
    text = log.read_text(encoding="utf-8", errors="replace")
    print("\n".join(_said(text).splitlines()[-30:]), flush=True)
    raise RuntimeError(f"not over after {limit:g} s" if code is None else f"ended with {code}: {reason_of(text)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """torchrun ends its ranks, which end what they started."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def reason_of(log: str) -> str:
    """The last error that a rank told.

    >>> reason_of("x\\n[rank1]: lightrl.errors.UserError: no such key\\n[rank0]: more\\nfoo.ChildFailedError: \\n")
    'UserError: no such key'
    """
    found = re.findall(r"^(?:\[rank\d+\]: *)?(?:\w+\.)*(\w*(?:Error|Exception): \S.*)$", log, re.MULTILINE)
    lines = _said(log).splitlines()
    return str(found[-1] if found else lines[-1] if lines else "it said nothing")[:500]


def _said(log: str) -> str:
    """What the ranks wrote, without torchrun's own report of those that failed."""
    return re.split(r"^[EW]\d{4} .*torch/distributed/elastic/", log, maxsplit=1, flags=re.MULTILINE)[0].strip()


class UtilizationWatch:
    """NVML's utilization of the first GPUs: in how much of the last sixth of a second or so a kernel ran.

    `samples` holds (time, mean over the GPUs) of all looks; it stays empty without GPUs, or where NVML does not tell.
    """

    def __init__(self, gpus: int) -> None:
        self.samples: list[tuple[float, float]] = []
        self._ended = threading.Event()
        if not gpus:
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in _visible(gpus)]
            pynvml.nvmlDeviceGetUtilizationRates(handles[0])
        except Exception as error:  # no package, no driver, or a GPU that does not tell
            print(f"no GPU utilization: {type(error).__name__}: {error}", flush=True)
            return

        def watch() -> None:
            while not self._ended.wait(0.05):
                with suppress(pynvml.NVMLError):
                    shares = [pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in handles]
                    self.samples.append((time.time(), sum(shares) / len(shares)))

        threading.Thread(target=watch, daemon=True).start()

    def stop(self) -> None:
        self._ended.set()


def _visible(gpus: int) -> list[int]:
    """NVML's numbers of the job's GPUs: it does not know of CUDA_VISIBLE_DEVICES."""
    named = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip().isdigit()]
    return ([int(part) for part in named] or list(range(gpus)))[:gpus]
