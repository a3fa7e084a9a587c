"""The rollout workers that the learner knows, and the threads that keep their policy current."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from services.common.artifact_transfer import iter_chunks
from services.common.artifacts import Artifact
from specroll.v1 import artifact_pb2, rollout_pb2, rollout_pb2_grpc

log = logging.getLogger(__name__)

_PAUSE_MODES = {
    "retract": rollout_pb2.PauseMode.PAUSE_MODE_RETRACT,
    "in_place": rollout_pb2.PauseMode.PAUSE_MODE_IN_PLACE,
}
# A push that failed is tried again after this long, then after twice as long: the worker may be loading or restarting.
_RETRY_SECONDS = 0.5
_LONGEST_RETRY_SECONDS = 15.0


@dataclass(slots=True)
class Worker:
    """One registered worker. version: policy that it last said it serves, -1 before it serves anything."""

    worker_id: str
    address: str
    channel: grpc.Channel
    seen_at: float
    version: int = -1
    digest: str = ""
    pushing: threading.Thread | None = None
    stub: rollout_pb2_grpc.RolloutServiceStub = field(init=False)

    def __post_init__(self) -> None:
        self.stub = rollout_pb2_grpc.RolloutServiceStub(self.channel)


class Workers:
    """Registry of workers. Every public method may be called from any thread.

    connect: opens a channel to host:port. pause_mode: how workers pause for an update.
    stale_seconds: a worker not heard of for so long is forgotten (it registers again when it comes back).
    """

    def __init__(
        self,
        connect: Callable[[str], grpc.Channel],
        *,
        pause_mode: str,
        stale_seconds: float,
        push_deadline: float = 120.0,
    ) -> None:
        self._connect = connect
        self._pause_mode = _PAUSE_MODES[pause_mode]
        self._stale_seconds = stale_seconds
        self._push_deadline = push_deadline
        self._lock = threading.Lock()
        self._workers: dict[str, Worker] = {}
        self._current: Artifact | None = None
        self._closing = threading.Event()
        self.pushes_failed = 0
        self.pause_seconds = 0.0  # of the last update, the slowest worker's

    def register(self, worker_id: str, address: str) -> None:
        """Takes a worker in, or again after it restarted: it serves nothing yet."""
        with self._lock:
            old = self._workers.pop(worker_id, None)
            self._workers[worker_id] = Worker(worker_id, address, self._connect(address), time.monotonic())
        if old is not None:
            old.channel.close()

    def heartbeat(self, worker_id: str, version: int, digest: str) -> bool:
        """Whether the worker is known. Starts a push where its policy is not the current one."""
        with self._lock:
            worker = self._workers.get(worker_id)
            if worker is None:
                return False
            worker.seen_at = time.monotonic()
            if worker.pushing is None:
                worker.version, worker.digest = version, digest
            self._push_if_behind(worker)
            return True

    def publish(self, artifact: Artifact) -> None:
        """Makes this the current policy and pushes it to every worker, without waiting for them."""
        with self._lock:
            self._current = artifact
            for worker in self._workers.values():
                self._push_if_behind(worker)

    def forget_silent(self) -> list[str]:
        """Drops workers that have not been heard of; returns their ids."""
        now = time.monotonic()
        with self._lock:
            silent = [w for w in self._workers.values() if now - w.seen_at > self._stale_seconds]
            for worker in silent:
                del self._workers[worker.worker_id]
        for worker in silent:
            worker.channel.close()
        return [worker.worker_id for worker in silent]

    def serving(self) -> list[Worker]:
        """Workers that serve some policy."""
        with self._lock:
            return [w for w in self._workers.values() if w.version >= 0]

    def speculation(self, deadline_seconds: float) -> rollout_pb2.SpeculationTotals | None:
        """Sums over the workers that answer, None where none speculates."""
        totals: rollout_pb2.SpeculationTotals | None = None
        for worker in self.serving():
            try:
                status = worker.stub.GetStatus(rollout_pb2.RolloutStatusRequest(), timeout=deadline_seconds)
            except grpc.RpcError as error:
                log.warning("worker %s did not say how it speculated: %s", worker.worker_id, error.code())
                continue
            if status.HasField("speculation"):
                totals = totals or rollout_pb2.SpeculationTotals()
                for name in (field_.name for field_ in totals.DESCRIPTOR.fields):
                    setattr(totals, name, getattr(totals, name) + getattr(status.speculation, name))
        return totals

    def ids(self) -> list[str]:
        with self._lock:
            return sorted(self._workers)

    def wait_serving(self, version: int, deadline_seconds: float, stop: threading.Event) -> list[Worker]:
        """Workers that serve `version`; waits for one at least. Raises TimeoutError naming what was seen."""
        end = time.monotonic() + deadline_seconds
        while not stop.is_set():
            ready = [w for w in self.serving() if w.version == version]
            if ready:
                return ready
            if time.monotonic() > end:
                known = {w.worker_id: w.version for w in self.serving()}
                raise TimeoutError(
                    f"no rollout worker serves policy version {version} after {deadline_seconds:.0f} s; "
                    f"registered: {self.ids() or 'none'}, serving: {known or 'none'}"
                )
            stop.wait(0.2)
        return []

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            workers = list(self._workers.values())
            self._workers.clear()
        for worker in workers:
            worker.channel.close()

    # A push thread lives as long as its worker is behind: one at a time per worker, always towards the newest.
    def _push_if_behind(self, worker: Worker) -> None:
        if self._current is None or worker.version < 0 or self._closing.is_set():
            return
        if worker.digest == self._current.digest or (worker.pushing is not None and worker.pushing.is_alive()):
            return
        worker.pushing = threading.Thread(
            target=self._push, args=(worker,), name=f"push-{worker.worker_id}", daemon=True
        )
        worker.pushing.start()

    def _push(self, worker: Worker) -> None:
        pause = _RETRY_SECONDS
        while not self._closing.is_set():
            with self._lock:
                artifact = self._current
                gone = self._workers.get(worker.worker_id) is not worker
                if artifact is None or gone or worker.digest == artifact.digest:
                    # Leaving is decided under the lock, so that a version published now finds no living thread.
                    worker.pushing = None
                    return
            try:
                answer = self._update(worker, artifact)
            except grpc.RpcError as error:
                self.pushes_failed += 1
                log.warning(
                    "worker %s did not take policy version %d (%s); trying again in %.0f s",
                    worker.worker_id, artifact.version, _reason(error), pause,
                )  # fmt: skip
                self._closing.wait(pause)
                pause = min(2 * pause, _LONGEST_RETRY_SECONDS)
                continue
            pause = _RETRY_SECONDS
            with self._lock:
                worker.version, worker.digest = answer.policy_version, artifact.digest
                self.pause_seconds = answer.pause_seconds
            log.debug("worker %s serves policy version %d", worker.worker_id, answer.policy_version)

    def _update(self, worker: Worker, artifact: Artifact) -> rollout_pb2.UpdatePolicyResponse:
        ref = artifact_pb2.ArtifactRef(version=artifact.version, path=str(artifact.path), digest=artifact.digest)
        header = rollout_pb2.UpdatePolicyRequest(
            header=rollout_pb2.UpdatePolicyHeader(policy=ref, pause_mode=self._pause_mode)
        )
        try:
            return worker.stub.UpdatePolicy(iter([header]), timeout=self._push_deadline)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                raise
        # The worker cannot read the learner's file system: the same call again, with the files.
        bare = rollout_pb2.UpdatePolicyRequest(
            header=rollout_pb2.UpdatePolicyHeader(
                policy=artifact_pb2.ArtifactRef(version=artifact.version, digest=artifact.digest),
                pause_mode=self._pause_mode,
            )
        )
        chunks = (rollout_pb2.UpdatePolicyRequest(chunk=chunk) for chunk in iter_chunks(artifact))
        return worker.stub.UpdatePolicy(itertools.chain([bare], chunks), timeout=self._push_deadline)


def _reason(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details()}"
