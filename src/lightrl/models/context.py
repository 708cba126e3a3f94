"""How many tokens a model reads."""

from __future__ import annotations

from transformers import PretrainedConfig


def context_length(config: PretrainedConfig) -> int | None:
    """Most tokens of a sample, prompt and response together; None if the config does not say.

    What the model was made for, or where its rotation changes with a sequence's length what comes before that
    (`longrope_limit`).
    """
    found = (getattr(config.get_text_config(), "max_position_embeddings", None), longrope_limit(config))
    return min((int(length) for length in found if length), default=None)


def longrope_limit(config: PretrainedConfig) -> int | None:
    """Tokens up to which `longrope` (Phi-3's and Phi-4's) takes its short factors; None for all other rotations.

    One token more, and *all* positions are rotated by the long ones. transformers chooses for a whole batch, by its
    largest position: a long sample would change the log-probs of those it is packed or sampled with, and the keys that
    an engine has cached would be those of another function.
    """
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    limits = []
    for part in [parameters, *parameters.values()]:  # some families have them by kind of layer
        if isinstance(part, dict) and part.get("rope_type") == "longrope":
            limit = part.get("original_max_position_embeddings")
            limits.append(limit or getattr(text, "original_max_position_embeddings", None))
    return min((int(limit) for limit in limits if limit), default=None)


def longrope_notice(config: PretrainedConfig) -> str | None:
    """One line for a model that is read to a part of its context; None for others."""
    limit, whole = longrope_limit(config), getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is None or not whole or limit >= whole:
        return None
    return (
        f"{config.model_type} rotates a sequence of more than {limit} tokens otherwise from its start (longrope), so "
        f"it would not be what sampled the first of them: samples are held to {limit} tokens, of a context of {whole}"
    )
