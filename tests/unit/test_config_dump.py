"""Resolved configurations written and read again (case C2), what a run needs, and the reference page."""

from __future__ import annotations

import dataclasses
import random
import tomllib
from pathlib import Path

import pytest

from lightrl.config import Config, ConfigError, dump_toml, load_config
from lightrl.config import docs as config_docs
from lightrl.config.fields import describe, sections
from lightrl.config.load import load_for_run
from lightrl.config.schema import (
    AgentConfig,
    AlgorithmConfig,
    CheckpointConfig,
    CorrectionConfig,
    CriticConfig,
    CriticOptimConfig,
    DataConfig,
    DebugConfig,
    DPOConfig,
    DumpConfig,
    EndpointConfig,
    EngineConfig,
    EvalConfig,
    EvalSetConfig,
    EvaluatorConfig,
    LogConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RewardConfig,
    RMConfig,
    RolloutConfig,
    RunConfig,
    SandboxConfig,
    SFTConfig,
    SyncConfig,
    TeacherConfig,
)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


FULL = Config(
    run=RunConfig(
        dir="runs/é \"x\" 'y'",
        steps=7,
        seed=12345678901234567890,
        resume=False,
        device="cuda",
        deterministic=True,
        on_step="m:f",
    ),
    model=ModelConfig(
        path="org/name",
        revision="v1",
        tokenizer="tok",
        compute_dtype="float32",
        activation_checkpointing=True,
        recompute_attention=True,
        reshard_after_forward=False,
        kernels="off",
        reference_path="ref",
        trust_remote_code=True,
    ),
    lora=LoraConfig(rank=4, alpha=2.5, use_rslora=True, dropout=0.5, target_modules=["q_proj", "é"], sync="merged"),
    data=DataConfig(
        path=["a.jsonl@[1:2]", "b"],
        split="test",
        input_key="q",
        label_key="a",
        metadata_key="m",
        tool_key="t",
        apply_chat_template=True,
        chat_template_kwargs={
            "enable_thinking": False,
            "a.b c": {"": [1, -2.5, "x", True, [], {}, [{"k": [{"l": 1}]}]], "\n": {"deep": {"er": 1e-300}}},
            "é": "\U0001f600\u2028\x00\x7f\x1b",
        },
        system_prompt='Line "one"\n\tline \\two\\\r\n"""\n\'\'\' # end ',
        map="m:f",
        max_prompt_tokens=5,
        overlong="error",
        shuffle=False,
    ),
    reward=RewardConfig(
        type="m:f", key="k", batched=True, timeout=0.5, max_failure_rate=1.0, concurrency=1, missing_think="zero"
    ),
    rollout=RolloutConfig(
        prompts_per_step=4,
        group_size=2,
        max_response_tokens=3,
        temperature=0.6,
        top_p=0.9,
        top_k=5,
        stop=["\n\n", "###"],
        stop_token_ids=[0, 151645],
        truncated="mask",
        filter="m:f",
        oversample_prompts=6,
        max_draws=2,
    ),
    agent=AgentConfig(
        environment="m:C",
        options={"a": [1, {"b": True}]},
        tools=["search", "m:f"],
        parser="hermes",
        tool_role="user",
        max_turns=3,
        max_turn_tokens=2,
        max_observation_tokens=5,
        tool_timeout=1.5,
        turn_timeout=2.5,
        episode_timeout=9.5,
        concurrency=4,
        search_corpus="c.jsonl",
        search_top_k=7,
    ),
    sandbox=SandboxConfig(timeout=1.5, memory_mib=2, file_mib=3, processes=4, output_kib=5, concurrency=6),
    engine=EngineConfig(
        kind="sglang",
        max_batch=2,
        max_prefill_tokens=3,
        tensor_parallel=2,
        memory_fraction=0.25,
        hang_timeout=20.0,
        quantization="fp8",
        max_restarts=4,
        args={"attention_backend": "triton", "nested": {"a": [1, 2.5, True]}},
        api_key_env="KEY",
        request_timeout=9.5,
    ),
    sync=SyncConfig(
        transport="disk", folder="w", address="node1", port=29600, timeout=8.5, bucket_mib=64, verify_every=3
    ),
    algorithm=AlgorithmConfig(
        advantage="gae",
        gamma=0.5,
        gae_lambda=0.9,
        whiten="group",
        overlong_buffer=2,
        overlong_penalty=0.5,
        skip_zero_advantage=False,
        minibatches_per_step=2,
        loss="dppo_kl",
        clip_low=0.1,
        clip_high=0.28,
        ratio_cap=5.0,
        aggregation="constant",
        constant_length=9,
        kl_coef=0.001,
        kl_in="reward",
        kl_estimator="k1",
        entropy_coef=1e-5,
    ),
    correction=CorrectionConfig(
        use_tis=True,
        tis_level="sequence",
        tis_mode="clip",
        tis_lower_bound=0.25,
        tis_upper_bound=3.0,
        tis_batch_normalize=True,
        use_rs=True,
        rs_level="geometric",
        rs_lower_bound=0.99,
        rs_upper_bound=1.01,
        rs_veto_threshold=1e-4,
        opsm_delta=0.5,
        routing_replay="trainer",
    ),
    sft=SFTConfig(batch_size=3, epochs=1.5, train_on="last", max_tokens=7, end_of_turn="<|user|>"),
    dpo=DPOConfig(
        batch_size=3,
        epochs=1.5,
        prompt_key="q",
        chosen_key="a",
        rejected_key="b",
        max_tokens=7,
        loss="simpo",
        beta=0.3,
        label_smoothing=0.1,
        simpo_margin=0.2,
        sft_coef=0.1,
        reference_path="r",
        precompute_reference=True,
        end_of_turn="<|user|>",
    ),
    rm=RMConfig(
        batch_size=3,
        epochs=1.5,
        prompt_key="q",
        chosen_key="a",
        rejected_key="b",
        max_tokens=7,
        margin_key="m",
        center_coef=0.1,
    ),
    optim=OptimConfig(
        lr=1e-08,
        betas=(0.1, 0.999),
        eps=1e-16,
        weight_decay=0.1,
        max_grad_norm=0.0,
        schedule="wsd",
        warmup_steps=1,
        decay_steps=2,
        min_lr_ratio=0.1,
    ),
    teacher=TeacherConfig(
        path="org/teacher",
        revision="main",
        coef=0.5,
        form="top_k",
        divergence="jsd",
        jsd_beta=0.25,
        top_k=9,
        temperature=0.8,
    ),
    critic=CriticConfig(path="org/critic", value_clip=0.2, pretrain_steps=3),
    critic_optim=CriticOptimConfig(
        lr=1e-4,
        betas=(0.2, 0.99),
        eps=1e-15,
        weight_decay=0.2,
        max_grad_norm=0.5,
        schedule="wsd",
        warmup_steps=2,
        decay_steps=3,
        min_lr_ratio=0.2,
    ),
    parallel=ParallelConfig(
        shard_size=2,
        expert_parallel=2,
        max_tokens_per_microbatch=100,
        share_prompts=False,
        offload="never",
        offload_host_gib=0.5,
        timeout=1e6,
    ),
    checkpoint=CheckpointConfig(
        every=0, keep_last=1, keep_best=3, best_metric="eval/x", async_save=False, hf_every=4, verify=False
    ),
    eval=EvalConfig(
        every=3,
        at_start=False,
        sets=[
            EvalSetConfig(
                name="a",
                path="p",
                split="s",
                input_key="i",
                label_key="l",
                apply_chat_template=False,
                system_prompt="",
                map="none",
                reward="math",
                samples_per_prompt=4,
                max_response_tokens=5,
                temperature=1.0,
                top_p=0.5,
                top_k=2,
                pass_threshold=0.0,
                gate=0.25,
            ),
            EvalSetConfig(name="b", path="q"),
        ],
    ),
    evaluator=EvaluatorConfig(url="https://node:1/a?b=c", every=2, timeout=1.5, retries=0, api_key_env="E"),
    log=LogConfig(
        trackers=["wandb"],
        progress=False,
        print_samples=0,
        print_every=1,
        save_samples=False,
        timeline_steps=(1, 1),
        profile_steps=(2, 4),
        wandb_project="p",
        wandb_name="n",
    ),
    dump=DumpConfig(rollouts=True),
    debug=DebugConfig(rollouts="elsewhere"),
)


