"""Episodes whose code hangs, floods, forks, raises, prints bytes: each ends within limits, is counted, leaves nothing.

All thousand of them: `PYTHONPATH=src:tests python tests/unit/test_agent_misbehaving.py 1000`.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter

import chat_templates as templates
import psutil
import pytest
from scripted import make_agent, play

from lightrl.observe.metrics import agent_metrics
from lightrl.rewards import sandbox
from lightrl.types import Sample, Status

ORPHANS = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
print("ok")
"""
CODES: dict[str, tuple[str, set[str]]] = {
    "fine": ("print('ok')", set()),
    "hangs": ("while True: pass", {"timeout"}),
    "sleeps": ("import time\ntime.sleep(600)", {"timeout"}),
    "floods": ("while True: print('x' * 9999)", {"output"}),
    "forks": (ORPHANS, set()),
    "forks on": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", {"timeout", "killed"}),
    "raises": ("raise RuntimeError('no')", {"error"}),
    "bytes": ("import sys\nsys.stdout.buffer.write(bytes(range(256)))", {"binary"}),
    "eats memory": ("x = bytearray(4 << 30)", {"memory"}),
    "kills": ("import os\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)", {"error", "killed", "output", ""}),
    "is no call": ("", {"arguments"}),
}
NAMES = list(CODES)


def run_episodes(count: int, group_size: int = 10) -> tuple[list[Sample], dict[str, float]]:
    """`count` episodes, all at once: each runs the code that its seed chooses, then answers."""
    limits = {"timeout": 1.5, "memory_mib": 256, "processes": 8, "output_kib": 16, "concurrency": 4}
    agent = make_agent(
        templates.CHATML, tools=["python"], parser="hermes", sandbox=limits, turn_timeout=600.0, concurrency=64,
        max_observation_tokens=64,
    )  # fmt: skip

    def script(said: str, seed: int) -> str:
        if "<|im_start|>tool" in said:
            return "done"
        code = CODES[NAMES[seed % len(NAMES)]][0]
        call = json.dumps({"name": "python", "arguments": {"code": code}}) if code else "no call"
        return f"<tool_call>{call}</tool_call>"

    try:
        groups = play(agent, script, prompts=-(-count // group_size), group_size=group_size, tokens=1000)
    finally:
        agent.close()
    return [s for group in groups for s in group.samples], agent_metrics(groups).result()


def code_of(sample: Sample) -> str:
    """The name of what the sample ran."""
    said = sample.metadata["messages"][0]["content"]
    for name, (code, _) in CODES.items():
        if code and json.dumps(code) in said:
            return name
    return "is no call"


def left_behind() -> list[int]:
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        if str(sandbox._CHILD) in (process.info["cmdline"] or ()):
            found.append(process.info["pid"])
    return found


def check(samples: list[Sample], metrics: dict[str, float]) -> Counter[str]:
    assert left_behind() == []
    ran: Counter[str] = Counter()
    counted: Counter[str] = Counter()
    for sample in samples:
        name = code_of(sample)
        ran[name] += 1
        failures = sample.metadata.get("tool_failures", {})
        allowed = CODES[name][1]
        assert set(failures) <= allowed, (name, failures)
        assert failures or not allowed or "" in allowed, name
        assert (sample.status, sample.metadata["turns"], sample.answer) == (Status.COMPLETED, 2, "done")
        counted.update(failures)
    told = {k.removeprefix("agent/tool_failures_"): v for k, v in metrics.items() if "tool_failures" in k}
    assert told == dict(counted)
    assert metrics["agent/tool_calls"] == 1
    return ran


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox's limits are Linux's")
def test_none_escapes_its_limits() -> None:
    ran = check(*run_episodes(30))
    assert sum(ran.values()) == 30
    assert len(ran) >= 8  # nearly every kind


if __name__ == "__main__":
    began = time.monotonic()
    episodes, numbers = run_episodes(int(sys.argv[1]))
    print(dict(check(episodes, numbers)))
    print({name: value for name, value in numbers.items() if name.startswith("agent/")})
    print(f"{len(episodes)} episodes in {time.monotonic() - began:.0f} s, no process left")
