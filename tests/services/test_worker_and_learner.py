"""The learner's and the worker's ends against each other, over real gRPC and Redis, with an engine of a few lines."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.common import grpc_setup
from services.common.artifacts import ArtifactStore
from services.common.lifecycle import wait_until
from services.config import Config
from services.learner.grpc_server import LearnerServicer
from services.learner.lease_desk import LeaseDesk
from services.learner.prompts import Prompt, PromptSet
from services.learner.workers import Workers
from services.rollout.completion import Completion, UpdateReport
from services.rollout.grading import Grade
from services.rollout.group_runner import GroupRunner
from services.rollout.grpc_server import RolloutServicer
from services.rollout.heads_service import WorkerHeads
from services.rollout.learner_link import LearnerLink
from services.rollout.policy import Served, ServedPolicy
from services.rollout.policy_store import PolicyStore
from services.rollout.prompt_loop import PromptLoop
from specroll.v1 import learner_pb2_grpc, rollout_pb2_grpc
from specroll_core.contracts import FinishReason, RewardStatus, SpecCounters, TrajectoryGroup, VersionSpan
from specroll_core.ledger import Delivery

WAIT = 30.0


class FakeEngine:
    """Says what it was asked; a sample takes until `release` is set."""

    def __init__(self) -> None:
        self.version = 0
        self.loaded: list[tuple[int, bytes]] = []
        self.release = asyncio.Event()
        self.release.set()
        self.aborted: list[str] = []
        self.fail_next = 0

    async def generate(self, prompt_ids: Any, sampling: Any, *, request_id: str, speculation: Any = None) -> Completion:
        version = self.version
        await self.release.wait()
        if self.fail_next:
            self.fail_next -= 1
            raise RuntimeError("the engine stumbled")
        return Completion(
            token_ids=(7, 8),
            logprobs=(-0.5, -0.25),
            finish_reason=FinishReason.STOP,
            policy_version_spans=(VersionSpan(version, 0, 2),),
            spec=SpecCounters(),
            cached_tokens=0,
        )

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def update_policy(self, model_dir: Path, version: int, *, pause_mode: str) -> UpdateReport:
        content = (model_dir / "model.safetensors").read_bytes()
        if content == b"broken":
            raise ValueError("the tensors do not fit")
        self.loaded.append((version, content))
        self.version = version
        return UpdateReport(pause_seconds=0.01, in_flight=3)


class FakeGrader:
    async def grade(self, completion: str, answer: str) -> Grade:
        return Grade(reward=1.0, status=RewardStatus.OK, detail="")


class FakeDecoder:
    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        return "x"


def make_config(**learner: Any) -> Config:
    settings = {"batch_groups": 2, "group_size": 2, "max_staleness": 1, "steps": 50, "heartbeat_seconds": 0.1} | learner
    return Config.model_validate({"learner": settings, "rollout": {"learner_timeout_seconds": 3.0}})


class LearnerEnd:
    """A learner without a trainer: desk, registry, server."""

    def __init__(self, config: Config, root: Path, *, port: int = 0, incarnation: str = "a") -> None:
        self.config = config
        train = tuple(Prompt(ids=(i + 1,), answer=str(i), index=i) for i in range(10))
        prompts = PromptSet(train=train, holdout=(), duplicates=0, too_long=0, seed=0)
        self.desk = LeaseDesk(config, prompts, incarnation=incarnation, state=None)
        self.desk.open()
        self.policies = ArtifactStore(root)
        self.workers = Workers(
            lambda address: grpc_setup.channel(address, security=config.security),
            pause_mode="retract",
            stale_seconds=5.0,
        )
        self.servicer = LearnerServicer(
            self.desk, self.workers, self.policies,
            config_digest=_digest(config), heartbeat_seconds=0.1, run_id="test",
        )  # fmt: skip
        self.server = grpc_setup.server("127.0.0.1", port, security=config.security)
        learner_pb2_grpc.add_LearnerServiceServicer_to_server(self.servicer, self.server.grpc)
        self.server.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def publish(self, version: int, content: bytes) -> None:
        artifact = self.policies.publish(version, lambda d: (d / "model.safetensors").write_bytes(content))
        self.workers.publish(artifact)

    def close(self) -> None:
        self.server.stop(0)
        self.workers.close()


def _digest(config: Config) -> str:
    from services.config_loader import digest

    return digest(config)


class StoreOnAnotherMachine(PolicyStore):
    """The learner's directories do not exist here."""

    def at_path(self, ref: Any) -> Path | None:
        return None


