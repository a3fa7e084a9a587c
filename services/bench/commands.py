"""`specroll bench`: from a configuration to a table."""

from __future__ import annotations

import asyncio
import contextlib
import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from services.bench import beside
from services.bench.ablate import ablate, ablation_table
from services.bench.heads import with_heads
from services.bench.measure import Bench
from services.bench.options import ABLATED_NODES, USUAL_PROMPTS, BenchOptions, reads_table
from services.bench.report import notes, table, write_json, write_plot
from services.bench.result import BenchResult, Curve, bounds_of
from services.config import Config, EngineConfig
from services.config_loader import load_config
from services.learner.prompts import load_prompts
from services.machine import cores, half_of_the_cores, quiet_libraries
from services.models import fetch_model
from services.output_file import check_output
from services.progress import progress_bar
from services.rollout.completion import EngineError
from services.rollout.engine import RolloutEngine

_HF_TOKENS = 64
# Prompts that an ablation completes before anything counts.
_WARM = 16
# A pipe has no width of its own, and a table that is cut says nothing.
_PIPE_WIDTH = 132


def bench_command(config_path: Path, overrides: Sequence[str], options: BenchOptions) -> int:
    """Measures and prints; 0, or 1 where the engine fails. Raises ValueError for what a user can put right."""
    check_output("--json", options.json)
    check_output("--plot", options.plot)
    if options.policy is not None and not (options.policy / "config.json").is_file():
        raise ValueError(f"--policy {options.policy} must be a directory with a model; there is no config.json in it.")
    overrides = [*overrides, "rollout.engine.speculation.enabled=true"]
    config = load_config(config_path, overrides)
    _check_prompts(config, options)
    if config.rollout.engine.speculation.table and not options.ablate:
        raise ValueError(
            "specroll bench repeats its prompts, and rollout.engine.speculation.table is for other prompts' rollouts: "
            "leave it off, or compare tokens per step with --ablate."
        )
    if options.ablate:
        _check_table(config, options)
    config = with_heads(config, config_path, overrides, options)
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    try:
        if options.ablate:
            return _ablate(config, options, console)
        result = measure(config, options)
    except EngineError as error:
        Console(stderr=True).print(f"specroll: {error}")
        return 1
    for temperature in options.temperatures:
        console.print(table(result, temperature))
    for line in notes(result):
        console.print(line)
    if options.plot is not None:
        write_plot(result, options.plot)
    return 0


def measure(config: Config, options: BenchOptions) -> BenchResult:
    """Starts an engine, runs every arm, and stops it. Main thread only."""
    setting = _Setting.of(config, options)
    result = BenchResult(_environment(config, options, setting))
    threads, dtype = setting.engine.threads, config.model.dtype
    if options.hf:
        for concurrency in options.concurrency:
            batch = [setting.prompts[i % len(setting.prompts)] for i in range(concurrency)]
            rate = beside.hf_rate(setting.directory, dtype, batch, _HF_TOKENS, options.temperatures[0], threads)
            result.hf[concurrency] = rate
    company = (
        beside.learner(setting.directory, dtype, cores()[threads:]) if options.learner else contextlib.nullcontext()
    )
    with (
        setting.serving(config) as engine,
        asyncio.Runner() as runner,
        company,
        progress_bar("measuring", None) as step,
    ):
        _update(runner, engine, options)
        bench = Bench(engine, setting.prompts, config.sampling.to_params(), options, step)
        run_cells(runner, bench, options, result)
    return result


def _ablate(config: Config, options: BenchOptions, console: Console) -> int:
    table = config.rollout.engine.speculation.table
    setting = _Setting.of(config, options)
    with setting.serving(config) as engine, asyncio.Runner() as runner, progress_bar("completing", None) as step:
        _update(runner, engine, options)
        found = runner.run(
            ablate(
                engine,
                setting.prompts,
                setting.warm,
                config.sampling.to_params(),
                arms=options.chosen,
                baseline=options.baseline,
                nodes=(options.nodes,) if options.nodes else ABLATED_NODES,
                temperatures=options.temperatures,
                concurrency=max(options.concurrency),
                group_size=options.group_size,
                divided=table,
                progress=step,
            )
        )
    for temperature in options.temperatures:
        console.print(ablation_table(found, temperature, options.baseline))
    if options.json is not None:
        environment = _environment(config, options, setting)
        record = {"environment": environment, "ablation": [asdict(a) for a in found]}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _check_prompts(config: Config, options: BenchOptions) -> None:
    held_out = config.data.holdout
    if held_out == 0:
        raise ValueError("specroll bench takes held-out prompts, and data.holdout is 0.")
    if options.prompts is not None and options.prompts > held_out:
        raise ValueError(f"--prompts {options.prompts} is more than the {held_out} that data.holdout keeps.")


