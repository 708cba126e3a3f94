"""The teacher of on-policy distillation: a frozen model on the policy's ranks, or a server elsewhere.

What it says of the step's samples comes onto them (a server's, before they are packed) or onto microbatches (that of a
model here): log-probs of the sampled tokens, and with `teacher.form` more of its distribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightrl.config.schema import Config, TeacherConfig
from lightrl.distributed.mesh import World
from lightrl.errors import UserError
from lightrl.kernels.divergence import Head, linear_top_logprobs
from lightrl.kernels.logprob import linear_logprobs
from lightrl.keys import read_key
from lightrl.models import load, registry
from lightrl.models.context import context_length
from lightrl.training.policy import Policy, PolicyModule, TeacherHead, logprobs_at
from lightrl.training.setup import check_parallel
from lightrl.types import Microbatch, Prompt, SampleGroup

if TYPE_CHECKING:
    from lightrl.engine.sglang_teacher import TeacherServer

UNKNOWN = -100.0
"""Log-prob of an id that the teacher has no output for, such as padding of the policy's vocabulary."""


class TeacherModule(PolicyModule):
    """Root of a teacher's FSDP tree. `form`, `k` and `size` are set once it is loaded."""

    form = "sampled"
    k = 0
    size = 0
    """Ids that the policy has too, the first of them."""

    def forward(
        self, batch: Microbatch, segments: Any, temperature: float, teacher: TeacherHead | None = None
    ) -> tuple[Any, ...]:
        """Log-probs [N] of the targets; ids and log-probs [N, k] of likely tokens (the microbatch's own
        `teacher_top_ids`, if it has them, else the likeliest here); rows [N, H] before the head. None: not asked for.
        """
        head = self.model.get_output_embeddings()
        count = self.model.get_input_embeddings().weight.shape[0]
        batch = replace(batch, input_ids=batch.input_ids.clamp(max=count - 1))
        count, ids = head.weight.shape[0], batch.teacher_top_ids
        targets = batch.targets.clamp(max=count - 1)
        if not self.packed:
            logits = self.padded_logits(batch) / temperature
            logprobs = logits.log_softmax(-1)
            found = logprobs.gather(-1, targets[:, None])[:, 0]
            if self.k and ids is None:
                ids = logits[:, : self.size].topk(self.k, dim=-1).indices
            top = None if ids is None else logprobs.gather(-1, ids.clamp(max=count - 1))
            rows = None
        else:
            rows = self.rows(batch, segments)
            mine = Head(weight=head.weight, bias=head.bias, temperature=temperature)
            found, _ = linear_logprobs(
                rows, head.weight, targets, bias=head.bias, temperature=temperature, kernels=self.kernels
            )
            top = None
            if self.k and ids is None:
                ids, top = linear_top_logprobs(rows, mine, self.k, self.size)
            elif ids is not None:
                top = logprobs_at(rows, head, targets, ids.clamp(max=count - 1), found, temperature)
        found = found.masked_fill(batch.targets >= count, UNKNOWN)
        top = None if top is None or ids is None else top.masked_fill(ids >= count, UNKNOWN)
        return found, ids, top, rows if self.form == "full" else None


@dataclass(kw_only=True)
class Teacher:
    """A teacher on this rank: `policy` where it is a model here, `server` where it is one elsewhere."""

    config: TeacherConfig
    temperature: float
    size: int
    policy: Policy | None = None
    server: TeacherServer | None = None

    @classmethod
    def build(cls, config: Config, world: World, vocab_size: int) -> Teacher:
        """What `[teacher]` says; `vocab_size` is the policy's."""
        teacher = config.teacher
        temperature = config.rollout.temperature if teacher.temperature is None else teacher.temperature
        if teacher.url is not None:
            return cls(config=teacher, temperature=temperature, size=vocab_size, server=make_server(teacher))
        model = replace(config.model, path=str(teacher.path), revision=teacher.revision)
        policy = Policy.load(model, world, frozen=True, root=TeacherModule, key="teacher.path")
        size = min(vocab_size, int(policy.hf_config.get_text_config().vocab_size))
        module: Any = policy.module
        module.form, module.size, module.k = teacher.form, size, teacher.k - teacher.student_k
        if teacher.form == "full" and not module.packed:  # seen before it was loaded, but for code of its own
            raise UserError(f"teacher.form: {no_full(teacher)}")
        return cls(config=teacher, temperature=temperature, size=size, policy=policy)

    @property
    def modules(self) -> list[PolicyModule]:
        """What takes memory here."""
        return [] if self.policy is None else [self.policy.module]

    def score(self, groups: Sequence[SampleGroup]) -> None:
        """Ask a server about this rank's samples."""
        if self.server is None:
            return
        samples = [s for g in groups for s in g.scored if any(s.mask)]  # others are not trained on
        answers = self.server.score([(s.tokens, s.response_length) for s in samples], self.config.k, self.size)
        for sample, answer in zip(samples, answers, strict=True):
            sample.teacher_logprobs = answer.logprobs
            if self.config.k:
                sample.teacher_top_ids, sample.teacher_top_logprobs = answer.top_ids, answer.top_logprobs

    @torch.no_grad()
    def add_targets(self, batch: Iterable[Sequence[Microbatch]], engine_top_k: int = 0) -> None:
        """What a teacher here says of every token, onto the host. Of the engine's likeliest tokens, the first
        `engine_top_k` are kept for what else they were asked for."""
        for microbatch in (m for minibatch in batch for m in minibatch):
            if self.config.student_k:
                self._take_engine_tokens(microbatch, engine_top_k)
            if self.policy is None:
                continue
            found, ids, top, rows = self.policy(replace(microbatch, rollout_top_ids=None), self.temperature)
            microbatch.teacher_logprobs = found.cpu()
            if self.config.k:
                microbatch.teacher_top_ids, microbatch.teacher_top_logprobs = ids.cpu(), top.cpu()
            if rows is not None:
                microbatch.teacher_hidden = rows.cpu()
        self.reclaim()

    def _take_engine_tokens(self, microbatch: Microbatch, engine_top_k: int) -> None:
        ids, logprobs = microbatch.rollout_top_ids, microbatch.rollout_top_logprobs
        if ids is None or logprobs is None:
            if microbatch.sample_keys:
                raise UserError("teacher.top_k_from: the engine did not say which tokens were the likeliest")
            ids, logprobs = torch.zeros(0, self.config.k, dtype=torch.int64), torch.zeros(0, self.config.k)
        microbatch.teacher_top_ids = ids[:, : self.config.k]
        microbatch.rollout_top_ids = ids[:, :engine_top_k] if engine_top_k else None
        microbatch.rollout_top_logprobs = logprobs[:, :engine_top_k] if engine_top_k else None

    def head(self) -> TeacherHead | None:
        """For `teacher.form = "full"`: its output layer, whole until `reclaim`. A collective."""
        if self.config.form != "full" or self.policy is None:
            return None
        module: Any = self.policy.module
        module.unshard()
        head = self.policy.model.get_output_embeddings()
        bias: Tensor | None = None if head.bias is None else head.bias.detach()
        return TeacherHead(
            head=Head(weight=head.weight.detach(), bias=bias, temperature=self.temperature),
            size=self.size,
            kind=self.config.kind,
            beta=self.config.beta,
        )

    def reclaim(self) -> None:
        """Back to shards."""
        if self.policy is not None:
            self.policy.reclaim()


