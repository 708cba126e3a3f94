"""Prompt sets that are generated here: the quickstart's arithmetic."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

SYSTEM_PROMPT = "Answer with a number only."
HELD_OUT = 40


def arithmetic(seed: int = 0) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All sums and differences of two one-digit numbers, split at random: (train rows, test rows).

    The 200 expressions are those of reasoning-gym's `chain_sum` with two terms of one digit (a test compares them).
    They are listed here, because that package needs a C compiler to install. Each occurs once: the `HELD_OUT` test
    expressions are never trained on. Same seed, same rows.

    A row: {"input": [system message, {"role": "user", "content": "What is 4 - 1?"}], "label": "3",
    "metadata": {"expression": "4 - 1"}}.
    """
    digits = range(10)
    sums = [(f"{a} + {b}", a + b) for a in digits for b in digits]
    differences = [(f"{a} - {b}", a - b) for a in digits for b in digits]
    rows = [_row(expression, answer) for expression, answer in sums + differences]
    random.Random(seed).shuffle(rows)
    return rows[HELD_OUT:], rows[:HELD_OUT]


def arithmetic_pairs(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Preferences: the number alone, as the system message asks, before a sentence that says it.

    A row: {"prompt": [messages], "chosen": [{"role": "assistant", "content": "3"}], "rejected": [{… "content": "The
    answer is 3."}]}.
    """
    pairs = []
    for row in rows:
        sides = {"chosen": row["label"], "rejected": f"The answer is {row['label']}."}
        answers = {name: [{"role": "assistant", "content": text}] for name, text in sides.items()}
        pairs.append({"prompt": row["input"], **answers})
    return pairs


def write_arithmetic(out: Path, seed: int = 0) -> Path:
    """Write `train.jsonl`, `test.jsonl` and, for preference training, `train_pairs.jsonl` and `test_pairs.jsonl` into
    the folder `out`; the same bytes every time."""
    train, test = arithmetic(seed)
    out.mkdir(parents=True, exist_ok=True)
    files = {"train": train, "test": test}
    files |= {f"{name}_pairs": arithmetic_pairs(rows) for name, rows in files.items()}
    for name, rows in files.items():
        partial = out / f".{name}.jsonl.partial.{os.getpid()}"
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        partial.replace(out / f"{name}.jsonl")
    return out


def _row(expression: str, answer: int) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": f"What is {expression}?"}]
    return {"input": messages, "label": str(answer), "metadata": {"expression": expression}}
