"""SGLang's own loaders against the receiver, in a process of its own: `python sglang_loaders.py FOLDER`.

Each of CASES is a tiny model of SGLang's on a CPU, as a rank of a tensor or expert parallel group would build it. It
loads a Hugging Face checkpoint with its own `load_weights`; then, with all memory overwritten, the same tensors come
through buffers. One line of JSON a case says what differs.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from lightrl.engine import sglang_receiver as receiver
from lightrl.kernels.fp8 import dequantize
from lightrl.models.fp8 import Fp8Plan
from lightrl.sync.buckets import BucketSender, plan_buckets

SMALL: dict[str, Any] = {
    "vocab_size": 130,  # SGLang pads it
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 400,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
MLA: dict[str, Any] = {
    **SMALL,
    **EXPERTS,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100, "rope_theta": 10000.0}
YARN |= {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**SMALL, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", SMALL),
    "qwen3": ("Qwen3", {**SMALL, "head_dim": 16}),
    "qwen3_moe": ("Qwen3Moe", {**SMALL, **EXPERTS, "head_dim": 16, "num_experts": 4}),
    "glm4_moe": (
        "Glm4Moe",
        {**SMALL, **EXPERTS, "head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
        | {"n_group": 1, "topk_group": 1, "use_qk_norm": True},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {**MLA, "first_k_dense_replace": 1, "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
        | {"rope_scaling": YARN},
    ),
    "glm4_moe_lite": ("Glm4MoeLite", {**MLA, "first_k_dense_replace": 1}),
    "gpt_oss": (
        "GptOss",
        {**SMALL, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 7.0},
    ),
}
TP1 = {"tp_rank": 1, "tp_size": 2, "attn_tp_rank": 1, "attn_tp_size": 2, "moe_tp_rank": 1, "moe_tp_size": 2}
TP0 = {key: 0 if "rank" in key else 2 for key in TP1}
EP1 = {**TP1, "moe_tp_rank": 0, "moe_tp_size": 1, "moe_ep_rank": 1, "moe_ep_size": 2}
CASES: list[tuple[str, str, dict[str, int]]] = [(kind, kind, {}) for kind in CONFIGS]
CASES += [(f"{kind} tp{tp['tp_rank']}", kind, tp) for kind in CONFIGS for tp in (TP0, TP1)]
CASES += [("gpt_oss tp1 gpu", "gpt_oss", TP1)]  # the experts' loader is another on a CPU
CASES += [(f"{kind} ep1", kind, EP1) for kind in ("qwen3_moe", "glm4_moe", "deepseek_v3")]

BLOCKS: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "num_key_value_heads": 2}
MLA_BLOCKS = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "v_head_dim": 64}
MLA_BLOCKS |= {"q_lora_rank": 256, "qk_nope_head_dim": 56}
FP8: dict[str, dict[str, Any]] = {
    "qwen2": BLOCKS,
    "qwen3": {**BLOCKS, "num_key_value_heads": 1},  # two ranks: half a block of keys, so q, k and v stay
    "qwen3_moe": {**BLOCKS, "moe_intermediate_size": 256},
    "glm4_moe": {**BLOCKS, "moe_intermediate_size": 256},
    "deepseek_v3": MLA_BLOCKS,
    "glm4_moe_lite": MLA_BLOCKS,
}
"""Sizes in whole blocks, for engines in FP8."""
CASES += [(f"{kind} fp8", kind, {}) for kind in FP8]
CASES += [(f"{kind} fp8 tp{tp['tp_rank']}", kind, tp) for kind in FP8 for tp in (TP0, TP1)]
CASES += [("qwen3_moe fp8 ep1", "qwen3_moe", EP1)]


def checkpoint(kind: str, folder: Path, fp8: bool = False) -> Path:
    """Of random bfloat16 values, under the names that transformers writes."""
    name, fields = CONFIGS[kind]
    fields = {**fields, **(FP8[kind] if fp8 else {})}
    path = folder / (f"{kind}_fp8" if fp8 else kind)
    if not path.exists():
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**fields)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():
            for tensor in [*model.parameters(), *(b for n, b in model.named_buffers() if "correction" in n)]:
                tensor.copy_(torch.randn(tensor.shape))
        model.save_pretrained(path)
    return path


class SGLang:
    """What of SGLang's process is needed to build models."""

    def __init__(self, path: Path, folder: Path) -> None:
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.distributed import parallel_state
        from sglang.srt.layers.dp_attention import initialize_dp_attention
        from sglang.srt.runtime_context import get_parallel, publish
        from sglang.srt.server_args import ServerArgs

        def prepare(path: Path, override: dict[str, Any]) -> Any:
            arguments = ServerArgs(
                json_model_override_args=json.dumps(override),
                model_path=str(path),
                device="cpu",
                dtype="bfloat16",
                load_format="dummy",
                skip_tokenizer_init=True,
                attention_backend="torch_native" if "gpt_oss" not in path.name else "intel_amx",
                sampling_backend="pytorch",
                grammar_backend="none",
            )
            config = ModelConfig.from_server_args(arguments)
            publish(arguments, role="scheduler", hf_config=config.hf_config)
            return arguments, config

        self._prepare = prepare
        self.parallel = get_parallel()
        arguments, config = prepare(path, {})
        method = f"file://{folder}/rendezvous"
        parallel_state.init_distributed_environment(1, 0, distributed_init_method=method, local_rank=0, backend="gloo")
        parallel_state.initialize_model_parallel()
        initialize_dp_attention(arguments, config)

    def build(self, path: Path, override: dict[str, Any] | None = None) -> nn.Module:
        from sglang.srt.configs.device_config import DeviceConfig
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.model_loader import get_model

        _, config = self._prepare(path, override or {})
        return get_model(
            model_config=config, load_config=LoadConfig(load_format="dummy"), device_config=DeviceConfig("cpu")
        )


