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

from lightrl.config.schema import LoraConfig, ModelConfig
from lightrl.distributed import fsdp
from lightrl.distributed.mesh import World
from lightrl.errors import UserError
from lightrl.kernels.divergence import Head, divergence, head_logprobs, linear_divergence
from lightrl.kernels.logits_at import logits_at
from lightrl.kernels.logprob import linear_logprobs
from lightrl.models import experts, gated_delta, load, lora, recompute, registry
from lightrl.models.attention import Segments
from lightrl.models.context_parallel import SharedSegments
from lightrl.models.names import Groups, StoredTensors, adapter_tensors, kept_names
from lightrl.models.quantized import without_quantization
from lightrl.models.routing import Routing, RoutingShape, routed, routers
from lightrl.types import Microbatch

Root = TypeVar("Root", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class TeacherHead:
    """A teacher's output layer, and how a policy's distribution differs from what it makes of `teacher_hidden`."""

    head: Head
    size: int
    """Ids that both know, the first of them."""
    kind: str
    beta: float


class PolicyModule(nn.Module):
    """Root of the FSDP tree. The loss's inputs are computed inside its forward, where the head's weight is whole."""

    def __init__(self, model: nn.Module, *, packed: bool, kernels: bool = False) -> None:
        super().__init__()
        self.kernels = kernels
        self.model: Any = model
        self.packed = packed

    def forward(
        self,
        batch: Microbatch,
        segments: Segments | SharedSegments | None,
        temperature: float,
        teacher: TeacherHead | None = None,
    ) -> tuple[Any, ...]:
        """Log-probs [N] and entropies [N] of the microbatch's targets, float32; log-probs [N, k] of the engine's
        likeliest tokens, then of the teacher's, where the microbatch has any; and with a `teacher` the divergence [N]
        from it, behind None where there are no such tokens."""
        ids = likely_ids(batch)
        if not self.packed:
            return self._by_logits(self.padded_logits(batch) / temperature, batch, ids, teacher)
        rows, head = self.rows(batch, segments), self.model.get_output_embeddings()
        found = linear_logprobs(
            rows, head.weight, batch.targets, bias=head.bias, temperature=temperature, kernels=self.kernels
        )
        top = None if ids is None else logprobs_at(rows, head, batch.targets, ids, found[0], temperature)
        if teacher is None:
            return found if top is None else (*found, top)
        mine = Head(weight=head.weight, bias=head.bias, temperature=temperature)
        assert batch.teacher_hidden is not None
        distance = linear_divergence(
            rows, mine, batch.teacher_hidden, teacher.head, size=teacher.size, kind=teacher.kind, beta=teacher.beta
        )
        return *found, top, distance

    def rows(self, batch: Microbatch, segments: Segments | SharedSegments | None) -> Tensor:
        """[N, H]: the packed rows that predict the targets."""
        hidden: Tensor = self.model.base_model(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            attention_mask=None,
            use_cache=False,
            segments=segments,
        ).last_hidden_state[0]
        return hidden[batch.logit_rows]

    def padded_logits(self, batch: Microbatch) -> Tensor:
        """[N, V] float32. One right-padded row a segment through the stock model: exact for any causal LM."""
        ids, mask = padded(batch)
        logits: Tensor = self.model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
        return logits[mask][batch.logit_rows].float()

    def _by_logits(
        self, logits: Tensor, batch: Microbatch, ids: Tensor | None, teacher: TeacherHead | None
    ) -> tuple[Any, ...]:
        """What `forward` returns, of logits over the temperature."""
        logprobs = logits.log_softmax(-1)
        # a sum over one element, not a view: FSDP's hooks warn of views
        found = logprobs.gather(-1, batch.targets[:, None]).sum(-1), -(logprobs.exp() * logprobs).sum(-1)
        top = None if ids is None else logprobs.gather(-1, ids)
        if teacher is None:
            return found if top is None else (*found, top)
        assert batch.teacher_hidden is not None
        theirs = head_logprobs(batch.teacher_hidden, teacher.head, teacher.size)
        mine = logits[:, : teacher.size].log_softmax(-1)
        return *found, top, divergence(mine, theirs, teacher.kind, teacher.beta)


def likely_ids(batch: Microbatch) -> Tensor | None:
    """[N, k] of the engine's likeliest tokens and, behind them, of the teacher's; None where there are neither."""
    ids = [part for part in (batch.rollout_top_ids, batch.teacher_top_ids) if part is not None]
    return torch.cat(ids, 1) if ids else None


def logprobs_at(rows: Tensor, head: Any, targets: Tensor, ids: Tensor, logprobs: Tensor, temperature: float) -> Tensor:
    """Log-probs of `ids` [N, k], from those [N] of `targets`, which know the logsumexp."""
    logits = logits_at(rows, head.weight, torch.cat([targets[:, None], ids], 1), head.bias) / temperature
    return logits[:, 1:] - logits[:, :1] + logprobs[:, None]


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
    adapters: LoraConfig | None = None
    """What is trained in place of the weights, which are then frozen; None: all weights are."""

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        world: World,
        *,
        frozen: bool = False,
        adapters: LoraConfig | None = None,
        seed: int = 0,
        root: Callable[..., PolicyModule] = PolicyModule,
        key: str = "model.path",
    ) -> Policy:
        """Stream `config.path`, which the config calls `key`, into shards below a `root`. `frozen` (a reference, a
        teacher) keeps compute precision and no gradients. New `adapters` are drawn with `seed`."""
        source = load.resolve_checkpoint(config.path, config.revision, key=key)
        hf_config = without_quantization(AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code))
        policy = cls.without_weights(
            config, hf_config, world, source=source, frozen=frozen, adapters=adapters, root=root
        )
        load.load_weights(policy.model, source, trust_remote_code=config.trust_remote_code)
        lora.initialize(policy.model, seed)
        return policy

    @classmethod
    def without_weights(
        cls,
        config: ModelConfig,
        hf_config: Any,
        world: World,
        *,
        source: Path,
        frozen: bool = False,
        adapters: LoraConfig | None = None,
        root: Callable[..., PolicyModule] = PolicyModule,
    ) -> Policy:
        """Sharded, on its device, prepared for training; parameters and buffers are yet to be filled.

        Under `adapters` weights stay as they are stored, if that is the compute precision: nothing is added to them.
        """
        dtype = compute_dtype(config.compute_dtype, world.device)
        narrow = frozen or (adapters is not None and load.stored_dtype(hf_config) == dtype)
        model = load.empty_model(
            hf_config, dtype=dtype if narrow else torch.float32, trust_remote_code=config.trust_remote_code
        )
        module = sharded_root(root, model, hf_config, config, world, dtype, frozen=frozen, adapters=adapters)
        return cls(
            module=module,
            hf_config=hf_config,
            source=source,
            compute_dtype=dtype,
            device=world.device,
            context_group=world.context_group,
            adapters=adapters,
        )

    @property
    def model(self) -> Any:
        """The Hugging Face causal LM."""
        return self.module.model

    def __call__(
        self,
        batch: Microbatch,
        temperature: float,
        routing: Routing | None = None,
        *,
        teacher: TeacherHead | None = None,
    ) -> tuple[Any, ...]:
        """Log-probs and entropies [N], with gradients where enabled, and what else `PolicyModule.forward` returns for
        this microbatch and `teacher`. Every rank must call it as often."""
        segments: Segments | SharedSegments | None = None
        if self.module.packed:
            segments = whole = Segments.from_microbatch(batch, self.device)
            if self.context_group is not None:
                segments = SharedSegments(whole, self.context_group)
        if self.adapters is not None and self.adapters.dropout:
            lora.set_dropout(self.model, torch.is_grad_enabled())
        with routed(self._routers, routing):
            found: tuple[Any, ...] = self.module(to_device(batch, self.device), segments, temperature, teacher)
        return found

    @torch.no_grad()
    def logprobs(self, batch: Microbatch, temperature: float, routing: Routing | None = None) -> Tensor:
        """[N] float32 on the host."""
        bare = replace(batch, rollout_top_ids=None, teacher_top_ids=None, teacher_hidden=None)
        logprobs: Tensor = self(bare, temperature, routing)[0]
        return logprobs.cpu()

    @cached_property
    def _routers(self) -> list[nn.Module]:
        return routers(self.model)

    @cached_property
    def routing_shape(self) -> RoutingShape | None:
        """What there is to choose for routers; None where none are known."""
        return RoutingShape.of(self.model, int(self.hf_config.get_text_config().num_hidden_layers))

    def lend(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights in compute precision under their Hugging Face names, valid until `reclaim`. A collective.

        With adapters: merged, in memory of their own, or (`lora.sync`) the frozen weights and the adapters themselves.
        """
        fsdp.unshard_all(self.module)
        tensors = fsdp.named_whole_tensors(self.model)
        return tensors if self.adapters is None or self.adapters.lent else self._merge(tensors)

    def stream(self) -> StoredTensors:
        """Whole weights as the checkpoint has them, adapters merged, one FSDP group at a time, for an engine elsewhere.

        Iterating is a collective.
        """
        return self._stored

    @cached_property
    def _stored(self) -> StoredTensors:
        """Planned once: a mixture of experts has tens of thousands of names."""
        names = [*kept_names(self.model), *adapter_tensors(self.model)]
        groups: Groups = fsdp.WholeTensors.of(self.module, self.model, self.compute_dtype, names)
        return StoredTensors(self.model, groups if self.adapters is None else lora.MergedGroups(groups, self._merge))

    @property
    def _merge(self) -> lora.Merge:
        return lora.Merge(lora.scalings(self.model), self.compute_dtype)

    def reclaim(self) -> None:
        """Back to shards; what was lent is freed."""
        fsdp.reshard_all(self.module)

    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if p.requires_grad]


@dataclass(frozen=True)
class AdaptersOff:
    """The reference of a policy that trains adapters: the policy without them, which takes no memory."""

    policy: Policy

    @property
    def module(self) -> PolicyModule:
        return self.policy.module

    def logprobs(self, batch: Microbatch, temperature: float) -> Tensor:
        """[N] float32 on the host."""
        with lora.switched_off(self.policy.model):
            return self.policy.logprobs(batch, temperature)

    def reclaim(self) -> None:
        self.policy.reclaim()


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
    gated_delta.prepare_training(model, world.device, dtype, fuse=kernels)
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
    adapters: LoraConfig | None = None,
) -> Root:
    """A `root` around the Hugging Face `model`, which is on the meta device: prepared for training, sharded, on its
    device. Weights are yet to be filled in."""
    packed, kernels = prepare_training(model, hf_config, config, world, dtype, frozen=frozen)
    if adapters is not None:
        lora.inject(model, adapters)
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
        reshard=config.reshard_after_forward or frozen,
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
