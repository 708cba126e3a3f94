"""Routing replay: by hand, against plain implementations of each family, packed, recomputed, and in runs."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import tiny_run
import torch
import torch.nn.functional as F
from test_experts import MIXTURES, checkpointed
from test_packed_models import TEMPERATURE, _finish, build, compare, samples, stock_results
from torch import Tensor

from lightrl.config.schema import CorrectionConfig
from lightrl.distributed.mesh import close_world
from lightrl.models import experts, registry
from lightrl.models.attention import Segments
from lightrl.models.routing import Recorder, Replay, Routing, RoutingShape, routed, routers
from lightrl.observe.dumps import read_samples
from lightrl.training import replay as replaying
from lightrl.training.packing import TrainSample, pack, share_rows
from lightrl.training.policy import PolicyModule
from lightrl.training.trainer import Trainer
from lightrl.types import NOT_RECORDED, RoutingRecord, Sample

# ----- by hand


def gate(**attributes: Any) -> SimpleNamespace:
    """A router whose logits are its hidden states."""
    weight = torch.eye(4)
    base = {"weight": weight, "bias": None, "top_k": 2, "place": 0, "routing": None, "choices": None}
    return SimpleNamespace(**base | attributes)


HIDDEN = torch.tensor([[1.0, 2.0, 5.0, 8.0], [8.0, 1.0, 5.0, 2.0]]).log()


def test_weights_of_replayed_experts_by_hand() -> None:
    """Shares 1/16, 2/16, 5/16, 8/16: alone the router takes 3 and 2. Row 0 replays 0 and 1, renormalised 1/3 and 2/3;
    of row 1 nothing is recorded: its own are 0 and 2, 8/13 and 5/13. d w_0 / d logits = w_0 (1 - w_0), - w_0 w_1."""
    record = torch.tensor([[[0, 1]], [[255, 255]]], dtype=torch.uint8)
    for router in (experts.softmax_router, experts.topk_softmax_router):
        hidden, replay = HIDDEN.clone().requires_grad_(), Replay(record)
        module = gate()
        with routed([module], replay):
            _, weights, indices = router(module, hidden)
        assert indices.tolist() == [[0, 1], [0, 2]]
        assert weights[0].tolist() == pytest.approx([1 / 3, 2 / 3])
        assert weights[1].tolist() == pytest.approx([8 / 13, 5 / 13])
        (gradient,) = torch.autograd.grad(weights[0, 0], hidden)
        assert gradient[0].tolist() == pytest.approx([2 / 9, -2 / 9, 0.0, 0.0], abs=1e-7)
        assert not gradient[1].any()
        counts = replay.counts()
        assert (counts.rows, counts.rows_other, counts.choices, counts.choices_other, counts.total) == (1, 1, 1, 1, 2)
        assert module.routing is None


def test_a_sigmoid_router_by_hand() -> None:
    """Sigmoids of log x are x / (1 + x): 1/2, 2/3, 5/6, 8/9. Groups (0, 1) and (2, 3), of which one is allowed: alone
    it would take 3 and 2. Experts 0 and 3 lie in both; the bias enters no weight: 9/25 and 16/25, times 2.5."""
    module = gate(num_group=2, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5)
    module.e_score_correction_bias = torch.tensor([0.0, 0.0, 3.0, 0.0])
    hidden, replay = HIDDEN[:1].clone().requires_grad_(), Replay(torch.tensor([[[3, 0]]], dtype=torch.int16))
    with routed([module], replay):
        _, weights, indices = experts.sigmoid_router(module, hidden)
    assert indices.tolist() == [[3, 0]]
    assert weights[0].tolist() == pytest.approx([2.5 * 16 / 25, 2.5 * 9 / 25])
    (gradient,) = torch.autograd.grad(weights[0, 0], hidden)
    # w = a / (a + b), d w / d a = b / (a + b)^2, and a (1 - a) = 8/81; likewise - a / (a + b)^2 · 1/4
    total = (8 / 9 + 1 / 2) ** 2
    expected = [-2.5 * (8 / 9) / total / 4, 0.0, 0.0, 2.5 * (1 / 2) / total * 8 / 81]
    assert gradient[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_the_order_of_experts_makes_no_difference_that_counts() -> None:
    replay = Replay(torch.tensor([[[2, 3]], [[0, 3]]], dtype=torch.uint8))
    with routed([module := gate()], replay):
        experts.softmax_router(module, HIDDEN)
    assert (replay.counts().rows, replay.counts().rows_other) == (2, 1)


def test_a_record_is_used_once_by_each_router_or_told() -> None:
    record = torch.zeros(2, 2, 2, dtype=torch.uint8)
    first, second = gate(), gate(place=1)
    with (
        pytest.raises(RuntimeError, match=r"routers \[1\] of 2 chose nothing"),
        routed([first, second], Replay(record)),
    ):
        experts.softmax_router(first, HIDDEN)
    assert first.routing is second.routing is None
    with routed([first], Replay(record[:, :1])):
        experts.softmax_router(first, HIDDEN)
        with pytest.raises(RuntimeError, match="router 0 chose twice"):
            experts.softmax_router(first, HIDDEN)
    with pytest.raises(RuntimeError, match="a record of 2 layers for a model with 1"), routed([first], Replay(record)):
        experts.softmax_router(first, HIDDEN)
    with pytest.raises(RuntimeError, match=r"a record of \[2, 3\] choices for a router that makes \[2, 2\]"):  # noqa: SIM117
        with routed([first], Replay(torch.zeros(2, 1, 3, dtype=torch.uint8))):
            experts.softmax_router(first, HIDDEN)
    used = RoutingRecord(experts=record, due=2)
    used.take()
    batch = pack([], [])
    batch.routing = used
    with pytest.raises(RuntimeError, match="was not used in 1 forwards"):
        replaying.check_used(batch)
    used.take()
    replaying.check_used(batch)
    with pytest.raises(RuntimeError, match="once more than it belongs"):
        used.take()
    batch = pack(*one_unit())
    for mode, old in (("rollout", None), ("trainer", torch.zeros(1))):
        batch.old_logprobs = old
        with pytest.raises(RuntimeError, match=f"'{mode}': a microbatch has no record"):
            replaying.replay_of(batch, CorrectionConfig(routing_replay=mode), torch.device("cpu"))
    batch.old_logprobs = None
    assert replaying.replay_of(batch, CorrectionConfig(routing_replay="trainer"), torch.device("cpu")) is None


def one_unit() -> tuple[list[list[TrainSample]], list[list[float]]]:
    return [samples()[1]], [[1.0, 1.0]]


def test_compact_numbers() -> None:
    """255 experts and "not recorded" fit a byte, 256 do not."""
    numbers = torch.tensor([0, 254, -1])
    for count, dtype, stored in ((255, torch.uint8, [0, 254, 255]), (256, torch.int16, [0, 254, -1])):
        shape = RoutingShape(layers=(0,), num_layers=1, top_k=2, num_experts=count)
        found = shape.compact(numbers)
        assert (found.dtype, found.tolist()) == (dtype, stored)
        assert stored[2] == NOT_RECORDED[dtype]


# ----- packed rows


def with_routing(units: list[list[TrainSample]], shape: RoutingShape, seed: int = 5) -> list[list[TrainSample]]:
    """Random distinct experts for every token that is fed, and for a group's prompt the same in all its samples."""
    g = torch.Generator().manual_seed(seed)

    def chosen(rows: int) -> Tensor:
        return torch.rand(rows, len(shape.layers), shape.num_experts, generator=g).topk(shape.top_k).indices

    for unit in units:
        prompt = chosen(len(unit[0].prompt))
        for sample in unit:
            sample.rollout_routing = shape.compact(torch.cat([prompt, chosen(len(sample.response) - 1)]))
    return units


