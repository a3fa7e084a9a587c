"""From the stream to batches, on a real server: what is acknowledged when, and what a successor finds."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace

import pytest

from services.common.embedded_redis import EmbeddedRedis
from services.common.keys import RunKeys
from services.common.redis_client import connect
from services.common.streams import ExclusiveLock, StreamConsumer, StreamInspector, StreamLimits, StreamProducer
from services.common.wire import serialize_trajectory_group
from services.config import Config
from services.learner.batches import BatchAssembler
from services.learner.lease_desk import LeaseDesk
from services.learner.prompts import Prompt, PromptSet
from specroll_core.contracts import PromptGroup
from specroll_core.ledger import LedgerState
from tests.services.learner.samples import simple_group

LIMITS = StreamLimits(max_entries=20)
CONFIG = Config.model_validate({"learner": {"batch_groups": 2, "group_size": 2, "max_staleness": 1, "steps": 10}})


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        client = connect(server.url, password=server.password)
        yield client
        client.close()


class Learner:
    """The learner's reading end, without training."""

    def __init__(
        self,
        client,
        keys: RunKeys,
        *,
        incarnation: str = "a",
        state: LedgerState | None = None,
        config: Config = CONFIG,
        limits: StreamLimits = LIMITS,
    ) -> None:
        prompts = PromptSet(
            train=tuple(Prompt(ids=(i + 1,), answer="", index=i) for i in range(50)),
            holdout=(), duplicates=0, too_long=0, seed=0,
        )  # fmt: skip
        self.desk = LeaseDesk(config, prompts, incarnation=incarnation, state=state)
        self.desk.open()
        self.lock = ExclusiveLock(client, keys, "learner", lifetime_seconds=2.0)
        self.lock.acquire(10.0)
        consumer = StreamConsumer(client, keys.trajectories, limits, f"learner-{incarnation}", lock=self.lock)
        self.batches = BatchAssembler(consumer, self.desk, limits, batch_timeout=20.0)
        self.batches.adopt()

    def lease(self, count: int, version: int = 0) -> list[PromptGroup]:
        return self.desk.lease("w", count, version=version, wait_seconds=5.0)

    def step(self) -> list[str]:
        groups = self.batches.next_batch(threading.Event(), lambda: None)
        assert groups is not None
        self.batches.complete(groups)
        return [group.group_id for group in groups]


@pytest.fixture
def keys() -> RunKeys:
    return RunKeys(f"test-{uuid.uuid4().hex}")


def publish(client, keys: RunKeys, lease: PromptGroup, limits: StreamLimits = LIMITS, **changes) -> None:
    group = simple_group(lease.group_id, lease_id=lease.lease_id, version=lease.policy_version)
    StreamProducer(client, keys.trajectories, limits).publish(
        serialize_trajectory_group(replace(group, **changes)), dedup_key=lease.lease_id, deadline_seconds=5.0
    )


def entries(client, keys: RunKeys) -> int:
    return StreamInspector(client, keys.trajectories, LIMITS).stats().entries


def test_nothing_is_acknowledged_before_the_checkpoint(client, keys) -> None:
    learner = Learner(client, keys)
    for lease in learner.lease(4):
        publish(client, keys, lease)
    assert len(learner.step()) == 2
    assert entries(client, keys) == 4
    assert learner.batches.acknowledge_trained() == 2
    assert entries(client, keys) == 2
    assert learner.batches.acknowledge_trained() == 0
    learner.lock.release()


def test_a_successor_trains_what_the_checkpoint_lacks_and_nothing_else(client, keys) -> None:
    first = Learner(client, keys)
    for lease in first.lease(4):
        publish(client, keys, lease)
    checkpointed = first.step()
    state = first.desk.state()
    first.batches.acknowledge_trained()
    lost = first.step()
    # It dies here: the second step is in no checkpoint.
    first.lock.release()

    second = Learner(client, keys, incarnation="b", state=state)
    assert sorted(second.step()) == sorted(lost)
    assert not set(lost) & set(checkpointed)
    assert second.batches.counters["accepted"] == 2
    second.batches.acknowledge_trained()
    assert entries(client, keys) == 0
    second.lock.release()


