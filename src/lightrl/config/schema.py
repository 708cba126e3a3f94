"""Every setting of a run: one frozen dataclass a section, docs beside the fields.

Ranges are checked in the section (`Field`), rules between sections in `Config.validate` and `rules.py`. No torch here:
config errors and `--help` answer at once. Optional fields default to None, because TOML has no null and a dump must
reload.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from lightrl.config import rules
from lightrl.config.agent import AgentConfig as AgentConfig
from lightrl.config.agent import SandboxConfig as SandboxConfig
from lightrl.config.agent import of_agents, of_serving
from lightrl.config.correction import CorrectionConfig as CorrectionConfig
from lightrl.config.endpoint import EndpointConfig as EndpointConfig
from lightrl.config.endpoint import of_endpoints
from lightrl.config.engines import EngineConfig as EngineConfig
from lightrl.config.engines import SyncConfig as SyncConfig
from lightrl.config.estimators import Estimator, estimator
from lightrl.config.evaluation import EvalConfig as EvalConfig
from lightrl.config.evaluation import EvalSetConfig as EvalSetConfig
from lightrl.config.evaluation import EvaluatorConfig as EvaluatorConfig
from lightrl.config.evaluation import of_evaluation
from lightrl.config.kinds import STRICT, Code, Count, Faults, Fraction, NonNegative, PositiveFloat, PositiveInt, Seconds
from lightrl.config.looking import DebugConfig as DebugConfig
from lightrl.config.looking import DumpConfig as DumpConfig
from lightrl.config.looking import of_looking
from lightrl.config.lora import LoraConfig as LoraConfig
from lightrl.config.lora import of_lora
from lightrl.config.optim import CriticConfig as CriticConfig
from lightrl.config.optim import CriticOptimConfig as CriticOptimConfig
from lightrl.config.optim import OptimConfig as OptimConfig
from lightrl.config.parallel import ParallelConfig as ParallelConfig
from lightrl.config.parallel import of_placement
from lightrl.config.preferences import DPOConfig as DPOConfig
from lightrl.config.preferences import RMConfig as RMConfig
from lightrl.config.schedules import of_rollouts
from lightrl.config.sft import SFTConfig as SFTConfig
from lightrl.config.teacher import TeacherConfig as TeacherConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunConfig:
    """The run as a whole."""

    dir: str = "runs/lightrl"
    """Folder of this run: resolved config, metrics, checkpoints, samples."""
    steps: PositiveInt = 100
    """Steps to train; a step is one collection of samples and the updates on it."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    """Seed of data order, sampling and initialisation."""
    resume: bool = True
    """Continue from the newest committed checkpoint in `dir`; false refuses a folder that already holds a run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; `auto` takes CUDA when there is one."""
    deterministic: bool = False
    """Ask torch for deterministic kernels (slower on GPU; the CPU is deterministic already)."""
    on_step: Code = "none"
    """`package.module:function` called on every rank after each step (docs/inspect.md#hooks)."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    """The policy: a Hugging Face causal LM."""

    path: str = ""
    """Hub name or local folder of the checkpoint. Required."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    tokenizer: str | None = None
    """Hub name or folder of the tokenizer; default: the model's own."""
    compute_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Precision of matrix products. Masters, gradients and optimizer are always float32. `auto`: bfloat16 where the
    hardware computes it natively, else float32."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass: less memory, about a third more time."""
    recompute_attention: bool = False
    """With `activation_checkpointing`, compute attention a second time too, instead of keeping its outputs (on a GPU in
    bfloat16: tokens x heads x head size x 2 bytes a layer). Gradients are the same."""
    reshard_after_forward: bool = True
    """Give a block's gathered weights back after its forward and gather them again for its backward pass. `false`: keep
    them until then, 2 bytes a weight on each rank, and one of three exchanges between ranks less."""
    kernels: Literal["auto", "off"] = "auto"
    """`auto`: known families on a GPU run on kernels of our own (norms, rotary positions, gated products, experts,
    gated delta layers, log-probs) and on the fastest attention that is installed; `off`: on torch and transformers
    alone. On a CPU they are the same."""
    reference_path: str | None = None
    """Checkpoint of the frozen reference for the KL term; default: the policy's own start."""
    trust_remote_code: bool = False
    """Run Python code that ships with the checkpoint. Only for sources you trust."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig:
    """Training prompts."""

    path: str | list[str] = ""
    """jsonl or parquet file, folder, or hub dataset; `path@[a:b]` takes a slice of rows. A list is concatenated.
    Required."""
    split: str = "train"
    """Split, for hub datasets and folders."""
    input_key: str = "input"
    """Field with the prompt: a string or a list of chat messages."""
    label_key: str | None = None
    """Field with the expected answer, handed to the reward."""
    metadata_key: str = "metadata"
    """Field with a dict that is handed to the reward (`rm_type` in it picks the reward of that row)."""
    tool_key: str = "tools"
    """Field with tool definitions for the chat template."""
    apply_chat_template: bool = False
    """Render the prompt through the tokenizer's chat template; a string becomes one user message."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the chat template, such as `enable_thinking = false`."""
    system_prompt: str | None = None
    """System message put before each conversation that has none."""
    map: Code = "none"
    """`package.module:function` that turns each row into another, or None to leave it out (docs/inspect.md#hooks)."""
    max_prompt_tokens: PositiveInt | None = None
    """Longest prompt; default: what the model's context leaves beside the response."""
    overlong: Literal["drop", "truncate", "error"] = "drop"
    """What to do with longer prompts. `truncate` keeps the end of a prompt, the beginning of a conversation
    (`lightrl sft`)."""
    shuffle: bool = True
    """Shuffle each epoch, by `run.seed` and the epoch's number."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardConfig:
    """How samples are scored."""

    type: Code = ""
    """Name of a rule (math, deepscaler, dapo, f1, gpqa, number, exact, random; `boxed_NAME` grades the last box), or
    `package.module:function`. A row's `metadata.rm_type` wins. Required unless every row names one, or
    `algorithm.advantage` is `none`."""
    key: str | None = None
    """Which entry of a dict reward is the number to train on."""
    batched: bool = False
    """A custom function takes lists: one call a group, one result a sample."""
    timeout: Seconds = 30.0
    """Seconds one reward call may take."""
    max_failure_rate: Fraction = 0.1
    """Failed samples are left out; a step with a larger share of them stops the run with the first traceback."""
    concurrency: PositiveInt = 8
    """Reward calls under way at once, a rank."""
    missing_think: Literal["grade_all", "zero"] = "grade_all"
    """A response that never closes its `<think>` block: grade the whole text, or give 0. Counted either way."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RolloutConfig:
    """Sampling of training data."""

    prompts_per_step: PositiveInt = 32
    """Prompts a step, over all ranks."""
    group_size: PositiveInt = 8
    """Samples a prompt."""
    max_response_tokens: PositiveInt = 1024
    """Longest response."""
    temperature: Annotated[float, Field(ge=rules.LOWEST_TEMPERATURE)] = 1.0
    """Sampling temperature; the trainer's log-probs use the same."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling. Below 1 the engine's distribution is no longer the one that is trained."""
    top_k: Count = 0
    """Sample from the k likeliest tokens; 0 is off."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a response."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Token ids that end a response, besides the model's EOS."""
    truncated: Literal["keep", "mask", "zero_reward"] = "keep"
    """Responses cut by length: train on them as scored, leave them out of the loss (they stay in the baseline), or
    give them 0 at most."""
    filter: Code = "none"
    """Which groups are trained on: `none` takes all, `nonzero_std` those whose rewards differ,
    `package.module:function` those it returns true, or (true, reason), for. Prompts are drawn until
    `prompts_per_step` groups pass."""
    oversample_prompts: PositiveInt | None = None
    """Prompts drawn at once with a `filter`; what is not needed is aborted and comes again in the next step. Default:
    `prompts_per_step`."""
    schedule: Literal["sync", "one_step_off", "async"] = "sync"
    """When samples are drawn. `sync`: before each step, by its weights. `one_step_off`: while the step before is being
    trained on, by the weights that it began with. `async`: all the time; new weights take over in the middle of
    answers (docs/rollouts.md)."""
    max_staleness: Count | None = None
    """`async`, `partial`: policy versions between a sample's oldest token and the weights that it is trained on, at
    most; 0 is as `sync`. Default: 1."""
    partial: Literal["drop", "mask", "correct"] = "drop"
    """Answers under way when a step of `sync` has its groups: `drop` begins them anew; `mask` goes on with them in the
    next step, and leaves what older weights drew out of the loss; `correct` trains on all of it, by `[correction]`."""
    max_draws: PositiveInt = 8
    """Most draws a step; after them it trains on what has passed, and stops the run when nothing has."""
    generate: Code = "none"
    """`package.module:function` that answers a prompt in place of one request to the engine (docs/inspect.md#hooks)."""

    @property
    def carries(self) -> bool:
        """Whether generation goes on over the borders of steps."""
        return self.schedule != "sync" or self.partial != "drop"

    @property
    def staleness(self) -> int:
        """Most versions between a sample's oldest token and the weights that it is trained on."""
        if not self.carries:
            return 0
        return 1 if self.max_staleness is None else self.max_staleness

    @property
    def prompts_per_draw(self) -> int:
        """Prompts of one draw."""
        return self.oversample_prompts or self.prompts_per_step


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AlgorithmConfig:
    """Advantages and loss."""

    advantage: Code = "grpo"
    """Advantage estimator: grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, gae (with a critic), none
    (of a teacher alone), or `package.module:function`; formulas in docs/algorithms.md. Dr.GRPO is `grpo` with
    `normalize_std = false`."""
    normalize_std: bool = True
    """`grpo`: divide group-centred rewards by their standard deviation (GRPO); false only centres them (Dr.GRPO)."""
    gamma: Fraction = 1.0
    """`reinforce_plus_plus`, `gae`: what a reward is worth one token earlier."""
    gae_lambda: Fraction = 1.0
    """`gae`: 1 weighs the critic's values against whole answers, 0 against the next value alone."""
    whiten: Literal["none", "batch", "group"] | None = None
    """Shift and scale advantages to mean 0 and variance 1 over all loss tokens of the step, on all ranks together, or
    over those of each group. Default: `batch` for `gae` and the two of REINFORCE++, else `none`."""
    overlong_buffer: PositiveInt | None = None
    """Answers that come within so many tokens of `rollout.max_response_tokens` lose part of their reward, evenly more
    up to `overlong_penalty` (DAPO); default: off."""
    overlong_penalty: PositiveFloat = 1.0
    """What an answer as long as `rollout.max_response_tokens` loses with `overlong_buffer`."""
    minibatches_per_step: PositiveInt = 1
    """Optimizer updates on each step's samples."""
    loss: Code = "ppo"
    """Policy loss: `ppo`, `gspo`, `cispo`, `sapo`, `reinforce`, `dppo_tv`, `dppo_kl` (formulas, and defaults of their
    keys, in docs/algorithms.md), or `package.module:function`."""
    clip_low: Fraction | None = None
    """`ppo`, `gspo`, `cispo`: the importance ratio is clipped below at 1 - clip_low. `dppo_…`: largest divergence where
    the advantage is negative. Default: the loss's own (`ppo`: 0.2)."""
    clip_high: NonNegative | None = None
    """… and above at 1 + clip_high, or largest divergence where the advantage is positive. Default: the loss's own
    (`ppo`: clip_low)."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """`ppo`: where the advantage is negative the loss is at most this many times its size; unset: no limit."""
    tau_pos: PositiveFloat | None = None
    """`sapo`: how fast the gate closes where the advantage is positive; default: 1."""
    tau_neg: PositiveFloat | None = None
    """`sapo`: … and elsewhere; default: 1.05."""
    ratio_cap: Annotated[float, Field(ge=1)] | None = None
    """`dppo_…`: largest importance ratio; default: 20."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """How token losses become one: mean over all tokens; mean over sequences of their token mean; sum over tokens
    divided by sequences x `constant_length`."""
    constant_length: PositiveInt | None = None
    """Length used by `constant`; default: `rollout.max_response_tokens`."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL to the reference; 0 loads no reference."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL goes: a term of the loss, or taken off the reward before advantages."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL per token (http://joschu.net/blog/kl-approx.html)."""
    kl_unbiased: bool = False
    """Multiply the KL in the loss by the importance ratio, so that its gradient is the KL's (DeepSeek-V3.2)."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    skip_zero_advantage: bool = True
    """Do not compute samples whose advantage is 0 where nothing but the advantage enters the loss (no KL or entropy
    term, no whitening): same gradients, less work. Entropy and mismatch are then measured on the others."""

    @property
    def estimator(self) -> Estimator:
        """What `advantage` names."""
        return estimator(self.advantage)

    @property
    def whitening(self) -> Literal["none", "batch", "group"]:
        """`whiten`, or the estimator's own."""
        return self.estimator.whiten if self.whiten is None else self.whiten


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointConfig:
    """Saving and resuming."""

    every: Count = 50
    """Steps between checkpoints; 0 saves only at the end."""
    keep_last: PositiveInt = 2
    """Newest checkpoints to keep."""
    keep_best: Count = 0
    """Also keep the best N by `best_metric`."""
    best_metric: str = "reward/mean"
    """Metric for `keep_best`; higher is better."""
    async_save: bool = True
    """Write in the background; a step counts only once it is committed."""
    hf_every: Count = 0
    """Steps between exports in Hugging Face format to `dir/hf`; 0 is off."""
    verify: bool = True
    """Check the checksums of a checkpoint before it is loaded."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LogConfig:
    """What a person sees."""

    trackers: list[Literal["jsonl", "tensorboard", "wandb"]] = field(default_factory=lambda: ["jsonl", "tensorboard"])
    """Where metrics go besides the console."""
    progress: bool = True
    """Progress bars on a terminal."""
    print_samples: Count = 2
    """Samples printed every `print_every` steps."""
    print_every: PositiveInt = 10
    """Steps between printed samples."""
    save_samples: bool = True
    """Write every sample to `dir/samples/` (read by `lightrl report`)."""
    timeline_steps: tuple[PositiveInt, PositiveInt] | None = None
    """First and last step that are drawn sample by sample into `dir/timeline/`, for chrome://tracing or Perfetto."""
    profile_steps: tuple[PositiveInt, PositiveInt] | None = None
    """First and last step that torch's profiler records, into `dir/profile/`."""
    wandb_project: str | None = None
    """Project of the W&B run."""
    wandb_name: str | None = None
    """Name of the W&B run; default: the name of `run.dir`."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config:
    """A whole run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    dpo: DPOConfig = field(default_factory=DPOConfig)
    rm: RMConfig = field(default_factory=RMConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    critic_optim: CriticOptimConfig = field(default_factory=CriticOptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    evaluator: EvaluatorConfig = field(default_factory=EvaluatorConfig)
    log: LogConfig = field(default_factory=LogConfig)
    dump: DumpConfig = field(default_factory=DumpConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    def validate(self, command: str = "train") -> Faults:
        """Rules between sections, as (key, what is wrong and what to do); empty when all hold. Of `command`, if any."""
        problems: Faults = []
        if self.algorithm.minibatches_per_step > self.rollout.prompts_per_step:
            problems.append(
                (
                    "algorithm.minibatches_per_step",
                    f"{self.algorithm.minibatches_per_step} minibatches from rollout.prompts_per_step = "
                    f"{self.rollout.prompts_per_step} prompts: lower one or raise the other",
                )
            )
        problems += rules.of_schedules(self)
        if self.algorithm.constant_length is not None and self.algorithm.aggregation != "constant":
            problems.append(("algorithm.constant_length", "only used by algorithm.aggregation = 'constant': drop it"))
        if self.model.reference_path is not None and self.algorithm.kl_coef == 0:
            problems.append(("model.reference_path", "a reference is only used with algorithm.kl_coef > 0"))
        if self.model.recompute_attention and not self.model.activation_checkpointing:
            text = "only used with model.activation_checkpointing = true: set it, or drop this"
            problems.append(("model.recompute_attention", text))
        problems += rules.of_engines(self) + rules.of_sampling(self) + rules.of_filters(self) + of_evaluation(self)
        problems += rules.of_advantages(self) + rules.of_critics(self) + rules.of_shared_rows(self)
        problems += rules.of_losses(self) + rules.of_corrections(self) + rules.of_teachers(self) + of_lora(self)
        problems += of_looking(self) + of_rollouts(self) + of_placement(self)
        problems += of_serving(self) if command == "serve" else of_agents(self) + of_endpoints(self)
        for name in ("wandb_project", "wandb_name"):
            if getattr(self.log, name) is not None and "wandb" not in self.log.trackers:
                problems.append((f"log.{name}", "add 'wandb' to log.trackers"))
        if self.checkpoint.best_metric != CheckpointConfig().best_metric and not self.checkpoint.keep_best:
            problems.append(("checkpoint.best_metric", "only used with checkpoint.keep_best > 0: set it, or drop this"))
        return problems

    def required(self, command: str = "train") -> Faults:
        """Keys that the command cannot do without and that are not set."""
        missing = []
        if not self.model.path:
            missing.append(("model.path", "name a Hugging Face checkpoint (hub name or folder)"))
        if not self.data.path and command != "serve":
            missing.append(("data.path", "name a prompt set (jsonl, parquet, folder or hub dataset)"))
        return missing
