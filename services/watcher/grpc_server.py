"""WatcherService: the files of heads for workers without the watcher's file system, and where the watcher stands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import grpc

from services.common.artifact_transfer import iter_chunks
from services.common.artifacts import ArtifactError
from specroll.v1 import artifact_pb2, watcher_pb2, watcher_pb2_grpc

if TYPE_CHECKING:
    from services.watcher.service import Watcher


class WatcherServicer(watcher_pb2_grpc.WatcherServiceServicer):
    """Answers from gRPC threads; reads of the watcher's state see values that were true a moment ago."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def FetchHeads(self, request, context) -> Iterator[artifact_pb2.ArtifactChunk]:
        try:
            artifact = self._watcher.registry.store.open(request.version)
        except (ArtifactError, ValueError) as error:
            context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        yield from iter_chunks(artifact)

    def GetStatus(self, request, context):
        watcher = self._watcher
        last = watcher.watch.last
        return watcher_pb2.WatcherStatus(
            run_id=watcher.run_id,
            phase=watcher.phase,
            heads_version=watcher.watch.version,
            workers=[
                watcher_pb2.WorkerHeads(
                    worker_id=w.worker_id,
                    address=w.address,
                    heads_version=w.version,
                    heads_checksum=w.checksum,
                    failure=w.failure or w.silence,
                )
                for w in watcher.fleet.workers()
            ],
            blocked=sorted(watcher.registry.blocked),
            records=watcher.watch.records,
            rows=watcher.buffer.received,
            acceptance=last.acceptance if last else 0.0,
            reference=last.reference if last else 0.0,
        )
