"""`specroll heads show` on a run's heads: every version, where it came from, what its gate said, who serves it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.table import Table

from services.common import grpc_setup
from services.common.keys import RunKeys
from services.common.run_board import RunBoard
from services.common.streams import StreamError
from services.config import SecurityConfig
from services.heads.registry import FILE, HeadsRegistry
from services.inspect_run import redis_of
from services.run_dir import RunDir
from specroll.v1 import rollout_pb2, rollout_pb2_grpc

_CALL_SECONDS = 10.0


def is_registry(directory: Path) -> bool:
    return (directory / FILE).is_file()


def show_registry(directory: Path) -> int:
    """Prints the versions under a run's `heads` directory; while the run goes on, who serves them too.

    Returns 2, with a sentence for each, where versions are broken: the others are shown all the same.
    """
    registry = HeadsRegistry(directory)
    current = registry.peek()
    serving = serving_workers(directory.absolute().parent)
    console = Console(highlight=False, soft_wrap=True)
    lineage = registry.lineage()
    console.print(lineage_table(lineage, current.version if current else 0, serving))
    if serving is None:
        console.print("the run does not go on now, so nobody serves them")
    broken = [line["broken"] for line in lineage if "broken" in line]
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    for reason in broken:
        errors.print(f"specroll: {reason}", markup=False)
    return 2 if broken else 0


def lineage_table(lineage: list[dict[str, Any]], current: int, serving: dict[int, list[str]] | None) -> Table:
    """serving: version -> workers; None where that is not known."""
    table = Table("version", "from", "rows", "policies", "tokens per step", "gain (95 %)", "state", "served by")
    for line in lineage:
        version = line["version"]
        if "broken" in line:
            table.add_row(str(version), "", "", "", "", "", "broken", "")
            continue
        trained, gate = line["trained_on"], line["gate"]
        policies = trained.get("policy_versions")
        state = f"blocked: {line['blocked']}" if line["blocked"] else "current" if version == current else ""
        workers = ", ".join((serving or {}).get(version, []))
        known = all(isinstance(gate.get(name), int | float) for name in ("new", "old", "low", "high"))
        table.add_row(
            str(version),
            "-" if line["parent"] is None else str(line["parent"]),
            str(trained.get("rows", "")),
            "" if policies is None else f"{policies[0]} to {policies[1]}",
            f"{gate['new']:.3f} (before {gate['old']:.3f})" if known else "",
            f"{gate['low']:+.3f} to {gate['high']:+.3f}" if known else "",
            state,
            workers,
        )
    return table


def serving_workers(run: Path) -> dict[int, list[str]] | None:
    """version -> ids of the workers that serve it, asked of each; None where the run has no Redis now."""
    try:
        with closing(redis_of(run)) as client:
            addresses = RunBoard(client, RunKeys(RunDir(run).run_id)).workers()
    except (ValueError, StreamError):
        return None
    found: dict[int, list[str]] = {}
    for worker_id, address in sorted(addresses.items()):
        with grpc_setup.channel(address, security=SecurityConfig()) as channel:
            try:
                status = rollout_pb2_grpc.RolloutServiceStub(channel).GetStatus(
                    rollout_pb2.RolloutStatusRequest(), timeout=_CALL_SECONDS
                )
            except grpc.RpcError:
                continue
        found.setdefault(status.heads_version, []).append(worker_id)
    return found
