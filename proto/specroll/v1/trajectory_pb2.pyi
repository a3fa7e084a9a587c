from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]

class RewardStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REWARD_STATUS_UNSPECIFIED: _ClassVar[RewardStatus]
    REWARD_STATUS_OK: _ClassVar[RewardStatus]
    REWARD_STATUS_TIMEOUT: _ClassVar[RewardStatus]
    REWARD_STATUS_ERROR: _ClassVar[RewardStatus]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
REWARD_STATUS_UNSPECIFIED: RewardStatus
REWARD_STATUS_OK: RewardStatus
REWARD_STATUS_TIMEOUT: RewardStatus
REWARD_STATUS_ERROR: RewardStatus

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "repetition_penalty", "frequency_penalty", "presence_penalty", "stop", "stop_token_ids", "ignore_eos", "seed", "logit_bias")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_new_tokens: int
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    seed: int
    logit_bias: _containers.ScalarMap[int, float]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., max_new_tokens: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., seed: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("version", "start", "end")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    version: int
    start: int
    end: int
    def __init__(self, version: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class SpecCounters(_message.Message):
    __slots__ = ("verify_steps", "drafted", "accepted", "accepted_by_depth", "accepted_by_source")
    VERIFY_STEPS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BY_DEPTH_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BY_SOURCE_FIELD_NUMBER: _ClassVar[int]
    verify_steps: int
    drafted: int
    accepted: int
    accepted_by_depth: _containers.RepeatedScalarFieldContainer[int]
    accepted_by_source: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, verify_steps: _Optional[int] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., accepted_by_depth: _Optional[_Iterable[int]] = ..., accepted_by_source: _Optional[_Iterable[int]] = ...) -> None: ...

class Trajectory(_message.Message):
    __slots__ = ("trajectory_id", "sample_index", "token_ids", "logprobs", "policy_version_spans", "head_version_spans", "finish_reason", "reward", "reward_status", "spec", "started_at", "finished_at")
    TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_SPANS_FIELD_NUMBER: _ClassVar[int]
    HEAD_VERSION_SPANS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    REWARD_STATUS_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_FIELD_NUMBER: _ClassVar[int]
    trajectory_id: str
    sample_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    policy_version_spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    head_version_spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    finish_reason: FinishReason
    reward: float
    reward_status: RewardStatus
    spec: SpecCounters
    started_at: float
    finished_at: float
    def __init__(self, trajectory_id: _Optional[str] = ..., sample_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., policy_version_spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., head_version_spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., reward: _Optional[float] = ..., reward_status: _Optional[_Union[RewardStatus, str]] = ..., spec: _Optional[_Union[SpecCounters, _Mapping]] = ..., started_at: _Optional[float] = ..., finished_at: _Optional[float] = ...) -> None: ...

class TrajectoryGroup(_message.Message):
    __slots__ = ("group_id", "lease_id", "prompt_index", "epoch", "policy_version", "prompt_ids", "worker_id", "trajectories", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_INDEX_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    lease_id: str
    prompt_index: int
    epoch: int
    policy_version: int
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    worker_id: str
    trajectories: _containers.RepeatedCompositeFieldContainer[Trajectory]
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, group_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., prompt_index: _Optional[int] = ..., epoch: _Optional[int] = ..., policy_version: _Optional[int] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., worker_id: _Optional[str] = ..., trajectories: _Optional[_Iterable[_Union[Trajectory, _Mapping]]] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class PromptGroup(_message.Message):
    __slots__ = ("group_id", "lease_id", "prompt_index", "epoch", "policy_version", "prompt_ids", "answer", "group_size", "sampling", "deadline")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_INDEX_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    lease_id: str
    prompt_index: int
    epoch: int
    policy_version: int
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    answer: str
    group_size: int
    sampling: SamplingParams
    deadline: float
    def __init__(self, group_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., prompt_index: _Optional[int] = ..., epoch: _Optional[int] = ..., policy_version: _Optional[int] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., answer: _Optional[str] = ..., group_size: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., deadline: _Optional[float] = ...) -> None: ...
