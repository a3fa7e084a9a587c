"""The configuration of a run: one class per concern, bounds on every field, read from TOML.

Loading, `--set` overrides and redaction are in `services/config_loader.py`. No class here has a default
that depends on the machine: what does (threads, free ports) is resolved by the launcher and written down
in the run directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, model_validator

from services.config_section import Section
from services.rollout.sglang_plugin import CPU_ATTENTION_BACKEND, TREE_ATTENTION_BACKENDS
from services.speculation_config import SpeculationConfig
from specroll_core.contracts import SamplingParams

# Of its context length SGLang gives two tokens less to prompt and completion: a completion that asks for them would
# end early, as "length", without a word.
RESERVED_TOKENS = 2

Port = Annotated[int, Field(ge=0, le=65535)]


class RunConfig(Section):
    """Where a run lives. The directory holds the resolved config, logs, metrics, checkpoints and Redis' files."""

    dir: Path = Path("runs/default")
    seed: int = Field(0, ge=0)


class ModelConfig(Section):
    """`source`: "bundled" (SmolLM2-135M-Instruct), a local Hugging Face directory, or a hub id.

    dtype: in which engine and learner compute. "auto" is bfloat16 where the machine multiplies in it, else float32;
    loading a configuration replaces it by the one that it stands for.
    """

    source: str = "bundled"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"


class DataConfig(Section):
    """Prompts. `source`: "reasoning-gym:NAME", a .jsonl or .parquet file, or a data set's name for `datasets`.

    template: a format string over the columns, for sources whose prompt is more than one column.
    system: system message of the chat, none where empty.
    holdout: prompts kept for evaluation, never trained on.
    """

    source: str = "reasoning-gym:basic_arithmetic"
    options: dict[str, str | int | float | bool | list[str]] = Field(default_factory=dict)
    subset: str | None = None
    split: str = "train"
    prompt_column: str = "question"
    answer_column: str = "answer"
    template: str = "{prompt}"
    system: str = ""
    size: int = Field(10_000, ge=1)
    holdout: int = Field(200, ge=0)
    max_prompt_tokens: int = Field(1024, ge=1)


class SamplingConfig(Section):
    """The law that training samples from. Penalties and logit bias are not offered here: the learner could
    not recompute their law from a trajectory alone."""

    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    max_new_tokens: int = Field(128, ge=1)
    stop: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _top_k_is_off_or_positive(self) -> SamplingConfig:
        if self.top_k == 0:
            raise ValueError("top_k must be -1 (off) or at least 1")
        return self

    def to_params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_new_tokens=self.max_new_tokens,
            stop=self.stop,
        )


class RewardConfig(Section):
    """`verifier`: "math" (math-verify), "exact" (last number or stripped text), or "package.module:function"
    taking (completion: str, answer: str) and returning a float."""

    verifier: str = "math"
    workers: int = Field(1, ge=1, le=64)
    timeout_seconds: float = Field(5.0, gt=0)
    retries: int = Field(1, ge=0)


class EngineConfig(Section):
    """SGLang. threads: OpenMP threads on a CPU (0: half of the cores). args: passed to `sgl.Engine` as they are."""

    threads: int = Field(0, ge=0)
    cpus: tuple[int, ...] = ()
    max_running_requests: int = Field(32, ge=1)
    max_total_tokens: int = Field(16_384, ge=64)
    context_length: int = Field(2048, ge=16)
    start_timeout_seconds: float = Field(300.0, gt=0)
    speculation: SpeculationConfig = Field(default_factory=SpeculationConfig)
    args: dict[str, str | int | float | bool] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _speculation_keeps_its_ground(self) -> EngineConfig:
        if self.speculation.enabled:
            for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
                if name in self.args and self.args[name] not in (CPU_ATTENTION_BACKEND, *TREE_ATTENTION_BACKENDS):
                    raise ValueError(
                        f"speculation.enabled needs args.{name} to be one of {', '.join(TREE_ATTENTION_BACKENDS)}: "
                        "others ignore the mask of a tree"
                    )
            if self.args.get("page_size", 1) != 1:
                raise ValueError("speculation.enabled needs args.page_size = 1: accepted tokens lie in slots of a tree")
            if self.args.get("tp_size", 1) != 1 or self.args.get("pp_size", 1) != 1:
                raise ValueError(
                    "speculation.enabled needs args.tp_size and args.pp_size = 1: heads read the whole LM head"
                )
            if "sampling_backend" in self.args:
                raise ValueError("speculation.enabled needs the project's own sampler: remove args.sampling_backend")
        return self


