"""Loading, exporting and checkpoints on two ranks, in one spawn; the test process is the world of one around it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lightrl.config.schema import CheckpointConfig
from lightrl.errors import UserError
from lightrl.models import export, load
from lightrl.training import checkpoint_storage
from lightrl.training.checkpoint import Checkpointer, CheckpointError

_SIZES: dict[str, Any] = {
    "vocab_size": 97,  # not divisible by 2
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
_CONFIG = CheckpointConfig(async_save=True, keep_last=9)


class Policy(nn.Module):
    """A causal LM and a parameter of one row, of which the second rank holds nothing."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.gate = nn.Parameter(torch.full((1, 4), 0.5))

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids, use_cache=False).logits.logsumexp(-1).mean() * self.gate.sum()


def _shard(root: nn.Module, model: PreTrainedModel, mesh: DeviceMesh, columns: bool = False) -> None:
    def place(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if columns and parameter.ndim == 2 else None

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, shard_placement_fn=place)
    if not model.config.tie_word_embeddings:
        fully_shard(model.model.embed_tokens, mesh=mesh)
    fully_shard(root, mesh=mesh)


def _training(folder: Path, mesh: DeviceMesh) -> tuple[Policy, torch.optim.AdamW]:
    model = load.empty_model(AutoConfig.from_pretrained(folder))
    policy = Policy(model)
    _shard(policy, model, mesh)
    policy.to_empty(device="cpu")
    with torch.no_grad():
        policy.gate.fill_(0.5)
    load.load_weights(model, folder)
    return policy, torch.optim.AdamW(policy.parameters(), lr=1e-2)


