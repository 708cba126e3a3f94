"""Supervised fine-tuning: a step is a batch of conversations and one update on the mean over their trained tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightrl.config.schema import DataConfig
from lightrl.data.conversations import Conversation, ConversationSet, load_conversations
from lightrl.observe.console import SFT_COLUMNS
from lightrl.training import setup
from lightrl.training.offline import OfflineTrainer, Terms
from lightrl.training.packing import TrainSample
from lightrl.training.policy import Policy, to_device
from lightrl.types import Microbatch


class SFTTrainer(OfflineTrainer[Conversation]):
    """A run of `lightrl sft`. Under torchrun and, as a world of one, in plain Python or a notebook."""

    command = "sft"
    columns = SFT_COLUMNS
    rows_called = "conversations"
    policy: Policy

    def read(self, data: DataConfig) -> ConversationSet:
        return load_conversations(
            data, self.config.sft, self.tokenizer, context_length=self.context_length, end_ids=self.end_ids
        )

    def load_model(self) -> Policy:
        self.policy = setup.load_policy(self.config, self.world)
        return self.policy

    def samples(self, number: int, row: Conversation) -> list[TrainSample]:
        return [train_sample(number, row)]

    def terms(self, batch: Microbatch, rows: Sequence[Conversation]) -> Terms:
        """The negative log-prob of each trained token; `loss_weights` are its share of the whole update."""
        logprobs, entropy = self.policy(batch, temperature=1.0)
        trained, total = batch.targets.numel(), logprobs.detach().sum()
        return Terms(
            loss=-(logprobs * to_device(batch, self.policy.device).loss_weights).sum(),
            means={"loss/entropy": (entropy.detach().sum(), trained)},
            eval_means={"loss": (-total, trained), "logprob": (total, trained)},
            counts={"trained_tokens": trained, "conversations": len(batch.sample_keys)},
        )

    @property
    def conversations(self) -> ConversationSet:
        """All rows of `data`."""
        rows: Any = self.rows
        return rows

    def describe(self) -> Mapping[str, object]:
        data = self.conversations
        trained, tokens = (sum(sum(c.loss_mask) for c in data), sum(len(c.tokens) for c in data))
        return {
            "data": f"{len(data)} conversations from {self.config.data.path}, {trained:,} of {tokens:,} tokens trained",
            "step": f"{self.config.sft.batch_size} conversations",
        }


def train_sample(number: int, conversation: Conversation) -> TrainSample:
    """A conversation for the packer: what comes before the first trained token is its prompt, and what comes after the
    last is left out, as nothing trained depends on it."""
    tokens, mask = conversation.tokens, conversation.loss_mask
    first = mask.index(1)
    end = len(mask) - mask[::-1].index(1)
    return TrainSample(
        group_index=number,
        index=0,
        prompt=tokens[:first],
        response=tokens[first:end],
        loss_mask=mask[first:end],
        rollout_logprobs=None,
        advantage=0.0,
    )
