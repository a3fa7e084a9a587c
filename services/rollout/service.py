"""The rollout service: one engine, one worker.

Registers, loads the current policy, and only then serves: prompts of the learner through the queue, and
`RolloutService` for evaluation and clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import threading
from collections.abc import Coroutine
from pathlib import Path

from services import queue
from services.common import grpc_setup, lifecycle
from services.common.keys import RunKeys
from services.common.logs import setup_logging
from services.common.metrics import serve_metrics
from services.common.run_board import RunBoard
from services.common.streams import StreamProducer, StreamUnavailable
from services.common.wire import serialize_trajectory_group
from services.config import Config, RolloutConfig
from services.models import load_tokenizer
from services.rollout.completion import EngineError, PartState
from services.rollout.engine import RolloutEngine
from services.rollout.exposition import WorkerCollector, registry
from services.rollout.grading import GradingPool
from services.rollout.group_runner import GroupRunner
from services.rollout.grpc_server import RolloutServicer
from services.rollout.heads_feedback import FeedbackForwarder
from services.rollout.heads_service import WorkerHeads, announce_for_ever, engine_with_heads
from services.rollout.learner_link import FirstContact, LearnerLink
from services.rollout.policy import Served, ServedPolicy
from services.rollout.policy_store import PolicyStore
from services.rollout.prompt_loop import PromptLoop
from specroll.v1 import artifact_pb2, learner_pb2, rollout_pb2_grpc
from specroll_core.contracts import TrajectoryGroup

log = logging.getLogger(__name__)

_FIRST_CONTACT_SECONDS = 120.0
# A full stream is back-pressure, not a fault: the learner may be in a long evaluation.
_PUBLISH_SECONDS = 3600.0
_ENGINE_CHECK_SECONDS = 1.0
_PARTS_SECONDS = 5.0


def advertised_host(rollout: RolloutConfig) -> str:
    """Where the learner reaches a worker that binds to `rollout.host`: a wildcard address names no machine."""
    if rollout.advertise:
        return rollout.advertise
    return socket.gethostname() if rollout.host in ("0.0.0.0", "::") else rollout.host  # noqa: S104


class RolloutWorker:
    """One rollout process. Call `run` in the main thread: SGLang installs signal handlers there."""

    def __init__(self, config: Config, *, cache: Path, stop: threading.Event) -> None:
        self._config = config
        self._stop = stop
        self.worker_id = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        rollout = config.rollout
        port = rollout.port or lifecycle.free_port(rollout.host)
        self._bind = (rollout.host, port)
        self._address = f"{advertised_host(rollout)}:{port}"
        self._store = PolicyStore(cache)
        self._heads_store = PolicyStore(cache / "heads")
        self._parts: list[PartState] = []

    def run(self) -> None:
        """Serves until the run is over or `stop` is set. Raises where it cannot go on."""
        config = self._config
        with FirstContact(config) as learner:
            answer = learner.register(self.worker_id, self._address, lifecycle.Deadline(_FIRST_CONTACT_SECONDS))
            model_dir = self._store.at_path(answer.policy)
            if model_dir is None:
                model_dir = self._store.from_chunks(answer.policy, learner.fetch(answer.policy.version))
        client, keys = queue.connect(config), RunKeys(answer.run_id)
        self._board = RunBoard(client, keys)
        self._feedback: FeedbackForwarder | None = None
        if config.rollout.engine.speculation.enabled and config.watcher.enabled:
            self._feedback = FeedbackForwarder(client, keys, config.watcher, worker_id=self.worker_id)
        log.info("loading policy version %d", answer.policy.version)
        engine = RolloutEngine.start(
            config=engine_with_heads(config, self._board, self._heads_store, model_dir),
            dtype=config.model.dtype,
            model_dir=model_dir,
            policy_version=answer.policy.version,
            seed=config.run.seed,
        )
        try:
            # SGLang installs its own handlers while it starts.
            setup_logging("rollout", config.logging.level)
            asyncio.run(self._serve(engine, model_dir, answer))
        finally:
            engine.close()
            if self._feedback is not None:
                self._feedback.close()
            with contextlib.suppress(StreamUnavailable):
                self._board.withdraw(self.worker_id)

    async def _serve(self, engine: RolloutEngine, model_dir: Path, answer: learner_pb2.RegisterResponse) -> None:
        config = self._config
        policy = ServedPolicy(
            engine, Served(answer.policy.version, answer.policy.digest), pause_mode=config.rollout.pause_mode
        )
        link = LearnerLink(config, worker_id=self.worker_id, address=self._address)
        producer = StreamProducer(queue.connect(config), RunKeys(answer.run_id).trajectories, queue.limits(config))
        grader = GradingPool(config.reward)
        await grader.start()
        runner = GroupRunner(engine, grader, load_tokenizer(model_dir), worker_id=self.worker_id)
        if self._feedback is not None:
            engine.observer = self._feedback.note
        heads = WorkerHeads(engine.heads, self._heads_store, speculation=config.rollout.engine.speculation.enabled)

        async def publish(group: TrajectoryGroup) -> None:
            await asyncio.to_thread(
                producer.publish,
                serialize_trajectory_group(group),
                dedup_key=group.lease_id,
                deadline_seconds=_PUBLISH_SECONDS,
            )

        async def load(ref: artifact_pb2.ArtifactRef) -> None:
            path = await asyncio.to_thread(self._store.at_path, ref)
            if path is None:
                path = await self._store.from_async_chunks(ref, link.fetch(ref.version))
            await policy.load(path, Served(ref.version, ref.digest))

        loop = PromptLoop(
            link,
            runner,
            policy,
            capacity=config.rollout.groups_in_flight,
            publish=publish,
            load=load,
            heartbeat_seconds=answer.heartbeat_seconds,
            learner_timeout=config.rollout.learner_timeout_seconds,
        )
        server = grpc_setup.aio_server(*self._bind, security=config.security)
        servicer = RolloutServicer(
            engine, runner, policy, self._store, loop, heads, worker_id=self.worker_id, chaos=config.rollout.chaos
        )
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, server.grpc)
        await server.start()
        if config.rollout.metrics_port:
            collector = WorkerCollector(runner, loop, policy, grader, engine.heads, self._feedback, self._parts)
            serve_metrics(config.rollout.metrics_port, config.rollout.host, registry(collector))
        log.info("worker %s serves on %s", self.worker_id, self._address)
        try:
            await self._until_first(
                loop.run(),
                self._watch_engine(engine),
                self._read_parts(engine),
                self._wait_for_stop(),
                announce_for_ever(self._board, self.worker_id, self._address),
            )
        finally:
            await server.stop()
            await grader.close()
            await link.close()

    async def _until_first(self, *parts: Coroutine[None, None, None]) -> None:
        """Runs all parts until one ends; its exception, if any, is this method's."""
        tasks = [asyncio.create_task(part) for part in parts]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for task in done:
            task.result()

    async def _watch_engine(self, engine: RolloutEngine) -> None:
        """Raises within seconds of the scheduler's death."""
        while (await engine.status()).alive:
            await asyncio.sleep(_ENGINE_CHECK_SECONDS)
        raise EngineError("one of the engine's processes has ended")

    async def _read_parts(self, engine: RolloutEngine) -> None:
        """Keeps what the metrics say of Reflex's parts up to date, where anybody can read them."""
        while True:
            if self._config.rollout.metrics_port:
                self._parts[:] = await engine.speculation_parts()
            await asyncio.sleep(_PARTS_SECONDS)

    async def _wait_for_stop(self) -> None:
        while not self._stop.is_set():
            await asyncio.sleep(0.1)
