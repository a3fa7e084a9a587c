"""The records that travel between services: frozen, plain Python, valid by construction.

A record checks itself when it is made, so a message that breaks a contract is rejected where it enters
a process and never travels further in. Protobuf converters are in `services/common/wire.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

# Who an accepted token can come from: `sources.Source` names them.
SOURCES = 4


class ContractError(ValueError):
    """A record whose fields contradict each other; the message names the record and the field."""


class FinishReason(StrEnum):
    STOP = "stop"  # a stop token, a stop string or the end-of-sequence token
    LENGTH = "length"  # max_new_tokens or the context length
    ABORT = "abort"  # cut by an operator or by a failure: never trained on


class RewardStatus(StrEnum):
    OK = "ok"  # `reward` is the verifier's verdict
    TIMEOUT = "timeout"  # the verifier was killed at its time limit
    ERROR = "error"  # the verifier failed: an infrastructure failure is never a reward of 0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The law that a request asks for. Defaults are plain sampling from the model.

    temperature: 0 is greedy. top_k: -1 is off. top_p, min_p: 1 and 0 are off. seed: None draws one.
    stop: strings that end the text; stop_token_ids: ids that end it beside the model's own.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_new_tokens: int = 128
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        _require(math.isfinite(self.temperature) and self.temperature >= 0, "temperature must be 0 or more")
        _require(0 < self.top_p <= 1, "top_p must be above 0 and at most 1")
        _require(self.top_k == -1 or self.top_k >= 1, "top_k must be -1 (off) or at least 1")
        _require(0 <= self.min_p <= 1, "min_p must lie between 0 and 1")
        _require(self.max_new_tokens >= 1, "max_new_tokens must be at least 1")
        _require(0 < self.repetition_penalty <= 2, "repetition_penalty must be above 0 and at most 2")
        _require(-2 <= self.frequency_penalty <= 2, "frequency_penalty must lie between -2 and 2")
        _require(-2 <= self.presence_penalty <= 2, "presence_penalty must lie between -2 and 2")
        _require(all(self.stop), "stop must not contain an empty string")
        _require(self.seed is None or 0 <= self.seed < 2**63, "seed must be 0 or more and below 2^63")
        _require(all(math.isfinite(b) for _, b in self.logit_bias), "logit_bias must be finite")


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of a trajectory came from this version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SpecCounters:
    """What speculation did for one trajectory.

    verify_steps: target forwards that verified proposals. drafted: nodes proposed beside the root.
    accepted: drafted nodes that were accepted, the bonus token not counted.
    accepted_by_depth[d]: accepted nodes at depth d + 1. accepted_by_source[s]: those of `sources.Source` s; empty where
    it is not known.
    """

    verify_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_depth: tuple[int, ...] = ()
    accepted_by_source: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _require(0 <= self.accepted <= self.drafted, "spec: accepted must be between 0 and drafted")
        _require(sum(self.accepted_by_depth) == self.accepted, "spec: accepted_by_depth must add up to accepted")
        _require(
            not self.accepted_by_source
            or (len(self.accepted_by_source) == SOURCES and sum(self.accepted_by_source) == self.accepted),
            f"spec: accepted_by_source must hold {SOURCES} numbers that add up to accepted",
        )


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sampled completion.

    logprobs[i] is the behaviour log-probability of token_ids[i]: of the law that it was sampled from,
    after temperature, top-k, top-p and min-p. Spans cover [0, len(token_ids)) without gaps.
    Times are seconds since the epoch. `reward` means something only where `reward_status` is OK.
    """

    trajectory_id: str
    group_id: str
    sample_index: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_version_spans: tuple[VersionSpan, ...]
    head_version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    reward: float
    reward_status: RewardStatus
    spec: SpecCounters
    worker_id: str
    started_at: float
    finished_at: float

    def __post_init__(self) -> None:
        name = f"trajectory {self.trajectory_id}"
        _require(bool(self.trajectory_id and self.group_id), f"{name}: ids must not be empty")
        _require(self.sample_index >= 0, f"{name}: sample_index must be 0 or more")
        _require(bool(self.prompt_ids), f"{name}: prompt_ids must not be empty")
        _require(bool(self.token_ids), f"{name}: token_ids must not be empty")
        _require(
            len(self.logprobs) == len(self.token_ids),
            f"{name}: {len(self.logprobs)} logprobs for {len(self.token_ids)} tokens",
        )
        _require(min(self.token_ids) >= 0 and min(self.prompt_ids) >= 0, f"{name}: negative token id")
        _require(all(lp <= 1e-5 for lp in self.logprobs), f"{name}: a log-probability is above 0 or not a number")
        _require(_covers(self.policy_version_spans, len(self.token_ids)), f"{name}: policy spans leave gaps")
        if self.head_version_spans:
            _require(_covers(self.head_version_spans, len(self.token_ids)), f"{name}: head spans leave gaps")
        if self.reward_status is RewardStatus.OK:
            _require(math.isfinite(self.reward), f"{name}: reward is not finite")

    @property
    def oldest_policy_version(self) -> int:
        return min(span.version for span in self.policy_version_spans)


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """One leased prompt: what a rollout worker needs to sample and grade `group_size` completions.

    answer: reference for the verifier. policy_version: the learner's version when the lease was given.
    deadline: seconds since the epoch at which the lease expires unless a heartbeat renews it.
    """

    group_id: str
    lease_id: str
    prompt_index: int
    epoch: int
    policy_version: int
    prompt_ids: tuple[int, ...]
    answer: str
    group_size: int
    sampling: SamplingParams
    deadline: float = 0.0

    def __post_init__(self) -> None:
        _require(bool(self.group_id and self.lease_id), "prompt group: ids must not be empty")
        _require(bool(self.prompt_ids), f"prompt group {self.group_id}: prompt_ids must not be empty")
        _require(self.group_size >= 1, f"prompt group {self.group_id}: group_size must be at least 1")


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """All siblings of one prompt, as they travel on the stream `trajectories`."""

    group_id: str
    lease_id: str
    prompt_index: int
    epoch: int
    policy_version: int
    trajectories: tuple[Trajectory, ...]
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(bool(self.trajectories), f"group {self.group_id}: no trajectories")
        for t in self.trajectories:
            _require(t.group_id == self.group_id, f"group {self.group_id}: holds a trajectory of {t.group_id}")
            _require(
                t.prompt_ids == self.trajectories[0].prompt_ids, f"group {self.group_id}: siblings differ in prompt"
            )

    @property
    def oldest_policy_version(self) -> int:
        return min(t.oldest_policy_version for t in self.trajectories)


def _covers(spans: Sequence[VersionSpan], length: int) -> bool:
    """Whether the spans tile [0, length) in order, each of at least one token."""
    at = 0
    for span in spans:
        if span.start != at or span.end <= span.start or span.version < 0:
            return False
        at = span.end
    return at == length


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ContractError(message)