def reload(config: Config) -> Config:
    Path("dump.toml").write_bytes(dump_toml(config).encode())
    return load_config("dump.toml")


def test_dump_reloads() -> None:
    assert reload(Config()) == Config()
    elsewhere = {  # have one value only, or go with others than these
        *("engine.kind", "engine.urls", "algorithm.normalize_std", "algorithm.dual_clip", "algorithm.tau_pos"),
        *("algorithm.tau_neg", "algorithm.kl_unbiased", "correction.use_rollout_logprobs", "parallel.context_parallel"),
        *("correction.score_centering_top_k", "teacher.url", "teacher.api_key_env", "teacher.request_timeout"),
        *("teacher.top_k_from", "agent.search_url", "rollout.generate", "rollout.schedule", "rollout.max_staleness"),
        *("rollout.partial", "parallel.rollout_ranks"),
        *(f"endpoint.{field.name}" for field in dataclasses.fields(EndpointConfig)),
    }
    for name, cls in sections().items():
        for field in dataclasses.fields(cls):
            key = f"{name}.{field.name}"
            if key not in elsewhere:
                # Each field differs from its default, so that a field lost on the way shows.
                assert getattr(getattr(FULL, name), field.name) != getattr(cls(), field.name), key
    assert reload(FULL) == FULL
    engine = EngineConfig(kind="sglang_server", urls=["http://a:1", "http://[::1]:2"])
    for changes in ({"transport": "nccl", "folder": None}, {"address": None, "port": 0}):
        sync = dataclasses.replace(FULL.sync, **changes)
        servers = dataclasses.replace(FULL, engine=engine, sync=sync)
        assert reload(servers) == servers
    endpoint = EndpointConfig(
        command=["a", "b c"], concurrency=3, foreign_sampling="ignore", host="0.0.0.0", port=9, address="n", key_env="K"
    )
    agent = AgentConfig(environment="outside")
    for given in (endpoint, EndpointConfig(function="m:f", max_body_mib=2), EndpointConfig(url="http://a/b")):
        outside = Config(agent=agent, endpoint=given, data=DataConfig(apply_chat_template=True))
        assert reload(outside) == outside
    beside = Config(rollout=RolloutConfig(schedule="async", max_staleness=3), correction=CorrectionConfig(use_tis=True))
    carried = Config(
        rollout=RolloutConfig(filter="m:f", partial="correct"), correction=CorrectionConfig(use_rollout_logprobs=True)
    )
    apart = Config(parallel=ParallelConfig(rollout_ranks=4), engine=EngineConfig(kind="sglang", tensor_parallel=2))
    for scheduled in (beside, carried, apart):
        assert reload(scheduled) == scheduled
    hooked = Config(rollout=RolloutConfig(generate="m:f"))
    assert reload(hooked) == hooked
    for teacher in (
        TeacherConfig(url="http://a:1", api_key_env="KEY", request_timeout=9.5),
        TeacherConfig(path="a/b", form="top_k", top_k_from="student"),
    ):
        assert reload(Config(teacher=teacher)) == Config(teacher=teacher)
    centred = Config(algorithm=AlgorithmConfig(normalize_std=False))
    assert reload(centred) == centred
    for algorithm in (
        AlgorithmConfig(dual_clip=3.0),
        AlgorithmConfig(loss="sapo", tau_pos=1.5, tau_neg=2.5),
        AlgorithmConfig(kl_coef=0.1, kl_unbiased=True),
    ):
        bypass = Config(
            algorithm=algorithm, correction=CorrectionConfig(use_rollout_logprobs=True, score_centering_top_k=9)
        )
        assert reload(bypass) == bypass


