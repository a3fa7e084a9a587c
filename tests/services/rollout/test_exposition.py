"""The worker's numbers as Prometheus reads them, over HTTP."""

from collections import Counter
from types import SimpleNamespace
from urllib.request import urlopen

from services.common.metrics import serve_metrics
from services.rollout.completion import PartState
from services.rollout.exposition import WorkerCollector, registry
from specroll_core.contracts import RewardStatus


def test_the_counters_are_served_as_they_stand():
    runner = SimpleNamespace(counters=Counter(tokens=120, groups=3))
    loop = SimpleNamespace(counters=Counter(groups_failed=2), in_flight=4)
    policy = SimpleNamespace(served=SimpleNamespace(version=7), updates=6)
    grader = SimpleNamespace(counts={RewardStatus.OK: 23, RewardStatus.TIMEOUT: 1, RewardStatus.ERROR: 0}, restarts=1)
    heads = SimpleNamespace(version=3, swaps=2, refused=Counter(artifact=1))
    feedback = SimpleNamespace(counters=Counter(frames=9))
    collector = WorkerCollector(
        runner, loop, policy, grader, heads, feedback, [PartState("memory", False, -0.02, 0.005, 812, 1)]
    )
    server = serve_metrics(0, "127.0.0.1", registry(collector))
    try:
        runner.counters["tokens"] += 5
        with urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=10) as answer:
            lines = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#")
    finally:
        server.shutdown()
    assert lines["specroll_tokens_total"] == "125.0"
    assert lines["specroll_policy_version"] == "7.0"
    assert lines["specroll_groups_failed_total"] == "2.0"
    assert lines['specroll_graded_total{status="timeout"}'] == "1.0"
    assert lines["specroll_grader_restarts_total"] == "1.0"
    assert lines["specroll_heads_version"] == "3.0"
    assert lines['specroll_heads_refused_total{cause="artifact"}'] == "1.0"
    assert lines["specroll_feedback_frames_total"] == "9.0"
    assert lines['specroll_speculation_part_on{part="memory"}'] == "0.0"
    assert lines['specroll_speculation_part_gain{part="memory"}'] == "-0.02"
    assert lines['specroll_speculation_part_gain_standard_error{part="memory"}'] == "0.005"
    assert lines['specroll_speculation_part_comparisons_total{part="memory"}'] == "812.0"
    assert lines['specroll_speculation_part_switches_total{part="memory"}'] == "1.0"
