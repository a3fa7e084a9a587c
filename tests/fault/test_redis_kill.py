"""kill -9 of processes that hold entries, of the server, and of the launcher that started it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from services.common.embedded_redis import EmbeddedRedis, EmbeddedRedisError
from services.common.keys import RunKeys
from services.common.lifecycle import process_is_alive, wait_until
from services.common.redis_client import connect
from services.common.streams import ExclusiveLock, StreamConsumer, StreamInspector, StreamLimits, StreamProducer

KEYS = RunKeys("fault").trajectories
LIMITS = StreamLimits(max_entries=100, max_bytes=2**20, reclaim_idle_seconds=0.1)

# Takes the role and three entries, says so, and works on them until it is killed.
CONSUMER = """
    import sys, threading
    from services.common.keys import RunKeys
    from services.common.redis_client import connect
    from services.common.streams import ExclusiveLock, StreamConsumer, StreamLimits
    client = connect(sys.argv[1])
    lock = ExclusiveLock(client, RunKeys("fault"), "learner", lifetime_seconds=1.0)
    lock.acquire()
    limits = StreamLimits(max_entries=100, max_bytes=2**20, reclaim_idle_seconds=0.1)
    consumer = StreamConsumer(client, RunKeys("fault").trajectories, limits, "doomed", lock=lock)
    print(len(consumer.read(3, 10.0)), flush=True)
    threading.Event().wait(60)
"""

# Starts the server, says its process id, and waits until it is killed.
LAUNCHER = """
    import sys, threading
    from pathlib import Path
    from services.common.embedded_redis import EmbeddedRedis
    server = EmbeddedRedis(Path(sys.argv[1]))
    server.start()
    print(server.pid, flush=True)
    threading.Event().wait(60)
"""


@pytest.fixture
def server(tmp_path):
    with EmbeddedRedis(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def client(server):
    client = connect(server.url, password=server.password)
    yield client
    client.close()


@pytest.fixture
def spawn():
    """Runs a script of this file and returns the process and its first line; kills it at the end."""
    processes = []

    def start(script, *args, env=None):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), *args],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        processes.append(process)
        return process, process.stdout.readline().strip()

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def publish(client, count):
    producer = StreamProducer(client, KEYS, LIMITS)
    for i in range(count):
        producer.publish(bytes(1000), dedup_key=f"g{i}", deadline_seconds=10)


def test_entries_of_a_killed_consumer_come_to_a_new_one(server, client, spawn):
    publish(client, 5)
    process, line = spawn(CONSUMER, server.url, env=server.environment())
    assert line == "3"
    process.send_signal(signal.SIGKILL)
    process.wait()
    consumer = StreamConsumer(client, KEYS, LIMITS, "successor")
    got = []

    def everything_came():
        got.extend(consumer.read(5, 0.2))
        return len(got) >= 5

    wait_until(everything_came, 20, "five entries")
    assert sorted((d.key, d.deliveries) for d in got) == [("g0", 2), ("g1", 2), ("g2", 2), ("g3", 1), ("g4", 1)]
    assert consumer.ack_many(got) == 5
    assert StreamInspector(client, KEYS, LIMITS).stats().bytes == 0


def test_the_successor_of_a_killed_learner_waits_for_its_lock_and_adopts_its_entries(server, client, spawn):
    publish(client, 5)
    process, line = spawn(CONSUMER, server.url, env=server.environment())
    assert line == "3"
    process.send_signal(signal.SIGKILL)
    process.wait()
    with ExclusiveLock(client, RunKeys("fault"), "learner") as lock:
        assert lock.fence == 2
        consumer = StreamConsumer(client, KEYS, LIMITS, "successor", lock=lock)
        assert [d.key for d in consumer.adopt_all()] == ["g0", "g1", "g2"]
        assert [d.key for d in consumer.read(5, 10.0)] == ["g3", "g4"]


def test_a_killed_server_comes_back_with_entries_pending_lists_and_marks(server, client):
    publish(client, 5)
    consumer = StreamConsumer(client, KEYS, LIMITS, "a")
    held = consumer.read(3, 10.0)
    held[0].ack()
    port, before = server.port, StreamInspector(client, KEYS, LIMITS).stats()
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: server.poll() is not None, 10, "the server's death")
    server.start()
    assert server.port == port, "clients reconnect to the address that they know"
    # The same client and consumer go on; the same keys are still known.
    assert StreamInspector(client, KEYS, LIMITS).stats() == before
    assert (before.entries, before.pending) == (4, 2)
    publish(client, 5)  # g0 was acknowledged: only it is new
    assert StreamInspector(client, KEYS, LIMITS).stats().entries == 5
    assert consumer.ack_many(held) == 2
    assert [d.key for d in consumer.read(5, 10.0)] == ["g3", "g4", "g0"]


def test_producer_and_consumer_bear_an_outage(server, client):
    """The server is killed and started again while both are at work: nothing is lost, nothing comes twice."""
    done = threading.Event()

    def produce():
        publish(client, 60)
        done.set()

    consumer, keys = StreamConsumer(client, KEYS, StreamLimits(max_entries=20), "a"), []
    thread = threading.Thread(target=produce)
    thread.start()
    for turn in range(200):
        if turn == 3:
            os.kill(server.pid, signal.SIGKILL)
            wait_until(lambda: server.poll() is not None, 10, "the server's death")
            server.start()
        deliveries = consumer.read(5, 0.2)
        keys += [d.key for d in deliveries]
        consumer.ack_many(deliveries)
        if done.is_set() and not deliveries:
            break
    thread.join(10)
    assert sorted(set(keys)) == sorted(f"g{i}" for i in range(60))
    # A reply lost by the kill may bring a publication again after its acknowledgement: at least once, never less.
    assert len(keys) <= 61


def test_the_server_dies_with_a_killed_launcher_and_its_directory_can_be_used_again(tmp_path, spawn):
    directory = tmp_path / "redis"
    process, pid = spawn(LAUNCHER, str(directory))
    with pytest.raises(EmbeddedRedisError, match=f"process {pid}, port .* still uses"):
        EmbeddedRedis(directory, start_timeout_seconds=0.3).start()
    password = (directory / "password").read_text()
    client = connect(f"redis://127.0.0.1:{_port(directory)}/0", password=password)
    publish(client, 2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with EmbeddedRedis(directory) as server:
        assert not process_is_alive(int(pid))
        again = connect(server.url, password=server.password)
        assert StreamInspector(again, KEYS, LIMITS).stats().entries == 2
        again.close()
    client.close()


def _port(directory):
    return json.loads((directory / "server.json").read_text())["port"]
