"""A whole run in miniature: a random Llama of 30k parameters, a character tokenizer, a task it can learn from.

Used by tests in their own process and by the scripts they start under torchrun.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHARACTERS = "abcdefghijklmnop 0123456789"


def make_model(folder: Path, *, family: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """Model and tokenizer as a Hugging Face folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<pad>"
    )
    fast.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %} {% endif %}"
    )
    fast.save_pretrained(folder)
    config = AutoConfig.for_model(
        family,
        **{
            "vocab_size": len(vocabulary),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            **changes,
        },
    )
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def make_data(path: Path, rows: int = 12) -> Path:
    """Prompts of different lengths; the label is the letter that `count_letter` counts."""
    with path.open("w") as file:
        for i in range(rows):
            letters = CHARACTERS[i % 10 : i % 10 + 2 + i % 4]
            file.write(json.dumps({"input": letters, "label": CHARACTERS[i % 5]}) + "\n")
    return path


def count_letter(sample: Any) -> float:
    """Share of the response that is the label's letter: dense, so a random model learns from it."""
    return sample.response.count(sample.prompt.label) / max(sample.response_length, 1)


def settings(folder: Path, **sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Sections of a config for a run in `folder`; keyword sections add to and replace keys."""
    base: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder / "run"), "steps": 4, "device": "cpu"},
        "model": {"path": str(folder / "model"), "compute_dtype": "float32"},
        "data": {"path": str(folder / "data.jsonl"), "label_key": "label"},
        "reward": {"type": "tiny_run:count_letter"},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_response_tokens": 8},
        "optim": {"lr": 1e-3},
        "checkpoint": {"every": 1, "keep_last": 3, "async_save": False},
        "log": {"trackers": ["jsonl"], "print_samples": 0},
    }
    for name, section in sections.items():
        base[name] = base.get(name, {}) | section
    return base


def make_run(folder: Path, **sections: dict[str, Any]) -> Any:
    """Everything a run needs in `folder`; returns its `Config`."""
    from lightrl.config.load import load_config

    if not (folder / "model").exists():
        make_model(folder / "model")
        make_data(folder / "data.jsonl")
    return load_config(**settings(folder, **sections))


def exported(folder: Path, step: int, run: str = "run") -> dict[str, Any]:
    """Weights that the run exported at `step` (`checkpoint.hf_every`), float32 as they are trained."""
    from safetensors.torch import load_file

    return load_file(folder / run / "hf" / f"step_{step:06d}" / "model.safetensors")


def metrics_of(folder: Path, *names: str) -> list[tuple[float, ...]]:
    """(step, metric, …) of every step of the run."""
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [(r["step"], *(r[n] for n in names)) for r in records if all(n in r for n in names)]


def train(folder: str, overrides: str = "{}") -> None:
    """Entry of child processes: train the run in `folder` with more sections as JSON."""
    import sys

    sys.path.insert(0, str(Path(__file__).parent))
    from lightrl.distributed.mesh import close_world
    from lightrl.training.trainer import Trainer

    trainer = Trainer(make_run(Path(folder), **json.loads(overrides)))
    trainer.train()
    trainer.close()
    close_world()


if __name__ == "__main__":
    import sys

    train(*sys.argv[1:])
