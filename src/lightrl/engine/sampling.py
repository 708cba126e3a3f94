"""Picking the next token: greedy, temperature, top-k, top-p, by inverse CDF from one uniform number a token.

One uniform a token makes a draw depend on its own logits and its own random stream only, whatever else is in the batch.
The log-prob that comes back is of the distribution really drawn from: tempered, truncated, renormalised (greedy: the
plain softmax). Shapes: `R` rows, `V` vocabulary, `K` candidates left by truncation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightrl.engine.base import GenerateRequest, SamplingParams

# The CDF is walked in two levels, blocks first: a full cumulative sum over V costs as much as the exponential itself.
_BLOCK = 128
# On a CPU rows are drawn a few at a time: temporaries of 2 MB stay in cache (3x faster at V = 49152).
_CPU_CHUNK = 2**19


def check_sampling(params: SamplingParams) -> None:
    """Raise ValueError for parameters that describe no distribution."""
    if params.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, not {params.max_new_tokens}")
    if not 0 <= params.temperature < float("inf"):
        raise ValueError(f"temperature must be 0 (greedy) or a positive number, not {params.temperature}")
    if not 0 < params.top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, not {params.top_p}")
    if params.top_k < 0:
        raise ValueError(f"top_k must be 0 (off) or positive, not {params.top_k}")
    cut = params.temperature == 0 or params.top_p < 1 or params.top_k > 0
    if params.top_logprobs < 0 or (params.top_logprobs and cut):
        raise ValueError("top_logprobs is a number, and goes with a temperature, top_p = 1 and top_k = 0 only")
    if any(not s for s in params.stop):
        raise ValueError("a stop string is empty")


def check_request(request: GenerateRequest, *, context_length: int, vocab_size: int, has_decoder: bool) -> None:
    """Raise ValueError, naming the request, for one that no engine with these limits can ever serve."""
    where = f"request {request.id!r}"
    tokens = request.tokens
    if request.n < 1:
        raise ValueError(f"{where}: n must be at least 1, not {request.n}")
    if request.seeds is not None and len(request.seeds) != request.n:
        raise ValueError(f"{where}: {len(request.seeds)} seeds for {request.n} answers")
    if not tokens:
        raise ValueError(f"{where}: the prompt is empty")
    if len(tokens) >= context_length:
        raise ValueError(f"{where}: {len(tokens)} prompt tokens leave no room in a context of {context_length}")
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise ValueError(f"{where}: token ids must lie in 0..{vocab_size - 1}")
    try:
        check_sampling(request.sampling)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if request.sampling.stop and not has_decoder:
        raise ValueError(f"{where}: stop strings need an engine that was given a tokenizer")


def sample(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> tuple[Tensor, Tensor]:
    """One token a row: (ids [R] int64, log-probs [R] float32).

    `logits` is [R, V] in float32; row r is drawn by `params[r]` with `uniforms[r]` in [0, 1]. Rows of NaN, or without a
    finite logit, give a NaN log-prob.
    """
    kinds = [_kind(p) for p in params]
    device = logits.device
    u = torch.tensor(uniforms, dtype=torch.float64, device=device)
    if len(set(kinds)) == 1:
        return _sample_kind(kinds[0], logits, params, u)
    ids = torch.empty(len(params), dtype=torch.int64, device=device)
    logprobs = torch.empty(len(params), dtype=torch.float32, device=device)
    for kind in sorted(set(kinds)):
        chosen = [r for r, k in enumerate(kinds) if k == kind]
        rows = torch.tensor(chosen, device=device)
        ids[rows], logprobs[rows] = _sample_kind(kind, logits[rows], [params[r] for r in chosen], u[rows])
    return ids, logprobs


def likeliest(logits: Tensor, params: Sequence[SamplingParams]) -> list[tuple[list[int], list[float]]]:
    """The `top_logprobs` likeliest tokens of each row of logits [R, V], and their log-probs; none where none are asked.

    Fewer where the vocabulary is smaller.
    """
    counts = [p.top_logprobs for p in params]
    if not any(counts):
        return [([], [])] * len(counts)
    temperature = torch.tensor([p.temperature or 1.0 for p in params], dtype=logits.dtype, device=logits.device)
    values, ids = (logits / temperature[:, None]).log_softmax(-1).topk(min(max(counts), logits.shape[-1]), dim=-1)
    rows = zip(counts, ids.tolist(), values.tolist(), strict=True)
    return [(top[:count], logprobs[:count]) for count, top, logprobs in rows]


def _kind(params: SamplingParams) -> str:
    if params.temperature == 0:
        return "greedy"
    if params.top_k > 0:
        return "top_k"
    return "top_p" if params.top_p < 1 else "full"


def _sample_kind(kind: str, logits: Tensor, params: Sequence[SamplingParams], u: Tensor) -> tuple[Tensor, Tensor]:
    if kind == "greedy":
        return sample_greedy(logits)
    temperature = torch.tensor([p.temperature for p in params], dtype=logits.dtype, device=logits.device)
    if kind == "full":
        return sample_full(logits, temperature, u)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=logits.device)
    if kind == "top_p":
        return sample_truncated(logits, temperature, None, top_p, u)
    return sample_truncated(logits, temperature, [p.top_k for p in params], top_p, u)


def sample_greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest token of each row, and its log-prob under the plain softmax."""
    best, ids = logits.max(dim=-1)
    return ids, best - torch.logsumexp(logits, dim=-1)


