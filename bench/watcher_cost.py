"""What the watcher costs a training run on the same cores: tokens trained on per second, in turn

- with the watcher stopped (SIGSTOP), which is as good as none,
- with it watching and nothing to do,
- and with its trainer at work all the time, at its priority and with its threads.

    python -m bench.watcher_cost CONFIG.toml --out DIRECTORY [--rounds 6] [--seconds 60]

The run is a real one, `specroll train`, with the learning rate at almost 0: completions that get shorter would be a
trend. The trainer's job is one as the watcher gives it, of 14,000 rows, and begins anew when it is done.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from services.bench.result import ratio_of
from services.common.lifecycle import Deadline
from services.config import Config
from services.config_loader import load_config
from services.heads.auto import cached_heads
from services.heads.collect import sample_rows
from services.heads.target import TargetModel
from services.learner.prompts import load_prompts
from services.models import fetch_model
from services.watcher.job import TrainJob
from services.watcher.rows import ChosenRows
from services.watcher.trainer import Trainer, lower_session

_START_SECONDS = 600.0
_STEPS_BEFORE = 3
ARMS = ("stopped", "idle", "training")

# Of the trainer's job, where the configuration allows as many.
_ROWS = 14_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--train-for-ever", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    settings = [
        f"run.dir={options.out / 'run'}",
        "learner.steps=100000",
        "learner.learning_rate=1e-12",
        "watcher.min_rows=1000000",
        "watcher.max_rows=1000000",
        *options.overrides,
    ]
    asked = load_config(options.config, options.overrides)
    if options.train_for_ever:
        train_for_ever(asked, options.out)
        return
    config = load_config(options.config, settings)
    options.out.mkdir(parents=True, exist_ok=True)
    save_rows(asked, options.out)
    run = subprocess.Popen(
        [sys.executable, "-m", "services.cli", "train", str(options.config), *(f"--set={s}" for s in settings)],
        stdout=(options.out / "run.log").open("w"), stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        rates = measure(run, Steps(Path(config.run.dir) / "metrics" / "learner.jsonl"), options)
    finally:
        run.send_signal(signal.SIGINT)
        run.wait(60)
    result = {"tokens_per_second": rates}
    for arm in ARMS:
        ratio = ratio_of(rates[arm], rates["stopped"])
        result[arm] = dataclasses.asdict(ratio)
        sys.stdout.write(f"{arm:9} {statistics.median(rates[arm]):7.1f} tokens/s, {ratio} of that without a watcher\n")
    (options.out / "watcher_cost.json").write_text(json.dumps(result, indent=1) + "\n")


class Steps:
    """The learner's records."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def all(self) -> list[tuple[float, float]]:
        """(time, tokens) of each step so far."""
        if not self._path.exists():
            return []
        records = [json.loads(line) for line in self._path.read_text().splitlines()]
        return [(r["time"], r["batch/tokens"]) for r in records if r["kind"] == "train"]

    def rate(self, begin: float, end: float) -> float:
        """Tokens a second between the first and the last step that ended within."""
        inside = [step for step in self.all() if begin < step[0] <= end]
        return sum(tokens for _, tokens in inside[1:]) / (inside[-1][0] - inside[0][0])


def measure(run: subprocess.Popen[bytes], steps: Steps, options: argparse.Namespace) -> dict[str, list[float]]:
    deadline = Deadline(_START_SECONDS)
    while len(steps.all()) < _STEPS_BEFORE:
        deadline.check("the first steps")
        if run.poll() is not None:
            raise SystemExit(f"the run ended with exit code {run.returncode}; see {options.out / 'run.log'}")
        time.sleep(1)
    watcher = next(p for p in psutil.Process(run.pid).children() if "watcher" in p.cmdline())
    rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
    enter: dict[str, Callable[[], subprocess.Popen[bytes] | None]] = {
        "stopped": watcher.suspend,
        "idle": lambda: None,
        "training": lambda: start_trainer(options),
    }
    for turn in range(options.rounds):
        for arm in ARMS[turn % 3 :] + ARMS[: turn % 3]:
            trainer = enter[arm]()
            begin = time.time()
            time.sleep(options.seconds)
            rates[arm].append(steps.rate(begin, time.time()))
            if arm == "stopped":
                watcher.resume()
            if trainer is not None:
                trainer.terminate()
                trainer.wait(30)
            sys.stderr.write(f"round {turn + 1}, {arm}: {rates[arm][-1]:.1f} tokens/s\n")
    return rates


def start_trainer(options: argparse.Namespace) -> subprocess.Popen[bytes]:
    overrides = [f"--set={s}" for s in options.overrides]
    return subprocess.Popen(
        [sys.executable, "-m", "bench.watcher_cost", str(options.config), f"--out={options.out}", "--train-for-ever",
         *overrides],
        start_new_session=True,
    )  # fmt: skip


def train_for_ever(config: Config, out: Path) -> None:
    """One job after the other, until SIGTERM."""
    ended = False

    def on_signal(*_: object) -> None:
        nonlocal ended
        ended = True

    signal.signal(signal.SIGTERM, on_signal)
    lower_session(config.watcher.nice)
    training, held_out = torch.load(out / "rows.pt", weights_only=False)
    trainer = Trainer(out / f"jobs-{os.getpid()}", threads=config.watcher.threads, nice=config.watcher.nice)
    job = TrainJob(
        policy_dir=str(fetch_model(config.model.source)),
        heads_dir=str(cached_heads(config)),
        serving=1,
        heads=config.heads.heads,
        rank=config.heads.rank,
        epochs=config.watcher.epochs,
        seconds=config.watcher.train_seconds,
        nodes=config.watcher.gate_nodes,
        sampled_children=True,
        seed=0,
    )
    while not ended:
        if not trainer.running:
            trainer.start(job, training, held_out)
        elif (done := trainer.poll()) is not None:
            trainer.discard(done[0])
        time.sleep(0.1)
    trainer.stop()


def save_rows(config: Config, out: Path) -> None:
    """Rows as the watcher has them: states and tokens of the base policy's completions."""
    target = TargetModel(fetch_model(config.model.source), torch.bfloat16, torch.device("cpu"))
    prompts = load_prompts(config.data, target.tokenizer, config.run.seed)
    law = config.sampling.to_params()
    made = []
    for chosen, tokens in (
        ([prompts.train[i].ids for i in prompts.order(0)], min(_ROWS, config.watcher.max_rows)),
        ([p.ids for p in prompts.holdout], config.watcher.gate_rows),
    ):
        rows = sample_rows(target, chosen, law, tokens=tokens)
        made.append(
            ChosenRows(
                rows.tokens,
                rows.hidden.bfloat16(),
                rows.sequence,
                rows.prompt,
                (law.temperature, law.top_p, law.top_k, law.min_p),
                (0, 0),
            )
        )
    torch.save(made, out / "rows.pt")


if __name__ == "__main__":
    main()
