"""What a restarted watcher knows, from logs as they are found."""

from __future__ import annotations

import random

import pytest

from services.watcher import records
from services.watcher.recall import recall
from services.watcher.records import FeedbackLog, rotated
from specroll_core.drift import DriftConfig, DriftDetector
from tests.core.test_drift import record, stream

CONFIG = DriftConfig(cooldown_seconds=10.0)


@pytest.fixture
def log(tmp_path):
    log = FeedbackLog(tmp_path / "feedback.jsonl")
    yield log
    log.close()


def reference(stream):
    detector = DriftDetector(CONFIG, 1)
    for r in stream:
        detector.observe(r)
    return detector.reference_acceptance()


def test_the_log_before_the_last_rotation_is_read_too(log, tmp_path, monkeypatch):
    path = tmp_path / "feedback.jsonl"
    made = list(stream(random.Random(0), 20))
    log.write("published", {"version": 1, "improving": False})
    for i, r in enumerate(made):
        if i == len(made) - 10:
            monkeypatch.setattr(records, "_MAX_LOG_BYTES", 0)
            log.write("record", r.to_json())
            monkeypatch.undo()
        else:
            log.write("record", r.to_json())
    assert rotated(path).exists()
    known = recall(path, CONFIG, 1)
    assert known.watch.records == len(made)
    assert known.watch.detector.reference_acceptance() == reference(made)


def test_records_of_a_worker_that_was_behind_say_nothing_about_what_serves(log, tmp_path):
    made = list(stream(random.Random(1), 20))
    log.write("record", record(random.Random(2), 0.0, "p", "T=1", heads=7).to_json())
    for r in made:
        log.write("record", r.to_json())
    known = recall(tmp_path / "feedback.jsonl", CONFIG, 1)
    assert known.watch.detector.reference_acceptance() == reference(made)


@pytest.mark.parametrize(
    ("begins", "leads_to"),
    [
        ([("check", {"heads": 1}), ("rolled_back", {"version": 1, "to": 0, "reason": "worse"})], 0),
        ([("gate", {"serving": 0}), ("published", {"version": 1})], 1),
    ],
)
def test_the_version_at_the_beginning_is_what_the_log_names(log, tmp_path, begins, leads_to):
    for r in stream(random.Random(3), 4):
        log.write("record", r.to_json())
    for kind, facts in begins:
        log.write(kind, facts)
    known = recall(tmp_path / "feedback.jsonl", CONFIG, leads_to)
    assert known.watch.records > 0
    assert known.watch.version == leads_to


def test_a_repair_that_reached_nobody_repaired_nothing(log, tmp_path):
    for r in stream(random.Random(4), 60, drop=0.3):
        log.write("record", r.to_json())
    degraded = recall(tmp_path / "feedback.jsonl", CONFIG, 1).watch.degraded_since
    assert degraded is not None
    log.write("repaired", {"version": 1, "workers": 0, "wrong": 1})
    assert recall(tmp_path / "feedback.jsonl", CONFIG, 1).watch.degraded_since == degraded
    log.write("repaired", {"version": 1, "workers": 1, "wrong": 1})
    assert recall(tmp_path / "feedback.jsonl", CONFIG, 1).watch.degraded_since is None


def test_cuts_and_needs_are_those_of_the_last_decision(log, tmp_path):
    def known():
        found = recall(tmp_path / "feedback.jsonl", CONFIG, 1)
        return found.healthy, found.fresh, found.needed

    assert known() == ("0", "0", None)
    log.write("published", {"version": 1, "needed": 900})
    log.write("check", {"heads": 1, "row": "5-0"})
    assert known() == ("5-0", "0", 900)
    log.write("degraded", {"version": 1, "row": "5-0"})
    log.write("check", {"heads": 1, "row": "5-0"})
    assert known() == ("5-0", "5-0", None)
    log.write("refused", {"stale": True, "needed": 1200, "time": 1.0})
    assert known() == ("5-0", "5-0", 1200)


def test_how_far_a_moving_policy_was_followed_is_known_after_a_restart(log, tmp_path):
    def known():
        found = recall(tmp_path / "feedback.jsonl", CONFIG, 1)
        return found.watch.wants_training(1e9), found.covered, found.stride

    log.write("published", {"version": 1, "improving": False})
    assert known() == (False, None, None)
    log.write("moved", {"version": 1, "policy": 3, "rows": 10, "covered": 0, "stride": 5})
    assert known() == (True, 0, 5)
    log.write("refused", {"stale": True, "moved": True, "time": 1.0, "covered": 0, "stride": 10})
    assert known() == (True, 0, 10)
    log.write("refused", {"stale": False, "moved": True, "time": 1.0, "covered": 3, "stride": 20})
    assert known() == (False, 3, 20)
    log.write("rolled_back", {"version": 1, "to": 1, "reason": "worse"})
    assert known() == (False, None, None)


@pytest.mark.parametrize("line", ['{"kind": 5}', "[1]", "{}", "no JSON"])
def test_a_log_that_something_else_wrote_into_does_not_stop_a_watcher(line, tmp_path, caplog):
    path = tmp_path / "feedback.jsonl"
    path.write_text(line + "\n")
    assert recall(path, CONFIG, 1).watch.records == 0
    assert "line 1" in caplog.text
