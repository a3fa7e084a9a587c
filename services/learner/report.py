"""What a run has come to: collected step by step, written as `report.json`, read by people and by tests.

The keys are part of the interface (`docs/report.md`); a test pins them.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from services.common.lifecycle import write_json
from services.config import Config
from services.learner.evaluation import Evaluation
from services.learner.overlap import Overlap
from services.run_dir import RunDir
from specroll.v1.rollout_pb2 import SpeculationTotals


class ReportBuilder:
    """Collects evaluations and steps of this process; a resumed run reports the steps since it was resumed."""

    def __init__(self, config: Config, run_dir: RunDir, *, started_at: float, resumed_at_step: int) -> None:
        self._config = config
        self._run_dir = run_dir
        self._started_at = started_at
        self._resumed_at_step = resumed_at_step
        self._evaluations: list[Evaluation] = []
        self._steps: list[dict[str, float]] = []
        self._step_ends: list[float] = []
        self.speculation: SpeculationTotals | None = None

    def add_evaluation(self, evaluation: Evaluation) -> None:
        self._evaluations.append(evaluation)

    def add_step(self, values: dict[str, float]) -> None:
        self._steps.append(values)
        self._step_ends.append(time.time())

    def write(self, checkpoint: Path | None, overlap: Overlap, *, completed: bool) -> Path:
        write_json(self._run_dir.report, self.build(checkpoint, overlap, completed=completed))
        return self._run_dir.report

    def build(self, checkpoint: Path | None, overlap: Overlap, *, completed: bool) -> dict[str, Any]:
        """The report. Times in seconds, staleness in policy versions, null where nothing was measured."""
        steps, learner = self._steps, self._config.learner
        times = overlap.summary()
        tokens = sum(s.get("batch/tokens", 0.0) for s in steps)
        between = [b - a for a, b in zip(self._step_ends, self._step_ends[1:], strict=False)]
        last = steps[-1] if steps else {}
        return {
            "run_id": self._run_dir.run_id,
            "completed": completed,
            "steps": self._resumed_at_step + len(steps),
            "resumed_at_step": self._resumed_at_step,
            "evaluations": [asdict(e) for e in self._evaluations],
            "reward_before": self._reward(0),
            "reward_after": self._reward(learner.steps),
            "train_reward_first": _value(steps[:1], "reward/mean"),
            "train_reward_last": _value(steps[-1:], "reward/mean"),
            "seconds": {
                "total": time.time() - self._started_at,
                "step_median": statistics.median(between) if between else None,
                "train_median": _median(steps, "seconds/step"),
                "wait_median": _median(steps, "seconds/wait"),
                **times,
            },
            "overlap": times["overlapped_seconds"] / times["training_seconds"] if times["training_seconds"] else None,
            "tokens_per_second": tokens / times["generation_seconds"] if times["generation_seconds"] else None,
            "staleness": {
                "bound": learner.max_staleness,
                "mean": _mean(steps, "off_policy/staleness/mean"),
                "max": max(
                    (s["off_policy/staleness/max"] for s in steps if "off_policy/staleness/max" in s), default=None
                ),
            },
            "mismatch_kl_equal_version": _weighted_mean(
                steps, "mismatch_kl/equal_version", "mismatch_kl/equal_version_tokens"
            ),
            "speculation": _speculation(self.speculation),
            "groups": {
                "trained": len(steps) * learner.batch_groups,
                "expired": last.get("queue/expired_total", 0.0),
                "returned": last.get("queue/returned_total", 0.0),
                "duplicate": last.get("queue/duplicate", 0.0),
                "stale": last.get("queue/stale", 0.0),
                "malformed": last.get("queue/malformed", 0.0),
            },
            "checkpoint": str(checkpoint) if checkpoint else None,
        }

    def _reward(self, step: int) -> dict[str, float] | None:
        found = [e for e in self._evaluations if e.step == step]
        return {"mean": found[-1].reward, "low": found[-1].low, "high": found[-1].high} if found else None


def _speculation(totals: SpeculationTotals | None) -> dict[str, float] | None:
    if totals is None or not totals.requests:
        return None
    return {
        "tokens_per_step": totals.emitted / totals.requests,
        "drafted_per_step": totals.drafted / totals.requests,
        "plain_rounds": totals.plain_rounds / totals.rounds,
        "speedup": totals.plain_seconds / totals.seconds,
    }


def _values(steps: list[dict[str, float]], name: str) -> list[float]:
    return [s[name] for s in steps if name in s and s[name] == s[name]]


def _value(steps: list[dict[str, float]], name: str) -> float | None:
    return next(iter(_values(steps, name)), None)


def _mean(steps: list[dict[str, float]], name: str) -> float | None:
    values = _values(steps, name)
    return statistics.fmean(values) if values else None


def _weighted_mean(steps: list[dict[str, float]], name: str, weight: str) -> float | None:
    """Mean over tokens: a step that trained on few of them says little by itself."""
    pairs = [(s[name], s[weight]) for s in steps if name in s and s[name] == s[name]]
    total = sum(w for _, w in pairs)
    return sum(v * w for v, w in pairs) / total if total else None


def _median(steps: list[dict[str, float]], name: str) -> float | None:
    values = _values(steps, name)
    return statistics.median(values) if values else None
