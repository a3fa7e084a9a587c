"""A worker's numbers for Prometheus, read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.rollout.grading import GradingPool
from services.rollout.group_runner import GroupRunner
from services.rollout.policy import ServedPolicy
from services.rollout.prompt_loop import PromptLoop


class WorkerCollector(Collector):
    """Reads the counters that the worker's parts keep. Reading is safe from the metrics server's thread."""

    def __init__(self, runner: GroupRunner, loop: PromptLoop, policy: ServedPolicy, grader: GradingPool) -> None:
        self._runner = runner
        self._loop = loop
        self._policy = policy
        self._grader = grader

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


def registry(collector: WorkerCollector) -> CollectorRegistry:
    made = CollectorRegistry()
    made.register(collector)
    return made
