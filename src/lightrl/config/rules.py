"""Rules between sections, by topic: (key, what is wrong and what to do) for each that does not hold."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightrl.config.schema import Config

Problems = list[tuple[str, str]]

LOWEST_TEMPERATURE = 0.01
"""Below, float32 log-probs of what was sampled are no longer told from rounding; greedy (0) is for evaluation."""


_FP8_EXPERTS = ("auto", "triton", "deep_gemm", "cutlass")


def of_sampling(config: Config) -> Problems:
    problems = []
    if "" in config.rollout.stop:
        problems.append(("rollout.stop", "an empty string is in every response; remove it"))
    if any(token < 0 for token in config.rollout.stop_token_ids):
        problems.append(("rollout.stop_token_ids", "token ids are not negative"))
    if any(0 < s.temperature < LOWEST_TEMPERATURE for s in config.eval.sets):
        problems.append(("eval.sets", f"a temperature is 0 (greedy) or at least {LOWEST_TEMPERATURE}"))
    return problems


def of_filters(config: Config) -> Problems:
    rollout = config.rollout
    if rollout.filter == "none":
        if rollout.oversample_prompts is not None:
            return [("rollout.oversample_prompts", "only used with a rollout.filter: set one, or drop it")]
        return []
    problems = []
    if rollout.filter != "nonzero_std" and ":" not in rollout.filter:
        text = f"no filter {rollout.filter!r}: choose 'none', 'nonzero_std' or 'package.module:function'"
        problems.append(("rollout.filter", text))
    if rollout.filter == "nonzero_std" and rollout.group_size == 1:
        problems.append(("rollout.filter", "no group of one has rewards that differ: raise rollout.group_size"))
    if rollout.oversample_prompts is not None and rollout.oversample_prompts < rollout.prompts_per_step:
        text = f"{rollout.oversample_prompts} are fewer than rollout.prompts_per_step = {rollout.prompts_per_step}"
        problems.append(("rollout.oversample_prompts", f"{text}: raise it, or drop it"))
    return problems


def of_sets(config: Config) -> Problems:
    """Names of sets are in metrics and, with other characters replaced, in files."""
    names = [s.name for s in config.eval.sets]
    problems = [("eval.sets", f"two sets are named {n!r}") for n in sorted({n for n in names if names.count(n) > 1})]
    if any(not 0 < len(n.strip()) <= 80 for n in names):
        problems.append(("eval.sets", "a set's name has 1 to 80 characters"))
    files: dict[str, str] = {}
    for name in dict.fromkeys(names):
        other = files.setdefault(re.sub(r"[^\w.-]+", "-", name), name)
        if other != name:
            problems.append(("eval.sets", f"{other!r} and {name!r} would write the same files; rename one"))
    return problems


def of_engines(config: Config) -> Problems:
    if config.engine.kind == "sglang_server":
        return _of_servers(config)
    if config.engine.urls:
        return [("engine.urls", "they are used by engine.kind = 'sglang_server': set it, or remove them")]
    if config.engine.kind == "sglang":
        return _of_sglang(config)
    if config.engine.quantization != "none":
        return [("engine.quantization", "only SGLang computes in FP8: set engine.kind = 'sglang', or 'none' here")]
    if config.engine.tensor_parallel > 1:
        return [("engine.tensor_parallel", "only SGLang splits an engine over ranks: set engine.kind = 'sglang'")]
    if config.engine.args:
        return [("engine.args", "they are SGLang's: set engine.kind = 'sglang', or remove them")]
    return []


def _of_sglang(config: Config) -> Problems:
    engine, problems = config.engine, []
    if config.run.device == "cpu" and engine.tensor_parallel > 1:
        problems.append(("engine.tensor_parallel", "engines on a CPU are not split: set it to 1"))
    if engine.quantization != "none":
        if str(engine.args.get("kv_cache_dtype", "auto")).startswith("fp8"):
            text = "with engine.quantization SGLang's scales of an FP8 cache would mean nothing: drop one"
            problems.append(("engine.args", f"kv_cache_dtype: {text}"))
        if "quantization" in engine.args:
            problems.append(("engine.args", "quantization: engine.quantization says it: drop one"))
        backend = engine.args.get("moe_runner_backend", "auto")
        if backend not in _FP8_EXPERTS:
            text = f"{backend!r} lays FP8 weights out anew: {', '.join(_FP8_EXPERTS)} do not"
            problems.append(("engine.args", f"moe_runner_backend: {text}"))
    return problems


def _of_servers(config: Config) -> Problems:
    engine, problems = config.engine, []
    if engine.quantization != "none":
        problems.append(("engine.quantization", "servers get weights as the policy has them: set it to 'none'"))
    if not engine.urls:
        problems.append(("engine.urls", "list the servers, such as ['http://node7:30000']"))
    if len(set(engine.urls)) < len(engine.urls):
        problems.append(("engine.urls", "a server is listed twice"))
    for url in engine.urls:
        if re.fullmatch(r"https?://(\[[\da-fA-F:.]+\]|[\w.-]+)(:\d{1,5})?(/[\w./-]*)?", url) is None:
            shown = re.sub(r"//.*@", "//…@", url)
            problems.append(("engine.urls", f"{shown!r} is not of the form http://HOST:PORT (keys: api_key_env)"))
    if engine.tensor_parallel > 1:
        problems.append(("engine.tensor_parallel", "servers are split by their own --tp-size: remove it"))
    if engine.args:
        problems.append(("engine.args", "servers take their arguments where they are started: remove them"))
    return problems
