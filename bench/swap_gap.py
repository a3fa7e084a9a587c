"""What a swap of heads does to the requests in flight: the longest wait for a token, with a swap and without.

    python -m bench.swap_gap CONFIG.toml --heads DIRECTORY [--concurrency 32] [--pairs 60] [--seconds 0.5]

A closed loop keeps so many streams in flight. Windows that begin with a swap, prepared and committed as the watcher
does it, and windows of the same length without one take turns, with a pause after each; of each the longest time
between two messages of any stream counts. A window is as long as its swap takes and `--seconds` more: in a longer one
the prefills of new requests, which everyone waits for, would hide what a swap does. Both versions are copies of the
same heads, so that nothing else changes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from services.common.artifacts import Artifact, ArtifactStore
from services.config import EngineConfig, SpeculationConfig
from services.config_loader import load_config
from services.heads.artifact import load_artifact, publish_heads
from services.learner.prompts import load_prompts
from services.models import fetch_model, load_tokenizer
from services.rollout.engine import RolloutEngine
from specroll_core.contracts import SamplingParams


class Streams:
    """Requests one after the other, in as many tasks as call `run`, and the longest wait of any for its next token."""

    def __init__(self, engine: RolloutEngine, prompts: Sequence[Sequence[int]], law: SamplingParams) -> None:
        self._engine, self._law = engine, law
        self._prompts, self._numbers = itertools.cycle(prompts), itertools.count()
        self.longest, self.ended, self.lost = 0.0, 0, 0

    async def run(self) -> None:
        while True:
            last, completion = None, None
            async for delta in self._engine.stream(
                next(self._prompts), self._law, request_id=f"g{next(self._numbers)}"
            ):
                now = time.perf_counter()
                # The first message waits for a prefill, not for a step.
                self.longest = max(self.longest, now - last) if last is not None else self.longest
                last, completion = now, delta.completion
            self.ended += completion is not None
            self.lost += completion is None


async def measure(engine: RolloutEngine, artifacts: Sequence[Artifact], streams: Streams, options) -> dict:
    tasks = [asyncio.create_task(streams.run()) for _ in range(options.concurrency)]
    versions = itertools.cycle(artifacts)
    gaps: dict[str, list[float]] = {"with": [], "without": []}
    commits: list[float] = []
    try:
        await asyncio.sleep(10)
        lasted = options.seconds
        for number in range(2 * options.pairs):
            kind = "without" if number % 2 else "with"
            await asyncio.sleep(options.seconds)
            streams.longest, began = 0.0, time.perf_counter()
            if kind == "with":
                artifact = next(versions)
                await engine.heads.prepare(artifact.path, artifact.version, artifact.digest)
                commits.append((await engine.heads.commit(artifact.version, artifact.digest)).commit_seconds)
                await asyncio.sleep(options.seconds)
                lasted = time.perf_counter() - began
            else:
                await asyncio.sleep(lasted)
            gaps[kind].append(streams.longest)
            sys.stderr.write(f"window {number + 1}, {kind}, {lasted:.2f} s: {1e3 * streams.longest:.0f} ms\n")
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    longer = [a - b for a, b in zip(gaps["with"], gaps["without"], strict=True)]
    return {
        "gap_ms_with": [round(1e3 * g, 1) for g in gaps["with"]],
        "gap_ms_without": [round(1e3 * g, 1) for g in gaps["without"]],
        "longer_ms_median": 1e3 * statistics.median(longer),
        "longer_ms_quartiles": [1e3 * q for q in statistics.quantiles(longer, n=4)],
        "commit_ms_median": 1e3 * statistics.median(commits),
        "commit_ms_largest": 1e3 * max(commits),
        "requests_ended": streams.ended,
        "requests_lost": streams.lost,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--heads", type=Path, required=True)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    config = load_config(options.config, [])
    directory = fetch_model(config.model.source)
    prompts = load_prompts(config.data, load_tokenizer(directory), config.run.seed)
    longest = max(len(prompts.train[i].ids) for i in prompts.order(0))
    context = longest + config.sampling.max_new_tokens + 64
    engine = RolloutEngine.start(
        config=EngineConfig(
            threads=options.threads,
            context_length=context,
            max_total_tokens=options.concurrency * context,
            max_running_requests=options.concurrency,
            speculation=SpeculationConfig(enabled=True),
        ),
        dtype=config.model.dtype,
        model_dir=directory,
        policy_version=0,
        seed=0,
    )
    scratch = Path(tempfile.mkdtemp())
    try:
        loaded, store = load_artifact(options.heads), ArtifactStore(scratch)
        artifacts = [publish_heads(store, v, loaded.heads, replace(loaded.manifest, parent=None)) for v in (1, 2)]
        streams = Streams(engine, [prompts.train[i].ids for i in prompts.order(0)], config.sampling.to_params())
        result = asyncio.run(measure(engine, artifacts, streams, options))
    finally:
        engine.close()
        shutil.rmtree(scratch, ignore_errors=True)
    sys.stdout.write(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
