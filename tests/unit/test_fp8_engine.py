"""Weights for an engine in FP8: which are quantised, what is sent, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightrl.config.schema import Config, EngineConfig, RunConfig
from lightrl.engine import sglang_arguments, sglang_host, sglang_start
from lightrl.engine.sglang_derived import Derived
from lightrl.engine.sglang_rehearsal import rehearse
from lightrl.engine.sglang_requests import Model
from lightrl.errors import UserError
from lightrl.kernels import fp8 as kernels
from lightrl.models import fp8
from lightrl.models.fp8 import Fp8Plan
from lightrl.sync.buckets import plan_buckets

BF16 = torch.bfloat16


def layout(**shapes: tuple[int, ...]) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    return [(name.replace("__", "."), shape, BF16) for name, shape in shapes.items()]


DENSE = layout(
    model__embed_tokens__weight=(1024, 256),
    model__layers__0__self_attn__q_proj__weight=(256, 256),
    model__layers__0__self_attn__k_proj__weight=(128, 256),
    model__layers__0__self_attn__v_proj__weight=(128, 256),
    model__layers__0__self_attn__q_norm__weight=(128,),
    model__layers__0__self_attn__o_proj__weight=(256, 256),
    model__layers__0__self_attn__o_proj__bias=(256,),
    model__layers__0__mlp__gate_proj__weight=(512, 256),
    model__layers__0__mlp__up_proj__weight=(512, 256),
    model__layers__0__mlp__down_proj__weight=(256, 512),
    lm_head__weight=(1024, 256),
)


def quantised(plan: Fp8Plan) -> set[str]:
    return {name.removeprefix("model.layers.0.").removesuffix(".weight") for name in plan.names}


def test_projections_are_quantised_and_nothing_else() -> None:
    plan = Fp8Plan.of(DENSE)
    attention = {f"self_attn.{p}_proj" for p in "qkvo"}
    assert quantised(plan) == attention | {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    names = [name for name, _, _ in plan.layout]
    at = names.index("model.layers.0.self_attn.k_proj.weight")
    assert plan.layout[at][1:] == ((128, 256), torch.float8_e4m3fn)
    assert plan.layout[at + 1] == ("model.layers.0.self_attn.k_proj.weight_scale_inv", (1, 2), torch.float32)
    assert [name for name in names if "scale" not in name] == [name for name, _, _ in DENSE]
    assert set(plan.kept) == {"model.embed_tokens", "lm_head"}
    assert plan.config()["weight_block_size"] == [128, 128]


def test_parts_that_are_no_whole_blocks_stay_with_those_they_are_fused_with() -> None:
    """Of two GPUs each would hold 64 rows of k: q and v stay, too."""
    plan = Fp8Plan.of(DENSE, parts=2)
    assert quantised(plan) == {"self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    assert {"model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"} <= set(plan.kept)
    with pytest.raises(ValueError, match="none of its matrices has sides that are multiples of 1024"):
        Fp8Plan.of(DENSE, parts=8)


def test_experts_go_together_and_routers_stay() -> None:
    experts = {f"experts__{e}__{part}_proj__weight": (128, 128) for e in range(2) for part in ("gate", "up", "down")}
    rest = {
        "gate__weight": (2, 128),
        "shared_expert__up_proj__weight": (128, 128),
        "shared_expert_gate__weight": (1, 128),
    }
    moe = layout(**{f"model__layers__0__mlp__{name}": shape for name, shape in {**experts, **rest}.items()})
    plan = Fp8Plan.of(moe)
    assert len(plan.names) == 7
    assert plan.kept == ("model.layers.0.mlp.gate", "model.layers.0.mlp.shared_expert_gate")
    narrow = [(n, (96, 128) if "shared_expert.up" in n else s, d) for n, s, d in moe]  # an engine may fuse it with them
    with pytest.raises(ValueError, match="none of its matrices"):
        Fp8Plan.of(narrow)


def test_what_attention_compresses_stays_under_both_names() -> None:
    mla = layout(
        a__q_a_proj__weight=(256, 256), a__kv_a_proj_with_mqa__weight=(576, 256), a__q_b_proj__weight=(256, 256),
        a__kv_b_proj__weight=(256, 512), a__o_proj__weight=(256, 256),
    )  # fmt: skip
    plan = Fp8Plan.of(mla)
    assert plan.names == {"a.q_b_proj.weight", "a.o_proj.weight"}
    assert set(plan.kept) == {"a.q_a_proj", "a.kv_a_proj_with_mqa", "a.fused_qkv_a_proj_with_mqa", "a.kv_b_proj"}


@pytest.mark.parametrize("masters", [torch.float32, BF16])
def test_sent_are_numbers_and_scales_of_what_the_policy_computes_with(
    masters: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    fused = torch.randn(3, 256, 128)  # gate and up of three experts, as they lie in memory
    half = fused.to(BF16)
    source = fused if masters == torch.float32 else half
    names = [f"l.0.experts.{e}.{part}_proj.weight" for e in range(3) for part in ("gate", "up")]
    norm, odd = torch.randn(128), torch.randn(128, 256).T  # not contiguous
    group = [
        ("l.0.norm.weight", norm),
        *zip(names, source.view(6, 128, 128).unbind(0), strict=True),
        ("l.0.o_proj.weight", odd),
    ]
    calls: list[tuple[int, ...]] = []

    def counted(weight: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(tuple(weight.shape))
        return kernels.quantize_weight(weight)

    monkeypatch.setattr(fp8, "quantize_weight", counted)
    plan = Fp8Plan.of([(n, tuple(t.shape), BF16) for n, t in group])
    [sent] = plan.apply([group], BF16)
    assert [(n, tuple(t.shape)) for n, t in sent] == [(n, s) for n, s, _ in plan.layout]
    assert [t.dtype for n, t in sent if n != "l.0.norm.weight"] == [d for n, _, d in plan.layout if "norm" not in n]
    assert calls == [(6, 128, 128), (1, 256, 128)]  # the experts at once
    found = dict(sent)
    assert found["l.0.norm.weight"] is norm
    for name, weight in [*zip(names, half.view(6, 128, 128), strict=True), ("l.0.o_proj.weight", odd.to(BF16))]:
        numbers, scales = kernels.quantize_reference(weight, 128, 128)
        assert torch.equal(found[name].view(torch.uint8), numbers.view(torch.uint8))
        assert torch.equal(found[f"{name}_scale_inv"], scales)
    bytes_of = sum(t.nbytes for n, t in sent if "norm" not in n)
    assert bytes_of / (half.nbytes + 2 * odd.numel()) == pytest.approx(0.5, abs=1e-3)


# ---- refusals


def model(folder: Path, kind: str = "qwen3", dtype: torch.dtype = BF16) -> Model:
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return Model(
        path=folder, layout=DENSE, eos_token_ids=[], decode=str, dtype=dtype, context_length=9, vocab_size=9
    )  # fmt: skip


def test_refused_where_sglang_would_change_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, cuda = EngineConfig(kind="sglang", quantization="fp8"), torch.device("cuda", 0)
    capability = [9, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: tuple(capability))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "card")
    assert sglang_start.fp8_plan(model(tmp_path), EngineConfig(kind="sglang"), cuda) is None
    plan = sglang_start.fp8_plan(model(tmp_path), config, cuda)
    assert plan is not None
    assert len(plan.names) == 7
    with pytest.raises(UserError, match=r"set model.compute_dtype = 'bfloat16'"):
        sglang_start.fp8_plan(model(tmp_path, dtype=torch.float32), config, cuda)
    with pytest.raises(UserError, match="anew on a CPU"):
        sglang_start.fp8_plan(model(tmp_path), config, torch.device("cpu"))
    with pytest.raises(UserError, match="no FP8 scales for models of type llama"):
        sglang_start.fp8_plan(model(tmp_path, "llama"), config, cuda)
    split = EngineConfig(kind="sglang", quantization="fp8", tensor_parallel=16)
    with pytest.raises(UserError, match=r"engine.quantization: none of its matrices .* 2048: set it to 'none'"):
        sglang_start.fp8_plan(model(tmp_path), split, cuda)
    capability[:] = [10, 0]
    with pytest.raises(UserError, match=r"capability 10.0 \(card\)"):
        sglang_start.fp8_plan(model(tmp_path), config, cuda)


@pytest.mark.parametrize(
    ("engine", "key"),
    [
        ({"kind": "transformers"}, "engine.quantization"),
        ({"kind": "sglang_server", "urls": ["http://a:1"]}, "engine.quantization"),
        ({"kind": "sglang", "args": {"kv_cache_dtype": "fp8_e4m3"}}, "engine.args"),
        ({"kind": "sglang", "args": {"quantization": "fp8"}}, "engine.args"),
        ({"kind": "sglang", "args": {"moe_runner_backend": "flashinfer_trtllm"}}, "engine.args"),
    ],
)
def test_rules(engine: dict[str, object], key: str) -> None:
    assert [k for k, _ in Config(engine=EngineConfig(quantization="fp8", **engine)).validate()] == [key]  # type: ignore[arg-type]
    assert not Config(engine=EngineConfig(**engine)).validate()  # type: ignore[arg-type]


def test_rules_allow_what_works() -> None:
    engine = EngineConfig(kind="sglang", quantization="fp8", args={"moe_runner_backend": "triton"})
    assert not Config(run=RunConfig(device="cuda"), engine=engine).validate()


# ---- the engine's side


def test_the_engine_is_told_of_the_form(tmp_path: Path) -> None:
    known = {"json_model_override_args", "x", *_KNOWN}
    plan = Fp8Plan.of(DENSE)
    override = sglang_start.config_override(model(tmp_path), plan)
    message = {"settings": _SETTINGS | {"override": override}, "args": {"json_model_override_args": '{"a": 1}', "x": 2}}
    found = sglang_host.engine_arguments(message, known)
    assert json.loads(found["json_model_override_args"]) == {"a": 1, "quantization_config": plan.config()}
    assert found["x"] == 2
    assert sglang_start.config_override(model(tmp_path), None) == {}
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    quantised = Model(**vars(model(tmp_path)))
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    assert sglang_start.config_override(quantised, None) == {"quantization_config": None}


_SETTINGS = {
    "model_path": "m", "dtype": "bfloat16", "trust_remote_code": False, "context_length": 64, "vocab_size": 9,
    "tensor_parallel": 1, "device": "cuda", "gpu": 0, "capability": [9, 0], "seed": 0, "memory_fraction": 0.5,
    "max_batch": 8, "max_prefill_tokens": 64, "port": 1,
}  # fmt: skip
_KNOWN = {*sglang_arguments.OURS, "dtype", "context_length", "load_format", "log_level", "sampling_backend"}
_KNOWN |= {"grammar_backend", "disable_custom_all_reduce", "disable_prefill_cuda_graph", "cuda_graph_max_bs_decode"}
_KNOWN |= {"attention_backend"}


class Held(nn.Module):
    """A linear layer of an engine in FP8, beside attention with scales of a KV cache."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(128, 128, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.zeros(1, 1), requires_grad=False)
        self.k_scale = nn.Parameter(torch.tensor(5e-4), requires_grad=False)
        self.k_scale._skip_weight_check = True  # type: ignore[attr-defined]
        self.k_scale_float = 5e-4

    def load_weights(self, weights: object) -> None:
        for name, weight in weights:  # type: ignore[attr-defined]
            getattr(self, name).data.copy_(weight)


def test_scales_of_a_kv_cache_are_the_engines_own() -> None:
    plan = plan_buckets(
        [("weight", (128, 128), torch.float8_e4m3fn), ("weight_scale_inv", (1, 1), torch.float32)], 10**6
    )
    held = Held()
    [fill] = rehearse(held, plan, Derived(held)).fills
    held.k_scale.data.fill_(9)
    fill.run()
    assert held.k_scale == torch.tensor(5e-4)


def test_weights_that_are_laid_out_anew_are_refused() -> None:
    plan = plan_buckets(
        [("weight", (128, 128), torch.float8_e4m3fn), ("weight_scale_inv", (1, 1), torch.float32)], 10**6
    )
    held = nn.Sequential(Held())
    held[0].weight_scale_inv.format_ue8m0 = True
    with pytest.raises(ValueError, match=r"laid the FP8 weights of 0 out anew .*fp8_gemm_runner_backend = 'triton'"):
        rehearse(held, plan, Derived(held))
    held[0].weight_scale_inv.format_ue8m0 = False
    held[0].quant_method = type("Method", (), {"use_marlin": True})()
    with pytest.raises(ValueError, match="laid the FP8 weights of 0 out anew"):
        rehearse(held, plan, Derived(held))
