"""Direct preference optimization: a step is a batch of pairs and one update on the mean of their losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightrl.algorithms.preferences import Logprobs, preference_loss
from lightrl.config.schema import DataConfig
from lightrl.data.pairs import Pair, PairSet, load_pairs
from lightrl.observe.console import preference_columns
from lightrl.training import setup
from lightrl.training.balance import CostModel
from lightrl.training.offline import Mean, OfflineTrainer, Terms, parts
from lightrl.training.packing import TrainSample
from lightrl.training.policy import AdaptersOff, Policy, to_device
from lightrl.types import Microbatch


class DPOTrainer(OfflineTrainer[Pair]):
    """A run of `lightrl dpo`. Under torchrun and, as a world of one, in plain Python or a notebook."""

    command = "dpo"
    columns = preference_columns("dpo")
    one_unit_a_row = True
    policy: Policy
    reference: Policy | AdaptersOff | None
    """None where the loss has none, or its log-probs are in the pairs."""

    def read(self, data: DataConfig) -> PairSet:
        return load_pairs(
            data, self.config.dpo, self.tokenizer, context_length=self.context_length, end_ids=self.end_ids
        )

    def check_models(self) -> None:
        if (path := self.config.dpo.reference_path) is not None:
            needed = setup.num_tokens(self.hf_config, self.tokenizer)
            pairs = [self.rows[i] for i in range(len(self.rows))]
            longest = max(len(side.tokens) for pair in pairs for side in (pair.chosen, pair.rejected))
            key = "dpo.reference_path"
            setup.check_reads(self.config, key, "reference", path, needed, longest, "dpo.max_tokens")

    def load_model(self) -> Policy:
        config, dpo = self.config, self.config.dpo
        if dpo.precompute_reference:
            self._precompute(setup.frozen_model(config.model, dpo.reference_path, self.world))
        self.policy, self.reference = setup.load_policy(config, self.world), None
        if dpo.has_reference and not dpo.precompute_reference:
            self.reference = setup.reference_of(self.policy, config.model, dpo.reference_path, self.world)
        return self.policy

    @torch.no_grad()
    def _precompute(self, reference: Policy) -> None:
        """Its log-probs of all pairs, into the pairs."""
        cost = CostModel.from_config(reference.hf_config.get_text_config())

        def filled(pairs: Any) -> PairSet:
            found: list[Pair] = []
            for part in parts(pairs):
                mine: dict[tuple[int, int], float] = {}
                for batch in self.pack_for([reference], part, cost):
                    sums = sample_sums(reference.logprobs(batch, temperature=1.0), batch)
                    mine |= dict(zip(batch.sample_keys, sums.tolist(), strict=True))
                everyone = {key: value for one in self.world.gather(mine) for key, value in one.items()}
                found += [replace(p, reference=(everyone[n, 0], everyone[n, 1])) for n, p in enumerate(part)]
            return PairSet(pairs=found, notices=pairs.notices)

        self.rows = self.source.prompts = filled(self.rows)
        self.eval_sets = {name: filled(pairs) for name, pairs in self.eval_sets.items()}

    def samples(self, number: int, row: Pair) -> list[TrainSample]:
        return [
            pair_sample(number, index, side.tokens, side.loss_mask, row.prompt_length)
            for index, side in enumerate((row.chosen, row.rejected))
        ]

    def pack(self, rows: Sequence[Pair]) -> list[Microbatch]:
        models: list[Policy | AdaptersOff] = [self.policy] if self.reference is None else [self.policy, self.reference]
        return self.pack_for(models, rows, self.cost)

    def complete(self, batch: Sequence[Microbatch], rows: Sequence[Pair]) -> None:
        """The reference's log-probs, where they are not in the pairs."""
        if self.reference is None:
            return
        for microbatch in batch:
            microbatch.ref_logprobs = self.reference.logprobs(microbatch, temperature=1.0)
        self.reference.reclaim()

    def terms(self, batch: Microbatch, rows: Sequence[Pair]) -> Terms:
        """The mean of the pairs' losses; with `dpo.sft_coef` also of -log p of the chosen answers' tokens."""
        config = self.config.dpo
        logprobs, entropy = self.policy(batch, temperature=1.0)
        if not batch.sample_keys:  # a rank without work takes part in the reduction all the same
            return Terms(loss=logprobs.sum() * 0.0)
        batch = to_device(batch, self.policy.device)
        policy, lengths = sample_sums(logprobs, batch), sample_sums(torch.ones_like(logprobs), batch)
        reference = self._reference_sums(batch, rows)
        chosen, rejected = (
            Logprobs(
                policy=policy[side::2],
                reference=None if reference is None else reference[side::2],
                lengths=lengths[side::2],
            )
            for side in (0, 1)
        )
        found = preference_loss(
            chosen,
            rejected,
            kind=config.loss,
            beta=config.strength,
            label_smoothing=config.label_smoothing,
            margin=config.target_margin,
        )
        pairs, tokens = len(found.loss), logprobs.numel()
        loss = found.loss.sum() / len(rows)
        rewards = reward_means(found.chosen, found.rejected)
        means: dict[str, Mean] = {
            **rewards,
            "logprobs/chosen": (chosen.policy.detach().sum(), pairs),
            "logprobs/rejected": (rejected.policy.detach().sum(), pairs),
            "loss/entropy": (entropy.detach().sum(), tokens),
        }
        if config.sft_coef:
            loss = loss - config.sft_coef * chosen.policy.sum() / sum(sum(row.chosen.loss_mask) for row in rows)
            means["loss/sft"] = (-chosen.policy.detach().sum(), int(chosen.lengths.sum()))
        return Terms(
            loss=loss,
            means=means,
            eval_means={"loss": (found.loss.detach().sum(), pairs)} | eval_names(rewards),
            counts={"pairs": pairs, "trained_tokens": tokens},
        )

    def _reference_sums(self, batch: Microbatch, rows: Sequence[Pair]) -> Tensor | None:
        """[2P]; None without a reference."""
        if batch.ref_logprobs is not None:
            return sample_sums(batch.ref_logprobs, batch)
        if not self.config.dpo.has_reference:
            return None
        known = [rows[number].reference for number, _ in batch.sample_keys[::2]]
        return torch.tensor([s for sums in known for s in sums or ()], dtype=torch.float64, device=self.policy.device)

    def describe(self) -> Mapping[str, object]:
        dpo, data = self.config.dpo, self.rows
        path = dpo.reference_path or "the policy's start"
        reference = f"; reference: {path}" if dpo.has_reference else ""
        return {
            "data": f"{len(data)} pairs from {self.config.data.path}",
            "loss": f"{dpo.loss}, beta {dpo.strength:g}{reference}",
            "step": f"{dpo.batch_size} pairs",
        }


