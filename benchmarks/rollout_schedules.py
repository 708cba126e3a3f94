"""Samples a second of whole steps by `rollout.schedule`, by `rollout.partial` and over-sampling, on two GPUs.

Each variant is a torchrun job of its own, a `Trainer` with random weights. Lengths of answers are lognormal (`--mean`,
`--longest`) and drawn from the number of group and sample: the same in all variants. A `rollout.generate` hook asks
for them with `ignore_eos`. Rewards cost nothing.

- sync: engine and training on the same GPUs, one after the other;
- one_step_off, async_1, async_2 (`max_staleness`): the last of the GPUs generate (`parallel.rollout_ranks`), the
  others train; beside `sync`;
- filter: `sync` with `filter = "nonzero_std"`, and half of the groups without spread: asks again until the step is
  full; beside `sync`;
- oversample, partial_correct, partial_mask: draws `--oversample` times the prompts at once and drops what is under way
  when enough pass, or goes on with it in the next step; beside `filter`.

Rates are of the samples that were trained on, from the end of the warm-up to the end of the last step. With `async` the
warm-up lasts until what was sampled in its slow first step is used up, and twice as many steps are measured; "sampled"
in the notes says how many tokens were sampled meanwhile for each that was trained on.

Share of GPU time that is idle, mean over GPUs: by NVML, the time in which no kernel ran (one that waits for another
rank counts as busy; needs `pynvml`, which comes with SGLang); by stages, the time in which no answer was under way on
the GPU and `time/train` did not run. Thrown away: sampled tokens, of the whole run, that no complete group has.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "src"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import common  # noqa: E402
import step_overhead  # noqa: E402
import train_step  # noqa: E402

PACKAGES = ("transformers", "triton", "sglang")
SIGMA = 0.8  # of the logarithm of lengths
LETTERS = "abcdefghij "
PROMPTS = 4096  # more than a run uses: none comes twice
TIS = {"correction": {"use_tis": True}}
STAGES = ("total", "generate", "train", "sync", "wait_for_rollouts")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How rollouts are made."""

    rollout: dict[str, Any] = field(default_factory=dict)
    more: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Other sections."""
    apart: bool = False
    """Some GPUs generate, the others train."""
    fills: int = 0
    """Steps until as much is under way as ever will be."""
    pipelined: bool = False
    """Answers outlive a step: it may take what was sampled long before, so more steps are made."""
    filtered: bool = False
    oversampled: bool = False
    beside: str | None = None
    """The variant that it is compared with."""


_FILTER = {"filter": "nonzero_std"}
VARIANTS = {
    "sync": Variant(),
    "one_step_off": Variant(rollout={"schedule": "one_step_off"}, more=TIS, apart=True, fills=1, beside="sync"),
    "async_1": Variant(
        rollout={"schedule": "async", "max_staleness": 1}, more=TIS, apart=True, fills=1, pipelined=True, beside="sync"
    ),
    "async_2": Variant(
        rollout={"schedule": "async", "max_staleness": 2}, more=TIS, apart=True, fills=2, pipelined=True, beside="sync"
    ),
    "filter": Variant(rollout=_FILTER, filtered=True, beside="sync"),
    "oversample": Variant(rollout=_FILTER, filtered=True, oversampled=True, beside="filter"),
    "partial_correct": Variant(
        rollout=_FILTER | {"partial": "correct"}, more=TIS, filtered=True, oversampled=True, fills=1, beside="filter"
    ),
    "partial_mask": Variant(
        rollout=_FILTER | {"partial": "mask"}, filtered=True, oversampled=True, fills=1, beside="filter"
    ),
}


def add_arguments(parser: Any) -> None:
    """Options of this op."""
    parser.add_argument("--variants", default=",".join(VARIANTS), help="which, in this order")
    parser.add_argument("--shape", default="Qwen3-0.6B", choices=list(train_step.SHAPES))
    parser.add_argument("--gpus", type=int, default=2, help="ranks")
    parser.add_argument("--rollout-ranks", type=int, default=1, help="ranks that generate alone; 0: all do both (CPU)")
    parser.add_argument("--prompts", type=int, default=32, help="a step")
    parser.add_argument("--samples", type=int, default=8, help="a prompt")
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--mean", type=int, default=256, help="of the lengths of answers")
    parser.add_argument("--longest", type=int, default=1024, help="answer")
    parser.add_argument("--oversample", type=float, default=2.5, help="times --prompts are drawn at once")
    parser.add_argument("--steps", type=int, default=2, help="measured; twice as many with async")
    parser.add_argument("--warmup", type=int, default=2, help="steps before; more where steps to come are under way")
    parser.add_argument("--tokens", type=int, default=32768, help="a microbatch")
    parser.add_argument("--memory-fraction", type=float, default=0.5, help="of a GPU, for SGLang")
    parser.add_argument("--limit", type=float, default=240, help="seconds of a variant's job")
    parser.add_argument("--budget", type=float, default=570, help="seconds of all; the others are not begun")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of all variants. One whose job fails is told and left out; RuntimeError if all do."""
    names = [name for name in args.variants.split(",") if name]
    if unknown := set(names) - set(VARIANTS):
        raise SystemExit(f"--variants: no {', '.join(sorted(unknown))}; there are {', '.join(VARIANTS)}")
    begun, longest, found, failed = time.monotonic(), 0.0, {}, {}
    with tempfile.TemporaryDirectory(prefix="lightrl_schedules_") as name:
        settings = {k: v for k, v in vars(args).items() if not isinstance(v, Path)} | {"folder": name}
        write_inputs(settings)
        for variant in names:
            start = time.monotonic()
            if start - begun + longest > args.budget:
                failed[variant] = f"not begun: it may not be over within --budget of {args.budget:g} s"
                continue
            try:
                found[variant] = measure_variant(settings, variant)
                told = json.dumps(found[variant])
            except (RuntimeError, OSError) as error:
                failed[variant] = told = str(error)
            longest = max(longest, time.monotonic() - start)
            print(f"{variant}, {time.monotonic() - start:.0f} s: {told}", flush=True)
    if not found:
        raise RuntimeError("; ".join(f"{variant}: {why}" for variant, why in failed.items()))
    print_table(found, failed)
    return make_rows(args, found, failed)


