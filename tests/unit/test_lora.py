"""Low-rank adapters against peft on the stock model; the base that stays; engines, reference, resume and exports."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import tiny_run
import tiny_sft
import torch
from lora_values import set_values
from safetensors.torch import load_file
from test_packed_models import TEMPERATURE, samples, tiny_config
from transformers import AutoModelForCausalLM, MambaConfig

pytest.importorskip("peft")

from lightrl.config.load import load_config
from lightrl.config.schema import Config, LoraConfig, ModelConfig
from lightrl.distributed.mesh import close_world, init_world
from lightrl.errors import UserError
from lightrl.models import gated_delta, lora, registry
from lightrl.models.attention import Segments
from lightrl.models.export_adapter import export_adapter
from lightrl.models.names import adapter_tensors, persistent_tensors
from lightrl.models.shards import whole_tensor
from lightrl.training import setup
from lightrl.training.export_cli import export_run
from lightrl.training.packing import pack
from lightrl.training.policy import Policy, PolicyModule
from lightrl.training.sft import SFTTrainer
from lightrl.training.trainer import Trainer
from lightrl.wrappers import clean_name, is_adapter

RUN = {"lora": {"rank": 3, "alpha": 12.0}, "optim": {"lr": 0.02}}


@pytest.fixture
def world():
    yield init_world("cpu")
    close_world()


def loaded(folder: Path, world, family: str = "qwen3", model: dict | None = None, **adapters) -> Policy:
    """A policy on a tiny checkpoint of the family in `folder`, its adapters at random values."""
    if not folder.exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(tiny_config(family)).save_pretrained(folder)
    settings = ModelConfig(path=str(folder), **{"compute_dtype": "float32", **(model or {})})
    policy = Policy.load(settings, world, adapters=LoraConfig(**{"rank": 3, "alpha": 5.0, **adapters}))
    set_values(policy.model)
    return policy


def copies(policy: Policy) -> dict[str, torch.Tensor]:
    """The frozen weights."""
    policy.reclaim()
    return {name: whole_tensor(t.detach()).clone() for name, t in persistent_tensors(policy.model).items()}


def peft_model(folder: Path, adapter: Path, dtype: torch.dtype = torch.float32, **options):
    from peft import PeftModel

    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return PeftModel.from_pretrained(stock, str(adapter), **options)


@pytest.mark.parametrize(
    ("family", "adapters"),
    [
        ("qwen3", {}),
        ("qwen2", {"use_rslora": True, "target_modules": ["q_proj", "down_proj"]}),
        ("phi3", {}),
        ("deepseek_v3", {}),
        ("gpt_oss", {"rank": 1}),
        ("qwen3_next", {}),
    ],
)
def test_gradients_are_pefts_on_the_stock_model(tmp_path, world, family, adapters):
    """Packed, prompts shared, with blocks computed twice, against each sample alone; what is exported is what peft
    loads."""
    policy = loaded(tmp_path / "model", world, family, {"activation_checkpointing": True}, **adapters)
    before = copies(policy)
    units = samples()
    batch = pack(units, [[1.0] * len(u) for u in units])
    weights = torch.randn(2, batch.targets.numel(), generator=torch.Generator().manual_seed(1))
    logprobs, entropies = policy(batch, TEMPERATURE)
    (logprobs * weights[0] + entropies * weights[1]).sum().backward()
    export_adapter(policy.module, tmp_path / "adapter", base=str(tmp_path / "model"), is_main=True)
    named = {clean_name(n): p for n, p in policy.model.named_parameters()}
    assert [n for n, p in named.items() if p.grad is not None] == [n for n in named if is_adapter(n)]

    peft = peft_model(tmp_path / "model", tmp_path / "adapter", is_trainable=True)
    expected = []
    for sample in (s for unit in units for s in unit):
        logits = peft(input_ids=torch.tensor([sample.prompt + sample.response]), use_cache=False).logits[0]
        log_p = (logits[len(sample.prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)
        chosen = log_p.gather(-1, torch.tensor(sample.response)[:, None])[:, 0]
        expected.append(torch.stack([chosen, -(log_p.exp() * log_p).sum(-1)]))
    together = torch.cat(expected, 1)
    (together * weights).sum().backward()
    torch.testing.assert_close(torch.stack([logprobs, entropies]), together, atol=2e-5, rtol=1e-4)
    theirs = {n.removeprefix("base_model.model."): p for n, p in peft.named_parameters() if p.requires_grad}
    assert {n.replace(".base_layer", "") for n in theirs} == {n for n in named if is_adapter(n)}
    for name, parameter in theirs.items():
        assert parameter.grad.abs().max() > 0, name
        torch.testing.assert_close(
            named[name].grad.full_tensor(), parameter.grad, atol=1e-4, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )
    after = copies(policy)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.interpreter
@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_kernels_go_through_the_adapters(tmp_path, world, family):
    """`model.kernels`: forwards that are exchanged for fused ones call the layers, not their weights."""
    stock = loaded(tmp_path / "model", world, family)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    registry.prepare_packed(model, fuse=True)
    gated_delta.prepare_training(model, torch.device("cpu"), torch.float32)
    lora.inject(model, LoraConfig(rank=3, alpha=5.0))
    values = {name: whole_tensor(t.detach()) for name, t in adapter_tensors(stock.model).items()}
    lora.fill(model, lambda name, shape: values[name].clone())
    batch = pack([samples()[1][1:], samples()[3]], [[1.0], [1.0]])
    expected, entropies = stock(batch, 1.0)
    (expected.sum() + entropies.sum()).backward()
    module = PolicyModule(model, packed=True)
    found, more = module(batch, Segments.from_microbatch(batch, torch.device("cpu")), 1.0)
    (found.sum() + more.sum()).backward()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    wanted = {clean_name(n): p.grad.full_tensor() for n, p in stock.model.named_parameters() if p.grad is not None}
    grads = {clean_name(n): p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert grads.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(grads[name], gradient, atol=1e-4, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_values_by_hand(tmp_path, world):
    """s = alpha / rank or alpha / sqrt(rank); A uniform within 1/sqrt(in), the same for a seed; B zero."""
    policy = loaded(tmp_path / "model", world)
    assert set(lora.scalings(policy.model).values()) == {5 / 3}
    model = ModelConfig(path=str(tmp_path / "model"), compute_dtype="float32")
    again = Policy.load(model, world, adapters=LoraConfig(rank=4, alpha=6, use_rslora=True))
    assert set(lora.scalings(again.model).values()) == {3.0}
    for name, tensor in adapter_tensors(again.model).items():
        whole = tensor.full_tensor()
        if ".lora_A." in name:
            bound = 1 / math.sqrt(whole.shape[1])
            assert 0.8 * bound < whole.abs().max() <= bound, name
        else:
            assert not whole.any(), name
    firsts = []
    for seed in (3, 3, 4):
        lora.initialize(again.model, seed)
        firsts.append(next(iter(adapter_tensors(again.model).values())).full_tensor().clone())
    assert torch.equal(firsts[0], firsts[1])
    assert not torch.equal(firsts[0], firsts[2])
    w, a, b = torch.eye(2), torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [-1.0]])
    assert lora.merged(w, a, b, 0.5).tolist() == [[2.5, 3.0], [-0.5, 0.0]]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_what_is_streamed_is_what_peft_merges(tmp_path, world, family):
    policy = loaded(tmp_path / "model", world, family, sync="merged")
    export_adapter(policy.module, tmp_path / "adapter", base="", is_main=True)
    peft_model(tmp_path / "model", tmp_path / "adapter").merge_and_unload().save_pretrained(tmp_path / "merged")
    expected = load_file(tmp_path / "merged" / "model.safetensors")
    plain = Policy.load(ModelConfig(path=str(tmp_path / "model"), compute_dtype="float32"), world)
    assert policy.stream().layout() == plain.stream().layout()
    for _ in range(2):
        streamed = {name: tensor.clone() for group in policy.stream() for name, tensor in group}
        assert streamed.keys() == expected.keys()
        assert all(torch.equal(streamed[name], tensor) for name, tensor in expected.items())
    before = {name: t.clone() for name, t in plain.lend()}
    lent = {name: t.clone() for name, t in policy.lend()}
    policy.reclaim()
    plain.reclaim()
    assert lent.keys() == before.keys()
    changed = {name for name, t in lent.items() if not torch.equal(t, before[name])}
    assert changed == set(lora.scalings(policy.model))
    assert not any(is_adapter(name) for name in lent)
    assert all(torch.equal(lent[name], streamed[name]) for name in changed)


def test_weights_stay_as_stored_and_adapters_are_float32(tmp_path, world):
    """A bfloat16 checkpoint is not widened; what engines get is bfloat16, merged in float32 and rounded once."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config("qwen3"), dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    policy = loaded(tmp_path / "model", world, model={"compute_dtype": "bfloat16"})
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert {t.dtype for t in persistent_tensors(policy.model).values()} == {torch.bfloat16}
    assert {t.dtype for t in adapter_tensors(policy.model).values()} == {torch.float32}
    batch = pack(samples(), [[1.0] * len(u) for u in samples()])
    policy(batch, 1.0)[0].sum().backward()
    assert {p.grad.dtype for p in policy.parameters()} == {torch.float32}
    policy.reclaim()
    values = {name: t.full_tensor().bfloat16().float() for name, t in adapter_tensors(policy.model).items()}
    streamed = {name: tensor.clone() for group in policy.stream() for name, tensor in group}
    for name, tensor in streamed.items():
        expected = stored[name]
        if name in lora.scalings(policy.model):
            a, b = (values[part] for part in lora.adapter_names(name))
            expected = (stored[name].float() + 5 / 3 * (b @ a)).bfloat16()
            assert not torch.equal(expected, stored[name])
        assert tensor.dtype == torch.bfloat16
        torch.testing.assert_close(tensor, expected, atol=0, rtol=2**-8)
    wide = loaded(tmp_path / "model", world)  # computes in float32: holds what it computes with
    assert {t.dtype for t in persistent_tensors(wide.model).values()} == {torch.float32}


