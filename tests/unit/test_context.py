"""Contexts of models whose rotation depends on how long a sequence is: packed and batched rows must not mix them."""

from __future__ import annotations

import pytest
import torch
from test_packed_models import COMMON, TEMPERATURE
from transformers import AutoConfig, AutoModelForCausalLM

from lightrl.models.attention import Segments
from lightrl.models.context import context_length, longrope_limit, longrope_notice
from lightrl.models.registry import prepare_packed
from lightrl.training.packing import TrainSample, pack
from lightrl.training.policy import PolicyModule

LIMIT = 64
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [8.0] * 4,
    "original_max_position_embeddings": LIMIT,
    "factor": 8.0,
}


def phi3() -> AutoConfig:
    sizes = COMMON | {"original_max_position_embeddings": LIMIT, "initializer_range": 0.3}
    return AutoConfig.for_model("phi3", **sizes, rope_parameters=dict(LONGROPE))


def logprobs_alone(model: torch.nn.Module, sample: TrainSample) -> torch.Tensor:
    """The stock model's, of one sample fed by itself."""
    logits = model(torch.tensor([sample.prompt + sample.response]), use_cache=False).logits[0]
    log_p = (logits[len(sample.prompt) - 1 : -1].float() / TEMPERATURE).log_softmax(-1)
    return log_p.gather(-1, torch.tensor(sample.response)[:, None])[:, 0]


def make_sample(group: int, prompt: int, response: int) -> TrainSample:
    ids = torch.randint(3, 97, (prompt + response,), generator=torch.Generator().manual_seed(group)).tolist()
    return TrainSample(
        group_index=group,
        index=0,
        prompt=ids[:prompt],
        response=ids[prompt:],
        loss_mask=[1] * response,
        rollout_logprobs=None,
        advantage=0.0,
    )


@torch.no_grad()
def worst_difference(lengths: list[tuple[int, int]]) -> float:
    """Packed together against alone, over samples of (prompt, response) tokens."""
    torch.manual_seed(1)
    stock = AutoModelForCausalLM.from_config(phi3(), attn_implementation="eager").eval()
    model = AutoModelForCausalLM.from_config(phi3()).eval()
    model.load_state_dict(stock.state_dict())
    prepare_packed(model)
    samples = [make_sample(i, *length) for i, length in enumerate(lengths)]
    batch = pack([[s] for s in samples], [[1.0]] * len(samples))
    ours, _ = PolicyModule(model, packed=True)(batch, Segments.from_microbatch(batch, torch.device("cpu")), TEMPERATURE)
    alone = torch.cat([logprobs_alone(stock, s) for s in samples])
    return float((ours - alone).abs().max())


def test_longrope_is_exact_within_its_limit() -> None:
    """And one sample beyond it changes the log-probs of the others in its row: why the context ends there."""
    longest = context_length(phi3())
    assert longest == LIMIT
    assert worst_difference([(9, 5), (longest - 7, 7), (1, 30)]) < 1e-5
    assert worst_difference([(9, 5), (longest - 6, 7), (1, 30)]) > 1e-2


def test_what_is_said_of_it() -> None:
    text = longrope_notice(phi3())
    assert text is not None
    assert text.startswith("phi3 rotates a sequence of more than 64 tokens otherwise")
    assert text.endswith("held to 64 tokens, of a context of 512")


@pytest.mark.parametrize("kind", ["default", "yarn", "linear", "dynamic", "llama3"])
def test_other_rotations_keep_their_context(kind: str) -> None:
    """Fixed ones, and NTK by length, which changes only beyond `max_position_embeddings`."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": LIMIT}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    config = AutoConfig.for_model("llama", **COMMON, rope_parameters=rope)
    assert (context_length(config), longrope_limit(config), longrope_notice(config)) == (512, None, None)


def test_rotations_by_kind_of_layer() -> None:
    parts = {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    config = phi3()
    config.rope_parameters = parts
    assert context_length(config) == LIMIT
