"""On one GPU: gradients of adapters against peft on the stock model on the CPU, and a run whose engine has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_run
import torch
from lora_values import set_values

pytest.importorskip("peft")

from lightrl.config.schema import LoraConfig, ModelConfig
from lightrl.distributed.mesh import close_world, init_world
from lightrl.models.export_adapter import export_adapter
from lightrl.training.packing import TrainSample, pack
from lightrl.training.policy import Policy
from lightrl.training.trainer import Trainer
from lightrl.wrappers import clean_name

pytestmark = pytest.mark.gpu
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "head_dim": 64}


def differences(folder: Path, device: str, dtype: str, kernels: str) -> dict[str, float]:
    """Of the log-probs, and by the norm of each gradient."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tiny_run.make_model(folder / "model", family="qwen3", **SIZES)
    settings = ModelConfig(
        path=str(folder / "model"), compute_dtype=dtype, kernels=kernels, activation_checkpointing=True
    )
    policy = Policy.load(settings, init_world(device), adapters=LoraConfig(rank=4, alpha=8.0))
    set_values(policy.model)
    g = torch.Generator().manual_seed(0)
    options = {"rollout_logprobs": None, "advantage": 0.0}
    samples = [
        TrainSample(
            group_index=n, index=0, prompt=torch.randint(3, 29, (n,), generator=g).tolist(),
            response=torch.randint(3, 29, (m,), generator=g).tolist(), loss_mask=[1] * m, **options,
        )
        for n, m in ((5, 31), (1, 7), (40, 60))
    ]  # fmt: skip
    logprobs, _ = policy(pack([[s] for s in samples], [[1.0]] * 3), 1.0)
    logprobs.sum().backward()
    export_adapter(policy.module, folder / "adapter", base="", is_main=True)
    stock = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    peft = PeftModel.from_pretrained(stock, str(folder / "adapter"), is_trainable=True)
    theirs = []
    for s in samples:
        log_p = peft(input_ids=torch.tensor([s.prompt + s.response])).logits[0, len(s.prompt) - 1 : -1].log_softmax(-1)
        theirs.append(log_p.gather(-1, torch.tensor(s.response)[:, None])[:, 0])
    torch.cat(theirs).sum().backward()
    found = {"log-probs": float((logprobs.detach().cpu() - torch.cat(theirs)).abs().max())}
    ours = {clean_name(n): p.grad for n, p in policy.model.named_parameters() if p.grad is not None}
    for name, parameter in peft.named_parameters():
        if parameter.requires_grad:
            mine = ours.pop(name.removeprefix("base_model.model.")).full_tensor().cpu()
            found[name] = float((mine - parameter.grad).norm() / parameter.grad.norm())
    assert not ours
    close_world()
    return found


@pytest.mark.parametrize("kernels", ["off", "auto"])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 0.06)])
def test_gradients_are_pefts(tmp_path: Path, dtype: str, bound: float, kernels: str) -> None:
    found = differences(tmp_path, "cuda", dtype, kernels)
    print({name: f"{value:.1e}" for name, value in sorted(found.items(), key=lambda item: -item[1])[:3]})
    assert max(found.values()) < bound


@pytest.mark.parametrize("sync", ["adapter", "merged"])
def test_a_run_learns_with_the_adapters_in_its_engine(tmp_path: Path, sync: str) -> None:
    config = tiny_run.make_run(
        tmp_path,
        run={"device": "cuda", "steps": 20},
        model={"compute_dtype": "bfloat16"},
        lora={"rank": 8, "sync": sync},
        optim={"lr": 1e-2},
        checkpoint={"every": 0},
    )
    trainer = Trainer(config)
    trainer.train()
    trainer.close()
    close_world()
    rows = tiny_run.metrics_of(tmp_path, "reward/mean", "mismatch/logprob_abs_diff")
    print([f"{reward:.3f} {difference:.1e}" for _, reward, difference in rows[:: len(rows) - 1]])
    assert max(difference for *_, difference in rows) < 0.02
    assert sum(r for _, r, _ in rows[-5:]) > sum(r for _, r, _ in rows[:5])