class RolloutConfig(Section):
    """One rollout worker. groups_in_flight: leases held at once. port 0 takes a free one, metrics_port 0 serves none.

    learner: the learner's host:port, set by the launcher on one machine. advertise: the host name under which
    the learner reaches this worker, where it is not `host`. cache: policy files received over the wire.
    chaos: allows calls that do harm on purpose, for tests.
    """

    learner: str = "127.0.0.1:50051"

    host: str = "127.0.0.1"
    port: Port = 0
    advertise: str | None = None
    cache: Path = Path("runs/rollout-cache")
    groups_in_flight: int = Field(8, ge=1)
    learner_timeout_seconds: float = Field(60.0, gt=0)
    pause_mode: Literal["retract", "in_place"] = "retract"
    metrics_port: Port = 0
    chaos: bool = False
    engine: EngineConfig = Field(default_factory=EngineConfig)


class HeadsConfig(Section):
    """Future-token heads of a run. init: "none", so that the watcher trains the first version; "auto", so that
    `specroll train` does before it starts, once for a model and task, while services that are started one by one begin
    as with "none"; or what `specroll heads train` made. heads, rank: the shape of heads that begin from nothing."""

    init: str = "none"
    heads: int = Field(3, ge=1, le=4)
    rank: int = Field(256, ge=1)


class WatcherConfig(Section):
    """The watcher, which keeps the heads good. It runs where speculation is on and `enabled` is set.

    learner: host:port that policy files come from where run.dir is not shared. row_fraction: of the requests whose
    positions become training rows, rows_per_second at most; max_row_bytes: of rows held in Redis. check_records,
    patience, cooldown_seconds: of `specroll_core/drift.py`. min_rows: rows that training begins with; max_rows: the
    newest that it takes, two bytes for each number of a hidden state. epochs: passes over them, of few rows more.
    train_seconds: after which training ends where it stands. gate_rows: held-out rows that decide; gate_nodes: of the
    trees that they are judged with, root included. threads, nice: of the trainer's process. keep_versions: heads kept
    on disk beside the serving ones and those before them.
    """

    enabled: bool = True
    host: str = "127.0.0.1"
    port: Port = 0
    advertise: str | None = None
    metrics_port: Port = 0
    learner: str = ""
    row_fraction: float = Field(1.0, gt=0, le=1)
    rows_per_second: float = Field(200.0, gt=0)
    max_row_bytes: int = Field(64 * 2**20, ge=2**20)
    check_records: int = Field(512, ge=32)
    patience: int = Field(2, ge=1)
    cooldown_seconds: float = Field(60.0, ge=0)
    min_rows: int = Field(4000, ge=64)
    max_rows: int = Field(56_000, ge=64)
    epochs: int = Field(3, ge=1)
    train_seconds: float = Field(240.0, gt=0)
    holdout: float = Field(0.15, gt=0, lt=0.5)
    gate_rows: int = Field(4000, ge=64)
    gate_nodes: int = Field(8, ge=1)
    threads: int = Field(1, ge=1)
    nice: int = Field(15, ge=0, le=19)
    keep_versions: int = Field(5, ge=2)


class LossConfig(Section):
    """GRPO. kind, correction and the bounds are those of `specroll_core/grpo.py`.

    clip_low, clip_high: PPO's lower and upper epsilon. cap: upper bound of the importance weight for
    `decoupled` (5) and `tis` (2); band: inside which `icepop` keeps a token. normalise: what advantages are divided
    by; `dr_grpo` never divides. overlong_buffer: `dapo` lowers the reward linearly, to -1, over that many tokens
    before sampling.max_new_tokens; 0 is off. beta: weight of the KL to the model that the run started from.
    """

    kind: Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo"] = "grpo"
    correction: Literal["decoupled", "tis", "icepop", "none"] = "decoupled"
    level: Literal["token", "sequence"] = "token"
    normalise: Literal["std", "none"] = "std"
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.28, gt=0)
    cap: float | None = Field(None, gt=0)
    band: tuple[float, float] = (0.5, 5.0)
    beta: float = Field(0.0, ge=0)
    overlong_buffer: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _band_is_ordered(self) -> LossConfig:
        if not 0 <= self.band[0] < self.band[1]:
            raise ValueError("band must hold two numbers, the lower one first")
        return self


class SfpoConfig(Section):
    """Slow-fast policy optimisation, `specroll_core/sfpo.py`. steps: fast updates on each batch, 0 turns it off.
    window, tau: steps whose entropies are remembered, and the z-score from which on alpha is 0."""

    steps: int = Field(0, ge=0)
    alpha: float = Field(0.8, gt=0, le=1)
    window: int = Field(10, ge=2)
    tau: float = Field(2.0, gt=0)