def test_dropout_is_for_gradients_alone(tmp_path, world):
    """With a gradient: peft's, of the same random numbers. Without one, and in the reference: none."""
    policy, plain = (loaded(tmp_path / "model", world, dropout=p) for p in (0.5, 0.0))
    sample = samples()[0][2]
    batch = pack([[sample]], [[1.0]])
    expected = plain.logprobs(batch, 1.0)
    assert torch.equal(policy.logprobs(batch, 1.0), expected)
    torch.manual_seed(5)
    drawn = policy(batch, 1.0)[0].detach()
    assert torch.equal(policy.logprobs(batch, 1.0), expected)
    export_adapter(policy.module, tmp_path / "adapter", base="", is_main=True)
    peft = peft_model(tmp_path / "model", tmp_path / "adapter", is_trainable=True).train()
    torch.manual_seed(5)
    fed = torch.tensor([sample.prompt + sample.response[:-1]])  # as packed: nothing follows the last token
    log_p = peft(input_ids=fed).logits[0].log_softmax(-1)
    theirs = log_p[len(sample.prompt) - 1 :].gather(-1, torch.tensor(sample.response)[:, None])[:, 0]
    torch.testing.assert_close(drawn, theirs, atol=1e-5, rtol=1e-5)
    assert (drawn - expected).abs().max() > 1e-2


