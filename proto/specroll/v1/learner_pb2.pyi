from specroll.v1 import artifact_pb2 as _artifact_pb2
from specroll.v1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterRequest(_message.Message):
    __slots__ = ("worker_id", "address", "config_digest")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CONFIG_DIGEST_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    config_digest: str
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., config_digest: _Optional[str] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("policy", "heartbeat_seconds", "redis_url", "run_id")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REDIS_URL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    policy: _artifact_pb2.ArtifactRef
    heartbeat_seconds: float
    redis_url: str
    run_id: str
    def __init__(self, policy: _Optional[_Union[_artifact_pb2.ArtifactRef, _Mapping]] = ..., heartbeat_seconds: _Optional[float] = ..., redis_url: _Optional[str] = ..., run_id: _Optional[str] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("worker_id", "lease_ids", "policy_version", "policy_digest")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    POLICY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    policy_version: int
    policy_digest: str
    def __init__(self, worker_id: _Optional[str] = ..., lease_ids: _Optional[_Iterable[str]] = ..., policy_version: _Optional[int] = ..., policy_digest: _Optional[str] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("policy_version", "expired_lease_ids", "finished")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    expired_lease_ids: _containers.RepeatedScalarFieldContainer[str]
    finished: bool
    def __init__(self, policy_version: _Optional[int] = ..., expired_lease_ids: _Optional[_Iterable[str]] = ..., finished: _Optional[bool] = ...) -> None: ...

class LeasePromptsRequest(_message.Message):
    __slots__ = ("worker_id", "capacity", "wait_seconds", "policy_version")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    capacity: int
    wait_seconds: float
    policy_version: int
    def __init__(self, worker_id: _Optional[str] = ..., capacity: _Optional[int] = ..., wait_seconds: _Optional[float] = ..., policy_version: _Optional[int] = ...) -> None: ...

class LeasePromptsResponse(_message.Message):
    __slots__ = ("groups", "finished")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.PromptGroup]
    finished: bool
    def __init__(self, groups: _Optional[_Iterable[_Union[_trajectory_pb2.PromptGroup, _Mapping]]] = ..., finished: _Optional[bool] = ...) -> None: ...

class ReturnLeasesRequest(_message.Message):
    __slots__ = ("worker_id", "lease_ids", "reason")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    def __init__(self, worker_id: _Optional[str] = ..., lease_ids: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ...) -> None: ...

class ReturnLeasesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FetchPolicyRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class LearnerStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LearnerStatus(_message.Message):
    __slots__ = ("run_id", "step", "policy_version", "leases_outstanding", "granted_total", "workers", "finished", "policy")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    LEASES_OUTSTANDING_FIELD_NUMBER: _ClassVar[int]
    GRANTED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    policy_version: int
    leases_outstanding: int
    granted_total: int
    workers: _containers.RepeatedScalarFieldContainer[str]
    finished: bool
    policy: _artifact_pb2.ArtifactRef
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ..., policy_version: _Optional[int] = ..., leases_outstanding: _Optional[int] = ..., granted_total: _Optional[int] = ..., workers: _Optional[_Iterable[str]] = ..., finished: _Optional[bool] = ..., policy: _Optional[_Union[_artifact_pb2.ArtifactRef, _Mapping]] = ...) -> None: ...
