"""The quickstart's data, and the shipped recipes."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest

from lightrl.config import load_config
from lightrl.data.tasks import HELD_OUT, SYSTEM_PROMPT, arithmetic, arithmetic_pairs, write_arithmetic


def test_rows_are_right_and_split_without_overlap() -> None:
    train, test = arithmetic()
    assert (len(train), len(test)) == (160, HELD_OUT)
    expressions = Counter(row["metadata"]["expression"] for row in train + test)
    assert set(expressions.values()) == {1}
    assert set(expressions) == {f"{a} {op} {b}" for a in range(10) for b in range(10) for op in "+-"}
    for row in train + test:
        left, operator, right = row["metadata"]["expression"].split()
        answer = int(left) + int(right) if operator == "+" else int(left) - int(right)
        assert row["label"] == str(answer)
        assert row["input"] == [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": f"What is {left} {operator} {right}?"},
        ]


def test_same_expressions_and_answers_as_reasoning_gym() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (needs a C compiler)")
    drawn = reasoning_gym.create_dataset(
        "chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1, size=4000, seed=0
    )
    theirs = {item["metadata"]["expression"]: item["answer"] for item in drawn}
    train, test = arithmetic()
    assert {row["metadata"]["expression"]: row["label"] for row in train + test} == theirs


def test_files_are_the_same_on_every_run(tmp_path: Path) -> None:
    """Digests written down here: a curve in the README belongs to exactly these rows."""
    for _ in range(2):
        write_arithmetic(tmp_path / "data")
    digests = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (tmp_path / "data").iterdir()}
    assert digests == {
        "train.jsonl": "8e9ee553d0aae1b212bf6e52305631595c9e91cd33f5b314074f8f439b2a44a6",
        "test.jsonl": "5a977679b2e1c9fdf05b7d2a04725abb2303f3a21a8159820f655f439e6ffc4a",
        "train_pairs.jsonl": "3291330c2fee93a778440ef50c4fb154fc3e7aeea25f614454885518b6c0f160",
        "test_pairs.jsonl": "dea4e63db61598c28caf793a7a2338e0950d00e3b8d1c1cce061e10c5627714e",
    }
    rows = [json.loads(line) for line in (tmp_path / "data" / "test.jsonl").read_text().splitlines()]
    assert rows == arithmetic()[1]


def test_pairs_prefer_the_number_alone() -> None:
    train, test = arithmetic()
    for row, pair in zip(train + test, arithmetic_pairs(train) + arithmetic_pairs(test), strict=True):
        assert pair["prompt"] == row["input"]
        (chosen,), (rejected,) = pair["chosen"], pair["rejected"]
        assert chosen == {"role": "assistant", "content": row["label"]}
        assert rejected == {"role": "assistant", "content": f"The answer is {row['label']}."}


def test_another_seed_is_another_split() -> None:
    held_out = [{row["label"] + row["metadata"]["expression"] for row in arithmetic(seed)[1]} for seed in (0, 1)]
    assert held_out[0] != held_out[1]


CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.mark.parametrize("recipe", sorted(CONFIGS.rglob("*.toml")), ids=lambda path: path.stem)
def test_recipe_is_valid_and_fits_a_screen(recipe: Path) -> None:
    config = load_config(recipe)
    assert config.required() == []
    lines = recipe.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 40
    assert lines[0].startswith("# ")
