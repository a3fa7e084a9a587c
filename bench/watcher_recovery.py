"""How fast the watcher brings heads up from nothing and back after a fault: one engine, one watcher, steady traffic.

    python -m bench.watcher_recovery CONFIG.toml --out DIRECTORY [--concurrency 8] [--nodes 8] [--minutes 12]
        [--moved DIRECTORY]
    python -m bench.watcher_recovery CONFIG.toml --out DIRECTORY --stationary --minutes 30 --set heads.init=DIRECTORY

No learner runs. Phases: no heads until the first version serves, unless heads.init names some; steady; noise of
standard deviation 1 on the output projections until heads are swapped; with --moved DIRECTORY another policy until they
are swapped again. With --stationary none of these: the policy and the heads stay good while the temperature and the
number of requests in flight change every two minutes, and any swap is one too many. Prints a line now and then, and a
summary at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
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
from services.rollout.heads_control import ServedHeads
from services.rollout.heads_feedback import FeedbackForwarder
from services.rollout.heads_service import WorkerHeads, announce_for_ever, engine_with_heads
from services.rollout.policy import Served, ServedPolicy
from services.rollout.policy_store import PolicyStore
from services.run_dir import RunDir
from specroll.v1 import rollout_pb2_grpc

_TURN_SECONDS = 120.0
# By when the watcher has met the engine.
_WATCHER_SECONDS = 40.0


class Traffic:
    """`concurrency` completions at any time. Tokens and rounds are counted by the heads version that served."""

    def __init__(self, engine, prompts, law, concurrency: int) -> None:
        self.engine, self.law, self.concurrency = engine, law, concurrency
        self.active = concurrency  # of the streams; the others wait
        self.prompts = itertools.cycle(prompts)
        self.done: list[tuple[float, int, int, int, float]] = []  # time, version, tokens, rounds, longest gap
        self.failed = 0
        self._numbers = itertools.count()

    async def run(self) -> None:
        await asyncio.gather(*(self._one_after_the_other(number) for number in range(self.concurrency)))

    async def _one_after_the_other(self, number: int) -> None:
        while True:
            if number >= self.active:
                await asyncio.sleep(0.2)
                continue
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

    def acceptance(self, since: float) -> tuple[float, float]:
        """Tokens per round, and tokens per second, of completions that ended since then."""
        chosen = [d for d in self.done if d[0] >= since]
        tokens, rounds = sum(d[2] for d in chosen), sum(d[3] for d in chosen)
        return tokens / rounds if rounds else float("nan"), tokens / max(1e-9, time.monotonic() - since)


class Phases:
    """Waits that say what is seen meanwhile, all of them over at `end`."""

    def __init__(self, engine: RolloutEngine, traffic: Traffic, minutes: float) -> None:
        self.engine, self.traffic = engine, traffic
        self.began = time.monotonic()
        self.end = self.began + 60 * minutes

    async def state(self) -> ServedHeads:
        return await self.engine.heads.state()

    async def until(self, what: str, reached: Callable[[ServedHeads], bool]) -> bool:
        while time.monotonic() < self.end:
            await asyncio.sleep(2)
            state = await self.state()
            say(self.traffic, state.version, what, self.began)
            if reached(state):
                return True
        return False

    async def settled(self, what: str) -> float:
        """Tokens per round of what ends more than 20 s from now, over six completions of every stream."""
        since = time.monotonic() + 20
        enough = 6 * self.traffic.concurrency
        await self.until(what, lambda _: sum(d[0] >= since for d in self.traffic.done) >= enough)
        return self.traffic.acceptance(since)[0]

    async def answered(self, what: str) -> dict[str, float | None]:
        """Until heads are swapped, and what is accepted before and after; None where nothing ended meanwhile."""
        began, swaps = time.monotonic(), (await self.state()).swaps
        swapped = await self.until(what, lambda state: state.swaps > swaps)
        seconds = time.monotonic() - began
        before = self.traffic.acceptance(began + 20)[0]
        after = await self.settled(f"after {what}") if swapped else math.nan
        found = {"acceptance": before, "seconds_to_swap": seconds, "acceptance_after": after}
        return {name: None if math.isnan(value) else value for name, value in found.items()}


async def measure(phases: Phases, heads: WorkerHeads, move: Callable[[], Awaitable[None]] | None) -> dict:
    """The phases, and what they took. move: brings another policy."""
    traffic = phases.traffic
    out: dict = {}
    await phases.until("start", lambda _: bool(traffic.done))
    first = time.monotonic()
    if (await phases.state()).version == 0:
        await phases.until("no heads", lambda state: state.version > 0)
        out["seconds_to_first_version"] = time.monotonic() - first
        out["acceptance_without_heads"] = traffic.acceptance(first)[0]
    out["acceptance"] = await phases.settled("steady")
    await heads.disturb(1.0, seed=0)
    out["disturbed"] = await phases.answered("noise")
    if move is not None:
        await move()
        out["moved"] = await phases.answered("another policy")
    await phases.until("steady", lambda _: False)
    state = await phases.state()
    return out | {
        "version": state.version,
        "swaps": state.swaps,
        "last_commit_ms": 1000 * state.commit_seconds,
        "acceptance_of_the_last_minute": traffic.acceptance(phases.end - 60)[0],
        "longest_gap_seconds": max(d[4] for d in traffic.done),
        "requests_failed": traffic.failed,
    }


async def stand_still(phases: Phases, metrics: Path) -> dict:
    """Stationary traffic until the end. metrics: the watcher's records."""
    traffic, turns = phases.traffic, []
    await phases.until("heads", lambda state: state.version > 0)
    # The watcher, when it comes, puts in place what it finds serving already: a swap, but none of its own accord.
    there = time.monotonic() + _WATCHER_SECONDS
    await phases.until("the watcher", lambda _: time.monotonic() >= there)
    swaps = (await phases.state()).swaps
    for turn in itertools.count():
        temperature = (0.6, 1.0)[turn % 2]
        traffic.law = replace(traffic.law, temperature=temperature)
        traffic.active = max(1, traffic.concurrency // (1, 2, 4)[turn % 3])
        began = time.monotonic()
        over = began + _TURN_SECONDS
        await phases.until(
            f"temperature {temperature}, {traffic.active} in flight", lambda _, over=over: time.monotonic() >= over
        )
        # What was in flight when the turn began ends under the law of the one before.
        accepted = round(traffic.acceptance(began + _TURN_SECONDS / 4)[0], 3)
        turns.append({"temperature": temperature, "in_flight": traffic.active, "tokens_per_round": accepted})
        if time.monotonic() >= phases.end:
            break
    state = await phases.state()
    return {
        "minutes": (time.monotonic() - phases.began) / 60,
        "requests": len(traffic.done),
        "rounds": sum(d[3] for d in traffic.done),
        "swaps": state.swaps - swaps,
        "version": state.version,
        "watcher_records": dict(Counter(json.loads(line)["kind"] for line in metrics.read_text().splitlines())),
        "requests_failed": traffic.failed,
        "turns": turns,
    }


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
    parser.add_argument("--stationary", action="store_true", help="change nothing that would be a reason for a swap")
    parser.add_argument("--moved", type=Path, help="a policy that training has moved on")
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
            config=engine_with_heads(config, RunBoard(client, keys), PolicyStore(options.out / "cache"), model_dir),
            dtype=config.model.dtype,
            model_dir=model_dir,
            policy_version=0,
            seed=0,
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

    async def move() -> None:
        made = ArtifactStore(RunDir(config.run.dir).policies).publish(
            1, lambda to: shutil.copytree(options.moved, to, dirs_exist_ok=True)
        )
        await policy.load(made.path, Served(1, made.digest))

    try:
        phases = Phases(engine, traffic, options.minutes)
        if options.stationary:
            return await stand_still(phases, RunDir(config.run.dir).metrics / "watcher.jsonl")
        return await measure(phases, heads, move if options.moved else None)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.stop()


if __name__ == "__main__":
    main()
