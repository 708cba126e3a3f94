"""The policy: a sharded Hugging Face model whose forward returns log-probs and entropies of response tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from lightrl.config.schema import ModelConfig
from lightrl.distributed import fsdp
from lightrl.distributed.mesh import World
from lightrl.errors import UserError
from lightrl.kernels.logits_at import logits_at
from lightrl.kernels.logprob import linear_logprobs
from lightrl.models import experts, gated_delta, load, recompute, registry
from lightrl.models.attention import Segments
from lightrl.models.context_parallel import SharedSegments
from lightrl.models.names import StoredTensors, kept_names
from lightrl.models.quantized import without_quantization
from lightrl.types import Microbatch

Root = TypeVar("Root", bound=nn.Module)


class PolicyModule(nn.Module):
    """Root of the FSDP tree. The loss's inputs are computed inside its forward, where the head's weight is whole."""

    def __init__(self, model: nn.Module, *, packed: bool, kernels: bool = False) -> None:
        super().__init__()
        self.kernels = kernels
        self.model: Any = model
        self.packed = packed

    def forward(
        self, batch: Microbatch, segments: Segments | SharedSegments | None, temperature: float
    ) -> tuple[Tensor, ...]:
        """Log-probs [N] and entropies [N] of the microbatch's targets, float32; and log-probs [N, k] of the engine's
        likeliest tokens, where the microbatch has them."""
        if not self.packed:
            return self._padded(batch, temperature)
        hidden = self.model.base_model(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            attention_mask=None,
            use_cache=False,
            segments=segments,
        ).last_hidden_state[0]
        head = self.model.get_output_embeddings()
        rows, ids = hidden[batch.logit_rows], batch.rollout_top_ids
        found = linear_logprobs(
            rows, head.weight, batch.targets, bias=head.bias, temperature=temperature, kernels=self.kernels
        )
        if ids is None:
            return found
        logits = logits_at(rows, head.weight, torch.cat([batch.targets[:, None], ids], 1), head.bias) / temperature
        return *found, logits[:, 1:] - logits[:, :1] + found[0][:, None]  # the target's log-prob knows the logsumexp

    def _padded(self, batch: Microbatch, temperature: float) -> tuple[Tensor, ...]:
        """One right-padded row a segment through the stock model: exact for any causal LM."""
        ids, mask = padded(batch)
        logits = self.model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
        logprobs = (logits[mask][batch.logit_rows].float() / temperature).log_softmax(-1)
        # a sum over one element, not a view: FSDP's hooks warn of views
        found = logprobs.gather(-1, batch.targets[:, None]).sum(-1), -(logprobs.exp() * logprobs).sum(-1)
        return found if batch.rollout_top_ids is None else (*found, logprobs.gather(-1, batch.rollout_top_ids))


@dataclass(kw_only=True)
class Policy:
    """A model on this rank, sharded over the world."""

    module: PolicyModule
    hf_config: Any
    source: Path
    """Folder of the checkpoint it was loaded from."""
    compute_dtype: torch.dtype
    device: torch.device
    context_group: Any = None
    """Ranks that share the rows of each microbatch; None: all rows are here."""

    @classmethod
    def load(cls, config: ModelConfig, world: World, *, frozen: bool = False) -> Policy:
        """Stream `config.path` into shards; `frozen` (a reference) keeps compute precision and no gradients."""
        source = load.resolve_checkpoint(config.path, config.revision)
        hf_config = without_quantization(AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code))
        policy = cls.without_weights(config, hf_config, world, source=source, frozen=frozen)
        load.load_weights(policy.model, source, trust_remote_code=config.trust_remote_code)
        return policy

    @classmethod
    def without_weights(
        cls, config: ModelConfig, hf_config: Any, world: World, *, source: Path, frozen: bool = False
    ) -> Policy:
        """Sharded, on its device, prepared for training; parameters and buffers are yet to be filled."""
        dtype = compute_dtype(config.compute_dtype, world.device)
        model = load.empty_model(
            hf_config, dtype=dtype if frozen else torch.float32, trust_remote_code=config.trust_remote_code
        )
        module = sharded_root(PolicyModule, model, hf_config, config, world, dtype, frozen=frozen)
        return cls(
            module=module,
            hf_config=hf_config,
            source=source,
            compute_dtype=dtype,
            device=world.device,
            context_group=world.context_group,
        )

    @property
    def model(self) -> Any:
        """The Hugging Face causal LM."""
        return self.module.model

    def __call__(self, batch: Microbatch, temperature: float) -> tuple[Tensor, ...]:
        """Log-probs and entropies [N], with gradients where enabled, and where the microbatch has likeliest tokens of
        the engine their log-probs [N, k]. Every rank must call it as often."""
        segments: Segments | SharedSegments | None = None
        if self.module.packed:
            segments = whole = Segments.from_microbatch(batch, self.device)
            if self.context_group is not None:
                segments = SharedSegments(whole, self.context_group)
        return self.module(to_device(batch, self.device), segments, temperature)

    @torch.no_grad()
    def logprobs(self, batch: Microbatch, temperature: float) -> Tensor:
        """[N] float32 on the host."""
        return self(replace(batch, rollout_top_ids=None), temperature)[0].cpu()

    def lend(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights in compute precision under their Hugging Face names, valid until `reclaim`. A collective."""
        fsdp.unshard_all(self.module)
        return fsdp.named_whole_tensors(self.model)

    def stream(self) -> StoredTensors:
        """Whole weights as the checkpoint has them, one FSDP group at a time, for an engine elsewhere.

        Iterating is a collective.
        """
        return self._stored

    @cached_property
    def _stored(self) -> StoredTensors:
        """Planned once: a mixture of experts has tens of thousands of names."""
        names = kept_names(self.model)
        return StoredTensors(self.model, fsdp.WholeTensors.of(self.module, self.model, self.compute_dtype, names))

    def reclaim(self) -> None:
        """Back to shards; what was lent is freed."""
        fsdp.reshard_all(self.module)

    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if p.requires_grad]


