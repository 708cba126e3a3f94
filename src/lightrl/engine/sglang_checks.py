"""What a server must be for this run, asked at the start; and whether all servers hold the same weights."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from lightrl.engine.sglang_http import RefusedError, Server, ServerError
from lightrl.engine.sglang_requests import Model
from lightrl.engine.sglang_versions import needs_weight_session, version_problem
from lightrl.errors import UserError

_PROBE = 60.0  # seconds


def examine(server: Server, model: Model, *, broadcast: bool) -> None:
    """UserError where the server is not there or cannot work with this policy; sets what weight sync needs to know."""
    where = f"engine.urls: {server.url}"
    try:
        info, about = server.get("/server_info", _PROBE), server.get("/model_info", _PROBE)
        if problem := _version(info) or _settings(info, model, broadcast) or _model(about, model):
            raise UserError(f"{where}: {problem}")
        vocabulary = vocabulary_of(server)
    except UserError:
        raise
    except ServerError as error:
        raise UserError(f"engine.urls: {error}") from None
    if vocabulary not in (None, model.vocab_size):
        raise UserError(
            f"{where}: its model's vocabulary is {vocabulary}, the policy's {model.vocab_size}: start it with the "
            "policy's checkpoint"
        )
    server.tensor_parallel = int(info.get("tp_size", 1))
    server.weight_sessions = needs_weight_session(str(info["version"]))


def _version(info: dict[str, Any]) -> str | None:
    problem = version_problem(str(info.get("version", "of an unknown version")))
    return None if problem is None else problem.split(":")[0].replace("is installed", "runs there")


def _settings(info: dict[str, Any], model: Model, broadcast: bool) -> str | None:
    ours = str(model.dtype).removeprefix("torch.")
    context, dtype = info.get("context_length"), info.get("dtype")
    if isinstance(context, int) and context < model.context_length:
        return f"its context is {context} tokens, the policy's {model.context_length}: start it with a larger one"
    if isinstance(dtype, str) and dtype not in ("auto", ours):
        return f"it computes in {dtype}, the policy in {ours}: start it with --dtype {ours}"
    if info.get("quantization"):
        text = f"it quantises its weights ({info['quantization']}), which cannot be synchronised: start it without"
        return text + "; of a quantised checkpoint with --json-model-override-args '{\"quantization_config\": null}'"
    if info.get("incremental_streaming_output"):
        return "it sends answers in pieces: start it without --incremental-streaming-output"
    if model.routing is not None:
        if not info.get("enable_return_routed_experts"):
            return "it returns no routing (correction.routing_replay): start it with --enable-return-routed-experts"
        if info.get("enable_hierarchical_cache"):
            return "it keeps no routing of prefixes that it brings back: start it without --enable-hierarchical-cache"
    if broadcast and int(info.get("dp_size") or 1) > 1 and not info.get("enable_dp_attention"):
        return "sync.transport = 'nccl' needs servers with --dp-size 1: list each under its own URL, or use 'disk'"
    if broadcast and int(info.get("pp_size") or 1) > 1:
        return "sync.transport = 'nccl' needs servers without pipeline parallelism (--pp-size 1): or use 'disk'"
    return None


def _model(about: dict[str, Any], model: Model) -> str | None:
    """Weights go by the names of this class's checkpoints: the server must run the same one."""
    config = json.loads((model.path / "config.json").read_text(encoding="utf-8"))
    for key in ("model_type", "architectures"):
        theirs, ours = about.get(key), config.get(key)
        if theirs and ours and theirs != ours:
            return f"it serves a model of {key} {theirs}, the policy is {ours}: start it with {model.path}"
    return None


def vocabulary_of(server: Server) -> int | None:
    """Size of the server's vocabulary, None if it does not tell.

    SGLang tells it only where it refuses ids beyond it, and it refuses them only here: in a prompt they end it.
    """
    beyond = 2**31 - 1
    sampling = {"max_new_tokens": 1, "logit_bias": {str(beyond): 0.0}}
    body = {"input_ids": [0], "return_logprob": True, "token_ids_logprob": [beyond], "sampling_params": sampling}
    try:
        server.post("/generate", body, _PROBE)
    except RefusedError as error:
        if error.status != 400:
            raise
        if found := re.search(r"\[0, (\d+)([)\]])", str(error)):
            return int(found[1]) + (found[2] == "]")
    return None


def checksums(server: Server, timeout: float) -> dict[str, str] | None:
    """SGLang's own checksum of every tensor it holds, by process and name; None where it has none (on a CPU)."""
    if server.get("/server_info", _PROBE).get("device") != "cuda":
        return None
    answer = server.post("/weights_checker", {"action": "checksum"}, timeout)
    return {f"{i}/{name}": s for i, rank in enumerate(answer["ranks"]) for name, s in rank["checksums"].items()}


def differing(servers: Sequence[Server], first: Sequence[Any], second: Sequence[Any]) -> str | None:
    """Compare checksums of all servers after the same weights were sent twice; what differs, if anything does."""
    for server, before, after in zip(servers, first, second, strict=True):
        if before is not None and (names := sorted(n for n in after if before.get(n) != after[n])):
            return f"{server.url} holds other values of {_few(names)} when the same weights are sent again"
    by_size: dict[int, tuple[Server, dict[str, str]]] = {}
    for server, found in zip(servers, second, strict=True):
        if found is None:
            continue
        other, expected = by_size.setdefault(server.tensor_parallel, (server, found))
        if names := sorted(n for n in found if expected.get(n) != found[n]):
            return f"{server.url} and {other.url} hold different values of {_few(names)}"
    return None


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
