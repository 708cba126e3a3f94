"""Loading, checking and writing configurations. Cases C1 and C2: bad inputs with the exact line, and who wins."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from bad_config import problems

from lightrl.config import Config, load_config
from lightrl.config.engines import unused_by_engine
from lightrl.config.fields import sections
from lightrl.config.sampling_only import for_evaluation, for_generation
from lightrl.config.schema import (
    DataConfig,
    EvalSetConfig,
    OptimConfig,
)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


SECTIONS = ", ".join(sections())
OPTIM_KEYS = ", ".join(f.name for f in dataclasses.fields(OptimConfig))
RUN_KEYS = "dir, steps, seed, resume, device, deterministic, on_step"
SET_KEYS = ", ".join(f.name for f in dataclasses.fields(EvalSetConfig))

BAD_TOML = {
    "an answer's tokens on several ranks": (
        '[algorithm]\nadvantage = "reinforce_plus_plus"\n[parallel]\ncontext_parallel = 2',
        [
            "run.toml:4: parallel.context_parallel: algorithm.advantage = 'reinforce_plus_plus' wants all tokens of an "
            "answer on one rank: set it to 1"
        ],
    ),
    "a sample's ratio on several ranks": (
        '[algorithm]\nloss = "gspo"\n[parallel]\ncontext_parallel = 2',
        [
            "run.toml:4: parallel.context_parallel: algorithm.loss = 'gspo' wants all tokens of an answer on one rank: "
            "set it to 1"
        ],
    ),
    "unknown key": ("[optim]\nlrr = 1", ["run.toml:2: optim.lrr: unknown key; did you mean optim.lr?"]),
    "unknown dotted key": ("optim.lrr = 1", ["run.toml:1: optim.lrr: unknown key; did you mean optim.lr?"]),
    "key outside of its section": ("lr = 1", ["run.toml:1: lr: unknown key; did you mean optim.lr?"]),
    "misspelt outside of its section": (
        "weight_decai = 1",
        ["run.toml:1: weight_decai: unknown key; did you mean optim.weight_decay?"],
    ),
    "key of another section": (
        "[algorithm]\n\ngroup_size = 4",
        ["run.toml:3: algorithm.group_size: unknown key; did you mean rollout.group_size?"],
    ),
    "key of three other sections": (
        "[run]\nevery = 4",
        ["run.toml:2: run.every: unknown key; did you mean checkpoint.every, eval.every or evaluator.every?"],
    ),
    "key like nothing": ("[run]\nqqq = 4", [f"run.toml:2: run.qqq: unknown key; [run] has {RUN_KEYS}"]),
    "unknown section": ("[optimizer]\nlr = 1", ["run.toml:1: optimizer: unknown section; did you mean optim?"]),
    "section like nothing": ("[zzz]", [f"run.toml:1: zzz: unknown section; sections are {SECTIONS}"]),
    "table inside a section": (
        "[optim]\nlr = 1\n[optim.adam]\nx = 1",
        [
            "run.toml:3: optim.adam: unknown key; [optim] has "
            + ", ".join(f.name for f in dataclasses.fields(OptimConfig))
        ],
    ),
    "section that is a value": ("optim = 3", ["run.toml:1: optim: a section: expected a table, got 3"]),
    "duplicate key": (
        '[run]\nseed = 1\ndir = """\n"""\nseed = 2',
        ["run.toml:5: run.seed: duplicate key, first set on line 2; keep one"],
    ),
    "duplicate section": (
        "[run]\nseed = 1\n[optim]\n[run]",
        ["run.toml:4: run: duplicate key, first set on line 1; keep one"],
    ),
    "key below a value": (
        "[optim]\nlr = 1\nlr.peak = 2",
        ["run.toml:3: optim.lr.peak: clashes with optim.lr on line 2"],
    ),
    "text for a number": ('[optim]\nlr = "abc"', ['run.toml:2: optim.lr: expected a number, got "abc"']),
    "quoted number": ('[run]\nsteps = "3"', ['run.toml:2: run.steps: expected a whole number, got "3"']),
    "bool for an int": ("[run]\nsteps = true", ["run.toml:2: run.steps: expected a whole number, got true"]),
    "bool for a float": ("[optim]\nlr = true", ["run.toml:2: optim.lr: expected a number, got true"]),
    "float for an int": ("[run]\nsteps = 3.0", ["run.toml:2: run.steps: expected a whole number, got 3.0"]),
    "int for a bool": ("[run]\nresume = 1", ["run.toml:2: run.resume: expected true or false, got 1"]),
    "number for text": ("[run]\ndir = 1", ["run.toml:2: run.dir: expected a string, got 1"]),
    "table for a number": ("[optim]\nlr.peak = 1", ["run.toml:2: optim.lr: expected a number, got a table"]),
    "neither string nor list": (
        "[data]\npath = 3",
        ["run.toml:2: data.path: expected a string or a list of strings, got 3"],
    ),
    "item of a list": (
        '[rollout]\nstop_token_ids = [\n 1,\n "x",\n]',
        ['run.toml:4: rollout.stop_token_ids[1]: expected a whole number, got "x"'],
    ),
    "list too short": ("[optim]\nbetas = [0.9]", ["run.toml:2: optim.betas: expected a list of 2 numbers, got [0.9]"]),
    "list too long": (
        "[optim]\nbetas = [0.1, 0.2, 0.3]",
        ["run.toml:2: optim.betas: expected a list of 2 numbers, got [0.1, 0.2, 0.3]"],
    ),
    "a date": (
        "[data.chat_template_kwargs]\nday = 2026-01-01",
        ["run.toml:2: data.chat_template_kwargs.day: a date; put it in quotes to make it a string"],
    ),
    "below the range": ("[optim]\nweight_decay = -1", ["run.toml:2: optim.weight_decay: must be >= 0, got -1"]),
    "beyond the range": (
        "[rollout]\ntop_p = 1.5",
        ["run.toml:2: rollout.top_p: must be > 0 and <= 1, got 1.5"],
    ),
    "range of an item": ("[optim]\nbetas = [0.9,\n1]", ["run.toml:3: optim.betas[1]: must be >= 0 and < 1, got 1"]),
    "range of an optional": (
        "[parallel]\nshard_size = 0",
        ["run.toml:2: parallel.shard_size: must be >= 1, got 0"],
    ),
    "inf": ("[optim]\nlr = inf", ["run.toml:2: optim.lr: must be finite, got inf"]),
    "nan": ("[optim]\nlr = nan", ["run.toml:2: optim.lr: must be finite, got nan"]),
    "unknown name": (
        '[optim]\nschedule = "cosin"',
        [
            'run.toml:2: optim.schedule: expected one of "constant", "linear", "cosine", "wsd", got "cosin"; '
            'did you mean "cosine"?'
        ],
    ),
    "long value": (
        "[optim]\nlr = '" + "x" * 200 + "'",
        ['run.toml:2: optim.lr: expected a number, got "' + "x" * 56 + "..."],
    ),
    "unknown key of a set": (
        '[[eval.sets]]\nname = "a"\npath = "p"\n[[eval.sets]]\nname = "b"\npath = "q"\ntemprature = 1',
        ["run.toml:7: eval.sets[1].temprature: unknown key; did you mean eval.sets[1].temperature?"],
    ),
    "strange key of a set": (
        '[[eval.sets]]\nname = "a"\npath = "p"\nzzz = 1',
        [f"run.toml:4: eval.sets[0].zzz: unknown key; [[eval.sets]] has {SET_KEYS}"],
    ),
    "missing key of a set": (
        '[eval]\n[[eval.sets]]\nname = "a"',
        ["run.toml:2: eval.sets[0].path: not set; every [[eval.sets]] table needs one"],
    ),
    "misspelt key of a set": (
        '[[eval.sets]]\nname = "a"\npth = "p"',
        ["run.toml:3: eval.sets[0].pth: unknown key; did you mean eval.sets[0].path?"],
    ),
    "no set": ("[eval]\nsets = [1]", ["run.toml:2: eval.sets[0]: expected a table, got 1"]),
    "no quotes": (
        "[run]\ndir = runs/x",
        ["run.toml:2:7: TOML syntax: Invalid value (strings need quotes; booleans are true and false)"],
    ),
    "open bracket": (
        "[run",
        ["run.toml:1:5: TOML syntax: Expected ']' at the end of a table declaration"],
    ),
    "rule between sections": (
        "[rollout]\nprompts_per_step = 2\n[algorithm]\nminibatches_per_step = 4",
        [
            "run.toml:4: algorithm.minibatches_per_step: 4 minibatches from rollout.prompts_per_step = 2 prompts: "
            "lower one or raise the other"
        ],
    ),
    "rule about a key that is not set": (
        '[optim]\nlr = 1\nschedule = "wsd"',
        ["run.toml:3: optim.decay_steps: optim.schedule = 'wsd' needs decay_steps > 0"],
    ),
    "keys without effect": (
        "[model]\nrecompute_attention = true\n[optim]\ndecay_steps = 5\nmin_lr_ratio = 0.1",
        [
            "run.toml:2: model.recompute_attention: only used with model.activation_checkpointing = true: set it, or "
            "drop this",
            "run.toml:4: optim.decay_steps: not used by optim.schedule = 'constant': drop it, or choose 'wsd'",
            "run.toml:5: optim.min_lr_ratio: optim.schedule = 'constant' does not decay: drop it, or choose 'linear', "
            "'cosine' or 'wsd'",
        ],
    ),
    "all at once, in the order of the file": (
        'lr = 1\n[optim]\nlr = -1\neps = "x"\n[data]\nshufle = true\n[eval]\nevery = 5',
        [
            "run.toml:1: lr: unknown key; did you mean optim.lr?",
            "run.toml:3: optim.lr: must be >= 0, got -1",
            'run.toml:4: optim.eps: expected a number, got "x"',
            "run.toml:6: data.shufle: unknown key; did you mean data.shuffle?",
        ],
    ),
}


@pytest.mark.parametrize("case", BAD_TOML)
def test_bad_toml(case: str) -> None:
    text, expected = BAD_TOML[case]
    Path("run.toml").write_text(text, encoding="utf-8")
    assert problems("run.toml") == expected
    Path("run.toml").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert problems("run.toml") == expected  # the same in a file from Windows


BAD_FLAGS = {
    "--optim.lrr 1": "--optim.lrr: unknown key; did you mean --optim.lr?",
    "--critic_optim.max-grad-norm=1": "--critic_optim.max-grad-norm: unknown key; did you mean "
    "--critic_optim.max_grad_norm?",
    "--optim.max-grad-norm=1": "--optim.max-grad-norm: unknown key; did you mean --optim.max_grad_norm?",
    "--optm.lr 1": "--optm.lr: unknown key; did you mean --optim.lr?",
    "--lr 1": "--lr: unknown key; did you mean --optim.lr?",
    "--optim 1": "--optim: a section; give its keys as --optim.KEY value",
    "--optim.lr": "--optim.lr: needs a value: a number",
    "--run.resume --optim.lr 1": "--run.resume: needs a value: true or false",
    "--optim.lrr --run.seed 1": "--optim.lrr: unknown key; did you mean --optim.lr?",
    "--optim.lr abc": '--optim.lr: expected a number, got "abc"',
    "--optim.lr=": '--optim.lr: expected a number, got ""',
    "--optim.lr -1": "--optim.lr: must be >= 0, got -1",
    "--optim.lr.peak 1": "--optim.lr: expected a number, got a table",
    "--run.steps 1e3": "--run.steps: expected a whole number, got 1000.0",
    "--run.steps true": "--run.steps: expected a whole number, got true",
    "--run.resume maybe": '--run.resume: expected true or false, got "maybe"',
    "--algorithm.advantage gpro": "--algorithm.advantage: no estimator 'gpro': did you mean 'grpo'? "
    "(your own is 'package.module:function')",
    "--log.trackers wandbb": '--log.trackers: expected one of "jsonl", "tensorboard", "wandb", got "wandbb"; '
    'did you mean "wandb"?',
    "--log.trackers [jsonl]": '--log.trackers: expected a list of names in TOML, such as \'["a", "b"]\', got "[jsonl]"',
    "--eval.sets held_out": '--eval.sets: expected a table, got "held_out"',
    "--eval.sets [{path='x'}]": "--eval.sets[0].name: not set; every [[eval.sets]] table needs one",
    "--data.chat_template_kwargs x": "--data.chat_template_kwargs: expected a table in TOML, such as "
    '\'{key = "text"}\', got "x"',
    "--data. x": "--data.'': unknown key; [data] has " + ", ".join(f.name for f in dataclasses.fields(DataConfig)),
    "run.toml": "run.toml: expected --section.key value",
}


@pytest.mark.parametrize("words", BAD_FLAGS)
def test_bad_flags(words: str) -> None:
    assert problems(overrides=words.split(" ")) == [BAD_FLAGS[words]]


def test_bad_files() -> None:
    Path("folder").mkdir()
    Path("latin.toml").write_bytes(b"[run]\ndir = '\xe9'")
    Path("bad.toml").write_text("[optim]\nlrr = 1\n")
    assert problems("nope.toml", "folder", "latin.toml", "bad.toml", overrides=["--x", "1"]) == [
        "nope.toml: no such file",
        "folder: a folder; expected a TOML file",
        "latin.toml: not UTF-8 text (byte 13); expected a TOML file",
        "bad.toml:2: optim.lrr: unknown key; did you mean optim.lr?",
        f"--x: unknown section; sections are {SECTIONS}",
    ]


def test_bad_keywords() -> None:
    assert problems(optim={"lr": "x", "lrr": 1}, optimizer={}) == [
        "optim.lrr: unknown key; did you mean optim.lr?",
        "optimizer: unknown section; did you mean optim?",
        'optim.lr: expected a number, got "x"',
    ]
    assert problems(data={"chat_template_kwargs": {"tool": object()}}) == [
        "data.chat_template_kwargs.tool: a value of type object has no place in TOML"
    ]
    assert problems(data={"chat_template_kwargs": {"tool": None}}) == [
        "data.chat_template_kwargs.tool: None has no place in TOML"
    ]
    assert problems(optim={"lr": None}) == ["optim.lr: expected a number, got null"]


def test_what_would_fail_later() -> None:
    sets = [{"name": "a b", "path": "p"}, {"name": "a/b", "path": "p"}, {"name": " ", "path": "p", "temperature": 1e-9}]
    assert problems(rollout={"stop": ["x", ""], "stop_token_ids": [5, -1]}, eval={"sets": sets}) == [
        "rollout.stop: an empty string is in every response; remove it",
        "rollout.stop_token_ids: token ids are not negative",
        "eval.sets: a temperature is 0 (greedy) or at least 0.01",
        "eval.sets: a set's name has 1 to 80 characters",
        "eval.sets: 'a b' and 'a/b' would write the same files; rename one",
    ]
    assert problems(
        run={"seed": 2**64}, rollout={"temperature": 1e-300}, reward={"timeout": 1e300}, parallel={"timeout": 1e300}
    ) == [
        "run.seed: must be >= 0 and < 18446744073709551616, got 18446744073709551616",
        "reward.timeout: must be > 0 and <= 10000000, got 1e+300",
        "rollout.temperature: must be >= 0.01, got 1e-300",
        "parallel.timeout: must be > 0 and <= 10000000, got 1e+300",
    ]


SERVERS = {"kind": "sglang_server", "urls": ["http://a:1"]}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"rollout": {"max_draws": 3}}, "rollout.max_draws: only used with a rollout.filter: set one, or drop it"),
        ({"algorithm": {"kl_in": "reward"}}, "algorithm.kl_in: only used with algorithm.kl_coef > 0: set it, or drop"),
        ({"algorithm": {"kl_estimator": "k1"}}, "algorithm.kl_estimator: only used with algorithm.kl_coef > 0: set"),
        (
            {"checkpoint": {"best_metric": "a/b"}},
            "checkpoint.best_metric: only used with checkpoint.keep_best > 0",
        ),
        ({"log": {"wandb_name": "a"}}, "log.wandb_name: add 'wandb' to log.trackers"),
        ({"sandbox": {"timeout": 3}}, "sandbox.timeout: only used with agent.environment or agent.tools: set one, or"),
        ({"evaluator": {"retries": 1}}, "evaluator.retries: only used with evaluator.url: set it, or drop this"),
        (
            {"engine": SERVERS, "sync": {"folder": "a"}},
            "sync.folder: not used by sync.transport = 'nccl': drop it, or choose the other",
        ),
        (
            {"engine": SERVERS, "sync": {"transport": "disk", "port": 1}},
            "sync.port: not used by sync.transport = 'disk': drop it, or choose the other",
        ),
    ],
)
def test_keys_without_effect_are_refused(sections: dict[str, Any], said: str) -> None:
    (found,) = problems(**sections)
    assert found.startswith(said)


def test_keys_of_another_engine_are_told() -> None:
    """One file serves several kinds of engine. Those that would change what is computed are refused."""
    tuned: dict[str, Any] = {"memory_fraction": 0.6, "hang_timeout": 9, "max_prefill_tokens": 99, "request_timeout": 5}
    rest = {"sync": {"bucket_mib": 64, "timeout": 9.0}, "parallel": {"offload": "never"}}
    mine = {
        "transformers": "engine.memory_fraction, engine.hang_timeout, engine.request_timeout, sync.timeout, "
        "sync.bucket_mib, parallel.offload",
        "sglang": "engine.request_timeout, sync.timeout",
        "sglang_server": "engine.max_prefill_tokens, engine.memory_fraction, engine.hang_timeout, parallel.offload",
    }
    for kind, told in mine.items():
        urls = {"urls": ["http://a:1"]} if kind == "sglang_server" else {}
        assert ", ".join(unused_by_engine(load_config(engine={"kind": kind} | urls | tuned, **rest))) == told
    beside = rest | {"parallel": {"rollout_ranks": 1}}
    assert unused_by_engine(load_config(engine=tuned, **beside)) == [
        *("engine.memory_fraction", "engine.request_timeout", "sync.timeout")
    ]
    assert problems(engine={"tensor_parallel": 2}) == [
        "engine.tensor_parallel: only SGLang splits an engine over ranks: set engine.kind = 'sglang'"
    ]


def test_a_problem_is_at_the_source_that_won() -> None:
    Path("a.toml").write_text('[optim]\nlr = -1\n\n[[eval.sets]]\nname = "a"\npath = "p"\ntop_p = 3\n')
    Path("b.toml").write_text("\n\n[optim]\nlr = -2\n[eval]\nsets = [{name = 'b', path = 'p', top_k = -1}]\n")
    assert problems("a.toml", "b.toml") == [
        "b.toml:4: optim.lr: must be >= 0, got -2",
        "b.toml:6: eval.sets[0].top_k: must be >= 0, got -1",
    ]
    assert problems("a.toml", "b.toml", eval={"sets": []}, overrides=["--optim.lr=-3"]) == [
        "--optim.lr: must be >= 0, got -3"
    ]
    assert problems("a.toml", optim={"lr": -4}, eval={"sets": []}) == ["optim.lr: must be >= 0, got -4"]


def test_who_wins() -> None:
    Path("a.toml").write_text(
        "[run]\nresume = false\nseed = 1\n[data]\nshuffle = false\npath = ['x', 'y']\n"
        "[data.chat_template_kwargs]\na = 1\nb = {c = 1, d = 2}\n[[eval.sets]]\nname = 'a'\npath = 'p'\n"
    )
    Path("b.toml").write_text(
        "[run]\nseed = 2\nsteps = 5\n[data]\npath = ['z']\n[data.chat_template_kwargs]\nb = {c = 3}\n"
        "[[eval.sets]]\nname = 'b'\npath = 'q'\n"
    )
    assert Config().run.resume is True
    one = load_config("a.toml")
    assert (one.run.resume, one.data.shuffle, one.run.seed) == (False, False, 1)  # false beats a default of true
    two = load_config("a.toml", "b.toml", run={"steps": 6})
    assert (two.run.resume, two.run.seed, two.run.steps) == (False, 2, 6)
    assert two.data.path == ["z"]
    assert two.data.chat_template_kwargs == {"a": 1, "b": {"c": 3, "d": 2}}
    assert [s.name for s in two.eval.sets] == ["b"]
    three = load_config(
        "a.toml",
        "b.toml",
        run={"steps": 6},
        overrides=["--run.steps", "7", "--run.resume=true", "--run.seed", "8", "--run.seed", "9"],
    )
    assert (three.run.steps, three.run.resume, three.run.seed) == (7, True, 9)
    assert load_config("b.toml", "a.toml").run.seed == 1
    assert load_config() == Config()


def test_keywords_take_python_values() -> None:
    config = load_config(
        model={"path": Path("models") / "m"},
        optim={"betas": (0.5, 0.6), "lr": 1},
        algorithm={"clip_high": None},
        eval={"sets": [EvalSetConfig(name="a", path="p", top_k=3)]},
    )
    assert (config.model.path, config.optim.betas, config.optim.lr) == ("models/m", (0.5, 0.6), 1.0)
    assert isinstance(config.optim.lr, float)
    assert config.algorithm.clip_high is None
    assert config.eval.sets == [EvalSetConfig(name="a", path="p", top_k=3)]


FLAGS = [
    ("optim.lr", "2e-6", 2e-6),
    ("optim.lr", "1", 1.0),
    ("optim.lr", ".5", 0.5),
    ("run.steps", "1_000", 1000),
    ("run.resume", "false", False),
    ("run.resume", "False", False),
    ("model.path", "123", "123"),
    ("model.path", "true", "true"),
    ("model.path", '"quoted"', '"quoted"'),
    ("model.path", "", ""),
    ("data.system_prompt", "- be = brief\n[x]", "- be = brief\n[x]"),
    ("algorithm.aggregation", "constant", "constant"),
    ("algorithm.clip_high", "0.28", 0.28),
    ("optim.betas", "[0.9, 0.999]", (0.9, 0.999)),
    ("rollout.stop_token_ids", "[1, 2]", [1, 2]),
    ("rollout.stop_token_ids", "7", [7]),
    ("rollout.stop", "###", ["###"]),
    ("rollout.stop", "12", ["12"]),
    ("rollout.stop", r'"\n"', ["\n"]),
    ("rollout.stop", '["a", "b"]', ["a", "b"]),
    ("log.trackers", "jsonl", ["jsonl"]),
    ("log.trackers", "[]", []),
    ("data.path", "a.jsonl@[1:3]", "a.jsonl@[1:3]"),
    ("data.path", '["a", "b"]', ["a", "b"]),
    ("data.path", "7", "7"),
    ("data.chat_template_kwargs", "{enable_thinking = false}", {"enable_thinking": False}),
    ("data.chat_template_kwargs.enable_thinking", "false", False),
    ("data.chat_template_kwargs.style", "brief", "brief"),
    ("eval.sets", "[{name = 'a', path = 'p'}]", [EvalSetConfig(name="a", path="p")]),
]


@pytest.mark.parametrize(("key", "text", "expected"), FLAGS)
def test_flags(key: str, text: str, expected: Any) -> None:
    for words in ([f"--{key}", text], [f"--{key}={text}"]):
        value: Any = load_config(overrides=words)
        for part in key.split("."):
            value = value[part] if isinstance(value, dict) else getattr(value, part)
        assert value == expected
        assert type(value) is type(expected)


def test_commands_that_only_sample_need_nothing_of_updates(tmp_path: Path) -> None:
    """No reference, no critic, no key of an evaluator elsewhere; and no rule between their keys is broken by that."""
    whole = load_config(
        algorithm={"advantage": "gae", "kl_coef": 0.1, "minibatches_per_step": 4, "kl_in": "reward"},
        model={"reference_path": "other"},
        critic={"value_clip": 0.2},
        optim={"warmup_steps": 30},
        run={"steps": 10},
        correction={"routing_replay": "rollout", "use_tis": True},
        eval={"sets": [{"name": "a", "path": "b"}]},
        evaluator={"url": "http://h/", "every": 5, "api_key_env": "KEY"},
    )
    for config in (for_evaluation(whole), for_generation(whole)):
        assert config.validate() == []
        assert not config.algorithm.estimator.critic
        assert config.algorithm.kl_coef == 0
        assert config.evaluator.url is None
        assert config.rollout == whole.rollout
    assert for_evaluation(whole).eval.sets == whole.eval.sets
    assert for_generation(whole).correction == type(whole.correction)(routing_replay="rollout")
    alone = load_config(teacher={"path": "t"}, algorithm={"advantage": "none"})
    assert not for_evaluation(alone).algorithm.estimator.rewards
    assert for_evaluation(alone).validate() == []
