from __future__ import annotations

import json
import urllib.request

import pytest

from services.common.metrics import Metrics


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_are_lines_of_finite_json(tmp_path):
    metrics = Metrics(tmp_path, service="learner")
    metrics.count("groups/malformed/total")
    metrics.write("train", 3, {"loss": 0.5, "off_policy/max": 2})
    metrics.write("train", 4, {"loss": float("nan"), "kl": float("inf")})
    first, second = lines(tmp_path / "learner.jsonl")
    assert first.pop("time") > 0
    assert first == {"kind": "train", "step": 3, "loss": 0.5, "off_policy/max": 2.0, "groups/malformed/total": 1}
    assert (second["loss"], second["kl"], second["metrics/non_finite/total"]) == (None, None, 2)
    for name in ("Loss", "a b", "", "/a", "step", "a//b"):
        with pytest.raises(ValueError, match="metric's name"):
            metrics.write("train", 5, {name: 1.0})
    assert len(lines(tmp_path / "learner.jsonl")) == 2
    metrics.close()


def test_a_line_cut_by_a_kill_is_cut_off_on_the_next_start(tmp_path):
    path = tmp_path / "learner.jsonl"
    for left, kept in ((b'{"step": 1}\n{"step": 2', 1), (b'{"st', 0), (b'{"step": 1}\n' + b"x" * 200_000, 1), (b"", 0)):
        path.write_bytes(left)
        metrics = Metrics(tmp_path, service="learner")
        metrics.write("train", 9, {})
        metrics.close()
        assert [line["step"] for line in lines(path)] == [*([1] * kept), 9]


def test_a_broad_except_is_counted_and_logged(tmp_path, caplog):
    metrics = Metrics(tmp_path, service="learner")
    with metrics.guard("display"):
        raise RuntimeError("no terminal")
    with metrics.guard("display"):
        pass
    assert metrics.counters() == {"errors/display/total": 1}
    assert "no terminal" in caplog.text
    metrics.close()


def test_prometheus_reads_gauges_and_counters(tmp_path):
    metrics = Metrics(tmp_path, service="learner")
    port = metrics.serve(0)
    metrics.write("train", 1, {"off_policy/in_queue/max": 3})
    metrics.count("dropped/total", 2)
    metrics.gauge("queue/entries").set_function(lambda: 7)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert "specroll_off_policy_in_queue_max 3.0" in text
    assert "specroll_dropped_total 2.0" in text
    assert "specroll_queue_entries 7.0" in text
    with pytest.raises(ValueError, match=f"Cannot serve metrics on port {port}"):
        Metrics(tmp_path / "other", service="x").serve(port)
    metrics.close()


def test_tensorboard_gets_the_finite_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = Metrics(tmp_path, service="learner", tensorboard=True)
    metrics.write("train", 1, {"loss": 0.5})
    metrics.write("train", 2, {"loss": float("nan")})
    metrics.close()
    events = EventAccumulator(str(tmp_path / "tensorboard" / "learner")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 0.5)]