def sample_full(logits: Tensor, temperature: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """A draw from softmax(logits / temperature); `temperature` [R] positive, `u` [R] float64."""
    num_rows, vocab = logits.shape
    rows = max(1, _CPU_CHUNK // vocab) if logits.device.type == "cpu" else num_rows
    if num_rows <= rows:
        return _sample_chunk(logits, temperature, u)
    chunks = zip(logits.split(rows), temperature.split(rows), u.split(rows), strict=True)
    ids, logprobs = zip(*(_sample_chunk(*chunk) for chunk in chunks), strict=True)
    return torch.cat(ids), torch.cat(logprobs)


def _sample_chunk(logits: Tensor, temperature: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, vocab = logits.shape
    scaled = _scaled(logits, temperature)
    weights = scaled.exp()
    if vocab % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, _BLOCK - vocab % _BLOCK))
    blocks = weights.view(num_rows, -1, _BLOCK)
    block_cdf = _cumsum(blocks.sum(dim=-1).double())
    total = block_cdf[:, -1:]
    target = u[:, None] * total
    block = _first_above(block_cdf, target)
    before = torch.where(block > 0, block_cdf.gather(1, (block - 1).clamp_min(0)), 0.0)
    inside = _cumsum(blocks[torch.arange(num_rows, device=logits.device), block[:, 0]].double())
    ids = (block * _BLOCK + _first_above(inside, target - before)).clamp_max(vocab - 1)
    logprobs = scaled.gather(1, ids) - total.log()
    return ids[:, 0], logprobs[:, 0].float()


def sample_truncated(
    logits: Tensor, temperature: Tensor, top_k: Sequence[int] | None, top_p: Tensor, u: Tensor
) -> tuple[Tensor, Tensor]:
    """A draw from the `top_k` likeliest tokens (None: all), then from the fewest of them that hold a share `top_p`.

    The order, and the rule that the token which crosses `top_p` is kept, are those of transformers' logits processors.
    """
    scaled = _scaled(logits, temperature)
    vocab = logits.shape[-1]
    if top_k is not None:
        keep = torch.tensor(top_k, device=logits.device)[:, None]
        ordered, order = scaled.topk(min(max(top_k), vocab), dim=-1)
        weights = ordered.double().exp()
        weights = weights.masked_fill(torch.arange(weights.shape[-1], device=keep.device) >= keep, 0.0)
        total = weights.sum(dim=-1, keepdim=True)
    else:
        total = scaled.exp().sum(dim=-1, keepdim=True).double()
        ordered, order = scaled.topk(_nucleus_bound(scaled, total, top_p), dim=-1)
        weights = ordered.double().exp()
    cdf = _cumsum(weights)
    outside = (cdf - weights >= top_p[:, None] * total) & (top_p[:, None] < 1)
    outside[:, 0] = False
    cdf = _cumsum(weights.masked_fill(outside, 0.0))
    place = _first_above(cdf, u[:, None] * cdf[:, -1:])
    logprobs = ordered.gather(1, place) - cdf[:, -1:].log()
    return order.gather(1, place)[:, 0], logprobs[:, 0].float()


def _scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    """(logits - max) / temperature [R, V]: subtracting first keeps precision at small temperatures."""
    return (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature[:, None])


def _nucleus_bound(scaled: Tensor, total: Tensor, top_p: Tensor) -> int:
    """How many of the likeliest tokens surely hold every row's nucleus.

    Tokens less likely than (1 - top_p) / V weigh less than 1 - top_p together, so the others hold top_p. On the CPU
    counting them is far cheaper than sorting V; on a GPU the count would cost a sync, and sorting is cheap.
    """
    vocab = scaled.shape[-1]
    if scaled.device.type != "cpu":
        return vocab
    # a little lower, for rounding
    floor = (0.99 * (1 - top_p)[:, None] / vocab * total).log().float()
    return max(1, int((scaled >= floor).sum(dim=-1).max()))


def _cumsum(values: Tensor) -> Tensor:
    """Along the last dim. torch has no deterministic one on a GPU and refuses: where asked for, the host does it."""
    if values.is_cuda and torch.are_deterministic_algorithms_enabled():
        return values.cpu().cumsum(dim=-1).to(values.device)
    return values.cumsum(dim=-1)


def _first_above(cdf: Tensor, target: Tensor) -> Tensor:
    """First index [R, 1] where the CDF [R, K] exceeds the target [R, 1]: never a token of probability zero.

    A target that rounding (or u = 1) put at or beyond the end falls on the last token that has any.
    """
    end = cdf[:, -1:]
    target = torch.minimum(target, torch.nextafter(end, torch.zeros_like(end)))
    return torch.searchsorted(cdf, target, right=True).clamp_max(cdf.shape[-1] - 1)
