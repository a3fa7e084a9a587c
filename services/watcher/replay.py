"""`specroll watcher --replay FILE`: detection and gate decisions once more, from what was recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console

from services.config_loader import load_config
from services.watcher.drift_settings import drift_config
from services.watcher.gate import GateReport, decide
from services.watcher.recall import take_in
from services.watcher.records import numbered_lines, rotated, wrong_line
from services.watcher.watch import Watch
from specroll_core.drift import DriftConfig

# What records lead to and something is done about.
_DECISIONS = ("degraded", "worse")
_fields_of_record = itemgetter("at", "heads", "stratum", "cluster")
# What a line that holds something else may raise on its way through the watch and the gate.
_WRONG_LINE = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


def replay(file: Path, config_path: Path | None, overrides: Sequence[str]) -> int:
    """Prints every decision: those that records lead to under the configuration's thresholds, and for every gate
    what follows from the numbers of its prompts. Returns 1 where they are not those that were recorded.

    Raises ValueError naming the line where the file holds something else.
    """
    again = _Replay(drift_config(load_config(config_path, overrides)))
    number = 0
    for number, line in numbered_lines(file):
        try:
            again.take(number, line)
        except _WRONG_LINE as error:
            raise wrong_line(file, number, error) from error
    if not number:
        raise ValueError(f"{file} is empty: no feedback was recorded in it.")
    again.finish()
    if again.differing and config_path is None:
        again.say("the thresholds are those of no configuration; name the run's with --config")
    if again.differing and (before := rotated(file)).exists():
        again.say(f"the log was begun anew when it had grown large, and what came before is in {before}")
    return 1 if again.differing else 0


class _Replay:
    """Follows a log line by line. differing: decisions that are not those that were recorded."""

    def __init__(self, config: DriftConfig) -> None:
        self.differing = 0
        self._config = config
        self._console = Console(highlight=False, soft_wrap=True)
        self._watch: Watch | None = None
        self._counts = {"record": 0, "check": 0, "degraded": 0, "worse": 0, "gate": 0}
        # What the last record has led to and the log has not said yet: decisions follow their record at once.
        self._due: list[tuple[str, int]] = []
        self._record_line = 0

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def take(self, number: int, line: dict[str, Any]) -> None:
        """number: of the line, for messages."""
        kind = line.pop("kind")
        if kind == "record":
            _fields_of_record(line)  # names one that is missing
            self._expect_none_due()
            self._record_line = number
            self._counts["record"] += 1
        watch = self._watch = self._watch or Watch(self._config, int(line["heads"]) if kind == "record" else 0)
        for name, facts in take_in(watch, kind, line).happened:
            self._counts[name] = self._counts.get(name, 0) + 1
            if name != "check":
                self.say(f"{name}: version {watch.version}, {_numbers(facts)}")
            if name in _DECISIONS:
                self._due.append((name, watch.version))
        if kind in _DECISIONS:
            self._compare(number, kind, int(line["version"]))
        elif kind == "published":
            self.say(f"published: version {line['version']}")
        elif kind == "rolled_back":
            self.say(f"rolled back to version {line['to']}: {line['reason']}")
        elif kind == "repaired":
            self.say(f"repaired: version {line['version']} on {line['workers']} workers")
        elif kind == "moved":
            self.say(f"moved: version {line['version']}, {line['rows']} rows of policies up to {line['policy']}")
        elif kind == "gate":
            self._gate(number, line)

    def finish(self) -> None:
        self._expect_none_due()
        counts = self._counts
        self.say(
            f"{counts['record']} records, {counts['check']} checks, {counts['degraded']} triggers, "
            f"{counts['worse']} new versions found worse, {counts['gate']} gates"
        )

    def _compare(self, number: int, kind: str, version: int) -> None:
        if (kind, version) in self._due:
            self._due.remove((kind, version))
        else:
            self._differ(f"line {number}: {kind} of version {version} was decided then, and is not decided now")

    def _expect_none_due(self) -> None:
        for kind, version in self._due:
            self._differ(f"line {self._record_line}: {kind} of version {version} is decided now, and was not then")
        self._due.clear()

    def _gate(self, number: int, line: dict[str, Any]) -> None:
        self._counts["gate"] += 1
        passed = line["passed"]
        if not isinstance(passed, bool):
            raise ValueError("passed must be true or false")
        again = _decided_again(line)
        self.say(
            f"gate: {again.new:.3f} against {again.old:.3f} tokens per step on {len(again.prompts)} prompts, "
            f"{again.low:+.3f} to {again.high:+.3f}: {'passed' if again.passed else 'refused'}"
        )
        if again.passed != passed:
            then, now = ("passed", "refused") if passed else ("refused", "passed")
            self._differ(f"line {number}: the gate was {then} then, and is {now} now")

    def _differ(self, text: str) -> None:
        self.differing += 1
        self.say(text)


def _decided_again(line: dict[str, Any]) -> GateReport:
    again = decide(line["prompts"], nodes=line["nodes"], temperature=line["temperature"])
    if not again.prompts:
        raise ValueError("a gate needs prompts, and there are none")
    if not all(map(math.isfinite, (again.new, again.old, again.low, again.high))):
        raise ValueError("prompts must hold tokens and steps above 0")
    return again


def _numbers(facts: dict) -> str:
    return ", ".join(f"{k} {v:.3f}" for k, v in facts.items() if isinstance(v, float))
