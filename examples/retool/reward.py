"""Right is 1; a wrong answer that at least ran code without an error gets 0.1, as ReTool's curve is helped along."""

from __future__ import annotations

import re

from lightrl.types import Sample, Status


def reward(sample: Sample) -> dict[str, float]:
    """The last number of the last turn against the label; `ran` is the metric `reward/parts/ran`."""
    numbers = re.findall(r"-?\d+", sample.graded)
    right = numbers[-1:] == [str(sample.prompt.label)] and sample.status is Status.COMPLETED
    ran = sample.metadata["tool_calls"] > 0 and not sample.metadata.get("tool_failures")
    return {"score": max(float(right), 0.1 * ran), "right": float(right), "ran": float(ran)}