def test_packing_keeps_each_rows_routing() -> None:
    """Answers x y and z to the prompt a b: rows a b x, the prompt's from the first. Alone: a b x, a b."""
    routing = [torch.tensor([[[1, 2]], [[3, 4]], [[5, 6]]]), torch.tensor([[[7, 8]], [[9, 10]]])]
    both = [
        TrainSample(
            group_index=0,
            index=i,
            prompt=[11, 12],
            response=response,
            loss_mask=[1] * len(response),
            rollout_logprobs=None,
            advantage=0.0,
            rollout_routing=record.to(torch.uint8),
        )
        for i, (response, record) in enumerate(zip(([13, 14], [15]), routing, strict=True))
    ]
    shared = pack([both], [[1.0, 1.0]])
    assert shared.routing is not None
    assert shared.routing.experts[:, 0].tolist() == [[1, 2], [3, 4], [5, 6]]
    alone = pack([[s] for s in both], [[1.0], [1.0]])
    assert alone.routing is not None
    assert alone.routing.experts[:, 0].tolist() == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]
    halves = [share_rows(alone, rank, 2).routing for rank in range(2)]
    found = [half.experts[:, 0].tolist() for half in halves if half is not None]
    assert found == [[[1, 2], [3, 4], [5, 6]], [[7, 8], [9, 10], [255, 255]]]
    assert pack([], []).routing is None
    both[1].rollout_routing = None
    assert pack([both], [[1.0, 1.0]]).routing is None
    both[1].rollout_routing = routing[0]
    with pytest.raises(ValueError, match="sample 0/1: routing of 3 tokens, 2 are fed"):
        pack([both], [[1.0, 1.0]])


