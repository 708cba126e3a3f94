"""The tool `python`: code of the model's in the sandbox."""

from __future__ import annotations

from lightrl.rewards.sandbox import Ran, Sandbox
from lightrl.rollout.tools.base import Tool, ToolError, definition_of

_SAID = {
    "timeout": "the code ran longer than it may and was ended",
    "memory": "the code needed more memory than it may have",
    "output": "the code printed more than it may and was ended",
    "binary": "the code printed bytes that are no text",
    "killed": "the code was ended by a signal",
}


def python_tool(sandbox: Sandbox, timeout: float) -> Tool:
    """Each call is a run of its own: names do not last. It is ended a little before `timeout` seconds."""
    limit = min(sandbox.config.timeout, max(0.9 * timeout - 1.0, 0.5 * timeout))

    def python(code: str) -> str:
        """Run Python code and return what it prints. Each call starts anew: names of earlier calls are gone."""
        return told(sandbox.run_sync(code, timeout=limit, echo=True))

    return Tool(definition=definition_of(python), function=python, concurrency=sandbox.config.concurrency)


def told(ran: Ran) -> str:
    """The output, for the model; ToolError for what failed, with what was printed before."""
    if ran.kind == "binary":
        raise ToolError(_SAID["binary"], "binary")
    output = ran.stdout if not ran.stderr else f"{ran.stdout}\n{ran.stderr}".strip("\n")
    output = output.replace("\0", "\ufffd")
    if ran.ok:
        return output or "(no output)"
    if ran.kind == "error":
        raise ToolError(f"exit status {ran.exit_code}", "error", output)
    raise ToolError(_SAID[ran.kind], ran.kind, output)
