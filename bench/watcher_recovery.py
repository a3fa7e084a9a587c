"""How fast the watcher brings heads up from nothing and back after a fault: one engine, one watcher, steady traffic.

    python -m bench.watcher_recovery CONFIG.toml --out DIRECTORY [--concurrency 8] [--nodes 8] [--minutes 12]

No learner runs: the policy stays as it is. Phases: no heads until the first version serves; steady; noise of standard
deviation 1 on the output projections until acceptance is back. Prints one line per ten seconds and a summary.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from services.common import grpc_setup
from services.common.artifacts import ArtifactStore
from services.common.embedded_redis import EmbeddedRedis
from services.common.keys import RunKeys
from services.common.lifecycle import child_dies_with_me, free_port
from services.common.redis_client import connect
from services.common.run_board import RunBoard
from services.config_loader import load_config
from services.learner.prompts import load_prompts
from services.models import fetch_model, load_tokenizer
from services.rollout.engine import RolloutEngine
from services.rollout.grpc_server import RolloutServicer
from services.rollout.heads_feedback import FeedbackForwarder
from services.rollout.heads_service import WorkerHeads, announce_for_ever
from services.rollout.policy import Served, ServedPolicy
from services.rollout.policy_store import PolicyStore
from services.run_dir import RunDir
from specroll.v1 import rollout_pb2_grpc


class Traffic:
    """`concurrency` completions at any time. Tokens and rounds are counted by the heads version that served."""

    def __init__(self, engine, prompts, law, concurrency: int) -> None:
        self.engine, self.law, self.concurrency = engine, law, concurrency
        self.prompts = itertools.cycle(prompts)
        self.done: list[tuple[float, int, int, int, float]] = []  # time, version, tokens, rounds, longest gap
        self.failed = 0
        self._numbers = itertools.count()

    async def run(self) -> None:
        await asyncio.gather(*(self._one_after_the_other() for _ in range(self.concurrency)))

    async def _one_after_the_other(self) -> None:
        while True:
            prompt = next(self.prompts)
            last, gap, completion = time.monotonic(), 0.0, None
            async for delta in self.engine.stream(prompt, self.law, request_id=f"b{next(self._numbers)}"):
                now = time.monotonic()
                gap, last = max(gap, now - last), now
                completion = delta.completion
            if completion is None:
                self.failed += 1
                continue
            version = completion.head_version_spans[-1].version
            self.done.append(
                (time.monotonic(), version, len(completion.token_ids) - 1, completion.spec.verify_steps, gap)
            )

    def acceptance(self, since: float, version: int | None = None) -> tuple[float, float]:
        """Tokens per round, and tokens per second, of completions that ended since then."""
        chosen = [d for d in self.done if d[0] >= since and version in (None, d[1])]
        tokens, rounds = sum(d[2] for d in chosen), sum(d[3] for d in chosen)
        return tokens / rounds if rounds else float("nan"), tokens / max(1e-9, time.monotonic() - since)


async def measure(engine, traffic: Traffic, heads: WorkerHeads, minutes: float) -> dict:
    """The phases, and what they took."""
    began = time.monotonic()
    end = began + 60 * minutes
    out: dict = {}

    async def until(predicate, what: str) -> bool:
        while time.monotonic() < end:
            await asyncio.sleep(2)
            say(traffic, (await engine.heads.state()).version, what, began)
            if await predicate():
                return True
        return False

    async def has_heads() -> bool:
        return (await engine.heads.state()).version > 0

    async def settled() -> bool:
        return len([d for d in traffic.done if d[1] > 0 and d[0] > served_at + 20]) >= 6 * traffic.concurrency

    while not traffic.done:
        await asyncio.sleep(0.1)
    first = traffic.done[0][0]
    if not await until(has_heads, "no heads"):
        return out
    served_at = time.monotonic()
    out["seconds_to_first_version"] = served_at - first
    out["acceptance_without_heads"] = traffic.acceptance(began)[0]
    await until(settled, "first version")
    out["acceptance_first_version"], out["tokens_per_second"] = traffic.acceptance(served_at + 20)
    out["commit_ms"] = 1000 * (await engine.heads.state()).commit_seconds
    before, swaps = out["acceptance_first_version"], (await engine.heads.state()).swaps
    await heads.disturb(1.0, seed=0)
    disturbed_at = time.monotonic()

    async def swapped() -> bool:
        return (await engine.heads.state()).swaps > swaps

    if await until(swapped, "disturbed"):
        out["acceptance_disturbed"] = traffic.acceptance(disturbed_at)[0]
        served_at = time.monotonic()
        out["seconds_from_fault_to_swap"] = served_at - disturbed_at
        await until(settled, "repaired")
        out["acceptance_recovered"] = traffic.acceptance(served_at + 20)[0]
        out["recovered_share"] = out["acceptance_recovered"] / before
    while time.monotonic() < end:
        await asyncio.sleep(10)
        say(traffic, (await engine.heads.state()).version, "steady", began)
    state = await engine.heads.state()
    out |= {"last_version": state.version, "swaps": state.swaps, "acceptance_last": traffic.acceptance(end - 60)[0]}
    out["requests_failed"] = traffic.failed
    return out


def say(traffic: Traffic, version: int, what: str, began: float) -> None:
    now = time.monotonic()
    if int(now - began) % 10 < 2:
        accepted, speed = traffic.acceptance(now - 15)
        sys.stderr.write(
            f"{now - began:6.0f} s  version {version}  {accepted:.3f} a round  {speed:.0f} tokens/s  {what}\n"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    options = parser.parse_args()
    with EmbeddedRedis(options.out / "redis-files") as server:
        os.environ.update(server.environment())
        engine_settings = {
            "threads": 1,
            "max_running_requests": options.concurrency,
            "speculation.enabled": "true",
            "speculation.nodes": options.nodes,
            "speculation.max_nodes": options.nodes,
        }
        settings = [f"run.dir={options.out / 'run'}", f"redis.url={server.url}"]
        settings += [f"rollout.engine.{name}={value}" for name, value in engine_settings.items()] + options.overrides
        config = load_config(options.config, settings)
        run_dir = RunDir(config.run.dir)
        run_dir.create(config, resume=False)
        model_dir = fetch_model(config.model.source)
        ArtifactStore(run_dir.policies).publish(0, lambda to: shutil.copytree(model_dir, to, dirs_exist_ok=True))
        watcher = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "watcher", f"--config={options.config}",
             *(f"--set={s}" for s in settings)],
            start_new_session=True, preexec_fn=child_dies_with_me(signal.SIGTERM),  # noqa: PLW1509
        )  # fmt: skip
        client, keys = connect(server.url, password=server.password), RunKeys(run_dir.run_id)
        feedback = FeedbackForwarder(client, keys, config.watcher, worker_id="bench")
        engine = RolloutEngine.start(
            config=config.rollout.engine, dtype=config.model.dtype, model_dir=model_dir, policy_version=0, seed=0
        )
        try:
            result = asyncio.run(serve(config, engine, feedback, RunBoard(client, keys), options))
        finally:
            engine.close()
            feedback.close()
            watcher.terminate()
            watcher.wait(30)
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


async def serve(config, engine, feedback: FeedbackForwarder, board: RunBoard, options) -> dict:
    engine.observer = feedback.note
    store = PolicyStore(options.out / "cache")
    heads = WorkerHeads(engine.heads, store, speculation=True)
    policy = ServedPolicy(engine, Served(0, "given"), pause_mode="retract")
    port = free_port()
    server = grpc_setup.aio_server("127.0.0.1", port, security=config.security)
    loop = type("Loop", (), {"in_flight": 0})
    servicer = RolloutServicer(engine, None, policy, store, loop, heads, worker_id="bench", chaos=True)
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, server.grpc)
    await server.start()
    prompts = load_prompts(config.data, load_tokenizer(engine.model_dir), config.run.seed)
    law = config.sampling.to_params()
    traffic = Traffic(engine, [prompts.train[i].ids for i in prompts.order(0)], law, options.concurrency)
    tasks = [
        asyncio.create_task(traffic.run()),
        asyncio.create_task(announce_for_ever(board, "bench", f"127.0.0.1:{port}")),
    ]
    try:
        return await measure(engine, traffic, heads, options.minutes)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.stop()


if __name__ == "__main__":
    main()
