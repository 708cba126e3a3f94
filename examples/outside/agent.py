"""An agent that knows nothing of LightRL: sums by chat completions, with a second try, on the standard library alone.

Where the model answers is in its environment, as OpenAI's clients read it; the task is on its standard input.
"""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.request
from typing import Any


def post(action: str, body: dict[str, Any]) -> dict[str, Any]:
    """Talk to the endpoint: `chat/completions` as everywhere, `reward` as LightRL has it."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/{action}",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as reply:
        return dict(json.load(reply))


def main() -> None:
    task = json.load(sys.stdin)["prompt"]
    messages, reward = list(task["messages"]), 0.0
    for attempt in (1, 2):
        choice = post("chat/completions", {"model": "policy", "messages": messages, "max_tokens": 12})["choices"][0]
        answer = re.findall(r"-?\d+", choice["message"]["content"])
        if answer and answer[-1] == task["label"]:
            reward = 1.0 / attempt
            break
        if choice["finish_reason"] == "length":
            break
        messages += [choice["message"], {"role": "user", "content": "That is not right. Try again."}]
    post("reward", {"reward": reward, "info": {"attempts": attempt}})


if __name__ == "__main__":
    main()