class WorkerEnd:
    """A worker without SGLang, on an event loop in a thread."""

    def __init__(
        self, config: Config, learner: str, store: PolicyStore, *, blocked: bool, heartbeat_seconds: float
    ) -> None:
        self.config = Config.model_validate(
            config.model_dump() | {"rollout": config.rollout.model_dump() | {"learner": learner}}
        )
        self.store, self.blocked, self.heartbeat_seconds = store, blocked, heartbeat_seconds
        self.published: list[TrajectoryGroup] = []
        self.failure: BaseException | None = None
        self.ready = threading.Event()
        self._stop = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.thread.start()
        assert self.ready.wait(WAIT)

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.engine = FakeEngine()
        if self.blocked:
            self.engine.release.clear()
        server = grpc_setup.aio_server("127.0.0.1", 0, security=self.config.security)
        store = self.store
        link = LearnerLink(self.config, worker_id="w1", address=f"127.0.0.1:{server.port}")
        answer = await link.register()
        self.policy = ServedPolicy(
            self.engine, Served(answer.policy.version, answer.policy.digest), pause_mode="retract"
        )
        runner = GroupRunner(self.engine, FakeGrader(), FakeDecoder(), worker_id="w1")

        async def publish(group: TrajectoryGroup) -> None:
            self.published.append(group)

        async def load(ref: Any) -> None:
            path = await asyncio.to_thread(store.at_path, ref)
            if path is None:
                path = await store.from_async_chunks(ref, link.fetch(ref.version))
            await self.policy.load(path, Served(ref.version, ref.digest))

        self.prompt_loop = PromptLoop(
            link, runner, self.policy, capacity=2, publish=publish, load=load,
            heartbeat_seconds=self.heartbeat_seconds, learner_timeout=self.config.rollout.learner_timeout_seconds,
        )  # fmt: skip
        heads = WorkerHeads(None, store, speculation=False)
        servicer = RolloutServicer(self.engine, runner, self.policy, store, self.prompt_loop, heads, worker_id="w1")
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, server.grpc)
        await server.start()
        self.ready.set()
        task = asyncio.create_task(self.prompt_loop.run())
        while not self._stop.is_set() and not task.done():
            await asyncio.sleep(0.02)
        if not task.done():
            task.cancel()
        self.failure = (await asyncio.gather(task, return_exceptions=True))[0]
        await server.stop(0)
        await link.close()

    def in_loop(self, what: Callable[[], Any]) -> None:
        self.loop.call_soon_threadsafe(what)

    def close(self) -> None:
        self._stop.set()
        self.thread.join(WAIT)
        assert not self.thread.is_alive()


@pytest.fixture
def ends(tmp_path: Path):
    made: list[Any] = []

    def make(
        *, shared_files: bool = True, blocked: bool = False, heartbeat_seconds: float = 0.1, **learner: Any
    ) -> tuple[LearnerEnd, WorkerEnd]:
        config = make_config(**learner)
        a = LearnerEnd(config, tmp_path / "policies")
        a.publish(0, b"zero")
        store = (PolicyStore if shared_files else StoreOnAnotherMachine)(tmp_path / "cache")
        b = WorkerEnd(config, a.address, store, blocked=blocked, heartbeat_seconds=heartbeat_seconds)
        made.extend([b, a])
        return a, b

    yield make
    for end in made:
        end.close()


def deliver_all(learner: LearnerEnd, worker: WorkerEnd) -> None:
    while worker.published:
        learner.desk.deliver(worker.published.pop(0))


def test_no_more_is_leased_than_the_bound_allows_and_updates_open_slots(ends) -> None:
    learner, worker = ends()
    wait_until(lambda: len(worker.published) == 4, WAIT, "(0 + 1 + 1) * 2 groups")
    time.sleep(0.5)
    assert len(worker.published) == 4, "a fifth group would break the bound"
    deliver_all(learner, worker)
    batch = learner.desk.next_batch()
    assert batch is not None
    learner.desk.complete(batch)
    learner.publish(1, b"one")
    wait_until(lambda: len(worker.published) == 2, WAIT, "two more groups, at version 1")
    assert [g.policy_version for g in worker.published] == [1, 1]
    assert worker.engine.loaded[-1] == (1, b"one")


def test_the_newest_policy_arrives_although_many_are_published_at_once(ends) -> None:
    learner, worker = ends()
    for version in range(1, 6):
        learner.publish(version, f"v{version}".encode())
    wait_until(lambda: worker.policy.served.version == 5, WAIT, "version 5")
    assert worker.engine.loaded[-1] == (5, b"v5")


