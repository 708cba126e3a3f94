"""A run of `lightrl sft` in miniature: the model of tiny_run, with the tokens and the template of ChatML."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import tiny_run

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def make_model(folder: Path, **changes: Any) -> Path:
    """As tiny_run's, with a head that is not tied: it overfits a few conversations in seconds."""
    from transformers import AutoTokenizer

    tiny_run.make_model(folder, **{"vocab_size": 32, "tie_word_embeddings": False, **changes})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    return folder


def conversation(rng: random.Random, turns: int) -> list[dict[str, Any]]:
    """Questions and answers of random letters, of different lengths."""
    words = ["".join(rng.choices(tiny_run.CHARACTERS, k=rng.randint(1, 9))) for _ in range(2 * turns)]
    return [{"role": ("user", "assistant")[i % 2], "content": word} for i, word in enumerate(words)]


def make_data(path: Path, rows: int = 12, seed: int = 0) -> Path:
    rng = random.Random(seed)
    lines = [json.dumps({"messages": conversation(rng, 1 + i % 3)}) for i in range(rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def settings(folder: Path, **sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Sections of a config for a run in `folder`; keyword sections add to and replace keys."""
    base: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder / "run"), "steps": 4, "device": "cpu"},
        "model": {"path": str(folder / "model"), "compute_dtype": "float32"},
        "data": {"path": str(folder / "data.jsonl"), "input_key": "messages", "apply_chat_template": True},
        "sft": {"batch_size": 5},
        "optim": {"lr": 1e-3},
        "checkpoint": {"every": 1, "keep_last": 3, "async_save": False},
        "log": {"trackers": ["jsonl"]},
    }
    for name, section in sections.items():
        base[name] = base.get(name, {}) | section
    return base


def make_run(folder: Path, **sections: dict[str, Any]) -> Any:
    """Everything a run needs in `folder`; returns its `Config`."""
    from lightrl.config.load import load_config

    if not (folder / "model").exists():
        make_model(folder / "model")
    if not (folder / "data.jsonl").exists():
        make_data(folder / "data.jsonl")
    return load_config(**settings(folder, **sections))


def rows_of(path: Path) -> list[list[dict[str, Any]]]:
    return [json.loads(line)["messages"] for line in path.read_text().splitlines()]


def by_hand(folder: Path, rows: list[list[dict[str, Any]]]) -> tuple[float, dict[str, Any], int]:
    """(loss, gradients, trained tokens): each conversation alone through the stock model, token by token as ChatML has
    them; the answers and what ends them count, all alike."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    losses = []
    for messages in rows:
        ids: list[int] = []
        counts: list[bool] = []
        for message in messages:
            for part, counted in (
                (["<|im_start|>", *message["role"], " "], False),
                ([*message["content"], "<|im_end|>"], message["role"] == "assistant" and message.get("train", True)),
            ):
                ids += tokenizer.convert_tokens_to_ids(part)
                counts += [counted] * len(part)
        logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        picked = [-logprobs[i, ids[i + 1]] for i in range(len(ids) - 1) if counts[i + 1]]
        losses += picked
    loss = torch.stack(losses).sum() / len(losses)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}, len(losses)


def watched(trainer: Any) -> list[dict[str, Any]]:
    """Gradients of each update to come, whole, as they are before the optimizer steps."""
    from lightrl.wrappers import clean_name

    seen: list[dict[str, Any]] = []

    def look(*_: Any) -> None:
        named = trainer.policy.module.named_parameters()
        seen.append({clean_name(n).removeprefix("model."): p.grad.full_tensor().clone() for n, p in named})

    trainer.optimizer.register_step_pre_hook(look)
    return seen


def train(folder: str, overrides: str = "{}") -> None:
    """Entry of child processes: train the run in `folder` with more sections as JSON."""
    import sys

    sys.path.insert(0, str(Path(__file__).parent))
    from lightrl.distributed.mesh import close_world
    from lightrl.training.sft import SFTTrainer

    trainer = SFTTrainer(make_run(Path(folder), **json.loads(overrides)))
    trainer.train()
    trainer.close()
    close_world()


if __name__ == "__main__":
    import sys

    train(*sys.argv[1:])
