"""What is needed of SGLang's answers, which its engine and its servers give alike. Imports nothing, as the process that
holds SGLang has it too."""

from __future__ import annotations

from typing import Any


def fields_of(answer: dict[str, Any], truncated: bool) -> dict[str, Any]:
    """Of one answer, complete or not. Log-probs come as [log-prob, id, text]; those of a `truncated` distribution apart
    and bare."""
    meta = answer.get("meta_info") or {}
    reason = meta.get("finish_reason") or {}
    if truncated:
        logprobs = meta.get("output_token_sampling_logprobs") or []
    else:
        logprobs = [entry[0] for entry in meta.get("output_token_logprobs") or []]
    top = meta.get("output_top_logprobs") or []
    return {
        "tokens": list(answer.get("output_ids") or []),
        "logprobs": logprobs,
        "reason": reason.get("type"),
        "matched": str(reason.get("matched")),
        "version": meta.get("weight_version"),
        "top_ids": [[entry[1] for entry in place] for place in top],
        "top_logprobs": [[entry[0] for entry in place] for place in top],
    }