class LearnerConfig(Section):
    """batch_groups: prompt groups in one step. group_size: completions per prompt. max_staleness: policy versions
    between a trajectory's oldest token and the step that trains on it; 0 is synchronous."""

    host: str = "127.0.0.1"
    port: Port = 0
    advertise: str | None = None
    metrics_port: Port = 0
    steps: int = Field(30, ge=1)
    batch_groups: int = Field(8, ge=1)
    group_size: int = Field(8, ge=1)
    max_staleness: int = Field(1, ge=0)
    publish_every: int = Field(1, ge=1)
    learning_rate: float = Field(2e-5, gt=0)
    warmup_steps: int = Field(2, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = Field(1.0, gt=0)
    minibatches: int = Field(1, ge=1)
    micro_batch_groups: int = Field(2, ge=1)
    threads: int = Field(0, ge=0)
    cpus: tuple[int, ...] = ()
    device: str = "auto"
    checkpoint_every: int = Field(10, ge=1)
    keep_checkpoints: int = Field(2, ge=1)
    lease_seconds: float = Field(30.0, gt=0)
    heartbeat_seconds: float = Field(2.0, gt=0)
    batch_timeout_seconds: float = Field(600.0, gt=0)
    loss: LossConfig = Field(default_factory=LossConfig)
    sfpo: SfpoConfig = Field(default_factory=SfpoConfig)

    @model_validator(mode="after")
    def _sfpo_takes_the_batch_whole(self) -> LearnerConfig:
        if self.sfpo.steps and self.minibatches > 1:
            raise ValueError("learner.sfpo.steps needs learner.minibatches = 1: its fast updates see the whole batch")
        return self


class EvalConfig(Section):
    """every: steps between evaluations on held-out prompts; 0 evaluates before and after only."""

    every: int = Field(0, ge=0)
    prompts: int = Field(200, ge=0)
    temperature: float = Field(1.0, ge=0)


class RedisConfig(Section):
    """url empty: the launcher starts an embedded server under the run directory.

    The password comes from the URL or, better, from the environment variable SPECROLL_REDIS_PASSWORD.
    """

    url: SecretStr = SecretStr("")
    max_groups: int = Field(1024, ge=1)
    max_bytes: int = Field(256 * 2**20, ge=2**20)
    reclaim_idle_seconds: float = Field(30.0, gt=0)
    max_deliveries: int = Field(3, ge=1)
    connect_timeout_seconds: float = Field(10.0, gt=0)


class SecurityConfig(Section):
    """Beyond loopback, gRPC needs a token (SPECROLL_GRPC_TOKEN) and Redis a password, unless this says otherwise."""

    allow_insecure: bool = False


class LoggingConfig(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    tensorboard: bool = False


class Config(Section):
    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    heads: HeadsConfig = Field(default_factory=HeadsConfig)
    watcher: WatcherConfig = Field(default_factory=WatcherConfig)
    redis: RedisConfig = Field(default_factory=RedisConfig)
    security: SecurityConfig = Field(default_factory=SecurityConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)

    @property
    def initial_heads(self) -> Path | None:
        """The heads that the configuration brings, None where the watcher is to train the first version."""
        if self.rollout.engine.speculation.heads is not None:
            return self.rollout.engine.speculation.heads
        return None if self.heads.init in ("none", "auto") else Path(self.heads.init)

    @model_validator(mode="after")
    def _staleness_allows_the_publication_interval(self) -> Config:
        # The workers' weights are up to publish_every - 1 steps old even when nothing is in flight.
        if self.learner.max_staleness < self.learner.publish_every - 1:
            raise ValueError(
                f"learner.max_staleness = {self.learner.max_staleness} must be at least learner.publish_every - 1 = "
                f"{self.learner.publish_every - 1}"
            )
        return self

    @model_validator(mode="after")
    def _sfpo_can_see_the_entropy(self) -> Config:
        law = self.sampling
        if self.learner.sfpo.steps and (law.top_k != -1 or law.top_p < 1 or law.min_p > 0):
            raise ValueError("learner.sfpo.steps needs sampling without top_k, top_p and min_p: it watches the entropy")
        return self

    @model_validator(mode="after")
    def _nothing_is_planted(self) -> Config:
        if self.rollout.engine.speculation.planted_bias:
            raise ValueError(
                "rollout.engine.speculation.planted_bias must be 0: it makes sampling wrong on purpose, for tests"
            )
        return self

    @model_validator(mode="after")
    def _one_prompt_fits_the_engine(self) -> Config:
        need = self.data.max_prompt_tokens + self.sampling.max_new_tokens
        if need > self.rollout.engine.context_length - RESERVED_TOKENS:
            raise ValueError(
                f"data.max_prompt_tokens + sampling.max_new_tokens = {need} exceeds "
                f"rollout.engine.context_length - {RESERVED_TOKENS} = "
                f"{self.rollout.engine.context_length - RESERVED_TOKENS}"
            )
        return self