def test_dump_of_random_text_and_numbers() -> None:
    rng = random.Random(0)
    alphabet = "ab \"'\\\n\r\t#=[]{},.\x00\x08\x0c\x1f\x7f\x85\u2028é\U0001f600\ufeff"
    for _ in range(60):
        text = ["".join(rng.choices(alphabet, k=rng.randrange(8))) for _ in range(6)]
        config = load_config(
            data={"system_prompt": text[0], "chat_template_kwargs": {text[1]: {text[2]: [text[3], rng.random()]}}},
            rollout={"stop": [f"{each}." for each in text[4:]]},
            optim={"lr": rng.random() * 10.0 ** rng.randrange(-300, 300), "eps": 5e-324},
        )
        assert tomllib.loads(dump_toml(config))["data"]["system_prompt"] == text[0]
        assert reload(config) == config


def test_what_a_run_needs() -> None:
    def check(*words: str, command: str = "train") -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load_for_run(["run.toml"], words, command=command)
        return caught.value.problems

    Path("run.toml").write_text('[data]\npath = ["here.jsonl@[0:5]",\n"gone.jsonl@[5:]", "org/hub", "./gone"]\n')
    Path("here.jsonl").touch()
    assert check() == [
        "run.toml:3: data.path[1]: no such file or folder: gone.jsonl",
        "run.toml:3: data.path[3]: no such file or folder: ./gone",
        "model.path: not set; name a Hugging Face checkpoint (hub name or folder)",
    ]
    sets = "[{name = 'a', path = '/gone.parquet'}]"
    assert check("--eval.sets", sets, "--model.path", "./gone", "--data.path=") == [
        "--eval.sets[0].path: no such file or folder: /gone.parquet",
        "--model.path: no such folder: ./gone",
        "--data.path: not set; name a prompt set (jsonl, parquet, folder or hub dataset)",
    ]
    assert check("--model.path=org/hub", "--data.path=org/hub", command="eval") == [
        "eval.sets: nothing to evaluate; add an [[eval.sets]] table with a name and a path"
    ]
    config = load_for_run(["run.toml"], ["--data.path", "here.jsonl", "--model.path", "org/hub"])
    assert config.data.path == "here.jsonl"


