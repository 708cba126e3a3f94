"""On one GPU: GAE's scan, and the critic's values, gradients, way off the GPU and back, and learning."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_run
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from lightrl.algorithms.advantages import TokenRewards, gae
from lightrl.config.load import load_config
from lightrl.distributed.fsdp import reshard_all
from lightrl.distributed.mesh import close_world, init_world
from lightrl.kernels.scan import reverse_scan, reverse_scan_reference
from lightrl.training.critic import Critic
from lightrl.training.packing import TrainSample, pack
from lightrl.training.trainer import Trainer

pytestmark = pytest.mark.gpu

GAE = {"algorithm": {"advantage": "gae"}}


@pytest.fixture(autouse=True)
def _world():
    yield
    close_world()


@pytest.mark.parametrize("length", [1, 63, 257, 8191])
def test_scan_equals_the_serial_one(length):
    g = torch.Generator("cuda").manual_seed(length)
    inputs = torch.randn(5, length, generator=g, device="cuda", dtype=torch.float64)
    decay = torch.rand(5, length, generator=g, device="cuda", dtype=torch.float64) + 0.3
    decay[:, ::31] = 0.0
    expected = reverse_scan_reference(decay, inputs)
    torch.testing.assert_close(reverse_scan(decay, inputs), expected, atol=1e-10, rtol=1e-10)
    found = reverse_scan(decay.float(), inputs.float())
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


def test_gae_at_full_size_equals_the_serial_one():
    """B = 256, T = 131,072, float32 in and out, within 1e-5 of the serial recurrence in float64."""
    g = torch.Generator("cuda").manual_seed(0)
    shape = (256, 131_072)
    ends = torch.rand(shape, generator=g, device="cuda") < 3e-5
    ends[:, -1] = True
    values = torch.randn(shape, generator=g, device="cuda")
    rewards = torch.randn(shape, generator=g, device="cuda").masked_fill_(~ends, 0.0)
    found = gae(TokenRewards(rewards=rewards, ends=ends, values=values), gamma=1.0, gae_lambda=0.95)
    goes_on = (~ends).double()
    deltas = rewards + goes_on * values.double().roll(-1, -1) - values.double()
    expected = reverse_scan_reference(0.95 * goes_on, deltas)
    assert float(((found.double() - expected).abs() / expected.abs().clamp(min=1.0)).max()) < 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.05)])
def test_values_and_gradients_equal_the_stock_float32_model(tmp_path: Path, dtype: str, tolerance: float):
    """Packed, with a shared prompt. Errors relative to the largest value, and to each gradient's norm."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=512, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    settings = load_config(**GAE, critic={"path": str(tmp_path)}, model={"compute_dtype": dtype})
    critic = Critic.build(settings, init_world("cuda"))
    g = torch.Generator().manual_seed(0)
    prompt = torch.randint(1, 64, (63,), generator=g).tolist()
    samples = [
        TrainSample(
            group_index=0, index=i, prompt=prompt, response=torch.randint(1, 64, (n,), generator=g).tolist(),
            loss_mask=[1] * n, rollout_logprobs=None, advantage=1.0,
        )
        for i, n in enumerate((1, 63, 257))
    ]  # fmt: skip
    values = critic(pack([samples], [[1.0] * 3]))
    weights = torch.randn(len(values), generator=g).cuda()
    (values * weights).sum().backward()
    stock = AutoModelForSequenceClassification.from_pretrained(tmp_path, attn_implementation="eager").cuda()
    expected = []
    for s in samples:
        ids = torch.tensor([s.prompt + s.response], device="cuda")
        expected.append(stock.score(stock.model(ids).last_hidden_state[0, len(prompt) - 1 : -1])[:, 0])
    wanted = torch.cat(expected)
    (wanted * weights).sum().backward()
    assert float((values - wanted).detach().abs().max() / wanted.detach().abs().max()) < tolerance
    reshard_all(critic.module)
    gradients = {name: p.grad.full_tensor() for name, p in critic.module.model.named_parameters()}
    for name, parameter in stock.named_parameters():
        assert gradients[name].dtype == torch.float32
        error = float((gradients[name] - parameter.grad).norm() / parameter.grad.norm())
        assert error < tolerance, (name, error)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_with_a_critic_learns_and_leaves_the_gpu(tmp_path: Path, dtype: str):
    """Policy and critic go to the host and back before each step, bit for bit. Reward and explained variance rise."""
    config = tiny_run.make_run(
        tmp_path,
        **GAE,
        run={"steps": 30, "device": "cuda"},
        model={"compute_dtype": dtype},
        rollout={"prompts_per_step": 8, "group_size": 8},
        optim={"lr": 1e-2},
        critic_optim={"lr": 3e-3},
        log={"save_samples": False},
    )
    trainer = Trainer(config, reward=lambda s: tiny_run.count_letter(s) + 0.5 * (s.prompt.label in "ab"))
    metrics = []
    for _ in range(30):
        reshard_all(trainer.critic.module)
        before = [p.to_local().clone() for p in trainer.critic.module.parameters()]
        trainer.rollouts.state._offloader.offload()
        assert all(p.to_local().untyped_storage().nbytes() == 0 for p in trainer.critic.module.parameters())
        trainer.rollouts.state.come_back()
        assert all(
            torch.equal(p.to_local(), b) for p, b in zip(trainer.critic.module.parameters(), before, strict=True)
        )
        metrics.append(trainer.step(trainer.source.next(8)))
    trainer.close()
    explained = [m["critic/explained_variance"] for m in metrics]
    rewards = [m["reward/mean"] for m in metrics]
    print(dtype, [round(e, 2) for e in explained], [round(r, 2) for r in rewards])
    assert sum(explained[-5:]) / 5 > 0.3
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 5 * 0.2