def prepare_training(
    model: Any, hf_config: Any, config: ModelConfig, world: World, dtype: torch.dtype, *, frozen: bool = False
) -> tuple[bool, bool]:
    """Make a model on the meta device take packed rows, where its family is known: whether it does, and whether by the
    kernels of `model.kernels`. Its experts are spread as `[parallel]` asks."""
    packed = registry.packs_exactly(hf_config) and registry.is_own_code(model)
    kernels = packed and config.kernels == "auto" and fused_kernels_run(world.device)
    if not packed:
        _refuse_spreading(model, world, frozen)
        return False, False
    registry.prepare_packed(model, fuse=kernels)
    gated_delta.prepare_training(model, world.device, dtype)
    if world.expert_mesh is not None:
        experts.spread(model, world.expert_mesh["ep"])
    return True, kernels


def sharded_root(
    root: Callable[..., Root],
    model: Any,
    hf_config: Any,
    config: ModelConfig,
    world: World,
    dtype: torch.dtype,
    *,
    frozen: bool = False,
) -> Root:
    """A `root` around the Hugging Face `model`, which is on the meta device: prepared for training, sharded, on its
    device. Weights are yet to be filled in."""
    packed, kernels = prepare_training(model, hf_config, config, world, dtype, frozen=frozen)
    module = root(model, packed=packed, kernels=kernels)
    if frozen:
        module.requires_grad_(False)
    fsdp.shard(
        module,
        model,
        world.mesh,
        compute_dtype=dtype,
        activation_checkpointing=config.activation_checkpointing and not frozen,
        recompute_contexts=partial(recompute.contexts, keep_attention=kernels and not config.recompute_attention),
        expert_mesh=world.expert_mesh,
    )
    module.to_empty(device=world.device)
    module.eval()  # no dropout: what is trained is what was sampled from
    return module


def padded(batch: Microbatch) -> tuple[Tensor, Tensor]:
    """Token ids and mask of a microbatch with a right-padded row a segment, [S, longest] each."""
    if batch.kv_index is not None:
        raise ValueError("a model that runs stock knows no shared prompts: pack each sample alone")
    lengths = batch.cu_seqlens_q.diff().long()
    mask = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
    ids = batch.input_ids.new_zeros(mask.shape)
    ids[mask] = batch.input_ids
    return ids, mask


def _refuse_spreading(model: Any, world: World, frozen: bool) -> None:
    """UserError where experts or rows are to be spread and the model runs stock; a reference may keep its experts."""
    for key, spread in (
        ("parallel.expert_parallel", world.expert_mesh is not None and not frozen),
        ("parallel.context_parallel", world.context_group is not None),
    ):
        if spread:
            raise UserError(f"{key}: {type(model).__name__} runs by its own code, which does not spread: set it to 1")


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware multiplies it natively (emulated on a CPU it is several times slower)."""
    if name == "auto":
        return torch.bfloat16 if native_bfloat16(device) else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def fused_kernels_run(device: torch.device) -> bool:
    """Triton's: on a GPU, where torch brings it along (it does on Linux)."""
    return device.type == "cuda" and find_spec("triton") is not None


def native_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.backends.cpu.get_cpu_capability()
    return capabilities in ("AVX512_BF16", "AMX") or any(
        check() for check in (getattr(torch.cpu, n, None) for n in _CPU_CHECKS) if check is not None
    )


_CPU_CHECKS = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")


def to_device(batch: Microbatch, device: torch.device) -> Microbatch:
    """The microbatch's tensors on `device`."""
    if device.type == "cpu":
        return batch
    moved: dict[str, Any] = {
        k: v.to(device, non_blocking=True) for k, v in vars(batch).items() if isinstance(v, Tensor)
    }
    return replace(batch, **moved)
