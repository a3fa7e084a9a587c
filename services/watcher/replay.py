"""`specroll watcher --replay FILE`: detection and gate decisions once more, from what was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from services.config_loader import load_config
from services.watcher.gate import decide
from services.watcher.recall import take_in
from services.watcher.records import read_log
from services.watcher.service import drift_config
from services.watcher.watch import Watch


def replay(file: Path, config_path: Path | None, overrides: Sequence[str]) -> int:
    """Prints every decision: those that records lead to under the configuration's thresholds, and for every gate
    what follows from the numbers of its prompts, beside what was decided then. Returns 1 where they differ.

    Raises ValueError where the file holds something else.
    """
    config = load_config(config_path, overrides)
    console = Console(highlight=False, soft_wrap=True)
    watch: Watch | None = None
    differing = 0
    counts = {"record": 0, "check": 0, "degraded": 0, "worse": 0, "gate": 0}
    for line in read_log(file):
        kind = line.pop("kind")
        watch = watch or Watch(drift_config(config), int(line["heads"]) if kind == "record" else 0)
        counts["record"] += kind == "record"
        for name, facts in take_in(watch, kind, line).happened:
            counts[name] = counts.get(name, 0) + 1
            if name != "check":
                console.print(f"{name}: version {watch.version}, {_numbers(facts)}", markup=False)
        if kind == "published":
            console.print(f"published: version {line['version']}", markup=False)
        elif kind == "rolled_back":
            console.print(f"rolled back to version {line['to']}: {line['reason']}", markup=False)
        elif kind == "repaired":
            console.print(f"repaired: version {line['version']} on {line['workers']} workers", markup=False)
        elif kind == "gate":
            counts["gate"] += 1
            again = decide(line["prompts"], nodes=line["nodes"], temperature=line["temperature"])
            differs = again.passed != line["passed"]
            differing += differs
            console.print(
                f"gate: {again.new:.3f} against {again.old:.3f} tokens per step on {len(again.prompts)} prompts, "
                f"{again.low:+.3f} to {again.high:+.3f}: {'passed' if again.passed else 'refused'}"
                f"{', which is not what was decided then' if differs else ''}",
                markup=False,
            )
    console.print(
        f"{counts['record']} records, {counts['check']} checks, {counts['degraded']} triggers, "
        f"{counts['worse']} new versions found worse, {counts['gate']} gates"
    )
    return 1 if differing else 0


def _numbers(facts: dict) -> str:
    return ", ".join(f"{k} {v:.3f}" for k, v in facts.items() if isinstance(v, float))