# ----- a run


def trained(tmp_path: Path, **sections) -> Trainer:
    trainer = Trainer(
        tiny_run.make_run(
            tmp_path, **{name: RUN.get(name, {}) | sections.get(name, {}) for name in {**RUN, **sections}}
        )
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("sync", ["merged", "adapter"])
def test_the_engine_samples_with_the_adapters(tmp_path, sync):
    trainer = trained(tmp_path, lora={"sync": sync}, run={"steps": 3}, checkpoint={"every": 0})
    differences = [d for _, d in tiny_run.metrics_of(tmp_path, "mismatch/logprob_abs_diff_max")]
    assert len(differences) == 3
    assert max(differences) < 1e-4
    batch = pack(samples_of(trainer), [[1.0] * 2])
    with lora.switched_off(trainer.policy.model):
        without = trainer.policy.logprobs(batch, 1.0)
    assert (trainer.policy.logprobs(batch, 1.0) - without).abs().max() > 1e-2  # it would be seen
    trainer.close()


def samples_of(trainer: Trainer):
    from lightrl.training.packing import TrainSample

    prompt = trainer.prompts[0].tokens
    options = {"group_index": 0, "prompt": prompt, "rollout_logprobs": None, "advantage": 0.0}
    return [[TrainSample(index=i, response=[5 + i, 7, 9], loss_mask=[1, 1, 1], **options) for i in range(2)]]


def test_the_reference_is_the_policy_without_adapters(tmp_path):
    trainer = trained(tmp_path, algorithm={"kl_coef": 0.05}, run={"steps": 2}, checkpoint={"every": 0})
    (_, first), (_, second) = tiny_run.metrics_of(tmp_path, "loss/kl")
    assert abs(first) < 1e-8 < second
    start = Policy.load(trainer.config.model, trainer.world, frozen=True)
    batch = pack(samples_of(trainer), [[1.0] * 2])
    expected, now = start.logprobs(batch, 1.0), trainer.policy.logprobs(batch, 1.0)
    assert torch.equal(trainer.reference.logprobs(batch, 1.0), expected)
    assert (now - expected).abs().max() > 1e-2
    assert torch.equal(trainer.policy.logprobs(batch, 1.0), now)  # they are on again
    trainer.close()
    other = tiny_run.make_model(tmp_path / "other", seed=1)
    config = tiny_run.make_run(tmp_path, **RUN, algorithm={"kl_coef": 0.05}, model={"reference_path": str(other)})
    assert isinstance(setup.load_reference(config, trainer.world, trainer.policy), Policy)  # a model of its own


def states(trainer: Trainer) -> list[torch.Tensor]:
    return [whole_tensor(t).clone() for state in trainer.optimizer.state.values() for t in state.values()]


def test_only_adapters_are_trained_saved_and_resumed_to_the_bit(tmp_path):
    """With a critic beside it, which is trained whole."""
    sections = {
        "algorithm": {"minibatches_per_step": 2, "advantage": "gae"},
        "checkpoint": {"every": 1, "hf_every": 4},
        "lora": {"dropout": 0.2},
    }
    whole = trained(tmp_path, **sections)
    stored = load_file(tmp_path / "model" / "model.safetensors")
    held = copies(whole.policy)
    assert all(torch.equal(held[name], tensor) for name, tensor in stored.items())
    adapters = {name: t.full_tensor().clone() for name, t in adapter_tensors(whole.policy.model).items()}
    assert all(".lora_A." in name or t.abs().max() > 0 for name, t in adapters.items())
    assert len(whole.optimizer.state) == len(adapters) == 2 * 14
    saved = [n for f in (tmp_path / "run" / "checkpoints" / "step_000004").glob("*.safetensors") for n in load_file(f)]
    assert sum(is_adapter(name) for name in saved) == 4 * len(adapters)  # value, two moments, number of steps
    assert all(is_adapter(name) or name.startswith(("rng.", "critic.")) for name in saved)
    moments = states(whole)
    whole.close()
    for step in (3, 4):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{step:06d}")
    resumed = trained(tmp_path, **sections)
    again = adapter_tensors(resumed.policy.model)
    resumed.policy.reclaim()
    assert all(torch.equal(again[name].full_tensor(), tensor) for name, tensor in adapters.items())
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(states(resumed), moments, strict=True))
    resumed.load_checkpoint(tmp_path / "run" / "checkpoints" / "step_000003", weights_only=True)  # `lightrl eval`
    resumed.policy.reclaim()
    assert not all(torch.equal(again[name].full_tensor(), tensor) for name, tensor in adapters.items())
    resumed.close()
    for changed, said in (
        ({"alpha": 3.0}, "its adapters were scaled otherwise: set lora.alpha"),
        ({"rank": 2, "alpha": 8.0}, r"has shape \(3, 32\) there, \(2, 32\) in this run"),
        ({"rank": 0, "alpha": 32.0, "dropout": 0.0}, "holds adapters: set lora.rank to those of its run"),
    ):
        with pytest.raises(UserError, match=said):
            trained(tmp_path, **{**sections, "lora": sections["lora"] | changed}, run={"steps": 5})
    shutil.rmtree(tmp_path / "run")
    trained(tmp_path, lora={"rank": 0, "alpha": 32.0}, run={"steps": 1}).close()
    with pytest.raises(UserError, match=r"holds a whole model: set lora\.rank to 0"):
        trained(tmp_path, run={"steps": 2})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exports_are_pefts_merge(tmp_path, dtype):
    """Of the run itself and of the command: the bits of `merge_and_unload`, and an adapter that peft loads."""
    tiny_run.make_model(tmp_path / "model", dtype=dtype)
    tiny_run.make_data(tmp_path / "data.jsonl")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype)
    stock.save_pretrained(tmp_path / "model")
    trained(tmp_path, run={"steps": 2}, checkpoint={"hf_every": 2}).close()
    close_world()
    export_run(tmp_path / "run", tmp_path / "merged")
    export_run(tmp_path / "run", tmp_path / "adapter", adapter=True)
    hf = tmp_path / "run" / "hf"
    ours, beside = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", hf / "step_000002"))
    adapter, written = (
        load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "adapter", hf / "step_000002_adapter")
    )
    peft = peft_model(tmp_path / "model", tmp_path / "adapter", dtype).merge_and_unload()
    peft.save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    start = load_file(tmp_path / "model" / "model.safetensors")
    assert ours.keys() == beside.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert tensor.dtype == dtype
        assert torch.equal(ours[name], tensor), name
        assert torch.equal(beside[name], tensor), name
    assert sum(not torch.equal(start[name], tensor) for name, tensor in theirs.items()) == 14
    assert adapter.keys() == written.keys()
    assert all(torch.equal(adapter[name], written[name]) for name in adapter)
    ids = torch.tensor([[3, 9, 4, 7]])
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=dtype, attn_implementation="eager")
    assert torch.equal(exported(ids).logits, peft(ids).logits)
    shutil.rmtree(tmp_path / "run")
    trained(tmp_path, lora={"rank": 0, "alpha": 32.0}, run={"steps": 1}).close()
    with pytest.raises(UserError, match=r"--adapter: only for a run with lora\.rank > 0"):
        export_run(tmp_path / "run", tmp_path / "none", adapter=True)