def test_a_crash_between_checkpoint_and_acknowledgement_trains_nothing_twice(client, keys) -> None:
    first = Learner(client, keys)
    for lease in first.lease(4):
        publish(client, keys, lease)
    trained = first.step()
    state = first.desk.state()  # the checkpoint is on disk, the acknowledgement was not sent
    first.lock.release()

    second = Learner(client, keys, incarnation="b", state=state)
    assert second.batches.counters["duplicate"] == 2
    assert not set(second.step()) & set(trained)
    second.lock.release()


@pytest.mark.parametrize("batch_groups", [2, 40])
def test_groups_that_came_during_a_step_longer_than_a_lease_are_not_sampled_again(client, keys, batch_groups) -> None:
    config = CONFIG.model_copy(
        update={
            "learner": CONFIG.learner.model_copy(
                update={"lease_seconds": 0.4, "batch_groups": batch_groups, "max_staleness": 1}
            )
        }
    )
    limits = StreamLimits(max_entries=200)
    learner = Learner(client, keys, config=config, limits=limits)
    leases = learner.lease(2 * batch_groups)  # more than one read takes in, where a batch has forty groups
    assert len(leases) == 2 * batch_groups
    for lease in leases[:-1]:
        publish(client, keys, lease, limits)
    time.sleep(0.5)  # the learner trains; the worker renews only what it samples, and of the last group is not heard
    again: list[PromptGroup] = []

    def lease_the_missing_one() -> None:  # at every turn of waiting, as a worker would
        if not again and learner.batches.counters["expired"]:
            again.extend(learner.lease(1))
            publish(client, keys, again[0], limits)

    for _ in range(2):
        groups = learner.batches.next_batch(threading.Event(), lease_the_missing_one)
        assert groups is not None
        assert len(groups) == batch_groups
        learner.batches.complete(groups)
    assert [lease.group_id for lease in again] == [leases[-1].group_id]
    assert learner.batches.counters["accepted"] == 2 * batch_groups
    assert learner.batches.counters["expired"] == learner.desk.counts()["expired_total"] == 1
    learner.lock.release()


def test_a_message_that_breaks_the_contract_goes_to_the_dead_letters(client, keys) -> None:
    learner = Learner(client, keys)
    good, bad, other = learner.lease(3)
    StreamProducer(client, keys.trajectories, LIMITS).publish(b"\xff\xff", dedup_key=bad.lease_id, deadline_seconds=5.0)
    publish(client, keys, good)
    publish(client, keys, other)
    assert set(learner.step()) == {good.group_id, other.group_id}
    assert learner.batches.counters["malformed"] == 1
    letters = StreamInspector(client, keys.trajectories, LIMITS).dead_letters()
    assert [letter.key for letter in letters] == [bad.lease_id]
    learner.lock.release()


def test_a_group_that_arrives_twice_is_trained_once(client, keys) -> None:
    learner = Learner(client, keys)
    first, second = learner.lease(2)
    learner.desk.release_worker("w")
    again, _ = learner.lease(2)
    assert again.group_id == first.group_id
    publish(client, keys, first)  # the worker that was given up on finishes all the same
    publish(client, keys, again)
    publish(client, keys, second)
    assert set(learner.step()) == {first.group_id, second.group_id}
    assert learner.batches.counters["duplicate"] == 1
    learner.batches.acknowledge_trained()
    assert entries(client, keys) == 0
    learner.lock.release()


def test_trained_groups_that_fill_the_stream_ask_for_a_checkpoint(client, keys) -> None:
    """20 entries are the bound: workers would wait for room, the learner for groups, and neither would move."""
    learner = Learner(client, keys)
    for step in range(5):
        for lease in learner.lease(2, version=step):
            publish(client, keys, lease)
        learner.step()
        assert learner.batches.queue_needs_room() == (step == 4)
    learner.batches.acknowledge_trained()
    assert not learner.batches.queue_needs_room()
    learner.lock.release()


def test_waiting_ends_with_a_sentence(client, keys) -> None:
    learner = Learner(client, keys)
    learner.batches._batch_timeout = 0.3
    learner.lease(1)
    with pytest.raises(TimeoutError, match=r"0 of 2 groups are here, 1 are being sampled by w"):
        learner.batches.next_batch(threading.Event(), lambda: None)
    learner.lock.release()
