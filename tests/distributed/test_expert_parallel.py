"""Experts spread over gloo ranks against one process that holds them all: gradients, updates, files, engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
import torch.distributed as dist
from distributed.test_gradients import make_samples
from families import FAMILIES, make_family
from safetensors.torch import load_file, save_file
from torch import Tensor

MIXTURES = [name for name, settings in FAMILIES.items() if "num_experts_per_tok" in settings]

CASES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"max_tokens": 24},  # a rank has a single row without loss at times
    "recomputed": {"model": "glm4_moe", "activation_checkpointing": True, "max_tokens": 30},
    "one_sample": {"model": "gpt_oss", "only": 1, "activation_checkpointing": True},  # one rank has all there is
    "idle": {"model": "idle", "activation_checkpointing": True},  # all tokens go to the first half of the experts
    "delta": {"model": "qwen3_next", "max_tokens": 24},
    "offloaded": {"model": "deepseek_v3", "offload": True},
}
"""Each on one process, and on two that share the experts."""
FOUR: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"expert_parallel": 2},
    "recomputed": {"expert_parallel": 4},  # one expert a rank
    "one_sample": {"expert_parallel": 2, "shard_size": 2},
    "idle": {"expert_parallel": 2},  # three experts for two ranks: each is cut
}


def make_models(folder: Path) -> None:
    for family in ("qwen3_moe", "glm4_moe", "gpt_oss", "qwen3_next", "deepseek_v3"):
        make_family(folder / family, family)
    make_family(folder / "idle", "glm4_moe", n_routed_experts=6)
    file = folder / "idle" / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensor[:] = torch.tensor([9.0, 9.0, 9.0, 0.0, 0.0, 0.0])
    save_file(tensors, file, metadata={"format": "pt"})


class Run:
    """A policy with its optimizer, for a case."""

    def __init__(self, models: Path, case: dict[str, Any], device: str = "cpu") -> None:
        from lightrl.config.schema import ModelConfig, OptimConfig
        from lightrl.distributed.mesh import init_world
        from lightrl.training.optim import build_optimizer, build_schedule
        from lightrl.training.policy import Policy

        self.case = case
        self.world = init_world(
            device,
            case.get("shard_size"),
            expert_parallel=case.get("expert_parallel", 1),
            context_parallel=case.get("context_parallel", 1),
        )
        model = ModelConfig(
            path=str(models / case.get("model", "qwen3_moe")),
            compute_dtype=case.get("compute_dtype", "float32"),
            activation_checkpointing=case.get("activation_checkpointing", False),
        )
        self.policy = Policy.load(model, self.world)
        config = OptimConfig(lr=1e-2, weight_decay=0.1, eps=1e-4)
        self.optimizer = build_optimizer(self.policy.parameters(), config)
        self.schedule = build_schedule(self.optimizer, config, 2)
        self.gradients: dict[str, Tensor] = {}
        self.optimizer.register_step_pre_hook(self._keep)

    def _keep(self, *_: Any) -> None:
        from lightrl.models.shards import whole_tensor

        for name, parameter in self.policy.module.named_parameters():
            assert parameter.grad is not None
            self.gradients[f"grad.{name}"] = whole_tensor(parameter.grad).clone().cpu()

    def update(self) -> dict[str, Tensor]:
        """Loss, norm, clipped gradients and new weights of one update on the same samples, whole."""
        from lightrl.config.schema import AlgorithmConfig
        from lightrl.observe.metrics import Tally
        from lightrl.training.balance import CostModel
        from lightrl.training.batch import build_minibatches
        from lightrl.training.objective import Objective
        from lightrl.training.update import update

        world, samples = self.world, make_samples(self.case.get("only"))
        (minibatch,) = build_minibatches(
            samples[world.rank :: world.size],
            world,
            minibatches=1,
            max_tokens=self.case.get("max_tokens", 1000),
            share_prompts=True,
            skip_zero_advantage=False,
            aggregation="token_mean",
            constant_length=16,
            cost=CostModel.from_config(self.policy.hf_config),
        )
        tally = Tally()
        result = update(
            self.policy, self.optimizer, self.schedule, minibatch, Objective.of(AlgorithmConfig(entropy_coef=0.01)),
            temperature=0.9, max_grad_norm=0.02, tally=tally,
        )  # fmt: skip
        assert result.stepped
        metrics = Tally.merged(world.gather(tally.to_dict())).result()
        found = {"norm": torch.tensor(result.grad_norm), "loss": torch.tensor(metrics["loss/total"])}
        return self.cleaned({**found, **self.gradients}) | self.state()

    def state(self) -> dict[str, Tensor]:
        """Weights and moments."""
        from lightrl.models.shards import whole_tensor

        self.policy.reclaim()
        state = {}
        for name, parameter in self.policy.module.named_parameters():
            moments = {f"{key}.{name}": value for key, value in self.optimizer.state[parameter].items()}
            for key, tensor in {f"weight.{name}": parameter, **moments}.items():
                state[key] = whole_tensor(tensor.detach()).clone().cpu()
        return self.cleaned(state)

    def cleaned(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        from lightrl.wrappers import clean_name

        return {clean_name(name): tensor.contiguous() for name, tensor in tensors.items()}

    def go_away_and_return(self) -> None:
        from lightrl.distributed.offload import Offloader

        offloader = Offloader(self.policy.module, self.optimizer, on_cpu=True)
        assert offloader.offload() > 0
        assert not any(p.to_local().untyped_storage().nbytes() for p in self.policy.parameters())
        offloader.close()


def two_updates(models: Path, case: dict[str, Any], device: str = "cpu") -> dict[str, Tensor]:
    run, results = Run(models, case, device), {}
    for number in range(2):
        results |= {f"{number}.{name}": tensor for name, tensor in run.update().items()}
        if case.get("offload"):
            run.go_away_and_return()
    return results


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], case: str, tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{case}: {n}: {m}"
        )


def reference(folder: Path) -> None:
    """All cases on one process."""
    make_models(folder)
    for name, case in CASES.items():
        results = two_updates(folder, case)
        save_file(results, folder / f"{name}.safetensors")
        if name == "idle":
            gradient = results["0.grad.model.model.layers.1.mlp.experts.down_proj"]
            assert [bool(expert.any()) for expert in gradient] == [True] * 3 + [False] * 3


# ----- on two ranks


def two_ranks(root: str) -> None:
    from lightrl.distributed.mesh import close_world

    models = Path(root)
    for name, case in CASES.items():
        found = two_updates(models, {**case, "expert_parallel": 2})
        assert_close(found, load_file(models / f"{name}.safetensors"), name)
    routing_is_not_repeated(models)
    reads_are_its_own(models)
    stock_is_refused(models)
    files(models)
    streams(models)
    close_world()


def routing_is_not_repeated(models: Path) -> None:
    """A block that is computed again takes the plan it made, split sizes included."""
    from lightrl.models import expert_parallel

    made, inner = [], expert_parallel.make_plan

    def counting(*args: Any) -> Any:
        made.append(torch.is_grad_enabled())
        return inner(*args)

    expert_parallel.make_plan = counting
    try:
        Run(models, {"activation_checkpointing": True, "expert_parallel": 2}).update()
    finally:
        expert_parallel.make_plan = inner
    assert len(made) == 2  # layers


def reads_are_its_own(models: Path) -> None:
    """Half of the experts on each rank, of memory and of what is read from files."""
    from lightrl.models import load

    read, inner = [], load.read_slice

    def counting(*args: Any) -> Tensor:
        part = inner(*args)
        read.append(part.numel())
        return part

    load.read_slice = counting
    try:
        policy = Run(models, {"expert_parallel": 2}).policy
    finally:
        load.read_slice = inner
    local = {name: p.to_local().numel() for name, p in policy.module.named_parameters()}
    whole = {name: p.numel() for name, p in policy.module.named_parameters()}
    assert sum(read) == sum(local.values())
    assert all(2 * local[name] == count for name, count in whole.items() if ".experts." in name)


def stock_is_refused(models: Path) -> None:
    """A model that runs by code of its own would not share anything."""
    from lightrl.errors import UserError
    from lightrl.models import registry

    inner = registry.is_own_code
    registry.is_own_code = lambda model: False
    try:
        for key in ("expert_parallel", "context_parallel"):
            with pytest.raises(UserError, match=f"^parallel.{key}: Qwen3MoeForCausalLM runs by its own code"):
                Run(models, {key: 2})
    finally:
        registry.is_own_code = inner


def files(models: Path) -> None:
    """Saved with experts spread, read without; and the other way round. Exports are the same to the last bit."""
    from lightrl.config.schema import CheckpointConfig
    from lightrl.models.export import export_hf
    from lightrl.training.checkpoint import Checkpointer

    case = CASES["recomputed"]
    spread, plain, again = (Run(models, {**case, "expert_parallel": size}) for size in (2, 1, 2))
    keeper = Checkpointer(models / "checkpoints", CheckpointConfig(async_save=False, keep_last=9))
    first = spread.update()
    for step, source, target in ((1, spread, plain), (2, plain, again)):
        keeper.save(step, model=source.policy.module, optimizer=source.optimizer, extra={}, metrics={})
        keeper.load(models / "checkpoints" / f"step_{step:06d}", target.policy.module, target.optimizer)
        state = target.state()
        assert all(torch.equal(tensor, first[name]) for name, tensor in state.items())
        assert state.keys() == spread.state().keys()
    continued, resumed = spread.update(), again.update()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in continued.items())
    plain.update()
    for name, run in (("plain", plain), ("spread", again)):
        run.policy.reclaim()
        export_hf(
            run.policy.module, models / name, source=models / "glm4_moe", dtype=torch.bfloat16,
            is_main=run.world.is_main,
        )  # fmt: skip
    dist.barrier()
    exported = [load_file(models / name / "model.safetensors") for name in ("plain", "spread")]
    assert_close(*exported, "export", tolerance=1e-2)
    stored = load_file(models / "glm4_moe" / "model.safetensors")
    assert {n: t.shape for n, t in exported[1].items()} == {n: t.shape for n, t in stored.items()}


def streams(models: Path) -> None:
    """What engines get, of every family: as without spread experts, bit for bit and in the same order."""
    for family in MIXTURES:
        if dist.get_rank() == 0 and not (models / family).exists():
            make_family(models / family, family)
        dist.barrier()
        case = {"model": family, "compute_dtype": "bfloat16"}
        plain, spread = (Run(models, {**case, "expert_parallel": size}).policy for size in (1, 2))
        results = []
        for policy in (plain, spread):
            lent = {name: tensor.clone() for name, tensor in policy.lend()}
            policy.reclaim()
            stream = policy.stream()
            sent = {name: tensor.to(torch.bfloat16, copy=True) for group in stream for name, tensor in group}
            results.append((lent, sent, {name: (shape, dtype) for name, shape, dtype in stream.layout()}))
            assert [name for name, _, _ in stream.layout()] == list(sent)
        for ours, theirs in zip(*(r[:2] for r in results), strict=True):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items()), family
        assert results[0][2] == results[1][2]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from lightrl.distributed.mesh import close_world

    folder = tmp_path_factory.mktemp("models")
    try:
        reference(folder)
    finally:
        close_world()
    return folder


def test_two_ranks_equal_one(models: Path, run_distributed) -> None:
    from lightrl.config.schema import CheckpointConfig
    from lightrl.distributed.mesh import close_world
    from lightrl.training.checkpoint import Checkpointer

    run_distributed(two_ranks, 2, models, timeout=300)
    try:  # one process goes on with what two have saved
        run = Run(models, CASES["recomputed"])
        keeper = Checkpointer(models / "checkpoints", CheckpointConfig(async_save=False))
        keeper.load(models / "checkpoints" / "step_000001", run.policy.module, run.optimizer)
        expected = load_file(models / "recomputed.safetensors")
        second = {name[2:]: tensor for name, tensor in expected.items() if name.startswith("1.")}
        assert_close(run.update(), second, "resumed alone")
    finally:
        close_world()


# ----- on four


def four_ranks(root: str) -> None:
    from lightrl.distributed.mesh import close_world

    models = Path(root)
    for name, changes in FOUR.items():
        found = two_updates(models, {**CASES[name], **changes})
        assert_close(found, load_file(models / f"{name}.safetensors"), name)
    close_world()


def test_four_ranks_equal_one(models: Path, run_distributed) -> None:
    run_distributed(four_ranks, 4, models, timeout=300)


# ----- whole runs

RUN: dict[str, Any] = {
    "run": {"steps": 2},
    "model": {"activation_checkpointing": True},
    "algorithm": {"kl_coef": 0.1, "minibatches_per_step": 2},
    "rollout": {"prompts_per_step": 8, "group_size": 3},
    "parallel": {"max_tokens_per_microbatch": 64},
    "checkpoint": {"hf_every": 1, "keep_last": 9},
}
METRICS = ("reward/mean", "loss/policy", "loss/kl", "optim/grad_norm", "policy/kl_old")


def with_parallel(sections: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**sections, "parallel": {**sections["parallel"], **changes}}


def make_run_folder(folder: Path) -> None:
    folder.mkdir()
    tiny_run.make_model(
        folder / "model", family="qwen3_moe", head_dim=8, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=24, initializer_range=0.15,
    )  # fmt: skip
    tiny_run.make_data(folder / "data.jsonl")


def sampled(folder: Path, step: int) -> dict[tuple[int, int], tuple[Any, ...]]:
    """What was sampled at a step, by group and number."""
    from lightrl.observe.dumps import list_dumps

    (dump,) = [d for d in list_dumps(folder / "run") if d.step == step]
    return {(r["group"], r["index"]): (r["tokens"], r["reward"]) for r in dump.samples()}


def assert_same_runs(found: Path, expected: Path) -> None:
    for step in (1, 2):
        assert sampled(found, step) == sampled(expected, step)
        weights = tiny_run.exported(expected, step)
        assert_close(tiny_run.exported(found, step), weights, f"step {step}", tolerance=2e-5)
    for ours, theirs in zip(*(tiny_run.metrics_of(f, *METRICS) for f in (found, expected)), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def eight_ranks(folder: str) -> None:
    """Two copies of the model, each over four ranks, of which pairs share the experts; engines over four ranks."""
    from lightrl.distributed.mesh import close_world, consecutive_group, deal
    from lightrl.training.trainer import Trainer

    sections = with_parallel(RUN, shard_size=4, expert_parallel=2, timeout=177.0) | {"run": {"steps": 1}}
    trainer = Trainer(tiny_run.make_run(Path(folder), **sections))
    world = trainer.world
    assert world.expert_mesh is not None
    for axis in ("replicate", "efsdp", "ep"):
        backend = world.expert_mesh[axis].get_group()._get_backend(world.device)
        assert backend.options._timeout == world.timeout  # parallel.timeout
    ranks = [dist.get_process_group_ranks(world.expert_mesh[axis].get_group()) for axis in ("replicate", "efsdp", "ep")]
    here = world.rank
    assert ranks == [[here % 4, here % 4 + 4], [here - here % 4 + here % 2 + i for i in (0, 2)], [here & ~1, here | 1]]
    group = consecutive_group(world, 4, "engine.tensor_parallel")
    members: list[Any] = [None] * 4
    dist.all_gather_object(members, deal(world, range(10), 4), group=group)
    assert members == [list(range(here // 4, 10, 2)), [], [], []]  # the first rank of an engine asks for its answers
    for _ in range(2):
        sums = {name: float(t.double().sum()) for part in trainer.policy.stream() for name, t in part}
        everyone = world.gather(sums)
        assert all(other == sums for other in everyone)
    stored = load_file(Path(folder) / "model" / "model.safetensors")
    assert sums == pytest.approx({name: float(t.double().sum()) for name, t in stored.items()}, rel=1e-6)
    trainer.train()
    trainer.close()
    close_world()


def test_eight_ranks_then_four(tmp_path: Path, run_distributed) -> None:
    """A run on eight ranks goes on on four, that share the experts otherwise: the run of one process."""
    for name in ("alone", "spread"):
        make_run_folder(tmp_path / name)
    run_distributed(tiny_run.train, 1, tmp_path / "alone", json.dumps(RUN))
    run_distributed(eight_ranks, 8, tmp_path / "spread", timeout=240)
    four = json.dumps(with_parallel(RUN, expert_parallel=4))
    run_distributed(tiny_run.train, 4, tmp_path / "spread", four, timeout=240)
    assert_same_runs(tmp_path / "spread", tmp_path / "alone")


# ----- refusals


@pytest.mark.parametrize(
    ("family", "ranks", "message"),
    [
        ("qwen3_moe", 3, "3 does not divide the 4 experts of model.path = here"),
        ("llama", 2, r"model.path = here \(llama\) has no experts that LightRL packs: set it to 1"),
        ("mixtral", 2, r"model.path = here \(mixtral\) has no experts that LightRL packs: set it to 1"),
    ],
)
def test_what_cannot_be_spread_is_refused(family: str, ranks: int, message: str) -> None:
    from transformers import AutoConfig

    from lightrl.config.schema import ParallelConfig
    from lightrl.errors import UserError
    from lightrl.training.setup import check_parallel

    config = AutoConfig.for_model(family, **({"num_experts": 4} if family == "qwen3_moe" else {}))
    parallel = ParallelConfig(expert_parallel=ranks)
    with pytest.raises(UserError, match=f"^parallel.expert_parallel: {message}$"):
        check_parallel(parallel, config, "model.path = here")
    if family != "qwen3_moe":  # a reference may be dense
        check_parallel(parallel, config, "model.reference_path = here", needs_experts=False)


def test_ranks_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    from lightrl.errors import UserError
    from lightrl.training.trainer import Trainer

    make_run_folder(tmp_path / "run")
    config = tiny_run.make_run(tmp_path / "run", parallel={"expert_parallel": 2})
    with pytest.raises(UserError, match=r"^parallel.expert_parallel: 2 does not divide the 1 ranks of this run$"):
        Trainer(config)
