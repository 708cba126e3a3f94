"""On one GPU: losses and corrections as on the CPU, logits of chosen tokens, and steps with all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from ragged import answers, gradients, packed

from lightrl.config.losses import LOSSES
from lightrl.config.schema import AlgorithmConfig, CorrectionConfig
from lightrl.distributed.mesh import close_world
from lightrl.kernels.logits_at import logits_at
from lightrl.observe.metrics import Tally
from lightrl.training.objective import Objective
from lightrl.training.policy import to_device
from lightrl.training.trainer import Trainer
from lightrl.training.update import microbatch_loss

pytestmark = pytest.mark.gpu
DEVICE = "cuda"

CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "sequence": {"use_tis": True, "tis_level": "sequence", "tis_mode": "clip", "use_rs": True, "rs_level": "geometric"},
    "token": {"use_tis": True, "tis_mode": "icepop", "rs_veto_threshold": 0.3, "opsm_delta": 0.01},
}


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_equals_the_cpu(loss: str, correction: str) -> None:
    """float64: the sums within samples are added up in another order, and nothing else differs."""
    objective = Objective.of(AlgorithmConfig(loss=loss), CorrectionConfig(**CORRECTIONS[correction]))
    results = []
    for device in (torch.device("cpu"), torch.device(DEVICE)):
        found = answers(seed=11)
        (packing,) = packed(found)
        packing.batch.old_logprobs = torch.cat([a.old for a in found])
        batch = to_device(packing.batch, device)
        share = microbatch_loss(packing.now.to(device), packing.entropy.to(device), batch, objective, Tally())
        share.backward()
        results.append((float(share.detach()), torch.cat(gradients(found))))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-12)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("num_rows", [1, 63, 257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_at_equal_autograd(num_rows: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(num_rows)
    hidden, head = torch.randn(num_rows, 64, generator=g), torch.randn(997, 64, generator=g)
    ids = torch.randint(997, (num_rows, 20), generator=g).to(DEVICE)
    cotangent = torch.randn(num_rows, 20, generator=g).to(DEVICE)
    results = []
    for precision in (dtype, torch.float64):
        x, w = (t.to(dtype).to(DEVICE, precision).requires_grad_() for t in (hidden, head))
        out = logits_at(x, w, ids) if precision == dtype else (x @ w.T).gather(-1, ids)
        results.append((out, *torch.autograd.grad((out * cotangent).sum(), [x, w])))
    tolerances = [(2e-2, 1e-3)] + ([(2e-2, 1e-3)] if dtype == torch.float32 else [(0.1, 2e-2)]) * 2  # TF32, rounding
    for mine, theirs, (atol, rtol) in zip(*results, tolerances, strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), atol=atol, rtol=rtol)


@pytest.fixture
def trainer_for(tmp_path: Path):
    made = []

    def build(**sections: Any) -> Trainer:
        made.append(Trainer(tiny_run.make_run(tmp_path, run={"device": DEVICE}, **sections)))
        return made[-1]

    yield build
    for trainer in made:
        trainer.close()
    close_world()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("algorithm", "correction"),
    [
        ({"loss": "gspo", "aggregation": "sequence_mean", "minibatches_per_step": 2}, CORRECTIONS["sequence"]),
        ({"minibatches_per_step": 2}, {"use_tis": True, "tis_batch_normalize": True}),
        ({"loss": "dppo_kl", "minibatches_per_step": 2}, {"use_rollout_logprobs": True}),
        ({}, {"score_centering_top_k": 5, "use_tis": True}),
    ],
)
def test_steps(trainer_for: Any, algorithm: dict[str, Any], correction: dict[str, Any], dtype: str) -> None:
    trainer = trainer_for(
        model={"compute_dtype": dtype}, algorithm=algorithm, correction=correction, log={"save_samples": False}
    )
    for _ in range(2):
        metrics = trainer.step(trainer.source.next(4))
        assert metrics["optim/grad_norm"] > 0
        assert metrics["optim/skipped_updates"] == 0
        assert metrics["mismatch/ess"] > (0.999 if dtype == "float32" else 0.9)
