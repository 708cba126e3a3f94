"""Models with a value head: in transformers' words sequence classifiers of one label."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from lightrl.errors import UserError
from lightrl.models.load import check_causal_lm, load_error
from lightrl.models.quantized import without_quantization

VALUE_HEAD = "score.weight"
"""The head's weight."""


def load_value_config(folder: Path, trust_remote_code: bool = False, *, key: str = "critic.path") -> PretrainedConfig:
    """Config of a model with a value head, a sequence classifier of one label, from the checkpoint of one or of a
    causal LM."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise load_error(key, str(folder), "config", error) from error
    if any("SequenceClassification" in name for name in config.architectures or []):
        if config.num_labels != 1:
            raise UserError(f"{key}: {folder} has {config.num_labels} labels; a value head has one, the value")
    else:
        check_causal_lm(config, str(folder), key)
        config.num_labels = 1
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise UserError(
            f"{key}: transformers has no sequence classifier of {config.model_type}, which a model with a value head "
            "is; name a checkpoint of another family with the same tokenizer"
        )
    return without_quantization(config)


def empty_value_model(config: PretrainedConfig, **kwargs: Any) -> PreTrainedModel:
    """That model on the meta device, float32; its value head is `score`."""
    config = copy.deepcopy(config)
    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32, **kwargs)