def pair_sample(number: int, index: int, tokens: list[int], mask: list[int], prompt_length: int) -> TrainSample:
    """Sample `index` of a pair for the packer; what comes after the last token that counts is left out."""
    end = len(mask) - mask[::-1].index(1)
    return TrainSample(
        group_index=number,
        index=index,
        prompt=tokens[:prompt_length],
        response=tokens[prompt_length:end],
        loss_mask=mask[prompt_length:end],
        rollout_logprobs=None,
        advantage=0.0,
    )


def sample_sums(values: Tensor, batch: Microbatch) -> Tensor:
    """[N] -> [M] float64, with gradients: each sample's sum. Chosen and rejected answers alternate in it."""
    sums = torch.zeros(len(batch.sample_keys), dtype=torch.float64, device=values.device)
    return sums.index_add(0, batch.sample_ids.to(values.device), values.double())


def reward_means(chosen: Tensor, rejected: Tensor) -> dict[str, Mean]:
    """Metrics of the two sides' rewards [P], without gradient."""
    pairs = len(chosen)
    return {
        "rewards/chosen": (chosen.sum(), pairs),
        "rewards/rejected": (rejected.sum(), pairs),
        "rewards/margins": ((chosen - rejected).sum(), pairs),
        "rewards/accuracies": ((chosen > rejected).float().sum(), pairs),
    }


def eval_names(means: Mapping[str, Mean]) -> dict[str, Mean]:
    """`rewards/margins` as `margins`: metrics of sets have their set's name before them."""
    return {name.rpartition("/")[2]: mean for name, mean in means.items()}
