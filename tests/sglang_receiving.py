"""A package `sglang` whose engines hold weights: each rank of one has its part of a qwen3_moe, which LightRL's own
receiver fills and compares; what it answers is drawn at random. For engines of several ranks where there is no GPU.

Its ranks are threads of one process. A part is what SGLang's rank holds: heads, and rows of all experts over `tp_size`,
or with `ep_size` whole experts; released weights are lost. After each sync a rank's parameters go to the file
`VERSION_ENGINE_RANK.safetensors` in the folder that STAND_IN_KEEPS names (`assembled` puts them together).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sglang_stand_in

ENGINE = '''
import asyncio, importlib, json, os, pathlib, pickle, random, time
import lightrl.engine.sglang_receiver  # while nobody waits for weights to be taken
import torch
from safetensors.torch import save_file
from torch import nn


class Experts(nn.Module):
    """w13 [experts, 2 x width, H] (gates above ups) and w2 [experts, H, width] of one rank."""
    num_fused_shared_experts = 0

    def __init__(self, config, layer, rank, ranks, spread):
        super().__init__()
        self.layer_id = layer
        self.moe_ep_rank, self.moe_ep_size = (rank, ranks) if spread else (0, 1)
        self.num_local_experts = config["num_experts"] // self.moe_ep_size
        self.place, parts = (0, 1) if spread else (rank, ranks)
        self.width, hidden = config["moe_intermediate_size"] // parts, config["hidden_size"]
        self.w13 = nn.Parameter(torch.empty(self.num_local_experts, 2 * self.width, hidden), requires_grad=False)
        self.w2 = nn.Parameter(torch.empty(self.num_local_experts, hidden, self.width), requires_grad=False)

    def load(self, expert, kind, tensor):
        mine = expert - self.moe_ep_rank * self.num_local_experts
        if not 0 <= mine < self.num_local_experts:
            return
        first = self.place * self.width
        if kind == "down_proj":
            self.w2.data[mine].copy_(tensor.narrow(1, first, self.width))
        else:
            row = self.width if kind == "up_proj" else 0
            self.w13.data[mine].narrow(0, row, self.width).copy_(tensor.narrow(0, first, self.width))


class Part(nn.Module):
    """A rank's part of the model."""

    def __init__(self, config, rank, ranks, spread):
        super().__init__()
        self.rank, self.ranks = rank, ranks
        hidden, size = config["hidden_size"], config["head_dim"]
        self.heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
        self.heads["v"], self.size = self.heads["k"], size
        self.whole = nn.ParameterDict()
        self.qkv, self.o, self.experts = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for layer in range(config["num_hidden_layers"]):
            rows = {kind: max(1, count // ranks) * size for kind, count in self.heads.items()}
            self.qkv.append(nn.ParameterDict({k: nn.Parameter(torch.empty(n, hidden), False) for k, n in rows.items()}))
            self.o.append(nn.ParameterDict({"weight": nn.Parameter(torch.empty(hidden, rows["q"]), False)}))
            self.experts.append(Experts(config, layer, rank, ranks, spread))
            norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
            norms |= {"self_attn.q_norm": size, "self_attn.k_norm": size}
            for name, length in norms.items():
                self.keep(f"model.layers.{layer}.{name}.weight", length)
            self.keep(f"model.layers.{layer}.mlp.gate.weight", config["num_experts"], hidden)
        self.keep("model.norm.weight", hidden)
        self.keep("model.embed_tokens.weight", config["vocab_size"], hidden)
        if not config["tie_word_embeddings"]:
            self.keep("lm_head.weight", config["vocab_size"], hidden)

    def keep(self, name, *shape):
        self.whole[name.replace(".", "-")] = nn.Parameter(torch.empty(shape), requires_grad=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            words = name.split(".")
            layer = int(words[2]) if words[1] == "layers" else None
            if "experts" in words:
                self.experts[layer].load(int(words[5]), words[6], tensor)
            elif words[-2] in ("q_proj", "k_proj", "v_proj"):
                kind = words[-2][0]
                target = self.qkv[layer][kind].data
                first = self.rank * self.heads[kind] // self.ranks * self.size  # keys, if fewer, go to several
                target.copy_(tensor.narrow(0, first, len(target)))
            elif words[-2] == "o_proj":
                target = self.o[layer]["weight"].data
                target.copy_(tensor.narrow(1, self.rank * target.shape[1], target.shape[1]))
            else:
                self.whole[name.replace(".", "-")].data.copy_(tensor)


class Manager:
    def __init__(self, arguments):
        self.last_receive_tstamp, self.number, self.version = 0.0, arguments["random_seed"], "default"
        config = json.loads(pathlib.Path(arguments["model_path"], "config.json").read_text())
        config.setdefault("num_experts", config.get("num_local_experts"))  # transformers 5 writes the latter
        self.vocabulary, ranks = config["vocab_size"], arguments["tp_size"]
        dtype = getattr(torch, arguments["dtype"])
        self.parts = [Part(config, rank, ranks, arguments.get("ep_size", 1) > 1).to(dtype) for rank in range(ranks)]
        self.forget()
    def forget(self):
        for part in self.parts:
            for parameter in part.parameters(): parameter.data.fill_(torch.nan)
    async def get_internal_state(self): self.last_receive_tstamp = time.time()
    async def generate_request(self, request, _):
        draw = random.Random(request.rid)
        tokens = [draw.randrange(3, self.vocabulary) for _ in range(request.sampling_params["max_new_tokens"])]
        await asyncio.sleep(0)
        self.last_receive_tstamp = time.time()
        if not request.rid.startswith("warm-up"):
            assert not any(p.isnan().any() for part in self.parts for p in part.parameters()), "no weights"
        logprob = -float(torch.tensor(self.vocabulary).log())
        meta = {"output_token_logprobs": [[logprob, t, None] for t in tokens], "finish_reason": {"type": "length"},
                "weight_version": self.version}
        yield {"output_ids": tokens, "meta_info": meta}
    def abort_request(self, rid): pass
    async def update_weights_from_tensor(self, request, _):
        room, name = request.load_format.rsplit(".", 1)
        load = getattr(importlib.import_module(room), name)
        tensors = [pickle.loads(payload) for payload in request.serialized_named_tensors]
        await asyncio.gather(*(asyncio.to_thread(load, part, given) for part, given in zip(self.parts, tensors)))
        self.version = request.weight_version or self.version
        if name == "receive" and (folder := os.environ.get("STAND_IN_KEEPS")):
            for rank, part in enumerate(self.parts):
                name = f"{request.weight_version}_{self.number}_{rank}.safetensors"
                save_file(dict(part.state_dict()), pathlib.Path(folder, name))
        return True, ""
    async def flush_cache(self): return type("Flushed", (), {"success": True})
    async def release_memory_occupation(self, request, _):
        if "weights" in request.tags: self.forget()
    async def resume_memory_occupation(self, request, _): pass


class Engine:
    def __init__(self, **arguments):
        self.server_args = arguments
        print("starting with", arguments, flush=True)
        torch.set_num_threads(1)
        self.loop, self.tokenizer_manager = asyncio.new_event_loop(), Manager(arguments)
    def get_all_child_pids(self): return []
    def shutdown(self): pass
'''
VERSION = "0.5.17"


def install(folder: Path) -> Path:
    """Write the package, with what pip would know of it; returns what to put on the path."""
    path = sglang_stand_in.install(folder)
    (path / "sglang" / "__init__.py").write_text(ENGINE)
    names = [*sglang_stand_in.NAMES.split(), "ep_size"]
    text = f"import dataclasses\nServerArgs = dataclasses.make_dataclass('ServerArgs', {names})\n"
    (path / "sglang" / "srt" / "server_args.py").write_text(text)
    about = path / f"sglang-{VERSION}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {VERSION}\n")
    return path


def assembled(folder: Path, version: int, *, heads: int, kv_heads: int, spread: bool) -> list[dict[str, Any]]:
    """What each engine held of a version, put together to whole tensors under the checkpoint's names.

    `spread`: over the ranks lie whole experts, not parts of each.
    """
    import torch
    from safetensors.torch import load_file

    engines: dict[str, dict[int, dict[str, Any]]] = {}
    for file in folder.glob(f"{version}_*.safetensors"):
        _, engine, rank = file.stem.split("_")
        engines.setdefault(engine, {})[int(rank)] = load_file(file)
    wholes = []
    for found in engines.values():
        parts = [found[rank] for rank in range(len(found))]
        whole: dict[str, Any] = {}
        for name in parts[0]:
            here = [part[name] for part in parts]
            place, layer, *rest = name.split(".")
            prefix = f"model.layers.{layer}"
            if place == "whole":
                assert all(torch.equal(t, here[0]) for t in here)
                whole[layer.replace("-", ".")] = here[0]
            elif place == "qkv":
                count = heads if rest[0] == "q" else kv_heads
                apart = here if count >= len(here) else here[:: len(here) // count]
                whole[f"{prefix}.self_attn.{rest[0]}_proj.weight"] = torch.cat(apart)
            elif place == "o":
                whole[f"{prefix}.self_attn.o_proj.weight"] = torch.cat(here, 1)
            else:
                whole |= _experts(f"{prefix}.mlp.experts", rest[0], here, spread)
        wholes.append(whole)
    return wholes


def _experts(prefix: str, kind: str, parts: list[Any], spread: bool) -> dict[str, Any]:
    import torch

    if kind == "w2":
        stacks = {"down_proj": torch.cat(parts, 0 if spread else 2)}
    else:
        halves = zip(*(part.chunk(2, 1) for part in parts), strict=True)
        stacks = {n: torch.cat(h, 0 if spread else 1) for n, h in zip(("gate_proj", "up_proj"), halves, strict=True)}
    return {f"{prefix}.{i}.{name}.weight": t for name, stack in stacks.items() for i, t in enumerate(stack)}