def _step(policy: Policy, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Update `number`, on the same batch on every rank: the world's size does not change the gradient."""
    ids = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    policy(ids).backward()
    optimizer.step()


def _whole(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every parameter with its moments, gathered."""
    for module in policy.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    state = {}
    for name, parameter in policy.named_parameters():
        for key, value in [("p", parameter), *optimizer.state[parameter].items()]:
            full = value.full_tensor() if isinstance(value, DTensor) else value
            state[f"{name}/{key}"] = full.detach().clone()
    return state


def _assert_same(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


# ----- on two ranks


def ranks(root: str) -> None:
    """Everything that needs two ranks; runs under torchrun."""
    dist.init_process_group("gloo")
    flat = init_device_mesh("cpu", (2,))
    replicated = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    _load_and_export(Path(root), flat, replicated)
    _reshard_and_resume(Path(root), flat, replicated)
    _failures(Path(root), flat)
    dist.barrier()
    dist.destroy_process_group()


def _load_and_export(root: Path, flat: DeviceMesh, replicated: DeviceMesh) -> None:
    rank = dist.get_rank()
    for family in _FAMILIES:
        source = root / family
        stock = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        total = sum(p.numel() for p in stock.parameters())
        cases = [(flat, False), (flat, True), (replicated, False)]
        for mesh, columns in cases if family == "llama" else cases[:1]:
            model = load.empty_model(AutoConfig.from_pretrained(source))
            _shard(model, model, mesh, columns)
            model.to_empty(device="cpu")
            read = _count_reads(lambda model=model, source=source: load.load_weights(model, source))
            for (name, ours), (_, theirs) in zip(model.named_parameters(), stock.named_parameters(), strict=True):
                assert torch.equal(ours.full_tensor(), theirs), (family, name)
            for (name, ours), (_, theirs) in zip(model.named_buffers(), stock.named_buffers(), strict=True):
                assert torch.equal(ours, theirs), (family, name)
            if family != "qwen3_moe":  # converted by transformers as a whole
                held = sum(p.to_local().numel() for p in model.parameters())
                assert read == held, (family, read, held)
                assert held == total if mesh is replicated else abs(held - total / 2) < total / 20
        out = root / f"{family}_out"
        export.export_hf(model, out, source=source, dtype=torch.bfloat16, is_main=rank == 0, max_shard_bytes=9_000)
        dist.barrier()
        expected = {k: v.bfloat16() for k, v in _all_tensors(source).items()}
        written = _all_tensors(out)
        assert written.keys() == expected.keys()
        assert all(torch.equal(written[k], v) for k, v in expected.items())
        with pytest.raises(UserError, match=r"not empty|on the main rank"):
            export.export_hf(model, out, source=source, dtype=None, is_main=rank == 0)
    if rank == 0:
        export.save_file = _full  # type: ignore[assignment]
    with pytest.raises((OSError, UserError), match=r"No space left|on the main rank"):
        export.export_hf(model, root / "never", source=source, dtype=None, is_main=rank == 0, max_shard_bytes=9_000)
    export.save_file = save_file


def _count_reads(action: Callable[[], None]) -> int:
    """Elements that `action` reads from safetensors files."""
    count, inner = 0, load.read_slice

    def counting(*args: Any) -> Tensor:
        nonlocal count
        part = inner(*args)
        count += part.numel()
        return part

    load.read_slice = counting  # type: ignore[assignment]
    try:
        action()
    finally:
        load.read_slice = inner
    return count


def _all_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def _full(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "No space left on device")


def _reshard_and_resume(root: Path, flat: DeviceMesh, replicated: DeviceMesh) -> None:
    """World 1 -> 2 -> 2 and 2 -> HSDP; the test process goes on with 2 -> 1."""
    keeper = Checkpointer(root / "checkpoints", _CONFIG)
    policy, optimizer = _training(root / "llama", flat)
    folder = keeper.latest()
    assert folder is not None
    assert folder.name == "step_000002"
    assert keeper.load(folder, policy, optimizer) == {"cursor": 2}
    assert policy.gate.to_local().numel() == (4 if dist.get_rank() == 0 else 0)
    _assert_same(_whole(policy, optimizer), load_file(root / "after_2.safetensors"))
    draws = _gather(torch.rand(3))
    assert not torch.equal(draws[0], draws[1])  # the new rank has a seed of its own

    _step(policy, optimizer, 3)
    keeper.save(3, model=policy, optimizer=optimizer, extra={"cursor": 3}, metrics={})
    at_3 = _whole(policy, optimizer)
    _step(policy, optimizer, 4)  # while step 3 is being written
    draws = _gather(torch.rand(3))
    after_4 = _whole(policy, optimizer)
    keeper.wait()
    _assert_same(after_4, load_file(root / "after_4.safetensors"), 1e-5)

    for mesh in (flat, replicated):
        policy, optimizer = _training(root / "llama", mesh)
        assert keeper.load(root / "checkpoints" / "step_000003", policy, optimizer) == {"cursor": 3}
        _assert_same(_whole(policy, optimizer), at_3)
        _step(policy, optimizer, 4)
        assert all(torch.equal(a, b) for a, b in zip(_gather(torch.rand(3)), draws, strict=True))
        _assert_same(_whole(policy, optimizer), after_4, 0.0 if mesh is flat else 1e-5)

    # Two replicas write one copy, and share the work.
    keeper.save(4, model=policy, optimizer=optimizer, extra={"cursor": 4}, metrics={})
    at_4 = _whole(policy, optimizer)
    keeper.wait()
    folder = root / "checkpoints" / "step_000004"
    sizes = [sum(f.stat().st_size for f in folder.glob(f"rank_0000{r}_*")) for r in (0, 1)]
    flat_sizes = sum(f.stat().st_size for f in (root / "checkpoints" / "step_000003").glob("rank_*"))
    assert abs(sum(sizes) - flat_sizes) < flat_sizes / 20
    assert min(sizes) > sum(sizes) / 10
    policy, optimizer = _training(root / "llama", flat)
    keeper.load(folder, policy, optimizer)
    _assert_same(_whole(policy, optimizer), at_4)


def _gather(tensor: Tensor) -> list[Tensor]:
    everyone = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(everyone, tensor)
    return everyone


def _failures(root: Path, flat: DeviceMesh) -> None:
    """What goes wrong on one rank is known to both."""
    rank = dist.get_rank()
    dir = root / "failing"
    policy, optimizer = _training(root / "llama", flat)
    keeper = Checkpointer(dir, _CONFIG)

    def save(step: int) -> None:
        keeper.save(step, model=policy, optimizer=optimizer, extra={}, metrics={})

    save(1)
    save(2)
    keeper.wait()
    if rank == 1:
        checkpoint_storage.save_file = _full  # type: ignore[assignment]
    save(3)
    with pytest.raises(CheckpointError, match=r"step 3 was not written: rank 1: OSError: .*No space left"):
        save(4)
    checkpoint_storage.save_file = save_file
    dist.barrier()
    assert sorted(f.name for f in dir.iterdir()) == ["step_000001", "step_000002"]

    dist.barrier()
    damaged = sorted((dir / "step_000002").glob("rank_00001_*"))[0]
    if rank == 0:
        content = bytearray(damaged.read_bytes())
        content[-3] ^= 1
        damaged.write_bytes(content)
    dist.barrier()
    assert keeper.latest() == dir / "step_000001"
    dist.barrier()
    if rank == 0:
        shutil.rmtree(dir / "step_000001")
    dist.barrier()
    with pytest.raises(UserError, match=r"rank_00001_0000\.safetensors has a wrong checksum"):
        keeper.latest()


# ----- in a world of one


@pytest.fixture(scope="module")
def world() -> Iterator[DeviceMesh]:
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    if ours:
        dist.destroy_process_group()


def test_two_ranks(tmp_path: Path, world: DeviceMesh, run_distributed: Callable[..., str]) -> None:
    for family, changes in _FAMILIES.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **{**_SIZES, **changes})
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
            tmp_path / family, max_shard_size="20KB"
        )
    policy, optimizer = _training(tmp_path / "llama", world)
    keeper = Checkpointer(tmp_path / "checkpoints", _CONFIG)
    for number in (1, 2):
        _step(policy, optimizer, number)
    keeper.save(2, model=policy, optimizer=optimizer, extra={"cursor": 2}, metrics={})
    save_file(_whole(policy, optimizer), tmp_path / "after_2.safetensors")
    for number in (3, 4):
        _step(policy, optimizer, number)
    keeper.wait()
    uninterrupted = _whole(policy, optimizer)
    save_file(uninterrupted, tmp_path / "after_4.safetensors")

    run_distributed(ranks, 2, tmp_path)

    policy, optimizer = _training(tmp_path / "llama", world)
    assert keeper.load(tmp_path / "checkpoints" / "step_000003", policy, optimizer) == {"cursor": 3}
    _step(policy, optimizer, 4)
    _assert_same(_whole(policy, optimizer), uninterrupted, 1e-5)
