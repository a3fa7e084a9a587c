from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ArtifactRef(_message.Message):
    __slots__ = ("version", "path", "digest")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    version: int
    path: str
    digest: str
    def __init__(self, version: _Optional[int] = ..., path: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class ArtifactChunk(_message.Message):
    __slots__ = ("file", "offset", "file_size", "data")
    FILE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    FILE_SIZE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    file: str
    offset: int
    file_size: int
    data: bytes
    def __init__(self, file: _Optional[str] = ..., offset: _Optional[int] = ..., file_size: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...
