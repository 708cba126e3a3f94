"""Slots of the embedded engine's cache, and the spans in which rows of unlike length are read."""

from __future__ import annotations

import random
from typing import Any

from lightrl.engine.batch import Row, Slots
from lightrl.engine.kv_cache import plan_spans


def test_rows_of_unlike_length_are_read_in_spans() -> None:
    assert plan_spans([5], 1536, "cpu") == [(0, 1)]
    assert plan_spans([10, 11, 10, 900, 901], 1536, "cpu") == [(0, 3), (3, 5)]
    assert plan_spans([900, 10, 900, 10], 1536, "cpu") == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert plan_spans([900, 10, 900, 10], 1536, "cuda") == [(0, 4)]


def test_slots_close_their_holes_with_rows_from_the_end() -> None:
    job: Any = object()
    slots = Slots(max_rows=8)
    rows = [Row(job=job, number=i, rng=random.Random(0)) for i in range(6)]
    assert [slots.take(row) for row in rows] == [0, 1, 2, 3, 4, 5]
    for slot in (1, 3, 5):
        slots.release(slot)
    assert slots.num_free == 5
    assert slots.compact() == [(4, 1)]
    assert [row.number for row in slots.running()] == [0, 4, 2]
    # the finished row's slot 3 still holds its prompt until another takes it
    assert slots.find_prompt(job) == 0
    assert slots.take(rows[3]) == 3
    slots.forget_prompts()
    assert slots.find_prompt(job) is None