def test_what_an_engine_gave_is_checked() -> None:
    shape = RoutingShape(layers=(1,), num_layers=2, top_k=2, num_experts=8)
    (unit,) = with_routing(one_unit()[0], shape)
    replaying.check_samples(unit, shape)
    unit[0].rollout_routing[3, 0, 1] = 255
    replaying.check_samples(unit, shape)
    unit[0].rollout_routing[3, 0, 0] = 8
    with pytest.raises(RuntimeError, match="sample 1/0: the engine chose an expert beyond the policy's 8"):
        replaying.check_samples(unit, shape)
    unit[0].rollout_routing = unit[0].rollout_routing[:, :, :1]
    with pytest.raises(
        RuntimeError, match=r"sample 1/0: the engine's choices are \[40, 1, 1\] of torch.uint8, the train"
    ):
        replaying.check_samples(unit, shape)
    unit[0].rollout_routing = None
    with pytest.raises(RuntimeError, match="sample 1/0: the engine did not say which experts it chose"):
        replaying.check_samples(unit, shape)


# ----- models


def results(module: PolicyModule, units: list[list[TrainSample]], coefficients: Tensor, routing: Routing | None) -> Any:
    """As `test_packed_models.our_results`, with a record or its making in the forward."""
    module.zero_grad()
    batch = pack(units, [[1.0] * len(u) for u in units])
    with routed(routers(module.model), routing):
        logprobs, entropies = module(batch, Segments.from_microbatch(batch, torch.device("cpu")), TEMPERATURE)
    return _finish(module.model, logprobs, entropies, coefficients)


def shape_of(model: torch.nn.Module) -> RoutingShape:
    shape = RoutingShape.of(model, model.config.num_hidden_layers)
    assert shape is not None
    return shape


