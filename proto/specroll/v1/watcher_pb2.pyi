from specroll.v1 import artifact_pb2 as _artifact_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FetchHeadsRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class WatcherStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatcherStatus(_message.Message):
    __slots__ = ("run_id", "phase", "heads_version", "workers", "blocked", "records", "rows", "acceptance", "reference")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    HEADS_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    phase: str
    heads_version: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerHeads]
    blocked: _containers.RepeatedScalarFieldContainer[int]
    records: int
    rows: int
    acceptance: float
    reference: float
    def __init__(self, run_id: _Optional[str] = ..., phase: _Optional[str] = ..., heads_version: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerHeads, _Mapping]]] = ..., blocked: _Optional[_Iterable[int]] = ..., records: _Optional[int] = ..., rows: _Optional[int] = ..., acceptance: _Optional[float] = ..., reference: _Optional[float] = ...) -> None: ...

class WorkerHeads(_message.Message):
    __slots__ = ("worker_id", "address", "heads_version", "heads_checksum", "failure")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HEADS_VERSION_FIELD_NUMBER: _ClassVar[int]
    HEADS_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    heads_version: int
    heads_checksum: str
    failure: str
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., heads_version: _Optional[int] = ..., heads_checksum: _Optional[str] = ..., failure: _Optional[str] = ...) -> None: ...