def _check_table(config: Config, options: BenchOptions) -> None:
    if config.rollout.engine.speculation.table and sum(map(reads_table, options.chosen)) > 1:
        raise ValueError(
            "specroll bench --ablate completes the same prompts with every arm, and rollout.engine.speculation.table "
            "is for other prompts' rollouts: name one arm at most that reads it, as in --arms "
            "heads-own-memory,heads-memory."
        )


@dataclass(frozen=True, slots=True)
class _Setting:
    """What is measured on: the model's directory, held-out prompts, some others, and the engine's configuration."""

    directory: Path
    prompts: list[tuple[int, ...]]
    warm: list[tuple[int, ...]]
    engine: EngineConfig

    @staticmethod
    def of(config: Config, options: BenchOptions) -> _Setting:
        quiet_libraries()
        directory = fetch_model(config.model.source)
        # Beside a learner the engine has the first half of the cores, as in a run on one machine.
        threads = options.threads or (half_of_the_cores() if options.learner else len(cores()))
        prompts, warm = _prompts(config, directory, options.prompts or USUAL_PROMPTS)
        longest = max(map(len, [*prompts, *warm]))
        return _Setting(
            directory,
            prompts,
            warm,
            _engine_config(config, options, threads, tuple(cores()[:threads]), longest, len(prompts)),
        )

    @contextlib.contextmanager
    def serving(self, config: Config) -> Iterator[RolloutEngine]:
        engine = RolloutEngine.start(
            config=self.engine,
            dtype=config.model.dtype,
            model_dir=self.directory,
            policy_version=0,
            seed=config.run.seed,
        )
        try:
            yield engine
        finally:
            engine.close()


def _update(runner: asyncio.Runner, engine: RolloutEngine, options: BenchOptions) -> None:
    if options.policy is not None:
        runner.run(engine.update_policy(options.policy, 1, pause_mode="retract"))


def run_cells(runner: asyncio.Runner, bench: Bench, options: BenchOptions, result: BenchResult) -> None:
    """Raises EngineError where a cell does not end. Whatever ends it, the JSON file holds the cells before."""
    curves: list[Curve] = []
    cells = [(temperature, concurrency) for temperature in options.temperatures for concurrency in options.concurrency]
    for number, (temperature, concurrency) in enumerate(cells, 1):
        try:
            arms, curve = runner.run(asyncio.wait_for(bench.cell(concurrency, temperature), bench.cell_seconds))
        except TimeoutError as error:
            raise EngineError(
                f"the windows of {concurrency} in flight did not end within {bench.cell_seconds:.0f} s"
            ) from error
        result.arms.extend(arms)
        if curve is not None:
            curves.append(curve)
        result.bounds = bounds_of(curves)
        result.complete = number == len(cells)
        if options.json is not None:
            write_json(result, options.json)


def _prompts(config: Config, directory: Path, count: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Held-out ones, which no heads were trained on, and some of the others to warm up with."""
    from transformers import AutoTokenizer

    loaded = load_prompts(config.data, AutoTokenizer.from_pretrained(directory), config.run.seed)
    return [tuple(p.ids) for p in loaded.holdout[:count]], [tuple(p.ids) for p in loaded.train[:_WARM]]


def _engine_config(
    config: Config, options: BenchOptions, threads: int, cpus: tuple[int, ...], longest: int, prompts: int
) -> EngineConfig:
    """As the configuration has it, with room for the largest load and the largest tree."""
    tree = options.largest_tree
    most = max(options.concurrency)
    each = longest + config.sampling.max_new_tokens + 2 * tree
    room = most * each + prompts * longest
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
    config: Config, options: BenchOptions, setting: _Setting
) -> dict[str, str | int | float | bool | None]:
    import torch

    engine = setting.engine
    recorded = replace(options, json=None, plot=None, policy=None, prompts=len(setting.prompts))
    return {
        "model": setting.directory.name,
        "policy": options.policy.name if options.policy else None,
        "dtype": config.model.dtype,
        "heads": str(engine.speculation.heads.name) if engine.speculation.heads else None,
        "machine": f"{platform.machine()}, {len(cores())} cores",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": engine.threads,
        "torch": torch.__version__,
        "options": json.dumps({name: getattr(recorded, name) for name in recorded.__slots__}),
    }