def coefficients_of(units: list[list[TrainSample]]) -> Tensor:
    count = sum(len(s.response) for u in units for s in u)
    return torch.randn(2, count, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("family", MIXTURES)
def test_its_own_routing_changes_no_bit(family: str) -> None:
    """Recorded, replayed, and replayed with blocks that are computed again: log-probs and gradients as without."""
    units = samples()
    coefficients = coefficients_of(units)
    found = []
    for wrap in (lambda m: PolicyModule(m, packed=True), checkpointed):
        _, model = build(family)
        registry.prepare_packed(model)
        module, shape = wrap(model), shape_of(model)
        dense = getattr(model.config, "first_k_dense_replace", 0) if family != "mimo_v2_flash" else 1
        assert shape.layers == tuple(range(dense, 2))
        recorder = Recorder(shape)
        found += [results(module, units, coefficients, None), results(module, units, coefficients, recorder)]
        replay = Replay(recorder.experts)
        found.append(results(module, units, coefficients, replay))
        counts = replay.counts()
        assert counts.rows_other == 0
        assert counts.choices == counts.total == len(recorder.experts) * len(shape.layers)
    for other in found[1:]:
        assert torch.equal(other[0], found[0][0])
        assert torch.equal(other[1], found[0][1])
        for mine, plain in zip(other[2].values(), found[0][2].values(), strict=True):
            assert torch.equal(mine, plain)


def plain_weights(module: Any, family: str, logits: Tensor, chosen: list[int]) -> list[Tensor]:
    """A row's weights of the `chosen` experts, as the families' papers have them."""
    if family in ("glm4_moe", "deepseek_v3", "mimo_v2_flash", "glm4_moe_lite"):
        scores = [1 / (1 + (-logits[e]).exp()) for e in chosen]
        return [module.routed_scaling_factor * s / sum(scores) for s in scores]
    parts = [logits[e].exp() for e in chosen]
    if getattr(module, "norm_topk_prob", True):  # and gpt-oss, whose softmax is over the chosen ones
        return [p / sum(parts) for p in parts]
    return [p / logits.exp().sum() for p in parts]


def force(stock: torch.nn.Module, family: str, records: list[Tensor]) -> None:
    """Routers of a stock model choose what `records` say, a forward after the other."""
    mixtures = [m for m in stock.modules() if isinstance(getattr(m, "experts", None), torch.nn.Module)]
    for place, mixture in enumerate(mixtures):
        module = mixture.gate if hasattr(mixture, "gate") else mixture.router
        queue = iter(records)

        def forward(hidden: Tensor, module: Any = module, queue: Any = queue, place: int = place) -> Any:
            logits = F.linear(
                hidden.reshape(-1, hidden.shape[-1]).float(), module.weight, getattr(module, "bias", None)
            )
            chosen = next(queue)[:, place].long()
            # the answer's last token is fed to a stock model, and predicts nothing
            chosen = torch.cat([chosen, chosen[-1:]]) if len(chosen) < len(logits) else chosen
            rows = zip(logits, chosen.tolist(), strict=True)
            weights = torch.stack([torch.stack(plain_weights(module, family, row, ids)) for row, ids in rows])
            return logits, weights, chosen

        module.forward = forward


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss", "qwen3_5_moe_text"])
def test_another_routing_equals_a_plain_implementation(family: str) -> None:
    """Random experts: log-probs, entropies and all gradients, routers' own included. With prompts shared; and each
    sample alone, in blocks that are computed again."""
    stock, model = build(family)
    registry.prepare_packed(model)
    shape = shape_of(model)
    units = with_routing(samples(), shape)
    coefficients = coefficients_of(units)
    force(stock, family, [s.rollout_routing for u in units for s in u])
    expected = stock_results(stock, units, coefficients)
    own = results(PolicyModule(model, packed=True), units, coefficients, None)
    assert (own[0] - expected[0]).abs().max() > 1e-3
    for wrap, packed in ((partial(PolicyModule, packed=True), units), (checkpointed, [[s] for u in units for s in u])):
        module = wrap(model)
        record = pack(packed, [[1.0] * len(u) for u in packed]).routing
        assert record is not None
        found = results(module, packed, coefficients, Replay(record.take()))
        names = {n.replace("._checkpoint_wrapped_module", ""): g for n, g in found[2].items()}
        compare((found[0], found[1], names), expected)
    weights = [g for n, g in names.items() if n.endswith(("mlp.gate.weight", "mlp.router.weight"))]
    assert len(weights) == len(shape.layers)
    assert all(g.any() for g in weights)


def test_rows_without_a_record_are_routed_by_the_trainer() -> None:
    """Every other row: as if its own choice, recorded before, had been there."""
    _, model = build("glm4_moe")
    registry.prepare_packed(model)
    module, shape, units = PolicyModule(model, packed=True), shape_of(model), with_routing(samples(), shape_of(model))
    record = pack(units, [[1.0] * len(u) for u in units]).routing
    assert record is not None
    holes = record.take().clone()
    holes[::2] = NOT_RECORDED[holes.dtype]
    replay = Replay(holes)
    found = results(module, units, coefficients_of(units), replay)
    counts = replay.counts()
    assert (counts.rows, counts.choices, counts.total) == (len(holes) // 2, len(holes) // 2, len(holes))
    assert counts.rows_other > 0
    seen: list[Tensor] = []
    hook = model.model.layers[1].mlp.experts.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    results(module, units, coefficients_of(units), Replay(holes))
    hook.remove()
    again = results(module, units, coefficients_of(units), Replay(shape.compact(seen[0][:, None])))
    assert torch.equal(found[0], again[0])
    assert torch.equal(seen[0][1::2], holes[1::2, 0].long())


# ----- runs

MODEL = {
    "family": "qwen3_moe", "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "initializer_range": 0.15, "tie_word_embeddings": False, "norm_topk_prob": False,
}  # fmt: skip


def trainer_of(folder: Path, mode: str, **sections: dict[str, Any]) -> Trainer:
    if not (folder / "model").exists():
        tiny_run.make_model(folder / "model", **MODEL)
        tiny_run.make_data(folder / "data.jsonl")
    small = {"correction": {"routing_replay": mode}, "run": {"steps": 2}, "optim": {"lr": 1e-2}}
    small |= {"parallel": {"max_tokens_per_microbatch": 100}, "model": {"activation_checkpointing": True}}
    return Trainer(tiny_run.make_run(folder, **small | sections))


def route_otherwise(trainer: Trainer) -> None:
    """The engine takes the second and third best experts: as rounding does, and for every token."""

    def forward(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)
        indices = experts._choose(router, lambda: logits.topk(3).indices[:, 1:])
        return logits, logits.softmax(-1).gather(-1, indices), indices

    for router in trainer.engine._model.routers:
        router.forward = MethodType(forward, router)


def run(trainer: Trainer) -> list[dict[str, float]]:
    try:
        return [trainer.step(trainer.source.next(4)) for _ in range(2)]
    finally:
        trainer.close()
        close_world()


def test_the_engines_routing_takes_the_mismatch_away(tmp_path: Path) -> None:
    """R3, prompts shared by their groups: the engine's other experts are in its log-probs, and in the trainer's."""
    without = trainer_of(tmp_path, "none")
    route_otherwise(without)
    for step in run(without):
        assert step["mismatch/logprob_abs_diff"] > 0.05
        assert "mismatch/routing_diff" not in step
    for updates in (1, 2):
        trainer = trainer_of(tmp_path, "rollout", algorithm={"minibatches_per_step": updates})
        route_otherwise(trainer)
        for step in run(trainer):
            assert step["mismatch/logprob_abs_diff_max"] < 1e-4
            assert step["mismatch/routing_diff"] == step["mismatch/routing_diff_choices"] == 1.0
            assert step["routing/missing_share"] == 0.0
            assert "routing/changed_share" not in step


@pytest.mark.parametrize(("mode", "updates", "uses"), [("rollout", 1, 1), ("rollout", 2, 2), ("trainer", 2, 1)])
def test_each_record_is_used_where_it_belongs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, updates: int, uses: int
) -> None:
    """The engine's by the pass before the updates and by the update, the trainer's by the update. A reference, and an
    entropy over all samples, change nothing."""
    taken: Counter[int] = Counter()
    kept: list[RoutingRecord] = []
    inner = RoutingRecord.take

    def take(record: RoutingRecord) -> Tensor:
        kept.append(record)
        taken[id(record)] += 1
        return inner(record)

    monkeypatch.setattr(RoutingRecord, "take", take)
    trainer = trainer_of(tmp_path, mode, algorithm={"minibatches_per_step": updates, "kl_coef": 0.1})
    steps = run(trainer)
    assert len(taken) >= 2 * updates
    assert set(taken.values()) == {uses}
    assert all(record.due == 0 for record in kept)
    assert all(("routing/changed_share" in step) == (mode == "trainer") for step in steps)


def test_replay_of_what_the_trainer_would_choose_changes_no_run(tmp_path: Path) -> None:
    """With an engine that routes as the trainer and one update a step, all weights are those of a run without."""
    weights = []
    for mode in ("none", "rollout"):
        trainer = trainer_of(tmp_path, mode)
        run(trainer)
        weights.append([p.full_tensor().clone() for p in trainer.policy.module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_partial_answers_and_dumps(tmp_path: Path) -> None:
    """An answer that is cut off keeps the routing of what it has, and is trained on; samples on disk are as ever."""
    trainer = trainer_of(tmp_path, "rollout", run={"steps": 1}, rollout={"max_response_tokens": 40})
    collect, seen = trainer.collect, []
    engine = trainer.engine
    sampled = engine._sample
    count = 0

    def sampling(*args: Any) -> None:
        nonlocal count
        sampled(*args)
        count += 1
        if count == 7:
            engine.abort()

    def collecting(*args: Any) -> Any:
        engine._sample = sampling
        groups = collect(*args)
        seen.extend(s for g in groups for s in g.samples)
        return groups

    trainer.collect = collecting
    trainer.train()
    trainer.close()
    close_world()
    cut: list[Sample] = [s for s in seen if s.status == "aborted"]
    assert len(cut) > 2
    for sample in cut:
        assert 0 < sample.response_length <= 7
        assert sample.rollout_routing is not None
        assert sample.rollout_routing.shape == (len(sample.tokens) - 1, 2, 2)
    (found,) = tiny_run.metrics_of(
        tmp_path, "mismatch/routing_diff", "mismatch/logprob_abs_diff_max", "optim/grad_norm"
    )
    assert found[1] == 0.0
    assert found[2] < 1e-4
    assert found[3] > 0
    lines = read_samples(tmp_path / "run", step=1)
    assert len(lines) == 16
    assert all("routing" not in key for line in lines for key in line)
