from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FeedbackBatch(_message.Message):
    __slots__ = ("worker_id", "trajectories")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    trajectories: _containers.RepeatedCompositeFieldContainer[TrajectoryFeedback]
    def __init__(self, worker_id: _Optional[str] = ..., trajectories: _Optional[_Iterable[_Union[TrajectoryFeedback, _Mapping]]] = ...) -> None: ...

class TrajectoryFeedback(_message.Message):
    __slots__ = ("request_id", "prompt", "temperature", "tokens", "finished_at", "rounds")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: str
    temperature: float
    tokens: int
    finished_at: float
    rounds: _containers.RepeatedCompositeFieldContainer[RoundCounts]
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[str] = ..., temperature: _Optional[float] = ..., tokens: _Optional[int] = ..., finished_at: _Optional[float] = ..., rounds: _Optional[_Iterable[_Union[RoundCounts, _Mapping]]] = ...) -> None: ...

class RoundCounts(_message.Message):
    __slots__ = ("heads_version", "policy_version", "drafted", "accepted")
    HEADS_VERSION_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    heads_version: int
    policy_version: int
    drafted: int
    accepted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, heads_version: _Optional[int] = ..., policy_version: _Optional[int] = ..., drafted: _Optional[int] = ..., accepted: _Optional[_Iterable[int]] = ...) -> None: ...