def memory(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, and what MLA derives from them."""
    found = dict(model.named_parameters())
    for path, module in model.named_modules():
        found |= {f"{path}.{key}": value for key, value in vars(module).items() if key in ("w_kc", "w_vc")}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def equal(a: Tensor, b: Tensor) -> bool:
    """Bit by bit."""
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def as_on_a_gpu() -> None:
    """On a CPU, SGLang would lay FP8 weights out anew, for instructions that few CPUs have."""
    from sglang.srt.layers.quantization import fp8

    fp8._is_cpu = False


def far_off(model: nn.Module, plain: nn.Module) -> list[str]:
    """FP8 parameters of a model that do not stand for those of another, loaded from the same in bfloat16."""
    theirs, wrong = dict(plain.named_parameters()), []
    mine = dict(model.named_parameters())
    for name, tensor in mine.items():
        if tensor.dtype == torch.float8_e4m3fn:
            scales = mine[name.removesuffix("weight") + "weight_scale_inv"]
            exact = theirs[name].float()
            step = exact.abs() / 16 + scales.float().max() * 2.0**-10
            if ((dequantize(tensor, scales) - exact).abs() > step).any():
                wrong.append(name)
    return wrong


def check(model: nn.Module, tensors: list[tuple[str, Tensor]]) -> dict[str, Any]:
    """Load twice, SGLang's way and ours, and compare."""
    with torch.no_grad():
        model.load_weights((name, tensor.clone()) for name, tensor in tensors)  # type: ignore[operator]
        expected = {name: tensor.detach().clone() for name, tensor in memory(model).items()}
        places = {name: tensor.data_ptr() for name, tensor in memory(model).items()}
        for tensor in memory(model).values():
            tensor.fill_(7)
    layout = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors]
    sender = BucketSender(plan_buckets(layout, 3000), torch.device("cpu"))
    sender.mailbox.begin()
    receiver.open_buffers(model, pickle.loads(base64.b64decode(sender.introduction())))
    sender.wait_done()

    def run(loader: Callable[..., None]) -> dict[str, Any]:
        sender.mailbox.begin()
        thread = threading.Thread(target=loader, args=(model, []))
        thread.start()
        try:
            return sender.send([[pair] for pair in tensors])
        finally:
            thread.join(60)

    with torch.no_grad():
        for tensor in memory(model).values():
            tensor.fill_(7)  # what the rehearsal has filled, too: SGLang releases its memory between syncs
    run(receiver.receive)
    got = memory(model)
    report = run(receiver.verify)
    filled = sum(fill.target.numel() for fill in model.__dict__["_lightrl_receiver"].fills)
    return {
        "wrong": [name for name, tensor in expected.items() if not equal(tensor, got[name])],
        "moved": [name for name, tensor in got.items() if tensor.data_ptr() != places[name]],
        "derived": [name for name in got if name.endswith(("w_kc", "w_vc"))],
        "differing": report["differing"],
        "not compared": sum(p.numel() for p in model.parameters()) - filled - report["compared"],
        "filled": filled,
    }


def check_fp8(sglang: SGLang, path: Path, tensors: list[tuple[str, Tensor]], parallel: dict[str, int]) -> Any:
    """The same for an engine in FP8; and what its numbers and scales stand for."""
    as_on_a_gpu()
    plan = Fp8Plan.of([(n, tuple(t.shape), t.dtype) for n, t in tensors], parallel.get("tp_size", 1))
    model = sglang.build(path, {"quantization_config": plan.config()})
    [sent] = plan.apply([tensors], torch.bfloat16)
    report = check(model, sent)
    plain = sglang.build(path)
    with torch.no_grad():
        plain.load_weights(iter(tensors))  # type: ignore[operator]
    kinds = [parameter.dtype for parameter in model.parameters()]
    return report | {"far off": far_off(model, plain), "fp8": kinds.count(torch.float8_e4m3fn)}


def main(folder: Path, chosen: list[str]) -> None:
    sglang = SGLang(checkpoint("llama", folder), folder)
    for name, kind, parallel in CASES:
        if chosen and name not in chosen:
            continue
        path = checkpoint(kind, folder, "fp8" in name)
        tensors = [pair for file in sorted(path.glob("*.safetensors")) for pair in load_file(file).items()]
        tensors.sort(key=lambda pair: pair[0])
        try:
            with sglang.parallel.override(**parallel):
                report = check_fp8(sglang, path, tensors, parallel) if "fp8" in name else None
                if report is None:
                    model = sglang.build(path)
                    for module in model.modules():
                        if name.endswith("gpu") and hasattr(module, "use_padded_loading"):
                            module.use_padded_loading = False
                    report = check(model, tensors)
        except Exception as error:
            traceback.print_exc()
            report = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"case": name, **report}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
