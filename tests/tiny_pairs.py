"""Runs of `lightrl dpo` and `lightrl rm` in miniature: the model of tiny_sft, and pairs of answers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import tiny_run
import tiny_sft


def pair(rng: random.Random) -> dict[str, Any]:
    """A question of one or three turns, a better answer and a worse one of another length."""
    messages = tiny_sft.conversation(rng, rng.randint(1, 2))[:-1]
    words = ["".join(rng.choices(tiny_run.CHARACTERS, k=rng.randint(1, 9))) for _ in range(2)]
    chosen, rejected = ([{"role": "assistant", "content": word}] for word in words)
    return {"prompt": messages, "chosen": chosen, "rejected": rejected}


def make_data(path: Path, rows: int = 12, seed: int = 0) -> Path:
    rng = random.Random(seed)
    path.write_text("".join(json.dumps(pair(rng)) + "\n" for _ in range(rows)))
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def settings(folder: Path, **sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Sections of a config for a run in `folder`; keyword sections add to and replace keys."""
    base = tiny_sft.settings(folder)
    base["data"] = {"path": str(folder / "data.jsonl"), "apply_chat_template": True}
    del base["sft"]
    base |= {"dpo": {"batch_size": 5}, "rm": {"batch_size": 5}}
    for name, section in sections.items():
        base[name] = base.get(name, {}) | section
    return base


def make_run(folder: Path, **sections: dict[str, Any]) -> Any:
    """Everything a run needs in `folder`; returns its `Config`."""
    from lightrl.config.load import load_config

    if not (folder / "model").exists():
        tiny_sft.make_model(folder / "model")
    if not (folder / "data.jsonl").exists():
        make_data(folder / "data.jsonl")
    return load_config(**settings(folder, **sections))


def encoded(folder: Path, row: dict[str, Any], side: str) -> tuple[list[int], list[bool]]:
    """Ids of a conversation as ChatML has them, and which are the answer's own."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    ids: list[int] = []
    counts: list[bool] = []
    for messages, counted in ((row["prompt"], False), (row[side], True)):
        for message in messages:
            for part, own in (
                (["<|im_start|>", *message["role"], " "], False),
                ([*message["content"], "<|im_end|>"], counted),
            ):
                ids += tokenizer.convert_tokens_to_ids(part)
                counts += [own] * len(part)
    return ids, counts


def logprobs(model: Any, folder: Path, row: dict[str, Any], side: str) -> Any:
    """Log-probs of the answer's tokens, the conversation alone through the stock model."""
    import torch

    ids, counts = encoded(folder, row, side)
    all_logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return torch.stack([all_logprobs[i, ids[i + 1]] for i in range(len(ids) - 1) if counts[i + 1]])
