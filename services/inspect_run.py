"""Looking at a running or stopped run from outside: status, health, queue."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import grpc
import redis
from pydantic import SecretStr
from rich.console import Console
from rich.table import Table

from services import queue
from services.common import grpc_setup, redis_client
from services.common.embedded_redis import recorded_connection
from services.common.keys import RunKeys
from services.common.streams import StreamError, StreamInspector
from services.common.wire import parse_trajectory_group
from services.config import Config, SecurityConfig
from services.run_dir import RunDir
from specroll.v1 import learner_pb2, learner_pb2_grpc

_CALL_SECONDS = 5.0


def check_health(address: str) -> int:
    """0 where the service says that it serves, 1 where it does not."""
    serving = grpc_setup.is_healthy(address, security=SecurityConfig(), timeout_seconds=_CALL_SECONDS)
    Console().print(f"{address} {'serves' if serving else 'does not serve'}", markup=False)
    return 0 if serving else 1


def print_status(address: str) -> int:
    """Where the learner at this address stands."""
    with grpc_setup.channel(address, security=SecurityConfig()) as channel:
        try:
            status = learner_pb2_grpc.LearnerServiceStub(channel).GetStatus(
                learner_pb2.LearnerStatusRequest(), timeout=_CALL_SECONDS
            )
        except grpc.RpcError as error:
            raise ValueError(f"no learner answers at {address}: {error.details()}") from None
    table = Table(show_header=False)
    table.add_row("run", status.run_id)
    table.add_row("step", str(status.step))
    table.add_row("policy version", str(status.policy_version))
    table.add_row("groups leased", f"{status.leases_outstanding} (granted in all: {status.granted_total})")
    table.add_row("workers", "\n".join(status.workers) or "none")
    table.add_row("finished", "yes" if status.finished else "no")
    Console().print(table)
    return 0


def queue_ls(run: Path) -> int:
    """Counts of the queue and its oldest entries."""
    with closing(redis_of(run)) as client:
        inspector = _inspector(run, client)
        stats, entries = inspector.stats(), inspector.entries(limit=20)
    console = Console(highlight=False)
    console.print(
        f"{stats.entries} groups, {stats.pending} of them read and not acknowledged, {stats.bytes} bytes, "
        f"{stats.dead} dead letters{'; closed until it drains' if stats.closed else ''}"
    )
    if entries:
        table = Table("entry", "lease", "bytes", "held by", "deliveries", "idle s")
        for e in entries:
            table.add_row(
                e.entry_id, e.key, str(len(e.payload)), e.consumer or "-", str(e.deliveries), f"{e.idle_seconds:.0f}"
            )
        console.print(table)
    return 0


def queue_show(run: Path, entry_id: str) -> int:
    """One entry, or dead letter, in words."""
    with closing(redis_of(run)) as client:
        inspector = _inspector(run, client)
        entry = inspector.show(entry_id) or inspector.show_dead(entry_id)
    if entry is None:
        raise ValueError(f"there is no entry and no dead letter {entry_id} in the run {run}")
    group = parse_trajectory_group(entry.payload)
    console = Console(highlight=False)
    console.print(
        f"group {group.group_id}, lease {group.lease_id}, policy version {group.policy_version}", markup=False
    )
    table = Table("sample", "tokens", "finish", "reward", "status", "policy versions")
    for t in group.trajectories:
        versions = ", ".join(f"{s.version}:[{s.start},{s.end})" for s in t.policy_version_spans)
        table.add_row(
            str(t.sample_index), str(len(t.token_ids)), t.finish_reason, f"{t.reward:g}", t.reward_status, versions
        )
    console.print(table)
    return 0


def queue_dead(run: Path) -> int:
    """Dead letters, oldest first."""
    with closing(redis_of(run)) as client:
        letters = _inspector(run, client).dead_letters()
    if not letters:
        Console().print("no dead letters")
        return 0
    table = Table("letter", "lease", "deliveries", "reason")
    for letter in letters:
        table.add_row(letter.entry_id, letter.key, str(letter.deliveries), letter.reason)
    Console().print(table)
    return 0


def queue_requeue(run: Path, entry_id: str) -> int:
    with closing(redis_of(run)) as client:
        try:
            new_id = _inspector(run, client).requeue(entry_id)
        except StreamError as error:
            raise ValueError(str(error)) from None
    Console().print(f"dead letter {entry_id} is entry {new_id} now", markup=False)
    return 0


def _config(run: Path) -> Config:
    saved = json.loads(RunDir(run).config.read_text())
    return Config.model_validate(saved)


def redis_of(run: Path) -> redis.Redis:
    """The run's Redis: the embedded one, where the run is going on, or the configured one.

    Raises ValueError where neither answers.
    """
    run_dir = RunDir(run)
    _ = run_dir.run_id
    config = _config(run)
    password = None
    if not config.redis.url.get_secret_value():
        recorded = recorded_connection(run_dir.redis)
        if recorded is None:
            raise ValueError(f"the run in {run} has no Redis server now; its queue can be looked at while it runs")
        url, password = recorded
        config = config.model_copy(update={"redis": config.redis.model_copy(update={"url": SecretStr(url)})})
    try:
        return queue.connect(config, deadline_seconds=_CALL_SECONDS, password=password)
    except redis_client.RedisUnavailable as error:
        raise ValueError(str(error)) from None


def _inspector(run: Path, client: redis.Redis) -> StreamInspector:
    return StreamInspector(client, RunKeys(RunDir(run).run_id).trajectories, queue.limits(_config(run)))
