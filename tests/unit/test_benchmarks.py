"""Result files of `benchmarks/`: arithmetic, format, the list of ops. Nothing is measured here."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import common

    return common


def test_ratio_says_how_many_times_better(common: ModuleType) -> None:
    seconds = common.result_row("a", "s", [2.0, 1.0, 4.0], [6.0, 5.0], better="lower", peer_name="p", goal=2.0)
    assert (seconds["ours"], seconds["peer"], seconds["ratio"]) == (2.0, 5.5, 2.75)
    assert (seconds["ours_spread"], seconds["peer_spread"], seconds["repeats"]) == ([1.0, 4.0], [5.0, 6.0], 3)
    rate = common.result_row("b", "samples/s", [30.0], [12.0], better="higher", peer_name="p")
    assert rate["ratio"] == 2.5
    alone = common.result_row("c", "s", [0.25], better="lower", limit=1.0)
    assert (alone["ratio"], alone["peer"], alone["peer_name"], alone["limit"]) == (None, None, None, 1.0)
    with pytest.raises(ValueError, match="nothing was measured"):
        common.result_row("d", "s", [], better="lower")


def test_result_file_holds_what_readers_expect(common: ModuleType, tmp_path: Path) -> None:
    row = common.result_row("step", "s", [1.23456], [2.0], better="lower", peer_name="p", note="n")
    result = common.report("demo", [row], command="python benchmarks/run.py --op demo", packages=("pytest", "no-such"))
    path = common.write_report(result, tmp_path / "results")
    assert [p.name for p in path.parent.iterdir()] == ["demo.json"]
    read = json.loads(path.read_text(encoding="utf-8"))
    assert list(read) == ["op", "date", "hardware", "commit", "command", "versions", "rows"]
    assert read["versions"]["pytest"] == pytest.__version__
    assert "no-such" not in read["versions"]
    assert set(common.ROW_KEYS) <= set(read["rows"][0])
    assert (read["rows"][0]["ours"], read["rows"][0]["ratio"]) == (1.235, 1.62)
    common.print_report(read)
    del row["note"]
    with pytest.raises(ValueError, match=r"demo: row 'step' lacks note"):
        common.report("demo", [row], command="")


def test_committed_results_have_the_format(common: ModuleType) -> None:
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        read = json.loads(path.read_text(encoding="utf-8"))
        assert read["op"] == path.stem
        for row in read["rows"]:
            assert set(common.ROW_KEYS) <= set(row), f"{path.name}: {row['case']}"


def test_every_listed_op_imports_without_torch() -> None:
    code = (
        "import sys; sys.path.insert(0, 'benchmarks'); import run\n"
        "for name in run.OPS:\n"
        "    op = run.load_op(name)\n"
        "    assert callable(op.run), name\n"
        "assert not {'torch', 'trl', 'transformers'} & set(sys.modules)\n"
        "raise SystemExit(run.main(['--list']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    listed = [line.split()[0] for line in done.stdout.splitlines()]
    files = {p.stem for p in (ROOT / "benchmarks").glob("*.py")} - {"common", "run"}
    assert set(listed) == files


def test_logprob_compares_with_peers_that_do_the_same(common: ModuleType) -> None:
    import argparse

    import logprob
    import torch

    work = logprob.Work.make(20, 8, 50, device="cpu")
    log_p = (work.hidden.detach() @ work.weight.detach().T).log_softmax(-1)
    expected = log_p[range(20), work.targets], torch.distributions.Categorical(logits=log_p).entropy()
    for peer in (logprob.whole_logits, lambda *inputs: logprob.checkpointed(7, *inputs)):
        for found, wanted in zip(logprob.forward(peer, work), expected, strict=True):
            torch.testing.assert_close(found, wanted)
    parser = argparse.ArgumentParser()
    logprob.add_arguments(parser)
    settings = "--rows 20 --cases 8:50 --peer-rows 7 --repeats 2 --device cpu"
    rows = logprob.run(parser.parse_args(settings.split()))
    assert {row["peer_name"] for row in rows} == {logprob.PLAIN, "whole logits", "chunks, checkpoint"}
    assert all(row["ours"] > 0 and row["limit"] > 0 for row in rows)


def test_moe_block_runs_small_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both blocks, of the same weights: what is timed computes the same."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import moe_block
    import torch

    parser = argparse.ArgumentParser()
    moe_block.add_arguments(parser)
    options = "--device cpu --dtype float32 --tokens 65 --hidden 32 --intermediate 24 --experts 5 --top-k 2 --repeats 1"
    args = parser.parse_args(options.split())
    rows = moe_block.run(args)
    assert [row["case"].split(",")[0] for row in rows] == ["forward", "forward + backward"]
    theirs, ours = moe_block.blocks(args)
    assert [b.experts.config._experts_implementation for b in (theirs, ours)] == ["grouped_mm", "lightrl_grouped"]
    x = torch.randn(1, 65, 32)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)


def test_worker_answers_in_turn_and_shows_its_last_words(common: ModuleType, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r})\n"
        "from common import Turns\n"
        "turns = Turns(); print('noise of a library'); turns.ready(version='1')\n"
        "turns.answer(asked=turns.wait())\n"
        "turns.wait(); raise RuntimeError('out of paper')\n"
    )
    worker = common.Worker("printer", script, [], threads=1, log=tmp_path / "log")
    assert worker.wait_ready() == {"version": "1"}
    assert worker.ask("page 7") == {"asked": "page 7"}
    with pytest.raises(RuntimeError, match=r"printer ended with code 1(?s:.*)out of paper"):
        worker.ask()
    worker.close()


@pytest.mark.parametrize(
    ("shape", "variant"), [("tiny", "kept"), ("tiny", "all"), ("tiny", "none"), ("tiny-stack", "kept")]
)
def test_train_step_and_its_peer_do_the_same(shape: str, variant: str, common: ModuleType) -> None:
    """The same gradients, clipped, from the same weights and tokens; blocks are computed as often as is said."""
    import torch
    import train_step

    from lightrl.distributed.mesh import init_world
    from lightrl.models.shards import own_part

    config = train_step.model_config(shape)
    world = init_world("cpu")
    ours = train_step.Ours(config, world, variant=variant)
    peer = train_step.Peer(config, world)
    tokens = torch.randint(97, (3, 33), generator=torch.Generator().manual_seed(0))
    first_moments = []
    for trained, model in ((ours, ours.policy.model), (peer, peer.module.model)):
        calls: list[int] = []
        model.model.layers[1].self_attn.k_proj.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        trained.prepared(tokens)()
        assert len(calls) == (1 if trained is ours and variant == "none" else 2)
        assert trained.bytes() > 3 * sum(p.numel() for p in trained.module.parameters()) * 4
        state = trained.optimizer.state
        first_moments.append([own_part(state[p]["exp_avg"]) for p in trained.module.parameters()])
    for mine, theirs in zip(*first_moments, strict=True):
        assert theirs.any()
        torch.testing.assert_close(mine, theirs, atol=1e-7, rtol=1e-4)


def test_flops_per_token(common: ModuleType) -> None:
    """Qwen3-0.6B: 6 x 595.6 million weights, of which 440 million in blocks; attention 6 x 28 x 2048 x rows."""
    import train_step

    shape = train_step.SHAPES["Qwen3-0.6B"]
    assert train_step.flops_per_token(shape, 16384) == 6 * (28 * 15_728_640 + 151_936 * 1024) + 6 * 28 * 2048 * 16384


def test_hybrid_stack_and_its_peer_do_the_same(common: ModuleType) -> None:
    """Rows of many lengths: packed by ours, padded by the peer, the same gradients."""
    import hybrid_stack
    import torch
    import train_step

    from lightrl.distributed.mesh import init_world

    world, config = init_world("cpu"), hybrid_stack.stack_config("tiny", 4)
    assert config.layer_types.count("full_attention") == 1
    peer, ours = hybrid_stack.make_peer(config, world), train_step.Ours(config, world, variant="kept")
    lengths = hybrid_stack.lengths_of("mixed", 90)
    assert sum(lengths) == 90
    assert len(set(lengths)) > 3
    tokens = [torch.randint(97, (n + 1,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    expected = hybrid_stack.gradients(peer, tokens)
    assert all(e.any() for e in expected.values())
    assert hybrid_stack.largest_error(hybrid_stack.gradients(ours, tokens), expected)[0] < 1e-3


def test_flops_of_hybrid_blocks(common: ModuleType) -> None:
    """Qwen3.5-9B, four blocks: MLPs of 151 million weights each; 58.7 million in attention, 67.4 in a delta layer."""
    import hybrid_stack

    shape = hybrid_stack.SHAPES["Qwen3.5-9B"]
    weights = 4 * 3 * 4096 * 12288 + 4096 * (3 * 4096 + 2 * 1024) + 3 * 4096 * (2 * 2048 + 3 * 4096 + 64) + 1024 * 4096
    states = 3 * 18 * 32 * 128 * 128
    assert hybrid_stack.flops_per_token(shape, 4, 1000) == 6 * weights + 6 * 4096 * 1000 + states


def test_efficiency_is_of_the_rate_of_one(common: ModuleType) -> None:
    import weak_scaling

    case = {"count": 1, "length": 8, "variant": "kept"}
    one = case | {"seconds": {"ours": [2.0, 1.0, 4.0], "peer": [1.0]}}
    many = case | {"seconds": {"ours": [2.5, 2.0, 4.0], "peer": [2.0]}}
    row = weak_scaling.efficiency("tiny", 1, 2, one, many)
    assert (row["ours"], row["ours_spread"], row["peer"], row["ratio"]) == (0.8, [0.5, 1.0], 0.5, 1.6)


def test_rl_update_counts_real_tokens(common: ModuleType) -> None:
    import rl_update

    args = argparse.Namespace(
        shape="tiny", groups=20, group_size=8, prompt=9, mean=50, longest=200, device="cpu", trl_liger=False
    )
    samples = rl_update.make_samples(args)
    lengths = [len(s["response"]) for s in samples]
    assert 40 < sum(lengths) / len(lengths) < 60
    assert max(lengths) <= 200
    assert samples[0]["prompt"] == samples[7]["prompt"] != samples[8]["prompt"]
    ours, peer = ([{"seconds": s, "grad_norm": n}] for s, n in ((2.0, 0.5), (4.0, 0.51)))
    [row] = rl_update.make_rows(args, samples, ours, peer, peer_name="TRL")
    real = sum(lengths) + 160 * 9
    assert row["ours"] == pytest.approx(real / 2, rel=1e-3)
    assert row["ratio"] == pytest.approx(2, rel=1e-3)
    assert f"160 x {9 + max(lengths)}" in row["note"]


def schedules_settings(**changes: object) -> dict[str, object]:
    given = {"folder": "nowhere", "out": "nowhere", "prompts": 4, "samples": 2, "longest": 100, "mean": 30, "steps": 2}
    given |= {"warmup": 1, "oversample": 2.5, "gpus": 2, "rollout_ranks": 1, "tokens": 4096, "memory_fraction": 0.5}
    return given | {"device": "cpu", "shape": "tiny"} | changes


def test_rollout_schedules_compares_runs_that_a_config_allows(common: ModuleType) -> None:
    import rollout_schedules as op

    from lightrl.config.load import load_config

    for name, kind in op.VARIANTS.items():
        for device, engine in (("cuda", "sglang"), ("cpu", "transformers")):
            config = load_config(**op.sections_of(schedules_settings(variant=name, device=device)))
            assert config.engine.kind == engine
            assert config.parallel.rollout_ranks == (config.rollout.schedule != "sync")
            assert (config.rollout.filter != "none") == kind.filtered
            assert config.rollout.prompts_per_draw == (10 if kind.oversampled else 4)
        assert kind.beside is None or kind.beside in op.VARIANTS
    lengths = [op.length_of(schedules_settings(), group, index) for group in range(200) for index in range(2)]
    assert 26 < sum(lengths) / len(lengths) < 32  # of those cut at 100
    assert (min(lengths) >= 1, max(lengths)) == (True, 100)
    rewards = [{op.reward_of(group, index, filtered=True) for index in range(4)} for group in range(400)]
    assert 170 < sum(len(group) > 1 for group in rewards) < 230


def test_rollout_schedules_sums_up_what_ranks_saw(common: ModuleType) -> None:
    import rollout_schedules as op

    step = {"seconds": 2.0, "samples": 8, "tokens": 50, "total": 1.9, "train": 0.5, "generate": 1.0}
    ranks = [
        {
            "steps": [step | {"seconds": 30.0}, step, step],
            "window": [100.0, 104.0],
            "busy_seconds": busy,
            "sampled_meanwhile": 100,
            "groups_done": 2,
            "start_seconds": 1.0,
            **given,
        }
        for busy, given in (
            (2.0, {"sampled": {"0": 100, "2": 40}, "complete": {"0": 100}, "staleness": {"0": 4}}),
            (1.0, {"sampled": {"1": 80, "3": 30}, "complete": {"1": 70, "3": 30}, "staleness": {"0": 2, "1": 2}}),
        )
    ]
    ranks = [rank | {"token_staleness": rank["staleness"]} for rank in ranks]
    looks = [(99.0, 0.0), (101.0, 0.5), (103.0, 1.0), (105.0, 0.0)]
    found = {"filter": op.summary(schedules_settings(), "filter", ranks, looks)}
    measured = found["filter"]
    assert (measured["samples_per_second"], measured["tokens_per_second"]) == ([4.0], [25.0])
    assert (measured["idle_by_nvml"], measured["idle_by_stages"]) == (0.25, 1 - (1.5 + 1.0) / 4)
    assert measured["staleness"] == {"0": 6, "1": 2}
    # of 250: 170 in the groups that steps took, of which 150 were trained on; 10 of these were sampled twice
    assert (measured["filtered"], measured["thrown"]) == (20 / 250, 80 / 250)
    for partial, thrown in (("partial_correct", 10), ("partial_mask", 40)):
        given = [rank | {"steps": [step, *rank["steps"]]} for rank in ranks]
        assert op.summary(schedules_settings(), partial, given, [])["thrown"] == thrown / 250
    apart = [ranks[0] | {"steps": [step] * 3 + [step | {"engine_idle": 0.1}] * 4, "window": [0.0, 8.0]}]
    measured = op.summary(schedules_settings(), "async_1", apart, [])
    assert measured["idle_by_stages"] == pytest.approx((0.8 + 6.0) / 16)  # of the GPU that generates, that trains
    assert op.summary(schedules_settings(rollout_ranks=0), "async_1", apart, [])["idle_by_stages"] is None
    args = argparse.Namespace(**schedules_settings())
    rows = op.make_rows(args, found | {"oversample": measured | {"samples_per_second": [6.0]}}, {"sync": "it broke"})
    assert [(row["peer_name"], row["ratio"]) for row in rows[:6:5]] == [(None, None), ("filter", 1.5)]
    assert rows[0]["note"].endswith("not measured: sync (it broke)")
    op.print_table(found, {"sync": "it broke"})


def test_a_job_that_fails_is_told_with_its_reason(common: ModuleType, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys, time\nif 'wait' in json.loads(sys.argv[1]): time.sleep(60)\nraise KeyError('x')"
    )
    for settings, limit, reason in (
        ({}, 60.0, "ended with 1: KeyError: 'x'"),
        ({"wait": 1}, 1.0, "not over after 1 s"),
    ):
        with pytest.raises(RuntimeError, match=reason):
            common.run_ranks(script, settings, 1, log=tmp_path / "log", limit=limit)
