"""The whole watcher on a real Redis and real gRPC, its trainer on the tiny model; only the engines are stand-ins."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import shutil
import threading
from collections import Counter
from types import SimpleNamespace

import grpc
import pytest
import torch

from services.common import grpc_setup
from services.common.artifacts import ArtifactStore
from services.common.embedded_redis import EmbeddedRedis
from services.common.keys import RunKeys
from services.common.lifecycle import free_port, wait_until
from services.common.redis_client import connect
from services.common.row_stream import RowStream
from services.common.run_board import LINE_SECONDS, RunBoard
from services.common.streams import StreamProducer
from services.config import Config, SecurityConfig
from services.heads.artifact import load_artifact
from services.rollout.grpc_server import RolloutServicer
from services.rollout.heads_control import HeadsRefused, ServedHeads
from services.rollout.heads_feedback import FEEDBACK_LIMITS
from services.rollout.heads_file import weights_checksum
from services.rollout.heads_service import WorkerHeads, engine_with_heads
from services.rollout.policy_store import PolicyStore
from services.run_dir import RunDir
from services.watcher.records import read_log
from services.watcher.replay import replay
from services.watcher.service import Watcher
from specroll.v1 import feedback_pb2, rollout_pb2_grpc, watcher_pb2, watcher_pb2_grpc
from tests.services.watcher.test_heads_trainer import buffer  # noqa: F401

WAIT = 100
TIMES = itertools.count(1.0)
pytestmark = pytest.mark.timeout(400)


class StandIn:
    """An engine's heads without an engine: loads what it is given, and can be made to fail or to forget."""

    def __init__(self):
        self.staged = self.heads = None
        self.served = ServedHeads(0, "", "")
        self.refuses = ""
        self.refused = Counter()
        self.disturbed = False

    async def prepare(self, directory, version, digest):
        if self.refuses:
            raise HeadsRefused("artifact", self.refuses)
        self.staged = (load_artifact(directory).heads, version, digest)

    async def commit(self, version, digest):
        if self.staged is None or self.staged[1:] != (version, digest):
            raise HeadsRefused("not_prepared", "nothing is prepared")
        self.heads, self.staged, self.disturbed = self.staged[0], None, False
        checksum = weights_checksum(self.heads.state_dict(), torch.float32)
        self.served = ServedHeads(version, digest, checksum, 0.001, self.served.swaps + 1)
        return self.served

    async def state(self):
        return self.served

    async def checksums(self):
        return ("disturbed" if self.disturbed else self.served.checksum), "policy"


