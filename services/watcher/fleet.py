"""The rollout workers as the watcher sees them, and how heads get to all of them.

Two phases over the fleet: every worker prepares, then those that could commit, so that a bad artifact changes nobody
and versions differ for milliseconds. A worker that fails keeps its old heads; it is named with the reason and tried
again, as is one that comes late.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc

from services.common.artifact_transfer import iter_chunks
from services.common.artifacts import Artifact
from specroll.v1 import artifact_pb2, rollout_pb2, rollout_pb2_grpc

log = logging.getLogger(__name__)

_STATUS_SECONDS = 30.0
_CHECKSUM_SECONDS = 60.0
_SWAP_SECONDS = 180.0
_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 1.0, 30.0
_PREPARE = rollout_pb2.SwapPhase.SWAP_PHASE_PREPARE
_COMMIT = rollout_pb2.SwapPhase.SWAP_PHASE_COMMIT


@dataclass(slots=True)
class Worker:
    """version, digest, checksum: of the heads that it said it serves, -1 before it said anything. failure: of the
    last attempt to swap, empty where it went well. silence: why the last question was not answered, likewise."""

    worker_id: str
    address: str
    channel: grpc.Channel
    version: int = -1
    digest: str = ""
    checksum: str = ""
    failure: str = ""
    silence: str = ""
    retry_at: float = 0.0
    pause: float = _FIRST_RETRY_SECONDS
    stub: rollout_pb2_grpc.RolloutServiceStub = field(init=False)

    def __post_init__(self) -> None:
        self.stub = rollout_pb2_grpc.RolloutServiceStub(self.channel)


class Fleet:
    """One thread calls it. connect: opens a channel to host:port."""

    def __init__(self, connect: Callable[[str], grpc.Channel]) -> None:
        self._connect = connect
        self._pool = ThreadPoolExecutor(max_workers=16, thread_name_prefix="fleet")
        self._workers: dict[str, Worker] = {}
        self._closing = False
        self.swaps = self.swaps_failed = 0
        self.commit_seconds = 0.0  # the slowest of the last swap

    def workers(self) -> list[Worker]:
        return sorted(self._workers.values(), key=lambda worker: worker.worker_id)

    def follow(self, addresses: dict[str, str]) -> None:
        """Takes in new workers, forgets those that are gone, and asks all what they serve."""
        for worker_id in self._workers.keys() - addresses.keys():
            log.info("worker %s is gone", worker_id)
            self._workers.pop(worker_id).channel.close()
        for worker_id, address in addresses.items():
            known = self._workers.get(worker_id)
            if known is None or known.address != address:
                self._workers[worker_id] = Worker(worker_id, address, self._connect(address))
        self._on_all(self.workers(), self._ask, self._silent)

    def behind(self, artifact: Artifact) -> list[Worker]:
        """Workers that are known to serve something else and are due for an attempt."""
        now = time.monotonic()
        return [w for w in self.workers() if w.version >= 0 and w.digest != artifact.digest and now >= w.retry_at]

    def swap(self, artifact: Artifact, workers: Sequence[Worker]) -> list[Worker]:
        """Puts an artifact into service on `workers`, also where it serves already; returns those that took it."""
        prepared = self._on_all(workers, lambda worker: self._prepare(worker, artifact), self._failed)
        self.commit_seconds = 0.0
        return self._on_all(prepared, lambda worker: self._commit(worker, artifact), self._failed)

    def disturbed(self, artifact: Artifact, checksum: str) -> list[Worker]:
        """Workers that say they serve an artifact, while the heads in their memory have another SHA-256 than it has.

        Left out are those that serve something else, which `behind` is about, those whose last attempt to swap was
        just now, and those that do not answer.
        """
        now = time.monotonic()
        asked = [w for w in self.workers() if w.digest == artifact.digest and now >= w.retry_at]
        live: dict[str, str] = {}

        def ask(worker: Worker) -> None:
            request = rollout_pb2.RolloutStatusRequest(checksums=True)
            live[worker.worker_id] = worker.stub.GetStatus(request, timeout=_CHECKSUM_SECONDS).heads_checksum

        return [w for w in self._on_all(asked, ask, self._silent) if live[w.worker_id] != checksum]

    def abort(self) -> None:
        """Ends all calls, now and later; from any thread."""
        self._closing = True
        for worker in list(self._workers.values()):
            worker.channel.close()

    def close(self) -> None:
        self.abort()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, worker: Worker) -> None:
        status = worker.stub.GetStatus(rollout_pb2.RolloutStatusRequest(), timeout=_STATUS_SECONDS)
        worker.version, worker.digest = status.heads_version, status.heads_digest
        worker.checksum = status.heads_checksum
        worker.silence = ""

    def _prepare(self, worker: Worker, artifact: Artifact) -> None:
        path = str(artifact.path)
        try:
            self._send(worker, artifact, path, _PREPARE)
        except grpc.RpcError as error:
            # The worker cannot read this file system: the same call again, with the files.
            if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                raise
            self._send(worker, artifact, "", _PREPARE)

    def _commit(self, worker: Worker, artifact: Artifact) -> None:
        answer = self._send(worker, artifact, str(artifact.path), _COMMIT)
        worker.version, worker.digest, worker.checksum = answer.heads_version, artifact.digest, answer.heads_checksum
        worker.failure, worker.retry_at, worker.pause = "", 0.0, _FIRST_RETRY_SECONDS
        self.commit_seconds = max(self.commit_seconds, answer.commit_seconds)
        self.swaps += 1

    @staticmethod
    def _send(
        worker: Worker, artifact: Artifact, path: str, phase: rollout_pb2.SwapPhase
    ) -> rollout_pb2.SwapHeadsResponse:
        ref = artifact_pb2.ArtifactRef(version=artifact.version, path=path, digest=artifact.digest)
        header = rollout_pb2.SwapHeadsRequest(header=rollout_pb2.SwapHeadsHeader(heads=ref, phase=phase))
        chunks = (rollout_pb2.SwapHeadsRequest(chunk=chunk) for chunk in iter_chunks(artifact)) if not path else ()
        return worker.stub.SwapHeads(itertools.chain([header], chunks), timeout=_SWAP_SECONDS)

    def _on_all(
        self, workers: Sequence[Worker], call: Callable[[Worker], None], failed: Callable[[Worker, str], None]
    ) -> list[Worker]:
        """Calls all at once and waits; returns those where it went well, after `failed` was told of the others."""
        futures = [(worker, self._pool.submit(call, worker)) for worker in workers]
        done = []
        for worker, future in futures:
            try:
                future.result()
                done.append(worker)
            except grpc.RpcError as error:
                failed(worker, f"{error.code().name}: {error.details()}")
            except ValueError:
                if not self._closing:  # what gRPC raises for a channel that was closed
                    raise
        return done

    def _silent(self, worker: Worker, reason: str) -> None:
        """Who could not be asked may well take heads: no attempt to swap waits for that."""
        if not self._closing and not worker.silence:
            log.warning("worker %s does not say what it serves: %s", worker.worker_id, reason)
        worker.silence = reason

    def _failed(self, worker: Worker, reason: str) -> None:
        if self._closing:
            return
        self.swaps_failed += 1
        worker.failure = reason
        worker.retry_at = time.monotonic() + worker.pause
        log.warning("worker %s: %s; trying again in %.0f s", worker.worker_id, reason, worker.pause)
        worker.pause = min(2 * worker.pause, _LONGEST_RETRY_SECONDS)
