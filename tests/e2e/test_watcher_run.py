"""A training run that begins with no heads, and its watcher, killed on the way."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import psutil
import pytest

from services.heads.registry import HeadsRegistry
from tests.e2e.cluster import end, specroll, steps_done, wait_for, write_tiny_run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]


def watcher_process(launcher: int) -> psutil.Process | None:
    for child in psutil.Process(launcher).children():
        try:
            if "watcher" in child.cmdline()[3:4]:
                return child
        except psutil.NoSuchProcess:
            continue
    return None


def served(run_dir: Path) -> list[int]:
    """Versions that the watcher says workers took."""
    path = run_dir / "watcher" / "feedback.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line["version"] for line in lines if line["kind"] == "swapped" and line["workers"]]


def test_from_no_heads_to_a_first_version_while_training(tmp_path: Path) -> None:
    config = write_tiny_run(
        tmp_path,
        rollout__engine__speculation={"enabled": True, "nodes": 4, "max_nodes": 4},
        heads={"init": "none", "heads": 2, "rank": 16},
        watcher={"min_rows": 300, "gate_rows": 100, "holdout": 0.3, "row_fraction": 1.0, "gate_nodes": 4, "nice": 0},
        learner={"steps": 5000, "checkpoint_every": 50},
    )
    run_dir = tmp_path / "run"
    run = specroll("train", str(config))
    # A pipe that nobody reads would stop the launcher after some hundred steps.
    threading.Thread(target=run.stdout.read, daemon=True).start()
    try:
        wait_for(lambda: steps_done(run_dir) >= 2 or run.poll() is not None, "two steps")
        assert run.poll() is None, run.stderr.read()
        first = watcher_process(run.pid)
        assert first is not None
        os.kill(first.pid, signal.SIGKILL)
        wait_for(lambda: (now := watcher_process(run.pid)) is not None and now.pid != first.pid, "another watcher")
        wait_for(lambda: 1 in served(run_dir) or run.poll() is not None, "a first version in service", 200)
        assert run.poll() is None, run.stderr.read()
        steps = steps_done(run_dir)
        wait_for(lambda: steps_done(run_dir) >= steps + 3, "steps with heads")
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130
    finally:
        end(run)
    lineage = HeadsRegistry(run_dir / "heads").lineage()
    assert lineage[0]["version"] == 1
    assert lineage[0]["parent"] is None
    assert lineage[0]["gate"]["low"] > 0
    shown = specroll("heads", "show", str(run_dir / "heads"))
    output, _ = shown.communicate(timeout=60)
    assert shown.returncode == 0
    assert "current" in output
    replayed = specroll("watcher", "--replay", str(run_dir / "watcher" / "feedback.jsonl"), "--config", str(config))
    output, errors = replayed.communicate(timeout=60)
    assert replayed.returncode == 0, output + errors
    assert "passed" in output
