"""Whole services as processes for the end-to-end tests: a tiny model, real Redis, real gRPC, the real engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tiny import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
# An engine start takes 20 s on two idle cores; a bound for a busy machine, never a measure.
START_SECONDS = 150.0


def even_length(completion: str, answer: str) -> float:
    """A reward that a random model can earn: it varies inside a group, so that steps have gradients."""
    return float(len(completion.encode()) % 2 == 0)


def write_tiny_run(directory: Path, **sections: dict[str, Any]) -> Path:
    """A configuration for a run of seconds; `sections` are merged over it. Returns the TOML file."""
    model = make_tiny_model(directory / "model")
    data = directory / "prompts.jsonl"
    data.write_text("".join(json.dumps({"question": f"Say {i}", "answer": str(i)}) + "\n" for i in range(60)))
    settings: dict[str, dict[str, Any]] = {
        "run": {"dir": str(directory / "run")},
        "model": {"source": str(model), "dtype": "float32"},
        "data": {"source": str(data), "holdout": 8, "max_prompt_tokens": 64},
        "sampling": {"max_new_tokens": 8},
        "reward": {"verifier": "tests.e2e.cluster:even_length"},
        "rollout": {"groups_in_flight": 4},
        "rollout.engine": {"max_running_requests": 16, "max_total_tokens": 4096, "context_length": 256, "threads": 1},
        "learner": {
            "steps": 4, "batch_groups": 2, "group_size": 4, "max_staleness": 1, "learning_rate": 1e-4,
            "checkpoint_every": 2, "threads": 1, "heartbeat_seconds": 0.5, "lease_seconds": 10.0,
            "batch_timeout_seconds": 120.0,
        },
        "eval": {"prompts": 8},
    }  # fmt: skip
    for name, values in sections.items():
        settings.setdefault(name.replace("__", "."), {}).update(values)
    path = directory / "run.toml"
    path.write_text("\n".join(f"[{name}]\n" + _toml(values) for name, values in settings.items()))
    return path


def _toml(values: dict[str, Any]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


def specroll(*arguments: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
    """A `specroll` process in a session of its own, its output on a pipe."""
    return subprocess.Popen(
        [sys.executable, "-m", "services.cli", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The learner's lines so far, of every kind."""
    path = run_dir / "metrics" / "learner.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def steps_done(run_dir: Path) -> int:
    return max((line["step"] for line in metrics(run_dir) if line["kind"] == "train"), default=0)


def wait_for(condition: Callable[[], object], what: str, seconds: float = START_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.1)


def processes_of(run_dir: Path) -> list[int]:
    """Processes whose command line or environment names the run directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            stat = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if str(run_dir).encode() in text and stat != "Z":
            found.append(int(entry.name))
    return found


def end(process: subprocess.Popen[str]) -> None:
    """Ends a process that a failed test may have left, with its session."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
