"""What is needed of SGLang's answers, which its engine and its servers give alike. Imports nothing, as the process that
holds SGLang has it too."""

from __future__ import annotations

import base64
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
        "routing": narrow(meta.get("routed_experts")),
    }


def narrow(text: str | None) -> tuple[int, str] | None:
    """Numbers of experts as SGLang sends them, int32 in base64, in as few bytes each as they need, 1 or 2.

    They are most of an answer. One byte is unsigned, two are signed; None stays None.

    >>> narrow(base64.b64encode(bytes([7, 0, 0, 0, 130, 0, 0, 0])).decode())  # 7, 130
    (1, 'B4I=')
    >>> narrow(base64.b64encode(bytes([255, 255, 255, 255, 44, 1, 0, 0])).decode())  # -1, 300
    (2, '//8sAQ==')
    """
    if text is None:
        return None
    wide = base64.b64decode(text)
    low, high = wide[::4], wide[1::4]
    if high.count(0) == len(high):
        return 1, base64.b64encode(low).decode()
    both = bytearray(2 * len(low))
    both[::2], both[1::2] = low, high
    return 2, base64.b64encode(both).decode()
