"""The worker's two loops: prompts in, groups out; heartbeats that keep the leases."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

import grpc

from services.rollout.group_runner import GroupRunner
from services.rollout.learner_link import LearnerGone, LearnerLink, NotRegistered, RunFinished
from services.rollout.policy import ServedPolicy
from specroll.v1 import artifact_pb2
from specroll_core.contracts import PromptGroup, TrajectoryGroup

log = logging.getLogger(__name__)

_LEASE_WAIT_SECONDS = 2.0
_RETRY_SECONDS = 0.5


class PromptLoop:
    """Keeps `capacity` groups in flight.

    publish: writes a group to the stream; may wait while the stream is full.
    load: brings the policy that the learner names at registration into the engine.
    learner_timeout: seconds without an answer after which the worker gives up.
    """

    def __init__(
        self,
        link: LearnerLink,
        runner: GroupRunner,
        policy: ServedPolicy,
        *,
        capacity: int,
        publish: Callable[[TrajectoryGroup], Awaitable[None]],
        load: Callable[[artifact_pb2.ArtifactRef], Awaitable[None]],
        heartbeat_seconds: float,
        learner_timeout: float,
    ) -> None:
        self._link = link
        self._runner = runner
        self._policy = policy
        self._capacity = capacity
        self._publish = publish
        self._load = load
        self._heartbeat_seconds = heartbeat_seconds
        self._learner_timeout = learner_timeout
        self._running: dict[str, asyncio.Task[None]] = {}  # by lease id
        self._registered = asyncio.Event()
        self._registered.set()
        self._heard_at = time.monotonic()
        self.counters: Counter[str] = Counter()

    @property
    def in_flight(self) -> int:
        return len(self._running)

    async def run(self) -> None:
        """Consumes leases, produces groups on the stream; waits for leases or for a running group to end.

        Returns when the learner says that the run is over; raises LearnerGone when it has been silent too long.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._beat())
                tasks.create_task(self._lease_for_ever())
        except* RunFinished:
            log.info("the run is over")
        finally:
            lease_ids = list(self._running)
            if lease_ids:
                await self._cancel(lease_ids, "the worker stops")
                await self._link.give_back(lease_ids, "the worker stops")

    async def _lease_for_ever(self) -> None:
        while True:
            await self._registered.wait()
            free = self._capacity - len(self._running)
            if free == 0:
                await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)
                continue
            try:
                groups = await self._link.lease(
                    free, version=self._policy.served.version, wait_seconds=_LEASE_WAIT_SECONDS
                )
            except NotRegistered:
                self._registered.clear()
                continue
            except grpc.aio.AioRpcError as error:
                self.counters["lease_failed"] += 1
                log.debug("no leases: %s", error.details())
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            for group in groups:
                self._running[group.lease_id] = asyncio.create_task(self._serve(group))

    async def _serve(self, group: PromptGroup) -> None:
        try:
            done = await self._runner.run(group)
            await self._publish(done)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001  a group's failure must not take the others with it
            self.counters["groups_failed"] += 1
            cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            log.warning("group %s failed and its lease goes back: %s", group.group_id, cause)
            # A fault that every group meets must not become a storm of leases.
            await asyncio.sleep(_RETRY_SECONDS)
            await self._link.give_back([group.lease_id], str(cause))
        finally:
            self._running.pop(group.lease_id, None)

    async def _beat(self) -> None:
        while True:
            served = self._policy.served
            try:
                answer = await self._link.heartbeat(self._running, version=served.version, digest=served.digest)
            except NotRegistered:
                self._heard_at = time.monotonic()
                await self._register_again()
            except grpc.aio.AioRpcError as error:
                silent = time.monotonic() - self._heard_at
                if silent > self._learner_timeout:
                    raise LearnerGone(
                        f"the learner has not answered for {silent:.0f} s (rollout.learner_timeout_seconds): "
                        f"{error.details()}"
                    ) from None
                self.counters["heartbeat_failed"] += 1
            else:
                self._heard_at = time.monotonic()
                if answer.finished:
                    raise RunFinished
                await self._cancel(answer.expired_lease_ids, "its lease expired")
            await asyncio.sleep(self._heartbeat_seconds)

    async def _register_again(self) -> None:
        """The learner restarted: what it leased before is void, and its policy may be an older one."""
        self._registered.clear()
        await self._cancel(list(self._running), "the learner restarted")
        try:
            answer = await self._link.register()
        except grpc.aio.AioRpcError as error:
            log.warning("cannot register again: %s", error.details())
            return
        log.info("registered again with the learner, which stands at policy version %d", answer.policy.version)
        await self._load(answer.policy)
        self._registered.set()

    async def _cancel(self, lease_ids: Iterable[str], reason: str) -> None:
        tasks = [task for lease_id in lease_ids if (task := self._running.get(lease_id)) is not None]
        if tasks:
            self.counters["groups_cancelled"] += len(tasks)
            log.info("%d groups in flight are dropped: %s", len(tasks), reason)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
