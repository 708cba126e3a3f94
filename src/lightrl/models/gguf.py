"""A Llama model in llama.cpp's GGUF format -> a Hugging Face folder.

Reads the weights (dequantised, never rounded again), the config and the byte-level BPE tokenizer that the file carries.
Only the Llama architecture: q and k rows are stored interleaved there, which other architectures do not do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightrl.errors import UserError

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
# Values of tokenizer.ggml.token_type, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
_CONTROL_TOKEN = 3
_USER_DEFINED_TOKEN = 4


def convert(path: Path, out: Path) -> None:
    """Write `path` as a Hugging Face folder `out` (created): config, generation config, float32 weights, tokenizer.

    float32, because a 4-bit weight is `scale * q + min` of two float16 numbers: bfloat16 would round it a second time.
    """
    reader = open_gguf(path)
    out.mkdir(parents=True, exist_ok=True)
    tensors = read_tensors(reader)
    config = read_config(reader, tied="lm_head.weight" not in tensors)
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", _generation_config(config))
    _write_tokenizer(reader, config, out)
    _write_weights(tensors, out / "model.safetensors")


def open_gguf(path: Path) -> GGUFReader:
    """Open a GGUF file. UserError when the `gguf` package is missing or the file holds another architecture."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError("reading GGUF files needs the gguf package: pip install 'lightrl-torch[quickstart]'") from error
    reader = GGUFReader(path)
    architecture = _value(reader, "general.architecture")
    if architecture != "llama":
        raise UserError(f"{path}: architecture {architecture!r}; only 'llama' files can be converted")
    return reader


def hf_name(name: str) -> str:
    """Name of a tensor in Hugging Face's Llama.

    >>> hf_name("blk.3.ffn_up.weight")
    'model.layers.3.mlp.up_proj.weight'
    """
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    kind, _, rest = name.partition(".")
    layer, _, leaf = rest.partition(".")
    if kind != "blk" or leaf not in _BLOCK_NAMES:
        raise UserError(f"GGUF tensor {name!r} has no place in a Llama model")
    return f"model.layers.{layer}.{_BLOCK_NAMES[leaf]}"


def deinterleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's row order of q and k.

    llama.cpp rotates neighbouring rows (0, 1), (2, 3) … of a head, Hugging Face rows (0, d/2), (1, d/2 + 1) …; the
    files are written with the rows of each head moved accordingly. [heads * d, H] -> [heads * d, H].
    """
    rows, width = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def read_tensors(reader: GGUFReader) -> dict[str, np.ndarray]:
    """All weights in float32 under their Hugging Face names, in the file's order."""
    from gguf import dequantize

    num_heads = _value(reader, "llama.attention.head_count")
    num_kv_heads = _value(reader, "llama.attention.head_count_kv", num_heads)
    tensors = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if tensor.name.endswith("attn_q.weight"):
            weight = deinterleave(weight, num_heads)
        elif tensor.name.endswith("attn_k.weight"):
            weight = deinterleave(weight, num_kv_heads)
        tensors[hf_name(tensor.name)] = np.ascontiguousarray(weight)
    return tensors


def read_config(reader: GGUFReader, tied: bool) -> dict[str, Any]:
    """`config.json` of the model. `tied`: the output head is the embedding."""

    def get(key: str, default: Any = None) -> Any:
        return _value(reader, f"llama.{key}", default)

    hidden, num_heads = get("embedding_length"), get("attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": get("vocab_size", len(reader.fields["tokenizer.ggml.tokens"].data)),
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": get("attention.head_count_kv", num_heads),
        "head_dim": get("rope.dimension_count", hidden // num_heads),
        "hidden_act": "silu",
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": _shortest(get("attention.layer_norm_rms_epsilon")),
        # transformers 5 reads rope_parameters; rope_theta beside it is what 4.x and other readers look for.
        "rope_theta": _shortest(get("rope.freq_base", 10000.0)),
        "rope_parameters": {"rope_type": "default", "rope_theta": _shortest(get("rope.freq_base", 10000.0))},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _value(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _value(reader, "tokenizer.ggml.padding_token_id"),
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": "float32",
    }


def read_tokenizer(reader: GGUFReader) -> Tokenizer:
    """The byte-level BPE tokenizer stored in the file, as transformers reads it from a GGUF."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if _value(reader, "tokenizer.ggml.model") != "gpt2":
        raise UserError("only GGUF files with a byte-level BPE tokenizer (tokenizer.ggml.model gpt2) can be read")
    tokens: list[str] = _value(reader, "tokenizer.ggml.tokens")
    types: list[int] = _value(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL_TOKEN, _USER_DEFINED_TOKEN):
            special = kind == _CONTROL_TOKEN
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
    return tokenizer


def _write_tokenizer(reader: GGUFReader, config: dict[str, Any], out: Path) -> None:
    tokens = _value(reader, "tokenizer.ggml.tokens")
    roles = {
        "bos_token": config["bos_token_id"],
        "eos_token": config["eos_token_id"],
        "pad_token": config["pad_token_id"],
        "unk_token": _value(reader, "tokenizer.ggml.unknown_token_id"),
    }
    read_tokenizer(reader).save(str(out / "tokenizer.json"))
    template = _value(reader, "tokenizer.chat_template")
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{role: tokens[i] for role, i in roles.items() if i is not None},
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
    }
    if template is not None:
        (out / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_json(out / "tokenizer_config.json", tokenizer_config)


def _write_weights(tensors: dict[str, np.ndarray], path: Path) -> None:
    from safetensors.numpy import save_file

    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it private to the user


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {key: value for key, value in ids.items() if value is not None}


def _value(reader: GGUFReader, key: str, default: Any = None) -> Any:
    entry = reader.fields.get(key)
    return default if entry is None else entry.contents()


def _shortest(value: float) -> float:
    """The float32 in the file as the decimal that was meant: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
