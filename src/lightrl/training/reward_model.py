"""A Bradley-Terry reward model: a step is a batch of pairs and one update on the mean of their losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightrl.algorithms.preferences import bradley_terry_loss
from lightrl.config.schema import DataConfig
from lightrl.data.pairs import Pair, PairSet, load_pairs
from lightrl.observe.console import preference_columns
from lightrl.training.dpo import eval_names, reward_means
from lightrl.training.offline import OfflineTrainer, Terms
from lightrl.training.packing import TrainSample
from lightrl.training.value_model import ValueModel, value_config_and_tokenizer
from lightrl.types import Microbatch


class RewardModelTrainer(OfflineTrainer[Pair]):
    """A run of `lightrl rm`. Under torchrun and, as a world of one, in plain Python or a notebook.

    The reward is what transformers' sequence classifiers give for a conversation: the value at its last token that is
    not padding.
    """

    command = "rm"
    columns = preference_columns("rm")
    one_unit_a_row = True

    def load_config_and_tokenizer(self) -> tuple[Any, Any]:
        """Of a causal LM, or of a sequence classifier of one label."""
        return value_config_and_tokenizer(self.config.model, "model.path")

    def read(self, data: DataConfig) -> PairSet:
        return load_pairs(
            data,
            self.config.rm,
            self.tokenizer,
            context_length=self.context_length,
            end_ids=self.end_ids,
            pad_token_id=self.hf_config.get_text_config().pad_token_id,
        )

    def load_model(self) -> ValueModel:
        self.rewarder = ValueModel.load(self.config.model, self.world, key="model.path", hf_config=self.hf_config)
        return self.rewarder

    def samples(self, number: int, row: Pair) -> list[TrainSample]:
        """Each answer whole, with one token more that is not fed: values are of what comes before a token."""
        start = row.prompt_length
        return [
            TrainSample(
                group_index=number,
                index=index,
                prompt=side.tokens[:start],
                response=[*side.tokens[start:], side.tokens[0]],
                loss_mask=[0] * (len(side.tokens) - start) + [1],
                rollout_logprobs=None,
                advantage=0.0,
            )
            for index, side in enumerate((row.chosen, row.rejected))
        ]

    def terms(self, batch: Microbatch, rows: Sequence[Pair]) -> Terms:
        """The mean of the pairs' losses."""
        rewards = self.rewarder(batch)
        if not batch.sample_keys:  # a rank without work takes part in the reduction all the same
            return Terms(loss=rewards.sum() * 0.0)
        chosen, rejected = rewards[::2], rewards[1::2]
        margins = [rows[number].margin for number, _ in batch.sample_keys[::2]]
        margin = torch.tensor(margins, dtype=rewards.dtype, device=rewards.device)
        losses = bradley_terry_loss(chosen, rejected, margin=margin, center=self.config.rm.center_coef)
        means = reward_means(chosen.detach(), rejected.detach())
        return Terms(
            loss=losses.sum() / len(rows),
            means=means,
            eval_means={"loss": (losses.detach().sum(), len(losses))} | eval_names(means),
            counts={"pairs": len(losses)},
        )

    def describe(self) -> Mapping[str, object]:
        return {
            "data": f"{len(self.rows)} pairs from {self.config.data.path}",
            "step": f"{self.config.rm.batch_size} pairs",
        }