def make_server(config: TeacherConfig) -> TeacherServer:
    """The client of `teacher.url`. UserError where its key is not set."""
    from lightrl.engine.sglang_teacher import TeacherServer

    key = read_key(config.api_key_env, "teacher.api_key_env")
    return TeacherServer(str(config.url), key, timeout=config.request_timeout)


def no_full(config: TeacherConfig) -> str:
    return (
        f"'full' wants logits that are its head's alone, and teacher.path = {config.path} is of a family that LightRL "
        "does not pack: choose 'top_k'"
    )


def check_teacher(config: Config, hf_config: Any, tokenizer: Any, prompts: Iterable[Prompt]) -> None:
    """UserError, before a model loads, for a teacher that reads other tokens than the policy writes, or too few."""
    teacher = config.teacher
    vocab_size = int(hf_config.get_text_config().vocab_size)
    longest = max((len(p.tokens) for p in prompts), default=0) + config.rollout.max_response_tokens
    if teacher.k > min(vocab_size, len(tokenizer)):
        raise UserError(f"teacher.top_k: {teacher.k} exceeds the {min(vocab_size, len(tokenizer))} tokens there are")
    if teacher.url is not None:
        make_server(teacher).check(tokenizer, vocab_size, longest)
        return
    path, trust = str(teacher.path), config.model.trust_remote_code
    folder = str(load.resolve_checkpoint(path, teacher.revision, weights=False, key="teacher.path"))
    theirs = load.load_model_config(folder, trust_remote_code=trust, key="teacher.path")
    _check_tokens(tokenizer, load.load_tokenizer(folder, trust_remote_code=trust, key="teacher.path"), path, config)
    size = int(theirs.get_text_config().vocab_size)
    needed = min(vocab_size, len(tokenizer))
    if size < needed:
        raise UserError(
            f"teacher.path: {path} has {size} tokens, the policy (model.path) {needed}: a teacher has the policy's "
            "vocabulary; name a model of its family"
        )
    check_parallel(config.parallel, theirs, f"teacher.path = {path}", needs_experts=False)
    context = context_length(theirs)
    if context is not None and context < longest:
        raise UserError(
            f"teacher.path: {path} reads {context} tokens, and prompts with answers of rollout.max_response_tokens = "
            f"{config.rollout.max_response_tokens} come to {longest}: lower that, or data.max_prompt_tokens"
        )
    if teacher.form == "full" and not registry.packs_exactly(theirs):
        raise UserError(f"teacher.form: {no_full(teacher)}")


def _check_tokens(mine: Any, theirs: Any, path: str, config: Config) -> None:
    """Every id that both name has the same name: a tokenizer that only knows more than the other will do."""
    names = {int(i): token for token, i in theirs.get_vocab().items()}
    ours = {int(i): token for token, i in mine.get_vocab().items()}
    differing = sorted(i for i, token in ours.items() if names.get(i, token) != token)
    if differing:
        key = "model.tokenizer" if config.model.tokenizer else "model.path"
        first = differing[0]
        raise UserError(
            f"teacher.path: {path} has another tokenizer than the policy ({key}): token {first} is {names[first]!r} "
            f"there and {ours[first]!r} here, as are {len(differing) - 1} of {len(ours)} others; name a teacher with "
            "the policy's tokenizer"
        )
