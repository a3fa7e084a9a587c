from specroll.v1 import artifact_pb2 as _artifact_pb2
from specroll.v1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PauseMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAUSE_MODE_UNSPECIFIED: _ClassVar[PauseMode]
    PAUSE_MODE_RETRACT: _ClassVar[PauseMode]
    PAUSE_MODE_IN_PLACE: _ClassVar[PauseMode]

class SwapPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SWAP_PHASE_UNSPECIFIED: _ClassVar[SwapPhase]
    SWAP_PHASE_PREPARE: _ClassVar[SwapPhase]
    SWAP_PHASE_COMMIT: _ClassVar[SwapPhase]
PAUSE_MODE_UNSPECIFIED: PauseMode
PAUSE_MODE_RETRACT: PauseMode
PAUSE_MODE_IN_PLACE: PauseMode
SWAP_PHASE_UNSPECIFIED: SwapPhase
SWAP_PHASE_PREPARE: SwapPhase
SWAP_PHASE_COMMIT: SwapPhase

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "prompt_ids", "sampling")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _trajectory_pb2.SamplingParams
    def __init__(self, request_id: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_trajectory_pb2.SamplingParams, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("token_ids", "logprobs", "finish_reason", "policy_version_spans", "spec", "head_version_spans")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_SPANS_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    HEAD_VERSION_SPANS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    finish_reason: _trajectory_pb2.FinishReason
    policy_version_spans: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.VersionSpan]
    spec: _trajectory_pb2.SpecCounters
    head_version_spans: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.VersionSpan]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., finish_reason: _Optional[_Union[_trajectory_pb2.FinishReason, str]] = ..., policy_version_spans: _Optional[_Iterable[_Union[_trajectory_pb2.VersionSpan, _Mapping]]] = ..., spec: _Optional[_Union[_trajectory_pb2.SpecCounters, _Mapping]] = ..., head_version_spans: _Optional[_Iterable[_Union[_trajectory_pb2.VersionSpan, _Mapping]]] = ...) -> None: ...

class UpdatePolicyRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: UpdatePolicyHeader
    chunk: _artifact_pb2.ArtifactChunk
    def __init__(self, header: _Optional[_Union[UpdatePolicyHeader, _Mapping]] = ..., chunk: _Optional[_Union[_artifact_pb2.ArtifactChunk, _Mapping]] = ...) -> None: ...

class UpdatePolicyHeader(_message.Message):
    __slots__ = ("policy", "pause_mode")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PAUSE_MODE_FIELD_NUMBER: _ClassVar[int]
    policy: _artifact_pb2.ArtifactRef
    pause_mode: PauseMode
    def __init__(self, policy: _Optional[_Union[_artifact_pb2.ArtifactRef, _Mapping]] = ..., pause_mode: _Optional[_Union[PauseMode, str]] = ...) -> None: ...

class UpdatePolicyResponse(_message.Message):
    __slots__ = ("policy_version", "pause_seconds", "in_flight")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    pause_seconds: float
    in_flight: int
    def __init__(self, policy_version: _Optional[int] = ..., pause_seconds: _Optional[float] = ..., in_flight: _Optional[int] = ...) -> None: ...

class SwapHeadsRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: SwapHeadsHeader
    chunk: _artifact_pb2.ArtifactChunk
    def __init__(self, header: _Optional[_Union[SwapHeadsHeader, _Mapping]] = ..., chunk: _Optional[_Union[_artifact_pb2.ArtifactChunk, _Mapping]] = ...) -> None: ...

class SwapHeadsHeader(_message.Message):
    __slots__ = ("heads", "phase")
    HEADS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    heads: _artifact_pb2.ArtifactRef
    phase: SwapPhase
    def __init__(self, heads: _Optional[_Union[_artifact_pb2.ArtifactRef, _Mapping]] = ..., phase: _Optional[_Union[SwapPhase, str]] = ...) -> None: ...

class SwapHeadsResponse(_message.Message):
    __slots__ = ("heads_version", "heads_checksum", "commit_seconds")
    HEADS_VERSION_FIELD_NUMBER: _ClassVar[int]
    HEADS_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    COMMIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    heads_version: int
    heads_checksum: str
    commit_seconds: float
    def __init__(self, heads_version: _Optional[int] = ..., heads_checksum: _Optional[str] = ..., commit_seconds: _Optional[float] = ...) -> None: ...

class DisturbHeadsRequest(_message.Message):
    __slots__ = ("deviation", "seed")
    DEVIATION_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    deviation: float
    seed: int
    def __init__(self, deviation: _Optional[float] = ..., seed: _Optional[int] = ...) -> None: ...

class DisturbHeadsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RolloutStatusRequest(_message.Message):
    __slots__ = ("checksums",)
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    checksums: bool
    def __init__(self, checksums: _Optional[bool] = ...) -> None: ...

class RolloutStatus(_message.Message):
    __slots__ = ("worker_id", "policy_version", "heads_version", "running", "groups_in_flight", "tokens_total", "ready", "heads_checksum", "heads_digest", "policy_checksum", "speculation")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    HEADS_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    GROUPS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    HEADS_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    HEADS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    POLICY_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    policy_version: int
    heads_version: int
    running: int
    groups_in_flight: int
    tokens_total: float
    ready: bool
    heads_checksum: str
    heads_digest: str
    policy_checksum: str
    speculation: SpeculationTotals
    def __init__(self, worker_id: _Optional[str] = ..., policy_version: _Optional[int] = ..., heads_version: _Optional[int] = ..., running: _Optional[int] = ..., groups_in_flight: _Optional[int] = ..., tokens_total: _Optional[float] = ..., ready: _Optional[bool] = ..., heads_checksum: _Optional[str] = ..., heads_digest: _Optional[str] = ..., policy_checksum: _Optional[str] = ..., speculation: _Optional[_Union[SpeculationTotals, _Mapping]] = ...) -> None: ...

class SpeculationTotals(_message.Message):
    __slots__ = ("rounds", "plain_rounds", "requests", "drafted", "emitted", "seconds", "plain_seconds")
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    rounds: float
    plain_rounds: float
    requests: float
    drafted: float
    emitted: float
    seconds: float
    plain_seconds: float
    def __init__(self, rounds: _Optional[float] = ..., plain_rounds: _Optional[float] = ..., requests: _Optional[float] = ..., drafted: _Optional[float] = ..., emitted: _Optional[float] = ..., seconds: _Optional[float] = ..., plain_seconds: _Optional[float] = ...) -> None: ...