def measure_variant(settings: dict[str, Any], variant: str) -> dict[str, Any]:
    """What its job measured. RuntimeError with the reason where it failed."""
    out = Path(settings["folder"], variant)
    out.mkdir()
    watch = common.UtilizationWatch(settings["gpus"] if settings["device"] == "cuda" else 0)
    try:
        given = settings | {"variant": variant, "out": str(out)}
        common.run_ranks(Path(__file__), given, settings["gpus"], log=out / "job.log", limit=settings["limit"])
    finally:
        watch.stop()
    ranks = [json.loads(path.read_text()) for path in sorted(out.glob("rank_*.json"))]
    return summary(settings, variant, ranks, watch.samples)


# ---- what was measured


def summary(
    settings: Mapping[str, Any], variant: str, ranks: Sequence[dict[str, Any]], looks: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    """Of one variant, from the files of its ranks and NVML's shares (time, busy)."""
    first, (begin, end) = ranks[0], ranks[0]["window"]
    measured, wall = first["steps"][warmup_of(VARIANTS[variant], settings) :], end - begin
    busy = [share for at, share in looks if begin <= at <= end]
    return {
        "samples_per_second": [sum(s["samples"] for s in measured) / wall],
        "tokens_per_second": [sum(s["tokens"] for s in measured) / wall],
        "step_seconds": [round(s["seconds"], 3) for s in measured],
        "stages": {k: sum(s[k] for s in measured) / len(measured) for k in STAGES if k in measured[0]},
        "staleness": added([rank["staleness"] for rank in ranks]),
        "token_staleness": added([rank["token_staleness"] for rank in ranks]),
        "idle_by_nvml": 1 - sum(busy) / len(busy) if busy else None,
        "idle_by_stages": idle_by_stages(settings, variant, ranks, measured, wall),
        "sampled_a_trained_token": sum(r["sampled_meanwhile"] for r in ranks) / sum(s["tokens"] for s in measured),
        **tokens_of(VARIANTS[variant], ranks),
        "start_seconds": first["start_seconds"],
    }


def added(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Sum of counts, by key."""
    return {key: sum(part.get(key, 0) for part in counts) for key in sorted(set().union(*counts))}


def idle_by_stages(
    settings: Mapping[str, Any],
    variant: str,
    ranks: Sequence[dict[str, Any]],
    measured: Sequence[Mapping[str, float]],
    wall: float,
) -> float | None:
    """Mean over GPUs; None where the same ones generate and train at once."""
    kind, gpus, engines = VARIANTS[variant], settings["gpus"], settings["rollout_ranks"]
    training = sum(s["train"] for s in measured)
    if "engine_idle" in measured[0]:
        generating = sum((1 - s["engine_idle"]) * s["seconds"] for s in measured)
    else:
        generating = sum(rank["busy_seconds"] for rank in ranks) / len(ranks)
    if not kind.apart:
        return max(0.0, 1 - (generating + training) / wall)
    if not engines:
        return None
    return max(0.0, 1 - (engines * generating + (gpus - engines) * training) / (gpus * wall))


def tokens_of(kind: Variant, ranks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Tokens that were sampled in the whole run, and of them the shares of groups that were filtered out, and of those
    that were thrown away. Groups to come that the next step would take on are none of these."""
    used = int(ranks[0]["groups_done"])
    sampled, complete = added([rank["sampled"] for rank in ranks]), {}
    for rank in ranks:
        complete |= rank["complete"]
    partial = kind.rollout.get("partial", "correct" if kind.apart else "drop")
    taken = thrown = 0
    for group, tokens in sampled.items():
        if int(group) < used:
            taken += complete[group]
            thrown += tokens - complete[group]
        elif partial == "drop" or (partial == "mask" and group in complete):
            thrown += tokens
    total, trained = sum(sampled.values()), sum(step["tokens"] for step in ranks[0]["steps"])
    return {"sampled_tokens": total, "filtered": (taken - trained) / total, "thrown": thrown / total}


def make_rows(
    args: argparse.Namespace, found: Mapping[str, dict[str, Any]], failed: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Rates, seconds, and shares of each variant; the first row's note names those that failed."""
    where = f"{args.shape}, {args.gpus} {'GPUs' if args.device == 'cuda' else 'ranks'}"
    what = f"{args.prompts} x {args.samples} answers, mean length {args.mean}, longest {args.longest}; "
    units: tuple[tuple[str, str, Literal["lower", "higher"]], ...] = (
        ("samples_per_second", "samples/s", "higher"),
        ("tokens_per_second", "tokens/s", "higher"),
        ("step_seconds", "s a step", "lower"),
    )
    rows = []
    for name, measured in found.items():
        case, peer = f"{name}: {where}", peer_of(found, name)
        for key, unit, better in units:
            theirs = [] if peer is None else found[peer][key]
            rows.append(common.result_row(case, unit, measured[key], theirs, better=better, peer_name=peer))
        rows[-3] |= {"note": what + note_of(measured), "measured": measured}
        for key in ("idle_by_nvml", "idle_by_stages"):
            if measured[key] is not None:
                unit = f"of GPU time, {key.replace('_', ' ')}"
                rows.append(common.result_row(case, unit, [measured[key]], better="lower"))
    if failed:
        rows[0]["note"] += "; not measured: " + "; ".join(f"{name} ({why})" for name, why in failed.items())
    return rows


def peer_of(found: Mapping[str, Any], name: str) -> str | None:
    """What a variant is compared with, if that was measured too."""
    beside = VARIANTS[name].beside
    return beside if beside in found else None


def note_of(measured: Mapping[str, Any]) -> str:
    stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in measured["stages"].items())
    return (
        f"seconds a step: {stages}; samples by staleness {shares(measured['staleness'])}, tokens "
        f"{shares(measured['token_staleness'])}; sampled {measured['sampled_a_trained_token']:.2f}; in all "
        f"{percent(measured['filtered'])} filtered out, {percent(measured['thrown'])} thrown away"
    )


def print_table(found: Mapping[str, dict[str, Any]], failed: Mapping[str, str]) -> None:
    """A line a variant."""
    lines = [
        ["variant", "samples/s", "times", "tokens/s", "s a step", "idle: NVML", "stages", "filtered", "thrown",
         "by staleness"]
    ]  # fmt: skip
    for name, measured in found.items():
        peer, seconds, [rate] = peer_of(found, name), measured["step_seconds"], measured["samples_per_second"]
        cells = [name, f"{rate:.1f}"]
        cells.append("" if peer is None else f"{rate / found[peer]['samples_per_second'][0]:.2f} x {peer}")
        cells += [f"{measured['tokens_per_second'][0]:.0f}", f"{sum(seconds) / len(seconds):.2f}"]
        cells += [percent(measured[key]) for key in ("idle_by_nvml", "idle_by_stages", "filtered", "thrown")]
        lines.append([*cells, shares(measured["staleness"])])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    for name, why in failed.items():
        print(f"{name}  failed: {why}", flush=True)


def shares(counts: Mapping[str, int]) -> str:
    total = sum(counts.values()) or 1
    return ", ".join(f"{key}: {percent(count / total)}" for key, count in counts.items())


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


# ---- the runs


def length_of(settings: Mapping[str, Any], group: int, index: int) -> int:
    """Tokens of one answer: lognormal, and at most `longest`."""
    draw = random.Random(f"length/{group}/{index}")
    middle = math.log(settings["mean"]) - SIGMA**2 / 2
    return min(settings["longest"], max(1, round(draw.lognormvariate(middle, SIGMA))))


def reward_of(group: int, index: int, *, filtered: bool) -> float:
    """Where groups are filtered, those of every second have no spread, by chance."""
    if filtered and random.Random(f"spread/{group}").random() < 0.5:
        return 1.0
    return random.Random(f"reward/{group}/{index}").random()


def sections_of(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A variant's config."""
    kind, folder, cuda = VARIANTS[settings["variant"]], settings["folder"], settings["device"] == "cuda"
    prompts = settings["prompts"]
    rollout = kind.rollout | {
        "prompts_per_step": prompts,
        "group_size": settings["samples"],
        "max_response_tokens": settings["longest"],
    }
    drawn = prompts
    if kind.oversampled:
        drawn = rollout["oversample_prompts"] = math.ceil(settings["oversample"] * prompts)
    engines = max(1, settings["rollout_ranks"]) if kind.apart else settings["gpus"]
    under_way = math.ceil(drawn * (1 + kind.fills * kind.apart) * settings["samples"] / engines)
    engine: dict[str, Any] = {"kind": "sglang" if cuda else "transformers", "max_batch": min(512, under_way)}
    if cuda:
        engine["memory_fraction"] = settings["memory_fraction"]
    parallel: dict[str, Any] = {"max_tokens_per_microbatch": settings["tokens"]}
    if kind.apart and settings["rollout_ranks"]:
        parallel["rollout_ranks"] = settings["rollout_ranks"]
    return {
        "run": {"dir": f"{settings['out']}/run", "steps": 10_000, "device": settings["device"]},
        "model": {"path": f"{folder}/model", "compute_dtype": "bfloat16" if cuda else "float32"},
        "data": {"path": f"{folder}/data.jsonl", "apply_chat_template": False},
        "reward": {"type": "random"},
        "engine": engine,
        "rollout": rollout,
        "parallel": parallel,
        "checkpoint": {"every": 0},
        "log": {"trackers": [], "print_samples": 0, "save_samples": False, "progress": False},
    } | kind.more


def write_inputs(settings: Mapping[str, Any]) -> None:
    """A model with random weights, a tokenizer of letters, and prompts."""
    folder, draw = Path(settings["folder"]), random.Random(0)
    context = settings["prompt"] + settings["longest"] + 1
    shape = train_step.SHAPES[settings["shape"]] | {"max_position_embeddings": context}
    step_overhead.write_model(folder / "model", shape, device="cpu")
    prompts = ["".join(draw.choices(LETTERS, k=settings["prompt"])) for _ in range(PROMPTS)]
    (folder / "data.jsonl").write_text("\n".join(json.dumps({"input": text}) for text in prompts))


# ---- on every rank


class CountingEngine:
    """What a hook asks: the run's engine, with a count of what it gave, also for groups that were ended."""

    def __init__(self, engine: Any, meter: Meter, group: int) -> None:
        self._engine, self._meter, self._group = engine, meter, group

    async def generate(self, request: Any) -> Any:
        with self._meter.answering():
            answers = await self._engine.generate(request)
        self._meter.sampled[self._group] += sum(len(answer.tokens) for answer in answers)
        return answers


class Meter:
    """The hooks of a run on one rank, and what they saw."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings, self._kind = settings, VARIANTS[settings["variant"]]
        self.sampled: Counter[int] = Counter()
        """Tokens that the engine gave, by group."""
        self.complete: dict[int, int] = {}
        """Tokens of groups all of whose answers are there."""
        self.staleness: Counter[int] = Counter()
        self.token_staleness: Counter[int] = Counter()
        self._busy, self._since, self._answering = 0.0, 0.0, 0

    async def generate(self, task: Any) -> list[Any]:
        """`rollout.generate`: answers of the lengths that are drawn for them."""
        task = replace(task, engine=CountingEngine(task.engine, self, task.group_index))

        async def answer(index: int) -> Any:
            length = length_of(self._settings, task.group_index, index)
            return await task.ask(task.prompt.tokens, index, max_new_tokens=length, ignore_eos=True)

        answers = await asyncio.gather(*(answer(i) for i in range(task.num_samples)))
        self.complete[task.group_index] = sum(len(a.tokens) for a in answers)
        return [task.sample(i, a) for i, a in enumerate(answers)]

    def reward(self, sample: Any) -> float:
        return reward_of(sample.group_index, sample.index, filtered=self._kind.filtered)

    def on_step(self, info: Any) -> None:
        """`run.on_step`, of measured steps. The weights that a step trains are of the version before it."""
        from lightrl.training.rollouts import versions_of

        if info.step <= warmup_of(self._kind, self._settings):
            return
        for sample in (s for group in info.groups for s in group.scored):
            ages = [info.step - 1 - version for version in versions_of(sample)]
            self.staleness[max(ages)] += 1
            self.token_staleness.update(ages)

    @contextmanager
    def answering(self) -> Iterator[None]:
        if self._answering == 0:
            self._since = time.perf_counter()
        self._answering += 1
        try:
            yield
        finally:
            self._answering -= 1
            if self._answering == 0:
                self._busy += time.perf_counter() - self._since

    @property
    def busy_seconds(self) -> float:
        """In which at least one answer was under way, so far."""
        return self._busy + (time.perf_counter() - self._since if self._answering else 0.0)

    def report(self) -> dict[str, Any]:
        counts = {"sampled": self.sampled, "complete": self.complete}
        counts |= {"staleness": self.staleness, "token_staleness": self.token_staleness}
        return {name: {str(key): count for key, count in dict(c).items()} for name, c in counts.items()}


def measure(settings: dict[str, Any]) -> None:
    from lightrl.config.load import load_config
    from lightrl.distributed.mesh import close_world
    from lightrl.training.hooks import Hooks
    from lightrl.training.rollout_ranks import serve_rollouts
    from lightrl.training.trainer import Trainer

    start, meter, config = time.time(), Meter(settings), load_config(**sections_of(settings))
    if serve_rollouts(config):
        return
    hooks = Hooks(generate=meter.generate, on_step=meter.on_step)
    trainer = Trainer(config, reward=meter.reward, hooks=hooks)
    started, steps = time.time() - start, []
    begin, busy, sampled = start, 0.0, 0
    kind = VARIANTS[settings["variant"]]
    warmup = warmup_of(kind, settings)
    for number in range(warmup + settings["steps"] * (1 + kind.pipelined)):
        if number == warmup:
            begin, busy, sampled = time.time(), meter.busy_seconds, meter.sampled.total()
        before = time.perf_counter()
        metrics = trainer.next_step()
        steps.append(step_of(metrics, time.perf_counter() - before))
        if trainer.world.is_main:
            print(json.dumps(steps[-1]), flush=True)
    measured = meter.report() | {
        "window": [begin, time.time()],
        "busy_seconds": meter.busy_seconds - busy,
        "sampled_meanwhile": meter.sampled.total() - sampled,
        "steps": steps,
        "groups_done": trainer.groups_done,
        "start_seconds": round(started, 1),
    }
    Path(settings["out"], f"rank_{trainer.world.rank}.json").write_text(json.dumps(measured))
    trainer.world.barrier()
    trainer.close()
    close_world()


def warmup_of(kind: Variant, settings: Mapping[str, Any]) -> int:
    """Steps that are not measured."""
    return int(settings["warmup"] + kind.fills * (1 + kind.pipelined))


def step_of(metrics: Mapping[str, float], seconds: float) -> dict[str, float]:
    """What is kept of a step's metrics."""
    kept = {stage: metrics[f"time/{stage}"] for stage in STAGES if f"time/{stage}" in metrics}
    if "engine/idle_share" in metrics:
        kept["engine_idle"] = metrics["engine/idle_share"]
    return kept | {
        "seconds": seconds,
        "samples": metrics["rollout/samples"],
        "tokens": metrics["rollout/response_tokens"],
    }


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    measure(json.loads(sys.argv[1]))
