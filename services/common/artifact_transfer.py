"""Sending a version in chunks, and receiving it: checked on the way, in the store whole or not at all."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from services.common.artifact_store import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Artifact,
    ArtifactError,
    ArtifactStore,
    FileEntry,
    parse_manifest,
)
from specroll.v1 import artifact_pb2

CHUNK_BYTES = 2 * 2**20  # small beside the message limit, large beside a message's cost


def iter_chunks(artifact: Artifact, chunk_bytes: int = CHUNK_BYTES) -> Iterator[artifact_pb2.ArtifactChunk]:
    """The version as messages for `receive`: the manifest first, then every file in order.

    An empty file is one chunk without data. Raises ArtifactError where a file has changed its size.
    """
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be at least 1, not {chunk_bytes}.")
    manifest = (artifact.path / MANIFEST).stat().st_size
    for name, size in [(MANIFEST, manifest), *((name, entry.size) for name, entry in artifact.files.items())]:
        try:
            with (artifact.path / name).open("rb") as file:
                for offset in range(0, max(size, 1), chunk_bytes):
                    data = file.read(min(chunk_bytes, size - offset))
                    if len(data) != min(chunk_bytes, size - offset):
                        raise ArtifactError(f"{artifact.path / name} ends before its {size} bytes.")
                    yield artifact_pb2.ArtifactChunk(file=name, offset=offset, file_size=size, data=data)
        except OSError as error:
            raise ArtifactError(f"{artifact.path / name} cannot be read: {error.strerror}.") from error


class Reception:
    """One version as it arrives: `add` its chunks, then `finish`, or `abort`, which leaves nothing behind.

    ref: what was announced; its digest must be that of the manifest that arrives.
    """

    def __init__(self, store: ArtifactStore, ref: artifact_pb2.ArtifactRef) -> None:
        self._store, self._ref = store, ref
        self._directory: Path = store.new_temporary(ref.version)
        self._manifest = bytearray()
        self._expected: dict[str, FileEntry] | None = None
        self._done: set[str] = set()
        self._name: str | None = None
        self._file: BinaryIO | None = None
        self._at = 0
        self._hash = hashlib.sha256()

    def add(self, chunk: artifact_pb2.ArtifactChunk) -> None:
        """Writes one chunk. Raises ArtifactError where it is not what the manifest promised, OSError on a full disk."""
        if self._expected is None:
            self._add_manifest(chunk)
            return
        if chunk.file != self._name:
            self._begin(chunk.file)
        entry = self._expected[chunk.file]
        if chunk.offset != self._at or chunk.file_size != entry.size or self._at + len(chunk.data) > entry.size:
            raise self._wrong(
                f"a chunk of {chunk.file!r} at offset {chunk.offset} of {chunk.file_size} bytes came where offset "
                f"{self._at} of {entry.size} was due"
            )
        assert self._file is not None
        self._file.write(chunk.data)
        self._hash.update(chunk.data)
        self._at += len(chunk.data)
        if self._at == entry.size:
            self._end(entry)

    def finish(self) -> Artifact:
        """Puts the version into the store, in place of one of the same number.

        Raises ArtifactError where parts are missing.
        """
        if self._expected is None:
            raise self._wrong("its manifest did not arrive")
        missing = sorted(self._expected.keys() - self._done)
        if missing:
            raise self._wrong(f"{len(missing)} files did not arrive whole: {', '.join(missing[:5])}")
        return self._store.commit(self._directory, self._ref.version, bytes(self._manifest), replace=True)

    def abort(self) -> None:
        """Forgets what has arrived. Idempotent; without effect after `finish`."""
        if self._file is not None:
            self._file.close()
            self._file = None
        shutil.rmtree(self._directory, ignore_errors=True)

    def _add_manifest(self, chunk: artifact_pb2.ArtifactChunk) -> None:
        """It comes first, so that nothing is written whose name, size and hash are not known."""
        size = chunk.file_size
        in_order = chunk.file == MANIFEST and chunk.offset == len(self._manifest)
        if not in_order or size > MAX_MANIFEST_BYTES or chunk.offset + len(chunk.data) > size:
            raise self._wrong(f"the manifest was due and {chunk.file!r} at offset {chunk.offset} came")
        self._manifest += chunk.data
        if len(self._manifest) < size:
            return
        found = hashlib.sha256(self._manifest).hexdigest()
        if found != self._ref.digest:
            raise self._wrong(f"its digest is {found}, announced was {self._ref.digest}")
        version, files, _ = parse_manifest(bytes(self._manifest), "the manifest that arrived")
        if version != self._ref.version:
            raise self._wrong(f"its manifest is of version {version}")
        needed, free = sum(entry.size for entry in files.values()), shutil.disk_usage(self._directory).free
        if needed > free:
            raise self._wrong(f"it needs {needed} bytes and the disk has {free} left")
        self._expected = files

    def _begin(self, name: str) -> None:
        if self._file is not None:
            raise self._wrong(f"{name!r} began before {self._name!r} was complete")
        assert self._expected is not None
        if name not in self._expected or name in self._done:
            raise self._wrong(f"{name!r} is not in its manifest, or came twice")
        self._name, self._at, self._hash = name, 0, hashlib.sha256()
        # "x": names were checked with the manifest, and nothing may lie there yet.
        self._file = (self._directory / name).open("xb")

    def _end(self, entry: FileEntry) -> None:
        assert self._file is not None
        assert self._name is not None
        self._file.close()
        self._file = None
        if self._hash.hexdigest() != entry.sha256:
            raise self._wrong(f"{self._name!r} has SHA-256 {self._hash.hexdigest()}, its manifest says {entry.sha256}")
        self._done.add(self._name)

    def _wrong(self, reason: str) -> ArtifactError:
        return ArtifactError(f"Version {self._ref.version} was not received: {reason}.")


def receive(
    store: ArtifactStore, ref: artifact_pb2.ArtifactRef, chunks: Iterable[artifact_pb2.ArtifactChunk]
) -> Artifact:
    """Writes the chunks of `iter_chunks` into the store, verified. The caller's stream carries the deadline.

    Raises ArtifactError, and whatever the stream raises; then nothing is left behind and an old version stays.
    """
    reception = Reception(store, ref)
    try:
        for chunk in chunks:
            reception.add(chunk)
        return reception.finish()
    except BaseException:
        reception.abort()
        raise
