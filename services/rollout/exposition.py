"""A worker's numbers for Prometheus, read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.rollout.completion import PartState
from services.rollout.grading import GradingPool
from services.rollout.group_runner import GroupRunner
from services.rollout.heads_control import HeadsControl
from services.rollout.heads_feedback import FeedbackForwarder
from services.rollout.policy import ServedPolicy
from services.rollout.prompt_loop import PromptLoop


class WorkerCollector(Collector):
    """Reads the counters that the worker's parts keep. Reading is safe from the metrics server's thread."""

    def __init__(
        self,
        runner: GroupRunner,
        loop: PromptLoop,
        policy: ServedPolicy,
        grader: GradingPool,
        heads: HeadsControl,
        feedback: FeedbackForwarder | None,
        parts: list[PartState],
    ) -> None:
        """parts: as they were last read; its owner writes new ones into the list."""
        self._runner = runner
        self._loop = loop
        self._policy = policy
        self._grader = grader
        self._heads = heads
        self._feedback = feedback
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("specroll_policy_version", "served", value=self._policy.served.version)
        yield CounterMetricFamily("specroll_policy_updates", "loads", value=self._policy.updates)
        yield GaugeMetricFamily("specroll_groups_in_flight", "leases being worked on", value=self._loop.in_flight)
        for name in ("tokens", "groups"):
            yield CounterMetricFamily(f"specroll_{name}", "sampled", value=self._runner.counters[name])
        for name in ("groups_failed", "groups_cancelled", "heartbeat_failed", "lease_failed"):
            yield CounterMetricFamily(f"specroll_{name}", "see docs/metrics.md", value=self._loop.counters[name])
        graded = CounterMetricFamily("specroll_graded", "verdicts by status", labels=["status"])
        for status, count in self._grader.counts.items():
            graded.add_metric([status.value], count)
        yield graded
        yield CounterMetricFamily("specroll_grader_restarts", "processes replaced", value=self._grader.restarts)
        yield GaugeMetricFamily("specroll_heads_version", "served, 0 for none", value=self._heads.version)
        yield CounterMetricFamily("specroll_heads_swaps", "committed", value=self._heads.swaps)
        refused = CounterMetricFamily("specroll_heads_refused", "swaps refused by cause", labels=["cause"])
        for cause, count in self._heads.refused.items():
            refused.add_metric([cause], count)
        yield refused
        yield from _of_parts(list(self._parts))
        if self._feedback is not None:
            for name, count in dict(self._feedback.counters).items():
                yield CounterMetricFamily(f"specroll_feedback_{name}", "see docs/watcher.md", value=count)


def _of_parts(parts: Sequence[PartState]) -> Iterator[Metric]:
    gauges: dict[str, Callable[[PartState], float]] = {
        "on": lambda part: part.on,
        "gain": lambda part: part.gain,
        "gain_standard_error": lambda part: part.standard_error,
    }
    for name, value in gauges.items():
        gauge = GaugeMetricFamily(f"specroll_speculation_part_{name}", "see docs/metrics.md", labels=["part"])
        for part in parts:
            gauge.add_metric([part.part], float(value(part)))
        yield gauge
    for name in ("comparisons", "switches"):
        counter = CounterMetricFamily(f"specroll_speculation_part_{name}", "see docs/metrics.md", labels=["part"])
        for part in parts:
            counter.add_metric([part.part], getattr(part, name))
        yield counter


def registry(collector: WorkerCollector) -> CollectorRegistry:
    made = CollectorRegistry()
    made.register(collector)
    return made
