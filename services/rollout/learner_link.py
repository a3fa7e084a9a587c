"""What a worker says to its learner: registers, heartbeats, leases, gives leases back."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import grpc

from services.common import grpc_setup
from services.common.lifecycle import Deadline
from services.common.wire import prompt_group_from_proto
from services.config import Config
from services.config_loader import ConfigError, digest
from specroll.v1 import artifact_pb2, learner_pb2, learner_pb2_grpc
from specroll_core.contracts import PromptGroup

log = logging.getLogger(__name__)

_CALL_SECONDS = 10.0
_FETCH_SECONDS = 600.0


class LearnerGone(Exception):
    """The learner has not answered for too long."""


class NotRegistered(Exception):
    """The learner does not know this worker: it restarted."""


class RunFinished(Exception):
    """The learner says that the run is over."""


class LearnerLink:
    """Calls on one learner, on the event loop that the worker lives in.

    worker_id: this process's name, new with every start. address: host:port where the learner reaches it.
    """

    def __init__(self, config: Config, *, worker_id: str, address: str) -> None:
        self._config = config
        self.worker_id = worker_id
        self.address = address
        self._channel = grpc_setup.aio_channel(config.rollout.learner, security=config.security)
        self._stub = learner_pb2_grpc.LearnerServiceStub(self._channel)

    async def register(self) -> learner_pb2.RegisterResponse:
        return await self._stub.Register(
            register_request(self._config, self.worker_id, self.address), timeout=_CALL_SECONDS
        )

    async def heartbeat(self, lease_ids: Iterable[str], *, version: int, digest: str) -> learner_pb2.HeartbeatResponse:
        """Renews the leases. Raises NotRegistered, or grpc.RpcError where the learner does not answer."""
        request = learner_pb2.HeartbeatRequest(
            worker_id=self.worker_id, lease_ids=list(lease_ids), policy_version=version, policy_digest=digest
        )
        try:
            return await self._stub.Heartbeat(request, timeout=_CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise NotRegistered from error
            raise

    async def lease(self, capacity: int, *, version: int, wait_seconds: float) -> list[PromptGroup]:
        """Prompt groups to work on, none where the staleness bound allows none within `wait_seconds`."""
        request = learner_pb2.LeasePromptsRequest(
            worker_id=self.worker_id, capacity=capacity, wait_seconds=wait_seconds, policy_version=version
        )
        try:
            answer = await self._stub.LeasePrompts(request, timeout=wait_seconds + _CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise NotRegistered from error
            raise
        if answer.finished:
            raise RunFinished
        return [prompt_group_from_proto(group) for group in answer.groups]

    async def give_back(self, lease_ids: Iterable[str], reason: str) -> None:
        """Best effort: a lease that cannot be given back expires."""
        request = learner_pb2.ReturnLeasesRequest(worker_id=self.worker_id, lease_ids=list(lease_ids), reason=reason)
        try:
            await self._stub.ReturnLeases(request, timeout=_CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            log.warning("leases could not be given back and will expire: %s", error.details())

    async def fetch(self, version: int):
        """The files of a policy version, as an asynchronous stream of chunks."""
        async for chunk in self._stub.FetchPolicy(
            learner_pb2.FetchPolicyRequest(version=version), timeout=_FETCH_SECONDS
        ):
            yield chunk

    async def close(self) -> None:
        await self._channel.close(grace=None)


def register_request(config: Config, worker_id: str, address: str) -> learner_pb2.RegisterRequest:
    return learner_pb2.RegisterRequest(worker_id=worker_id, address=address, config_digest=digest(config))


class FirstContact:
    """The calls made before the engine, and so the event loop, is there. Use as a context manager."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._channel = grpc_setup.channel(config.rollout.learner, security=config.security)
        self._stub = learner_pb2_grpc.LearnerServiceStub(self._channel)

    def __enter__(self) -> FirstContact:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def register(self, worker_id: str, address: str, deadline: Deadline) -> learner_pb2.RegisterResponse:
        """Tries until the learner answers. Raises LearnerGone after the deadline, ConfigError where it refuses."""
        request = register_request(self._config, worker_id, address)
        while True:
            try:
                return self._stub.Register(request, timeout=_CALL_SECONDS, wait_for_ready=True)
            except grpc.RpcError as error:
                if error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED):
                    raise ConfigError([f"The learner refuses this worker: {error.details()}."]) from None
                if deadline.expired:
                    raise LearnerGone(
                        f"no learner answers at {self._config.rollout.learner} (rollout.learner): {error.details()}"
                    ) from None

    def fetch(self, version: int) -> Iterator[artifact_pb2.ArtifactChunk]:
        yield from self._stub.FetchPolicy(learner_pb2.FetchPolicyRequest(version=version), timeout=_FETCH_SECONDS)