def test_a_broken_policy_is_refused_and_the_next_one_is_served(ends) -> None:
    learner, worker = ends()
    learner.publish(1, b"broken")
    wait_until(lambda: learner.workers.pushes_failed >= 1, WAIT, "a refusal")
    assert worker.policy.served.version == 0
    learner.publish(2, b"two")
    wait_until(lambda: worker.policy.served.version == 2, WAIT, "version 2")


def test_files_are_streamed_where_there_is_no_shared_file_system(ends) -> None:
    """The worker cannot read the path that it is told: the learner sends the files in chunks by the same call."""
    learner, worker = ends(shared_files=False)
    content = bytes(range(256)) * 40_000  # 10 MB: several chunks, above gRPC's default limit
    learner.publish(1, content)
    wait_until(lambda: worker.policy.served.version == 1, WAIT, "version 1")
    assert worker.engine.loaded[-1] == (1, content)


def test_a_group_that_fails_goes_back_and_is_sampled_again(ends) -> None:
    learner, worker = ends()
    wait_until(lambda: len(worker.published) == 4, WAIT, "the first groups")
    worker.engine.fail_next = 1
    deliver_all(learner, worker)
    learner.desk.complete(learner.desk.next_batch() or [])
    learner.publish(1, b"one")
    wait_until(lambda: len(worker.published) == 2, WAIT, "both groups, one at the second try")
    assert worker.prompt_loop.counters["groups_failed"] == 1
    assert learner.desk.counts()["returned_total"] == 1


def test_a_silent_worker_loses_its_leases_and_they_are_given_out_again(ends) -> None:
    learner, worker = ends(heartbeat_seconds=3600.0, blocked=True, lease_seconds=0.5)
    wait_until(lambda: learner.desk.counts()["leased"] == 2, WAIT, "two leases")

    def expired() -> bool:
        learner.desk.expire()
        return learner.desk.counts()["expired_total"] == 2

    wait_until(expired, WAIT, "both leases to expire")
    # What the worker says too late is welcome all the same, as nobody else has done it.
    worker.in_loop(worker.engine.release.set)
    wait_until(lambda: len(worker.published) >= 2, WAIT, "the late groups")
    assert learner.desk.deliver(worker.published[0]) is Delivery.ACCEPTED


def test_a_worker_that_is_stopped_gives_its_leases_back(ends) -> None:
    learner, worker = ends(blocked=True)
    wait_until(lambda: learner.desk.counts()["leased"] == 2, WAIT, "two leases")
    worker.close()
    assert learner.desk.counts()["leased"] == 0
    assert learner.desk.counts()["returned_total"] == 2
    assert len(worker.engine.aborted) == 4, "both samples of both groups are ended in the engine"


def test_a_restarted_learner_is_found_and_its_older_policy_loaded(ends, tmp_path: Path) -> None:
    learner, worker = ends()
    for version in (1, 2):
        wait_until(lambda: len(worker.published) >= 2, WAIT, "groups")
        deliver_all(learner, worker)
        learner.desk.complete(learner.desk.next_batch() or [])
        learner.publish(version, f"first-{version}".encode())
    wait_until(lambda: worker.policy.served.version == 2, WAIT, "version 2")
    port = learner.server.port
    learner.close()
    shutil.rmtree(tmp_path / "policies")
    again = LearnerEnd(learner.config, tmp_path / "policies", port=port, incarnation="b")
    again.publish(0, b"zero again")
    try:
        wait_until(lambda: worker.engine.loaded[-1] == (0, b"zero again"), WAIT, "the restarted learner's policy")
        worker.published.clear()
        wait_until(lambda: len(worker.published) >= 2, WAIT, "groups for the restarted learner")
        assert all(group.lease_id.startswith("b:") for group in worker.published[-2:])
    finally:
        again.close()


def test_a_worker_gives_up_on_a_learner_that_stays_away(ends) -> None:
    learner, worker = ends()
    learner.close()
    worker.thread.join(WAIT)
    assert not worker.thread.is_alive()
    assert "the learner has not answered" in str(getattr(worker.failure, "exceptions", [worker.failure])[0])


def test_the_end_of_the_run_reaches_the_worker(ends) -> None:
    learner, worker = ends()
    learner.servicer.finished = True
    worker.thread.join(WAIT)
    assert not worker.thread.is_alive()
    assert worker.failure is None


def test_another_configuration_is_refused(ends) -> None:
    learner, _ = ends()
    config = Config.model_validate({"sampling": {"temperature": 0.5}, "rollout": {"learner": learner.address}})

    async def register() -> None:
        link = LearnerLink(config, worker_id="w2", address="127.0.0.1:1")
        try:
            await link.register()
        finally:
            await link.close()

    with pytest.raises(grpc.RpcError, match="start both from the same file"):
        asyncio.run(register())
