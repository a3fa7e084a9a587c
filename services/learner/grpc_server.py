"""LearnerService: registration, heartbeats, leases, policy files."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import grpc

from services.common.artifact_transfer import iter_chunks
from services.common.artifacts import ArtifactError, ArtifactStore
from services.common.wire import prompt_group_to_proto
from services.learner.lease_desk import LeaseDesk
from services.learner.workers import Workers
from specroll.v1 import artifact_pb2, learner_pb2, learner_pb2_grpc

log = logging.getLogger(__name__)

# Longer waits would hold a server thread for a worker that may be gone.
_MAX_WAIT_SECONDS = 5.0


class LearnerServicer(learner_pb2_grpc.LearnerServiceServicer):
    """Answers workers from gRPC threads; all state is in the desk and the registry.

    config_digest: of the settings that both ends must share; a worker with another one is refused.
    """

    def __init__(
        self,
        desk: LeaseDesk,
        workers: Workers,
        policies: ArtifactStore,
        *,
        config_digest: str,
        heartbeat_seconds: float,
        run_id: str,
    ) -> None:
        self._desk = desk
        self._workers = workers
        self._policies = policies
        self._config_digest = config_digest
        self._heartbeat_seconds = heartbeat_seconds
        self._run_id = run_id
        self.finished = False  # set by the learner once nothing is left to do, evaluation included

    def Register(self, request, context):
        if request.config_digest != self._config_digest:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                "the worker's configuration differs from the learner's in [model], [sampling], [reward] or run.seed; "
                "start both from the same file, and name model.dtype where the machines are of different kinds",
            )
        policy = self._policies.latest()
        if policy is None:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the learner has not published a policy yet")
            raise AssertionError("abort raises")
        lost = self._desk.release_worker(request.worker_id)
        self._workers.register(request.worker_id, request.address)
        log.info(
            "worker %s registered from %s%s", request.worker_id, request.address,
            f"; {lost} leases of its earlier life are given out again" if lost else "",
        )  # fmt: skip
        return learner_pb2.RegisterResponse(
            policy=artifact_pb2.ArtifactRef(version=policy.version, path=str(policy.path), digest=policy.digest),
            heartbeat_seconds=self._heartbeat_seconds,
            run_id=self._run_id,
        )

    def Heartbeat(self, request, context):
        self._know(request.worker_id, request.policy_version, request.policy_digest, context)
        return learner_pb2.HeartbeatResponse(
            policy_version=self._desk.step,
            expired_lease_ids=self._desk.renew(request.worker_id, request.lease_ids),
            finished=self.finished,
        )

    def LeasePrompts(self, request, context):
        if request.worker_id not in self._workers.ids():
            context.abort(grpc.StatusCode.NOT_FOUND, f"worker {request.worker_id} is not registered")
        if not 0 <= request.policy_version <= self._desk.step:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"policy version {request.policy_version} is not one of this run's; load the current one first",
            )
        groups = self._desk.lease(
            request.worker_id,
            request.capacity,
            version=request.policy_version,
            wait_seconds=min(request.wait_seconds, _MAX_WAIT_SECONDS),
        )
        if groups and not context.is_active():
            # The worker went away while it waited: nobody would ever work on these.
            self._desk.give_back(request.worker_id, [group.lease_id for group in groups])
        return learner_pb2.LeasePromptsResponse(
            groups=[prompt_group_to_proto(group) for group in groups], finished=self.finished
        )

    def ReturnLeases(self, request, context):
        count = self._desk.give_back(request.worker_id, request.lease_ids)
        log.warning("worker %s gave %d leases back: %s", request.worker_id, count, request.reason)
        return learner_pb2.ReturnLeasesResponse()

    def FetchPolicy(self, request, context) -> Iterator[artifact_pb2.ArtifactChunk]:
        try:
            artifact = self._policies.open(request.version)
        except ArtifactError as error:
            context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        yield from iter_chunks(artifact)

    def GetStatus(self, request, context):
        counts = self._desk.counts()
        return learner_pb2.LearnerStatus(
            run_id=self._run_id,
            step=self._desk.step,
            policy_version=self._desk.step,
            leases_outstanding=counts["leased"],
            granted_total=counts["granted_total"],
            workers=self._workers.ids(),
            finished=self.finished,
            policy=self._current_policy(),
        )

    def _current_policy(self) -> artifact_pb2.ArtifactRef | None:
        policy = self._policies.latest()
        if policy is None:
            return None
        return artifact_pb2.ArtifactRef(version=policy.version, path=str(policy.path), digest=policy.digest)

    def _know(self, worker_id: str, version: int, digest: str, context) -> None:
        if not self._workers.heartbeat(worker_id, version, digest):
            context.abort(grpc.StatusCode.NOT_FOUND, f"worker {worker_id} is not registered at {time.time():.0f}")
