"""Rules between sections, by topic.

A key that has no effect is a fault, so that nobody counts on it. Those are not that only tune another `engine.kind`
(`engines.unused_by_engine`), or another command (`lightrl sft` and the like): one file serves several, and the run says
which are not used.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from typing import TYPE_CHECKING

from lightrl.config.estimators import ESTIMATORS
from lightrl.config.kinds import Faults
from lightrl.config.losses import LOSSES

if TYPE_CHECKING:
    from lightrl.config.schema import Config


LOWEST_TEMPERATURE = 0.01
"""Below, float32 log-probs of what was sampled are no longer told from rounding; greedy (0) is for evaluation."""


_FP8_EXPERTS = ("auto", "triton", "deep_gemm", "cutlass")


def of_sampling(config: Config) -> Faults:
    problems = []
    if "" in config.rollout.stop:
        problems.append(("rollout.stop", "an empty string is in every response; remove it"))
    if any(token < 0 for token in config.rollout.stop_token_ids):
        problems.append(("rollout.stop_token_ids", "token ids are not negative"))
    if any(0 < s.temperature < LOWEST_TEMPERATURE for s in config.eval.sets):
        problems.append(("eval.sets", f"a temperature is 0 (greedy) or at least {LOWEST_TEMPERATURE}"))
    return problems


def of_filters(config: Config) -> Faults:
    rollout = config.rollout
    if rollout.filter == "none":
        unused = {"oversample_prompts": None, "max_draws": type(rollout)().max_draws}
        return [
            (f"rollout.{key}", "only used with a rollout.filter: set one, or drop it")
            for key, default in unused.items()
            if getattr(rollout, key) != default
        ]
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


def of_advantages(config: Config) -> Faults:
    algorithm, problems = config.algorithm, []
    name, chosen = algorithm.advantage, algorithm.estimator
    if ":" not in name and name not in ESTIMATORS:
        near = difflib.get_close_matches(name, ESTIMATORS, n=1)
        choices = ", ".join(map(repr, ESTIMATORS))
        text = f"no estimator {name!r}: " + (f"did you mean {near[0]!r}?" if near else f"choose one of {choices}")
        return [("algorithm.advantage", f"{text} (your own is 'package.module:function')")]
    default = type(algorithm)()
    for key in dict.fromkeys(key for other in ESTIMATORS.values() for key in other.keys):
        if getattr(algorithm, key) != getattr(default, key) and key not in chosen.keys:
            takers = " or ".join(repr(n) for n, other in ESTIMATORS.items() if key in other.keys)
            problems.append((f"algorithm.{key}", f"only used by algorithm.advantage = {takers}: drop it"))
    if algorithm.overlong_buffer is None and algorithm.overlong_penalty != 1.0:
        problems.append(
            ("algorithm.overlong_penalty", "only used with algorithm.overlong_buffer: set it, or drop this")
        )
    if algorithm.overlong_buffer is not None and algorithm.overlong_buffer > config.rollout.max_response_tokens:
        limit = f"rollout.max_response_tokens = {config.rollout.max_response_tokens}"
        problems.append(("algorithm.overlong_buffer", f"{algorithm.overlong_buffer} exceeds {limit}: lower it"))
    return problems


def of_critics(config: Config) -> Faults:
    """Keys of a critic that the estimator does not have."""
    if config.algorithm.estimator.critic:
        return []
    takers = " or ".join(repr(n) for n, other in ESTIMATORS.items() if other.critic)
    return [
        (f"{name}.{field.name}", f"only used with algorithm.advantage = {takers}: set that, or drop this")
        for name, section in (("critic", config.critic), ("critic_optim", config.critic_optim))
        for field in dataclasses.fields(section)
        if getattr(section, field.name) != getattr(type(section)(), field.name)
    ]


def of_schedules(config: Config) -> Faults:
    problems = []
    updates = config.run.steps * config.algorithm.minibatches_per_step
    for name, optim in (("optim", config.optim), ("critic_optim", config.critic_optim)):
        if optim.schedule == "wsd" and optim.decay_steps == 0:
            problems.append((f"{name}.decay_steps", f"{name}.schedule = 'wsd' needs decay_steps > 0"))
        if optim.schedule != "wsd" and optim.decay_steps > 0:
            text = f"not used by {name}.schedule = {optim.schedule!r}: drop it, or choose 'wsd'"
            problems.append((f"{name}.decay_steps", text))
        if optim.schedule == "constant" and optim.min_lr_ratio > 0:
            text = f"{name}.schedule = 'constant' does not decay: drop it, or choose 'linear', 'cosine' or 'wsd'"
            problems.append((f"{name}.min_lr_ratio", text))
        by_epochs = any(section.epochs is not None for section in (config.sft, config.dpo, config.rm))
        if not by_epochs and optim.warmup_steps + optim.decay_steps > updates:
            problems.append(
                (
                    f"{name}.warmup_steps",
                    f"warmup_steps + decay_steps = {optim.warmup_steps + optim.decay_steps} exceed the run's {updates} "
                    "updates (run.steps x algorithm.minibatches_per_step)",
                )
            )
    return problems


def of_engines(config: Config) -> Faults:
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


def _of_sglang(config: Config) -> Faults:
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


_URL = r"https?://(\[[\da-fA-F:.]+\]|[\w.-]+)(:\d{1,5})?(/[\w./-]*)?"


def _of_url(key: str, url: str) -> Faults:
    if re.fullmatch(_URL, url) is not None:
        return []
    shown = re.sub(r"//.*@", "//…@", url)
    return [(key, f"{shown!r} is not of the form http://HOST:PORT (keys: api_key_env)")]


def _of_servers(config: Config) -> Faults:
    engine, problems = config.engine, []
    if engine.quantization != "none":
        problems.append(("engine.quantization", "servers get weights as the policy has them: set it to 'none'"))
    if not engine.urls:
        problems.append(("engine.urls", "list the servers, such as ['http://node7:30000']"))
    if len(set(engine.urls)) < len(engine.urls):
        problems.append(("engine.urls", "a server is listed twice"))
    for url in engine.urls:
        problems += _of_url("engine.urls", url)
    other = {"nccl": ("folder",), "disk": ("address", "port")}[config.sync.transport]
    for key in other:
        if getattr(config.sync, key) != getattr(type(config.sync)(), key):
            text = f"not used by sync.transport = {config.sync.transport!r}: drop it, or choose the other"
            problems.append((f"sync.{key}", text))
    if engine.tensor_parallel > 1:
        problems.append(("engine.tensor_parallel", "servers are split by their own --tp-size: remove it"))
    if engine.args:
        problems.append(("engine.args", "servers take their arguments where they are started: remove them"))
    return problems


def of_losses(config: Config) -> Faults:
    algorithm, name = config.algorithm, config.algorithm.loss
    if name not in LOSSES and ":" not in name:
        near = difflib.get_close_matches(name, LOSSES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose {', '.join(LOSSES)} or package.module:function"
        return [("algorithm.loss", f"no loss {name!r}: {hint}")]
    problems, takes = [], LOSSES[name].keys if name in LOSSES else ()
    for key in dict.fromkeys(key for loss in LOSSES.values() for key in loss.keys):
        if getattr(algorithm, key) is not None and key not in takes:
            takers = " or ".join(repr(other) for other, loss in LOSSES.items() if key in loss.keys)
            text = f"not used by algorithm.loss = {name!r}, but by {takers}: drop it, or change the loss"
            problems.append((f"algorithm.{key}", text))
    for key in ("kl_in", "kl_estimator"):
        if algorithm.kl_coef == 0 and getattr(algorithm, key) != getattr(type(algorithm)(), key):
            problems.append((f"algorithm.{key}", "only used with algorithm.kl_coef > 0: set it, or drop this"))
    if algorithm.kl_unbiased and (algorithm.kl_coef == 0 or algorithm.kl_in != "loss"):
        text = "only used with algorithm.kl_coef > 0 and algorithm.kl_in = 'loss': set them, or drop this"
        problems.append(("algorithm.kl_unbiased", text))
    return problems


def of_shared_rows(config: Config) -> Faults:
    """With `parallel.context_parallel` an answer's tokens lie on several ranks: what adds them up before the loss
    would see a part."""
    if config.parallel.context_parallel == 1:
        return []
    algorithm, correction = config.algorithm, config.correction
    own_with_kl = ":" in algorithm.advantage and algorithm.kl_coef > 0 and algorithm.kl_in == "reward"
    found = {
        f"algorithm.advantage = {algorithm.advantage!r}": algorithm.estimator.kind == "tokens" or own_with_kl,
        f"algorithm.loss = {algorithm.loss!r}": algorithm.loss == "gspo" or ":" in algorithm.loss,
        f"correction.tis_level = {correction.tis_level!r}": correction.use_tis and correction.tis_level != "token",
        f"correction.rs_level = {correction.rs_level!r}": correction.use_rs and correction.rs_level != "token",
        "correction.rs_veto_threshold": correction.rs_veto_threshold is not None,
        "correction.opsm_delta": correction.opsm_delta is not None,
    }
    text = "wants all tokens of an answer on one rank: set it to 1"
    return [("parallel.context_parallel", f"{key} {text}") for key, holds in found.items() if holds]


def of_corrections(config: Config) -> Faults:
    """Keys without effect, bounds that hold nothing, and a mismatch that would be corrected twice."""
    c = config.correction
    problems = [
        (f"correction.{key}", f"only used with correction.{switch} = true: set it, or drop this")
        for switch, keys in _SWITCHED.items()
        for key in keys
        if not getattr(c, switch) and getattr(c, key) != getattr(type(c)(), key)
    ]
    if c.use_tis and c.tis_mode == "truncate" and c.tis_lower_bound is not None:
        if not c.use_rs or c.rs_lower_bound is not None:
            text = "not used by correction.tis_mode = 'truncate', which only caps: drop it, or choose 'clip'"
            problems.append(("correction.tis_lower_bound", text))
    elif c.use_tis and c.tis_mode != "truncate":
        problems += _of_bounds("tis", c.tis_lower_bound, *c.tis_bounds)
    if c.use_rs:
        problems += _of_bounds("rs", c.rs_lower_bound, *c.rs_bounds)
    problems += _of_score_centering(config) + _of_routing_replay(config)
    if c.use_rollout_logprobs and c.use_tis:
        if config.algorithm.loss in LOSSES and LOSSES[config.algorithm.loss].has_ratio:
            text = (
                f"the ratio of algorithm.loss = {config.algorithm.loss!r} is to the engine's log-probs already with "
                "correction.use_rollout_logprobs: drop one of the two (loss = 'reinforce' has no ratio)"
            )
            problems.append(("correction.use_tis", text))
        if c.tis_batch_normalize:
            text = (
                "needs the trainer's log-probs of the whole step before its updates, which "
                "correction.use_rollout_logprobs saves: drop one of the two"
            )
            problems.append(("correction.tis_batch_normalize", text))
    return problems


def _of_score_centering(config: Config) -> Faults:
    """It is the mean gradient of -w A log p, with weights of tokens, over all that the engine could have sampled."""
    c, key = config.correction, "correction.score_centering_top_k"
    if c.score_centering_top_k == 0:
        return []
    problems = []
    updates = config.algorithm.minibatches_per_step
    if updates > 1 and config.algorithm.loss != "reinforce":
        text = (
            f"the gradient of algorithm.loss = {config.algorithm.loss!r} is only that of 'reinforce' in the first of "
            f"algorithm.minibatches_per_step = {updates} updates: choose 'reinforce', or set 1"
        )
        problems.append((key, text))
    elif updates > 1 and c.use_tis and not c.use_rollout_logprobs:
        text = (
            "goes by present weights; with correction.use_tis and several updates set correction.use_rollout_logprobs"
        )
        problems.append((key, text))
    if c.use_tis and c.tis_level != "token":
        problems.append((key, f"weights are of whole samples with correction.tis_level = {c.tis_level!r}: set 'token'"))
    if c.use_tis and c.tis_mode == "mask":
        problems.append((key, "correction.tis_mode = 'mask' takes tokens out of it: choose 'icepop', which does not"))
    for other in ("use_rs", "rs_veto_threshold", "opsm_delta"):
        if getattr(c, other) not in (False, None):
            problems.append((key, f"does not know what correction.{other} rejects: drop one of the two"))
    if config.rollout.top_p < 1 or config.rollout.top_k > 0:
        name = "top_p" if config.rollout.top_p < 1 else "top_k"
        problems.append((key, f"wants the engine's whole distribution, which rollout.{name} cuts: remove it"))
    return problems


def _of_routing_replay(config: Config) -> Faults:
    """A record must be made before what it is for, and of the tokens that it is for."""
    c, key = config.correction, "correction.routing_replay"
    if c.routing_replay == "trainer":
        if config.algorithm.minibatches_per_step == 1:
            text = (
                "'trainer' replays in a step's updates what was chosen before them, and with "
                "algorithm.minibatches_per_step = 1 nothing is: raise that, choose 'rollout', or drop this"
            )
            return [(key, text)]
        if c.use_rollout_logprobs:
            text = "'trainer' records in the pass that correction.use_rollout_logprobs saves: choose 'rollout'"
            return [(key, f"{text}, or drop one of the two")]
    if c.routing_replay == "rollout" and config.engine.kind == "sglang":
        if config.run.device == "cpu":
            return [(key, "SGLang records routing on GPUs only: choose engine.kind = 'transformers', or drop this")]
        if config.engine.args.get("enable_hierarchical_cache"):
            text = "keeps no record of the prefixes that it brings back: drop it"
            return [("engine.args", f"enable_hierarchical_cache: with {key} = 'rollout' SGLang {text}")]
    return []


_SWITCHED = {
    "use_tis": ("tis_level", "tis_mode", "tis_lower_bound", "tis_upper_bound", "tis_batch_normalize"),
    "use_rs": ("rs_level", "rs_lower_bound", "rs_upper_bound"),
}


def _of_bounds(name: str, given: float | None, low: float, high: float) -> Faults:
    """Of `low` and `high` in force, where the lower one may not be `given`."""
    if low < high:
        return []
    upper = f"correction.{name}_upper_bound"
    if given is None:
        text = f"correction.{name}_lower_bound is {low:g} by default, not below {high:g}: set it, or raise this"
        return [(upper, text)]
    return [(f"correction.{name}_lower_bound", f"{low:g} is not below {upper} = {high:g}: exchange them")]


def of_teachers(config: Config) -> Faults:
    """Keys of `[teacher]` that have no effect or ask for what a teacher cannot give; an advantage of nothing."""
    teacher = config.teacher
    if not teacher.enabled:
        problems = [
            (f"teacher.{field.name}", "only used with teacher.path or teacher.url: set one of them, or drop this")
            for field in dataclasses.fields(teacher)
            if getattr(teacher, field.name) != getattr(type(teacher)(), field.name)
        ]
        return problems + _of_no_advantage(config)
    problems = [
        (f"teacher.{key}", f"only used with teacher.{switch} = {value!r}: set that, or drop this")
        for switch, value, keys in (
            ("form", "top_k", ("top_k", "top_k_from")),
            ("divergence", "jsd", ("jsd_beta",)),
        )
        for key in keys
        if getattr(teacher, switch) != value and getattr(teacher, key) is not None
    ]
    if teacher.form == "sampled" and teacher.kind != "reverse_kl":
        text = (
            f"{teacher.kind!r} wants more than the sampled token, which is all of teacher.form = 'sampled': choose "
            "'top_k' or 'full' there"
        )
        problems.append(("teacher.divergence", text))
    if teacher.student_k and (config.rollout.top_p < 1 or config.rollout.top_k > 0):
        name = "top_p" if config.rollout.top_p < 1 else "top_k"
        text = f"the engine names no likeliest tokens where rollout.{name} cuts its distribution: remove it"
        problems.append(("teacher.top_k_from", text))
    problems += _of_teacher_path(config) if teacher.url is None else _of_teacher_url(config, teacher.url)
    return problems + _of_no_advantage(config)


def _of_teacher_path(config: Config) -> Faults:
    teacher = config.teacher
    return [
        (f"teacher.{key}", "only used with teacher.url: set that, or drop this")
        for key in ("api_key_env", "request_timeout")
        if getattr(teacher, key) != getattr(type(teacher)(), key)
    ]


def _of_teacher_url(config: Config, url: str) -> Faults:
    """What a server tells of its prompts: log-probs of their tokens and of its own likeliest, at temperature 1."""
    teacher, problems = config.teacher, _of_url("teacher.url", url)
    if teacher.path is not None:
        problems.append(("teacher.url", "teacher.path names a teacher too: drop one of the two"))
    if teacher.revision is not None:
        problems.append(("teacher.revision", "it is of teacher.path; the server at teacher.url has its own: drop it"))
    if url.rstrip("/") in [other.rstrip("/") for other in config.engine.urls]:
        problems.append(("teacher.url", "it is one of engine.urls, which get the policy's weights: name another"))
    if teacher.form == "full":
        text = (
            "'full' wants all of the teacher's distribution, which teacher.url does not send: choose 'top_k', or name"
        )
        problems.append(("teacher.form", f"{text} teacher.path"))
    if teacher.student_k:
        text = "a server at teacher.url names its own likeliest tokens alone: choose 'teacher', or name teacher.path"
        problems.append(("teacher.top_k_from", text))
    if teacher.temperature is None and config.rollout.temperature != 1:
        text = (
            f"a server at teacher.url answers at temperature 1, and rollout.temperature is "
            f"{config.rollout.temperature:g}: set 1 here if the policy at its own is to be drawn to that, or there"
        )
        problems.append(("teacher.temperature", text))
    elif teacher.temperature not in (None, 1):
        text = f"{teacher.temperature:g} is not what a server at teacher.url answers at: set 1, or name teacher.path"
        problems.append(("teacher.temperature", text))
    return problems


def _of_no_advantage(config: Config) -> Faults:
    """`algorithm.advantage = "none"`: something else has to teach, and what works by rewards does nothing."""
    algorithm, key = config.algorithm, "algorithm.advantage"
    if algorithm.estimator.rewards:
        return []
    problems = []
    by_reward = algorithm.kl_in == "reward"
    if not (config.teacher.enabled or algorithm.entropy_coef or (algorithm.kl_coef and not by_reward)):
        problems.append(
            (key, "'none' leaves nothing to learn from: set teacher.path or teacher.url, or choose another")
        )
    others = {
        "algorithm.kl_in = 'reward'": algorithm.kl_coef > 0 and by_reward,
        "algorithm.overlong_buffer": algorithm.overlong_buffer is not None,
        "algorithm.whiten": algorithm.whiten not in (None, "none"),
        "rollout.filter = 'nonzero_std'": config.rollout.filter == "nonzero_std",
    }
    return problems + [
        (key, f"'none' makes nothing of rewards, nor of {name}: drop it") for name, on in others.items() if on
    ]
