"""On CUDA: the embedded engine by the contract of all engines, and its log-probs against the trainer's in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from engine import contract
from engine.test_transformers_engine import CONFIGS, CONTEXT, EOS, OTHERS, VOCAB, make_engine, stock

from lightrl.distributed.mesh import close_world
from lightrl.engine.base import GenerateRequest, SamplingParams
from lightrl.engine.transformers import TransformersEngine
from lightrl.training.trainer import Trainer

pytestmark = pytest.mark.gpu


def cuda_engine(model: torch.nn.Module, **options: Any) -> TransformersEngine:
    return make_engine(model, device="cuda", dtype=next(model.parameters()).dtype, **options)


@pytest.mark.parametrize("name", [*CONFIGS, *OTHERS])
@pytest.mark.parametrize("share", [True, False])
def test_float32_contract(name: str, share: bool) -> None:
    model = stock((CONFIGS | OTHERS)[name]()).cuda()
    engine = cuda_engine(model, share=share)
    contract.check_greedy(engine, model, VOCAB, tolerance=1e-4)
    contract.check_sampled_logprobs(engine, model, VOCAB, temperature=0.7)
    contract.check_sampled_logprobs(engine, model, VOCAB, temperature=0.7, top_k=9, top_p=0.9)
    contract.check_sampled_logprobs(engine, model, VOCAB, temperature=1.2, top_p=0.8)
    contract.check_length_and_eos(engine, VOCAB, EOS)
    contract.check_stop_ids(engine, VOCAB)
    contract.check_abort(engine, VOCAB)
    contract.check_bad_requests(engine, VOCAB, CONTEXT)
    engine.close()
    assert engine._cache.num_bytes == 0


@pytest.mark.parametrize("name", [*CONFIGS, *OTHERS])
def test_bfloat16_errs_no_more_than_stock(name: str) -> None:
    """Log-probs of sampled tokens against the stock float32 model of the same weights."""
    model = stock((CONFIGS | OTHERS)[name]()).to("cuda", torch.bfloat16)
    exact = stock((CONFIGS | OTHERS)[name]()).to("cuda", torch.bfloat16).float()
    engine = cuda_engine(model)
    contract.check_stop_ids(engine, VOCAB)
    sampling = SamplingParams(max_new_tokens=20, ignore_eos=True)
    requests = [
        GenerateRequest(
            id=str(n), tokens=contract.prompt(n, VOCAB), sampling=sampling, n=6, seeds=tuple(range(n, n + 6))
        )
        for n in (1, 63, 257)
    ]
    ours, theirs = [], []
    for request, completions in zip(requests, contract.run(engine, requests, stagger=2), strict=True):
        for completion in completions:
            ids = torch.tensor(completion.tokens)[:, None]
            truth, rounded = (
                contract.reference_logits(m, request, completion).log_softmax(-1).gather(1, ids)[:, 0]
                for m in (exact, model)
            )
            ours.append((torch.tensor(completion.logprobs) - truth).abs())
            theirs.append((rounded - truth).abs())
    ours_mean, theirs_mean = float(torch.cat(ours).mean()), float(torch.cat(theirs).mean())
    print(f"{name}: {ours_mean:.5f}, stock {theirs_mean:.5f}")
    assert ours_mean <= 1.5 * theirs_mean + 2e-3


@pytest.fixture
def trainer_for(tmp_path: Path):
    made = []

    def build(**sections: Any) -> Trainer:
        made.append(Trainer(tiny_run.make_run(tmp_path, **sections)))
        return made[-1]

    yield build
    for trainer in made:
        trainer.close()
    close_world()


def test_trainer_and_engine_agree_in_bfloat16(trainer_for, tmp_path: Path) -> None:
    """Random weights in the shape of Qwen3-0.6B, a hundred tokens an answer."""
    tiny_run.make_model(
        tmp_path / "model", family="qwen3", vocab_size=151_936, hidden_size=1024, intermediate_size=3072,
        num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=1024,
    )  # fmt: skip
    tiny_run.make_data(tmp_path / "data.jsonl")
    trainer = trainer_for(
        run={"device": "cuda"},
        model={"compute_dtype": "bfloat16"},
        rollout={"group_size": 8, "max_response_tokens": 100},
        algorithm={"minibatches_per_step": 2},
    )
    metrics = trainer.step(trainer.source.next(4))
    print({k: v for k, v in metrics.items() if k.startswith(("mismatch", "time", "perf"))})
    assert 0 < metrics["mismatch/logprob_abs_diff"] <= 0.011


@pytest.mark.model
def test_trainer_and_engine_agree_on_a_real_model(trainer_for, tmp_path: Path, smollm2: Path) -> None:
    """Logits of SmolLM2 reach 40: had the engine rounded them to bfloat16, the difference would be 0.02."""
    tiny_run.make_data(tmp_path / "data.jsonl")
    (tmp_path / "model").symlink_to(smollm2)
    for temperature in (1.0, 0.7):
        trainer = trainer_for(
            run={"device": "cuda"},
            model={"compute_dtype": "bfloat16"},
            rollout={"group_size": 16, "max_response_tokens": 100, "temperature": temperature},
            algorithm={"minibatches_per_step": 2},
        )
        metrics = trainer.step(trainer.source.next(4))
        print({k: v for k, v in metrics.items() if k.startswith(("mismatch", "time", "perf"))})
        assert 0 < metrics["mismatch/logprob_abs_diff"] <= 0.011
