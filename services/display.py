"""What a person sees while a run goes on, on a terminal or through a pipe, and at its end."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from services.config import Config
from services.run_dir import RunDir

# The watcher's records that are counted at the end, one and many.
_WATCHED = {
    "check": ("check", "checks"),
    "training": ("training", "trainings"),
    "published": ("new version of the heads", "new versions of the heads"),
    "repaired": ("repair", "repairs"),
    "rolled_back": ("roll-back", "roll-backs"),
    "alarm": ("alarm", "alarms"),
}
_ALWAYS_SAID = ("check", "training", "published")


class Display:
    """Follows the learner's metrics file: one line per step, and on a terminal a status line below."""

    def __init__(self, config: Config, run_dir: RunDir) -> None:
        self._config = config
        self._run_dir = run_dir
        self._console = Console(stderr=False, highlight=False, soft_wrap=True)
        learner = run_dir.metrics / "learner.jsonl"
        # A resumed run shows what is new, not what an earlier process wrote.
        self._metrics = Tail(learner, learner.stat().st_size if learner.exists() else 0)
        self._status = (
            self._console.status("starting Redis, the engine and the learner") if sys.stdout.isatty() else None
        )
        self._started = time.monotonic()
        self._said_headline = False

    def __enter__(self) -> Display:
        self.say(f"run directory {self._run_dir.root}, logs in {self._run_dir.logs}")
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status:
            self._status.stop()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def error(self, text: str) -> None:
        Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)

    def update(self) -> None:
        """Shows what is new. Called several times a second."""
        for line in self._metrics.new_lines():
            if line.get("kind") == "eval":
                self._say_evaluation(line)
            elif line.get("kind") == "train":
                self._say_step(line)

    def _say_evaluation(self, line: dict[str, Any]) -> None:
        self.say(
            f"held-out reward after {line['step']} steps: {line['reward']:.3f} "
            f"[{line['low']:.3f}, {line['high']:.3f}] on {line['prompts']:.0f} prompts"
        )
        if self._status:
            self._status.update("waiting for the first batch" if line["step"] == 0 else "training")

    def _say_step(self, line: dict[str, Any]) -> None:
        if not self._said_headline:
            self._said_headline = True
            self.say("  step   reward   length  staleness   step s   wait s  tokens/s  queue")
        seconds = _number(line, "seconds/step")
        self.say(
            f"{line['step']:4d}/{self._config.learner.steps:<4d}"
            f"{_number(line, 'reward/mean'):7.3f}"
            f"{_number(line, 'completion/length/mean'):9.1f}"
            f"{_number(line, 'off_policy/staleness/mean'):7.2f}/{_number(line, 'off_policy/staleness/max'):.0f}"
            f"{seconds:9.1f}{_number(line, 'seconds/wait'):9.1f}"
            f"{_number(line, 'rollout/tokens_per_second'):10.0f}"
            f"{_number(line, 'queue/ready') + _number(line, 'queue/leased'):7.0f}"
        )
        if self._status:
            self._status.update("training")


class Tail:
    """The lines added to a JSONL file since the last call, at first from byte `at` on.

    One that is not whole yet is left for later. The file need not exist yet.
    """

    def __init__(self, path: Path, at: int) -> None:
        self._path = path
        self._at = at

    def new_lines(self) -> Iterator[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return
        whole, newline, _ = data.rpartition(b"\n")
        self._at += len(whole) + len(newline)
        for line in whole.splitlines():
            yield json.loads(line)


def print_report(run_dir: RunDir) -> None:
    """The end of a run in a table. The learner's figures, and more, are in report.json."""
    report = json.loads(run_dir.report.read_text())
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"\nrun {report['run_id']}", markup=False)
    for name, value in _rows(report):
        # Plain lines and no table: paths are long, and a path that is cut off cannot be copied.
        console.print(f"  {name:<24}{value}", markup=False)
    if (seen := watched(run_dir.metrics / "watcher.jsonl")) is not None:
        console.print(f"  {'watcher':<24}{seen}", markup=False)
    console.print(f"  {'report':<24}{run_dir.report}", markup=False)


def watched(metrics: Path) -> str | None:
    """What the watcher has seen and done since the run was begun; None where there was none.

    metrics: its records, one JSON line each.
    """
    if not metrics.exists():
        return None
    kinds = Counter(line["kind"] for line in Tail(metrics, 0).new_lines())
    if not kinds:
        return "no check: too little was drafted"
    said = {kind: words for kind, words in _WATCHED.items() if kinds[kind] or kind in _ALWAYS_SAID}
    return ", ".join(f"{kinds[kind]} {words[kinds[kind] != 1]}" for kind, words in said.items())


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, key in (("held-out reward before", "reward_before"), ("held-out reward after", "reward_after")):
        value = report[key]
        if value:
            yield name, f"{value['mean']:.3f}  [{value['low']:.3f}, {value['high']:.3f}]"
    yield "steps", f"{report['steps']}, {_maybe(report['seconds']['step_median'])} s each in the median"
    yield "generation", f"{_maybe(report['tokens_per_second'])} tokens/s"
    if (spec := report["speculation"]) is not None:
        rate, gain = spec["tokens_per_step"], spec["speedup"]
        yield "speculation", f"{rate:.2f} tokens a step, {gain:.2f} times as fast as the plain rounds of this run"
    if report["overlap"] is not None:
        yield "overlap", f"generation ran during {report['overlap']:.0%} of the training time"
    stale = report["staleness"]
    yield "staleness", f"mean {_maybe(stale['mean'], 2)}, max {_maybe(stale['max'], 0)}, bound {stale['bound']}"
    yield (
        "engine against learner",
        f"mismatch KL {_maybe(report['mismatch_kl_equal_version'], 6)} per token at equal versions",
    )
    if report["checkpoint"]:
        yield "checkpoint", report["checkpoint"]
        yield "load it with", f'AutoModelForCausalLM.from_pretrained("{report["checkpoint"]}")'


def _number(line: dict[str, Any], name: str) -> float:
    value = line.get(name)
    return float("nan") if value is None else float(value)


def _maybe(value: float | None, digits: int = 1) -> str:
    return "not measured" if value is None else f"{value:.{digits}f}"
