"""Where a rollout worker gets policy files from: the learner's own directory where it can be read, else chunks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from services.common.artifact_transfer import receive
from services.common.artifacts import ArtifactError, ArtifactStore, open_artifact
from specroll.v1 import artifact_pb2

log = logging.getLogger(__name__)

# Received versions kept on the worker's disk: the one that is served and the one that arrives.
_KEEP = 2


class PolicyStore:
    """Resolves a reference to a verified model directory on this machine."""

    def __init__(self, cache: Path) -> None:
        self._cache = ArtifactStore(cache)

    def at_path(self, ref: artifact_pb2.ArtifactRef) -> Path | None:
        """The directory that the learner named, if this machine sees the same files there; None otherwise."""
        if not ref.path:
            return None
        try:
            artifact = open_artifact(Path(ref.path))
        except ArtifactError as error:
            log.debug("cannot read policy version %d at %s: %s", ref.version, ref.path, error)
            return None
        return artifact.path if artifact.digest == ref.digest else None

    def from_chunks(self, ref: artifact_pb2.ArtifactRef, chunks: Iterator[artifact_pb2.ArtifactChunk]) -> Path:
        """Writes the files, verifies them, and returns their directory. Raises ArtifactError."""
        # A restarted learner makes versions anew: a directory of the same number may hold the one that is gone.
        self._cache.discard(lambda version: version == ref.version)
        path = receive(self._cache, ref, chunks).path
        self._cache.prune(keep=_KEEP)
        return path

    async def from_async_chunks(
        self, ref: artifact_pb2.ArtifactRef, chunks: AsyncIterator[artifact_pb2.ArtifactChunk]
    ) -> Path:
        """`from_chunks` for a stream on the event loop; files are written and hashed in a thread."""
        loop = asyncio.get_running_loop()

        def pull() -> Iterator[artifact_pb2.ArtifactChunk]:
            while True:
                chunk = asyncio.run_coroutine_threadsafe(_next_or_none(chunks), loop).result()
                if chunk is None:
                    return
                yield chunk

        return await asyncio.to_thread(self.from_chunks, ref, pull())


async def _next_or_none(chunks: AsyncIterator[artifact_pb2.ArtifactChunk]) -> artifact_pb2.ArtifactChunk | None:
    return await anext(chunks, None)
