"""A reward by a model: a sequence classifier of one label, as `lightrl rm` exports it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from threading import Lock
from typing import Any

from lightrl.errors import UserError
from lightrl.types import Sample


class RewardModel:
    """Rewards of a list of samples, for `reward.batched`.

    `Trainer(config, reward=RewardModel("exported/rm"))`; or, in a module of your own, `score = RewardModel(…)`, which
    `reward.type = "module:score"` names. The answer is put behind the prompt's chat messages by the chat template of
    the reward model's own tokenizer, or behind its text where there are none, with an end-of-sequence token.

    Each rank loads one: to `device`, default its GPU, or the CPU without one. At most `max_batch` conversations are
    computed together. Raises UserError for a folder that holds no such model.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        device: str | None = None,
        dtype: str = "auto",
        max_batch: int = 16,
        trust_remote_code: bool = False,
    ) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

        if device is None:
            device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
        kwargs: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        try:
            config = AutoConfig.from_pretrained(path, **kwargs)
            if config.num_labels != 1 or not any("SequenceClass" in name for name in config.architectures or ()):
                raise ValueError(f"it is {config.architectures}, with {config.num_labels} labels")  # a head of chance
            self.tokenizer: Any = AutoTokenizer.from_pretrained(path, **kwargs)
            model: Any = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype, **kwargs)
        except (OSError, ValueError, RuntimeError) as error:
            text = " ".join(str(error).split())[:300]
            raise UserError(f"reward model {path}: not a sequence classifier of one label: {text}") from error
        if model.config.get_text_config().pad_token_id is None:
            raise UserError(f"reward model {path}: its config names no pad_token_id, before which it would score")
        self.model = model.to(device).eval()
        self.max_batch = max_batch
        self._one_at_a_time = Lock()  # groups are scored in threads: one batch is enough memory

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """The model's value of each answer."""
        rewards: list[float] = []
        with self._one_at_a_time:
            for start in range(0, len(samples), self.max_batch):
                rewards += self._score([self._tokens(s) for s in samples[start : start + self.max_batch]])
        return rewards

    def _tokens(self, sample: Sample) -> list[int]:
        prompt, tokenizer = sample.prompt, self.tokenizer
        if prompt.messages is not None:
            messages = [*prompt.messages, {"role": "assistant", "content": sample.response}]
            text = tokenizer.apply_chat_template(messages, tools=prompt.tools, tokenize=False)
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])
        answer = tokenizer(sample.response, add_special_tokens=False)["input_ids"]
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        return [*tokenizer(prompt.text)["input_ids"], *answer, *end]

    def _score(self, rows: list[list[int]]) -> list[float]:
        import torch

        device, pad = self.model.device, self.model.config.get_text_config().pad_token_id
        width = max(map(len, rows))
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
        with torch.no_grad():
            logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return [float(value) for value in logits[:, 0].float().cpu()]