def test_sft_with_adapters(tmp_path):
    tiny_sft.make_model(tmp_path / "model", initializer_range=0.3)
    config = tiny_sft.make_run(
        tmp_path, lora={"rank": 8}, optim={"lr": 0.02}, run={"steps": 12}, checkpoint={"hf_every": 12, "every": 0}
    )
    trainer = SFTTrainer(config)
    trainer.train()
    losses = [loss for _, loss in tiny_run.metrics_of(tmp_path, "loss/total")]
    assert losses[-1] < 0.8 * losses[0]
    stored = load_file(tmp_path / "model" / "model.safetensors")
    held = copies(trainer.policy)
    assert all(torch.equal(held[name], tensor) for name, tensor in stored.items())
    adapter = tmp_path / "run" / "hf" / "step_000012_adapter"
    peft = peft_model(tmp_path / "model", adapter)
    ids = torch.tensor([[3, 9, 4, 7]])
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf" / "step_000012")
    torch.testing.assert_close(exported(ids).logits, peft(input_ids=ids).logits, atol=1e-5, rtol=1e-5)
    trainer.close()


# ----- what is refused


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"lora": {"alpha": 8.0}}, r"lora\.alpha.*only used with lora\.rank > 0"),
        (
            {"lora": {"rank": 2, "sync": "adapter"}, "engine": {"kind": "sglang"}},
            r"lora\.sync.*engine\.kind = 'sglang'",
        ),
        ({"lora": {"rank": 2, "target_modules": []}}, r"lora\.target_modules.*no layer is named"),
        ({"lora": {"rank": 2, "target_modules": "lm_head"}}, r"lora\.target_modules.*lm_head has no adapters"),
        ({"lora": {"rank": 2, "target_modules": ["model.embed_tokens"]}}, "embed_tokens has no adapters"),
        ({"lora": {"rank": -1}}, r"lora\.rank"),
        ({"lora": {"rank": 2, "dropout": 1.0}}, r"lora\.dropout"),
    ],
)
def test_refused_by_the_config(sections, said):
    with pytest.raises(UserError, match=said):
        load_config(**sections)


