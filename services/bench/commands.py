"""`specroll bench`: from a configuration to a table."""

from __future__ import annotations

import asyncio
import contextlib
import json
import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from services.bench import beside
from services.bench.measure import Bench
from services.bench.options import BenchOptions
from services.bench.report import notes, table, write_json, write_plot
from services.bench.result import BenchResult
from services.config import Config, EngineConfig
from services.config_loader import load_config
from services.learner.prompts import load_prompts
from services.machine import cores, half_of_the_cores, quiet_libraries
from services.models import fetch_model
from services.output_file import check_output
from services.progress import progress_bar
from services.rollout.completion import EngineError
from services.rollout.engine import RolloutEngine

# A window of the slowest machine that anybody would wait for.
_CELL_SECONDS = 3600.0
_HF_TOKENS = 64
# The arm whose widths make the bound: what a run does where it is measured, else heads.
_BOUND_ARMS = ("speculation", "heads", "heads-target-match", "memory", "lookup")

# A pipe has no width of its own, and a table that is cut says nothing.
_PIPE_WIDTH = 132


def bench_command(config_path: Path, overrides: Sequence[str], options: BenchOptions) -> int:
    """Measures and prints; 0, or 1 where the engine fails. Raises ValueError for what a user can put right."""
    check_output("--json", options.json)
    check_output("--plot", options.plot)
    config = load_config(config_path, [*overrides, "rollout.engine.speculation.enabled=true"])
    try:
        result = measure(config, options)
    except EngineError as error:
        Console(stderr=True).print(f"specroll: {error}")
        return 1
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    for temperature in options.temperatures:
        console.print(table(result, temperature))
    for line in notes(result):
        console.print(line)
    if options.json is not None:
        write_json(result, options.json)
    if options.plot is not None:
        write_plot(result, options.plot)
    return 0


def measure(config: Config, options: BenchOptions) -> BenchResult:
    """Starts an engine, runs every arm, and stops it. Main thread only."""
    quiet_libraries()
    directory = fetch_model(config.model.source)
    # Beside a learner the engine has the first half of the cores, as in a run on one machine.
    threads = options.threads or (half_of_the_cores() if options.learner else len(cores()))
    engine_cpus = tuple(cores()[:threads])
    prompts = _prompts(config, directory, options.prompts)
    engine_config = _engine_config(config, options, threads, engine_cpus, max(map(len, prompts)))
    result = BenchResult(_environment(config, options, engine_config, directory))
    if options.hf:
        for concurrency in options.concurrency:
            batch = [prompts[i % len(prompts)] for i in range(concurrency)]
            result.hf[concurrency] = beside.hf_rate(directory, batch, _HF_TOKENS, options.temperatures[0], threads)
    engine = RolloutEngine.start(
        config=engine_config, dtype=config.model.dtype, model_dir=directory, policy_version=0, seed=config.run.seed
    )
    company = beside.learner(directory, cores()[threads:]) if options.learner else contextlib.nullcontext()
    try:
        with asyncio.Runner() as runner, company, progress_bar("measuring", None) as step:
            bench = Bench(engine, prompts, config.sampling.to_params(), options, step)
            _run(runner, bench, options, result)
    finally:
        engine.close()
    return result


def _run(runner: asyncio.Runner, bench: Bench, options: BenchOptions, result: BenchResult) -> None:
    curve_of = next((arm for arm in _BOUND_ARMS if arm in options.arms), None)
    for temperature in options.temperatures:
        for concurrency in options.concurrency:
            arms = runner.run(asyncio.wait_for(bench.arms(concurrency, temperature), _CELL_SECONDS))
            result.arms.extend(arms)
            if options.widths and curve_of is not None:
                bound = bench.bound(concurrency, temperature, curve_of)
                result.bounds.append(runner.run(asyncio.wait_for(bound, _CELL_SECONDS)))


def _prompts(config: Config, directory: Path, count: int) -> list[tuple[int, ...]]:
    """Held-out ones, which no heads were trained on. Raises ValueError where the configuration holds none out."""
    from transformers import AutoTokenizer

    loaded = load_prompts(config.data, AutoTokenizer.from_pretrained(directory), config.run.seed)
    if not loaded.holdout:
        raise ValueError("specroll bench takes held-out prompts, and data.holdout is 0.")
    return [tuple(prompt.ids) for prompt in loaded.holdout[:count]]


def _engine_config(
    config: Config, options: BenchOptions, threads: int, cpus: tuple[int, ...], longest: int
) -> EngineConfig:
    """As the configuration has it, with room for the largest load and the largest tree."""
    tree = options.largest_tree
    most = max(options.concurrency)
    each = longest + config.sampling.max_new_tokens + 2 * tree
    room = most * each + options.prompts * longest
    old = config.rollout.engine
    return old.model_copy(
        update={
            "threads": threads,
            "cpus": cpus,
            "max_running_requests": max(most, old.max_running_requests),
            "max_total_tokens": max(room, old.max_total_tokens),
            "speculation": old.speculation.model_copy(
                update={"nodes": 0, "max_nodes": max(tree, old.speculation.max_nodes)}
            ),
        }
    )


def _environment(
    config: Config, options: BenchOptions, engine: EngineConfig, directory: Path
) -> dict[str, str | int | float | bool | None]:
    import torch

    recorded = replace(options, json=None, plot=None)
    return {
        "model": directory.name,
        "dtype": config.model.dtype,
        "heads": str(engine.speculation.heads.name) if engine.speculation.heads else None,
        "machine": f"{platform.machine()}, {len(cores())} cores",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": engine.threads,
        "torch": torch.__version__,
        "options": json.dumps({name: getattr(recorded, name) for name in recorded.__slots__}),
    }