def test_every_key_is_described() -> None:
    keys = {key.full_name: key for key in describe()}
    for name, cls in {**sections(), "eval.sets": EvalSetConfig}.items():
        for field in dataclasses.fields(cls):
            assert keys.pop(f"{name}.{field.name}").doc, f"{name}.{field.name} has no doc"
    assert not keys
    keys = {key.full_name: key for key in describe()}
    assert (keys["optim.lr"].type, keys["optim.lr"].range, keys["optim.lr"].default) == ("float", ">= 0", "1e-06")
    assert (keys["optim.betas"].type, keys["optim.betas"].default) == ("list of 2 float", "[0.9, 0.95]")
    assert keys["data.path"].type == "string or list of string"
    assert (keys["algorithm.clip_high"].type, keys["algorithm.clip_high"].default) == ("float", "")
    assert keys["log.trackers"].type == 'list of ("jsonl" | "tensorboard" | "wandb")'
    assert keys["eval.sets"].type == "list of table"
    assert (keys["eval.sets.name"].default, keys["eval.sets.top_p"].range) == ("required", "> 0 and <= 1")


def test_the_reference_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert config_docs.main(["--check", str(page)]) == 0
    assert config_docs.main(["--write", "x/page.md"]) == 0
    assert Path("x/page.md").read_bytes() == page.read_bytes()
    Path("x/page.md").write_text("old")
    assert config_docs.main(["--check", "x/page.md"]) == 1
    assert config_docs.main([]) == 2
    assert "x/page.md is not current" in capsys.readouterr().err