def test_refused_before_weights_are_read(tmp_path, world, monkeypatch):
    tiny_run.make_run(tmp_path)
    monkeypatch.setattr("lightrl.models.load.load_weights", lambda *_, **__: pytest.fail("weights were read"))
    for targets, said in (
        (["q_proj", "w_pack"], r"lora\.target_modules: LlamaForCausalLM has no 'w_pack'; it has down_proj, "),
        (["self_attn"], r"lora\.target_modules: model\.layers\.0\.self_attn has no adapters here; choose of down_proj"),
    ):
        with pytest.raises(UserError, match=said):
            loaded(tmp_path / "model", world, target_modules=targets)
    mamba = MambaConfig(vocab_size=30, hidden_size=32, num_hidden_layers=1)
    AutoModelForCausalLM.from_config(mamba).save_pretrained(tmp_path / "mamba")
    with pytest.raises(UserError, match=r"lora\.target_modules: .* incompatible with Mamba"):
        loaded(tmp_path / "mamba", world, target_modules=["out_proj"])
    rank = r"lora\.rank: {} is low for none of the layers: the largest, model\.layers\.0\.{}, is {}, and its updates"
    for targets, most, (layer, shape) in (
        ("all-linear", 32, (r"mlp\.down_proj", "32 x 64")),
        (["k_proj", "v_proj"], 16, (r"self_attn\.k_proj", "16 x 32")),
    ):
        with pytest.raises(UserError, match=rank.format(most + 1, layer, shape)):
            loaded(tmp_path / "model", world, target_modules=targets, rank=most + 1)
        with pytest.raises(pytest.fail.Exception, match="weights were read"):  # though k_proj and v_proj have less
            loaded(tmp_path / "model", world, target_modules=targets, rank=most)
    monkeypatch.setattr(lora, "find_spec", lambda name: None)
    monkeypatch.setattr("lightrl.training.policy.Policy.load", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(UserError, match=r"lora\.rank: peft is not installed: pip install 'lightrl-torch\[lora\]'"):
        Trainer(tiny_run.make_run(tmp_path, lora={"rank": 2}))


def test_layers_of_mixtures_that_peft_would_take_for_experts_stay(world, tmp_path):
    """peft turns `down_proj` and the like into adapters of fused experts; ours are on attention there."""
    policy = loaded(tmp_path / "model", world, "glm4_moe")
    assert {name.split(".")[-2] for name in lora.scalings(policy.model)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with pytest.raises(UserError, match="down_proj has no adapters here"):
        loaded(tmp_path / "model", world, "glm4_moe", target_modules=["down_proj"])


def test_off_by_default():
    assert Config().lora.rank == 0