class Worker:
    """A worker's gRPC service on a thread's event loop."""

    def __init__(self, name, board, cache, *, sees_files=True):
        self.name, self.board, self.control = name, board, StandIn()
        store = PolicyStore(cache)
        if not sees_files:
            store.at_path = lambda _: None
        self.port = free_port()
        self.loop = asyncio.new_event_loop()
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self.loop.run_until_complete, args=(self.serve(store, sees_files),))
        self.thread.start()
        assert self.ready.wait(20)
        self.announce()

    def announce(self):
        self.board.announce(self.name, f"127.0.0.1:{self.port}")

    async def serve(self, store, sees_files):
        self.stopped = asyncio.Event()
        engine = SimpleNamespace(status=self.status, speculation_stats=self.no_stats)
        policy = SimpleNamespace(served=SimpleNamespace(version=0))
        heads = WorkerHeads(self.control, store, speculation=True)
        if not sees_files:
            heads._is_here = lambda _: False
        loop = SimpleNamespace(in_flight=0)
        server = grpc_setup.aio_server("127.0.0.1", self.port, security=SecurityConfig())
        servicer = RolloutServicer(engine, None, policy, store, loop, heads, worker_id=self.name)
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, server.grpc)
        await server.start()
        self.ready.set()
        while not self.stopped.is_set():
            try:
                await asyncio.wait_for(self.stopped.wait(), LINE_SECONDS / 4)
            except TimeoutError:
                await asyncio.to_thread(self.announce)
        await server.stop()

    async def status(self):
        return SimpleNamespace(running=0, tokens_total=0)

    async def no_stats(self):
        return None

    def stop(self):
        self.loop.call_soon_threadsafe(self.stopped.set)
        self.thread.join(20)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def setting(server, tmp_path, tiny_dir, monkeypatch):
    """A run on disk and in Redis, and a way to start watchers of it."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    config = Config.model_validate({
        "run": {"dir": str(tmp_path / "run")},
        "model": {"source": str(tiny_dir), "dtype": "float32"},
        "redis": {"url": server.url},
        "rollout": {"engine": {"speculation": {"enabled": True}}},
        "heads": {"heads": 2, "rank": 32},
        "watcher": {
            "min_rows": 800, "gate_rows": 600, "gate_nodes": 4, "holdout": 0.3, "cooldown_seconds": 0.5, "nice": 0,
            "check_records": 128,
        },
    })  # fmt: skip
    run_dir = RunDir(config.run.dir)
    run_dir.create(config, resume=False)
    ArtifactStore(run_dir.policies).publish(0, lambda target: shutil.copytree(tiny_dir, target, dirs_exist_ok=True))
    client = connect(server.url, password=server.password)
    keys = RunKeys(run_dir.run_id)
    made = SimpleNamespace(
        config=config, run_dir=run_dir, client=client, keys=keys, board=RunBoard(client, keys), tmp=tmp_path,
        running=[], workers=[],
    )  # fmt: skip

    def start():
        stop = threading.Event()
        watcher = Watcher(config, run_dir.run_id, stop=stop)
        thread = threading.Thread(target=watcher.run)
        thread.start()
        made.running.append((watcher, thread, stop))
        return watcher

    def finish():
        while made.running:
            watcher, thread, stop = made.running.pop()
            stop.set()
            thread.join(30)
            watcher.close()

    def worker(name, **how):
        made.workers.append(Worker(name, made.board, tmp_path / f"cache-{name}", **how))
        return made.workers[-1]

    made.start, made.finish, made.worker = start, finish, worker
    yield made
    finish()
    for one in made.workers:
        one.stop()
    client.close()


def events(setting, kind):
    path = setting.run_dir.root / "watcher" / "feedback.jsonl"
    return [line for line in read_log(path) if line["kind"] == kind] if path.exists() else []


def until(predicate, what):
    wait_until(predicate, WAIT, what)


def send_rows(setting, buffer):  # noqa: F811
    stream = RowStream(setting.client, setting.keys.feedback_rows, 2**26)
    for frames in buffer._frames.values():
        for _, frame in frames:
            stream.append(frame.to_bytes())


def send_statistics(setting, rng, trajectories, heads, rate):
    """Trajectories of 32 rounds with four drafted nodes each; rate: of acceptance."""
    producer = StreamProducer(setting.client, setting.keys.feedback, FEEDBACK_LIMITS)
    batch = feedback_pb2.FeedbackBatch(worker_id="w")
    for _ in range(trajectories):
        accepted = [0, 0, 0, 0]
        for _ in range(32):
            accepted[next((d for d in range(3) if rng.random() > rate), 3)] += 1
        batch.trajectories.add(
            request_id="r", prompt=f"{rng.getrandbits(64):016x}", temperature=1.0, tokens=60, finished_at=next(TIMES),
            rounds=[feedback_pb2.RoundCounts(heads_version=heads, policy_version=0, drafted=4, accepted=accepted)],
        )  # fmt: skip
    producer.publish(batch.SerializeToString(), dedup_key=str(rng.random()), deadline_seconds=10)


def test_from_nothing_to_heads_that_are_kept_good(setting, buffer):  # noqa: F811
    near, far = setting.worker("near"), setting.worker("far", sees_files=False)
    watcher = setting.start()
    until(lambda: setting.board.heads() is not None, "the watcher")
    assert setting.board.heads().version == 0
    assert engine_with_heads(setting.config, setting.board, None, None).speculation.heads is None

    send_rows(setting, buffer)
    until(lambda: near.control.served.version == far.control.served.version == 1, "version 1 on both workers")
    assert watcher.registry.lineage()[0]["gate"]["low"] > 0
    assert near.control.served.checksum == far.control.served.checksum
    assert setting.board.heads().digest == near.control.served.digest

    # One that comes late brings the heads from its start, over the wire where it must.
    late = PolicyStore(setting.tmp / "late")
    late.at_path = lambda _: None
    policy = ArtifactStore(setting.run_dir.policies).latest().path
    path = engine_with_heads(setting.config, setting.board, late, policy).speculation.heads
    assert load_artifact(path).artifact.digest == near.control.served.digest
    newcomer = setting.worker("newcomer")
    until(lambda: newcomer.control.served.version == 1, "version 1 on the newcomer")

    # The copy of one worker goes wrong: acceptance falls, and that copy is put right without any training.
    rng = random.Random(0)
    send_statistics(setting, rng, 200, heads=1, rate=0.6)
    until(lambda: len(events(setting, "check")) >= 20, "checks of the reference")
    assert not events(setting, "degraded")
    near.control.disturbed = True
    swaps = far.control.served.swaps
    send_statistics(setting, rng, 60, heads=1, rate=0.02)
    until(lambda: events(setting, "repaired"), "the repair")
    assert events(setting, "alarm")
    assert not near.control.disturbed
    assert far.control.served.swaps == swaps

    # The same fall with copies that are as published: new heads are trained, and not taken unless they are better.
    send_statistics(setting, rng, 120, heads=1, rate=0.02)
    until(lambda: len(events(setting, "degraded")) == 2, "the second trigger")
    send_rows(setting, buffer)  # only rows that came after acceptance was well are learned from
    until(lambda: len(events(setting, "gate")) == 2, "the second gate")
    gate = events(setting, "gate")[1]
    until(lambda: events(setting, "published" if gate["passed"] else "refused"), "what follows from the gate")
    assert gate["passed"] == (gate["low"] > 0)

    with grpc_setup.channel(setting.board.heads().watcher, security=setting.config.security) as channel:
        stub = watcher_pb2_grpc.WatcherServiceStub(channel)
        status = stub.GetStatus(watcher_pb2.WatcherStatusRequest(), timeout=10)
        assert {w.worker_id for w in status.workers} == {"near", "far", "newcomer"}
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.FetchHeads(watcher_pb2.FetchHeadsRequest(version=99), timeout=10))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND

    setting.finish()
    log = setting.run_dir.root / "watcher" / "feedback.jsonl"
    config = setting.tmp / "run.toml"
    config.write_text("[watcher]\ncheck_records = 128\ncooldown_seconds = 0.5\n")
    assert replay(log, config, []) == 0


def test_a_worker_that_refuses_keeps_its_heads_and_is_tried_again(setting, buffer):  # noqa: F811
    good, bad = setting.worker("good"), setting.worker("bad")
    bad.control.refuses = "the disk is full"
    watcher = setting.start()
    send_rows(setting, buffer)
    until(lambda: good.control.served.version == 1, "version 1 on the worker that takes it")
    until(lambda: any("disk is full" in w.failure for w in watcher.fleet.workers()), "the reason")
    assert bad.control.served.version == 0
    bad.control.refuses = ""
    until(lambda: bad.control.served.version == 1, "the second attempt")


def test_a_restarted_watcher_knows_what_serves(setting, buffer):  # noqa: F811
    worker = setting.worker("w")
    setting.start()
    send_rows(setting, buffer)
    until(lambda: worker.control.served.version == 1, "version 1")
    setting.finish()
    watcher = setting.start()
    assert watcher.watch.version == 1
    until(lambda: watcher.fleet.workers() and watcher.fleet.workers()[0].version == 1, "the worker's answer")
    assert worker.control.served.swaps == 1
    assert json.loads((setting.run_dir.root / "heads" / "registry.json").read_text())["highest"] == 1
