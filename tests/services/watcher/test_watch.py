"""The watcher's decisions, record by record."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from services.watcher.recall import recall
from services.watcher.records import FeedbackLog
from services.watcher.watch import Watch
from specroll_core.drift import DriftConfig
from tests.core import test_drift as drift_streams
from tests.core.test_drift import RATES, record, stream

CONFIG = DriftConfig(cooldown_seconds=10.0)


def feed(watch, records):
    return [kind for r in records for kind, _ in watch.observe(r).happened if kind != "check"]


def steady(rng, count, heads, factor=1.0):
    return [
        record(rng, 1e4 + i, f"n{i // 4}-{heads}", "T=1", rng.gauss(0, 0.05), factor, heads=heads) for i in range(count)
    ]


def test_without_heads_training_is_wanted_at_once():
    watch = Watch(CONFIG, 0)
    assert watch.wants_training(0.0)
    watch.swapped(1)
    assert watch.version == 1
    assert not watch.on_trial  # nothing was there to compare with
    assert watch.wants_training(0.0)  # with more rows they may be better still
    watch.refused(0.0)
    assert not watch.wants_training(1e9)


def test_a_fall_is_answered_once_until_something_is_done():
    watch = Watch(CONFIG, 1)
    happened = feed(watch, stream(random.Random(0), 60, drop=0.3))
    assert happened.count("degraded") == 1
    assert watch.wants_training(1e9)
    watch.repaired()
    assert not watch.wants_training(1e9)


def test_a_refused_candidate_makes_the_present_the_new_normal():
    rng = random.Random(1)
    watch = Watch(CONFIG, 1)
    assert feed(watch, stream(rng, 60, drop=0.3)) == ["degraded"]
    watch.refused(now=500.0)
    assert not watch.wants_training(500.0)
    assert feed(watch, stream(rng, 60, drop=0.3, from_check=0)) == []
    assert not watch.wants_training(1e9)


def test_a_gate_that_could_not_decide_leaves_the_wish_for_training_as_it_was():
    watch = Watch(CONFIG, 1)
    rng = random.Random(1)
    assert feed(watch, stream(rng, 60, drop=0.3)) == ["degraded"]
    watch.refused(now=500.0, undecided=True)
    assert not watch.wants_training(509.0)  # a pause, whatever else lacks
    assert watch.wants_training(510.0)
    assert watch.degraded_since is not None
    feed(watch, stream(rng, 60, drop=0.3, from_check=0))
    assert watch.last.fall > 0.05  # the present is not the new normal
    watch.refused(now=600.0)
    assert not watch.wants_training(600.0)
    watch.swapped(2)
    watch.refused(now=700.0, undecided=True)
    assert watch.improving
    watch.refused(now=700.0)
    assert not watch.improving


def test_heads_for_a_policy_that_moved_are_on_trial_against_what_the_old_ones_did_on_it():
    """Acceptance is 30 % lower on the new policy, whatever the heads; before it is sure of, the policy is followed."""
    rng = random.Random(3)
    for moved in (True, False):
        watch = Watch(CONFIG, 1)
        feed(watch, stream(rng, 30))
        if moved:
            watch.policy_moved()
        feed(watch, stream(rng, 2, from_check=0, drop=0.3))
        assert watch.degraded_since is None
        watch.swapped(2)
        feed(watch, (replace(r, heads=2) for r in stream(rng, 30, from_check=0, drop=0.3)))
        assert bool(watch.wants_rollback) == (not moved)


def test_a_policy_that_has_moved_is_answered_by_one_training(monkeypatch):
    watch = Watch(CONFIG, 1)
    rng = random.Random(1)
    feed(watch, stream(rng, 40))
    reference = watch.detector.reference_acceptance()
    watch.moved = True
    assert watch.wants_training(0.0)
    watch.refused(now=0.0, undecided=True, moved=True)
    assert not watch.wants_training(1e9)
    # Nothing was seen to be wrong with these heads: what they are compared with stays, and a fall is answered at once.
    assert watch.detector.reference_acceptance() == reference
    watch.degraded_since = 20.0
    assert watch.wants_training(20.0)
    watch.moved = True
    watch.refused(now=30.0)
    assert not watch.wants_training(40.0)
    # Rows are still gathered for what few of them began.
    watch.improving = watch.moved = True
    watch.refused(now=50.0, moved=True)
    assert (watch.improving, watch.moved) == (True, False)
    watch.moved = True
    watch.swapped(2)
    assert not watch.moved


def test_failures_wait_longer_each_time():
    watch = Watch(CONFIG, 0)
    waits = []
    for _ in range(3):
        watch.failed(now=0.0)
        waits.append(next(t for t in range(10_000) if watch.wants_training(t)))
    assert waits == [20, 40, 80]


def test_a_worse_version_is_to_be_rolled_back():
    rng = random.Random(2)
    watch = Watch(CONFIG, 1)
    feed(watch, stream(rng, 40))
    watch.swapped(2)
    assert watch.on_trial
    assert "worse" in feed(watch, steady(rng, 400, heads=2, factor=0.7))
    assert "acceptance" in watch.wants_rollback
    assert not watch.wants_training(1e9)
    watch.rolled_back(1)
    assert watch.version == 1
    assert not watch.wants_rollback


def test_a_version_as_good_as_the_old_one_passes_its_trial():
    rng = random.Random(3)
    watch = Watch(CONFIG, 1)
    feed(watch, stream(rng, 40))
    watch.swapped(2)
    assert feed(watch, steady(rng, 400, heads=2)) == ["kept"]
    assert not watch.on_trial
    assert not watch.wants_rollback


@pytest.mark.parametrize("strata", [1, 4, 12])
@pytest.mark.parametrize("checks", [6, 16])
def test_after_a_drift_new_heads_are_compared_with_what_the_old_ones_had_come_to(monkeypatch, strata, checks):
    """The old heads fell to 0.6 of what they accepted. New ones at 0.8 or 0.6 of it stay, those at 0.4 do not."""
    names = [f"T=1 n={n}" for n in range(strata)]
    monkeypatch.setattr(drift_streams, "RATES", dict.fromkeys(names, RATES["T=1"]))
    for factor, worse in ((0.8, False), (0.6, False), (0.4, True)):
        rng, watch, i = random.Random(strata), Watch(CONFIG, 1), 0

        def seen(heads, factor, rounds, until=None, *, rng=rng, watch=watch):
            nonlocal i
            happened = []
            for _ in range(rounds // 32):
                i += 1
                own = random.Random(i // 4).gauss(0, 0.05)
                happened += feed(watch, [record(rng, i / 4, f"p{i // 4}", names[i // 4 % strata], own, factor, heads)])
                if until in happened:
                    break
            return happened

        seen(1, 1.0, strata * 6144)
        assert seen(1, 0.6, 512 * 40, until="degraded") == ["degraded"]
        seen(1, 0.6, 512 * checks)
        watch.swapped(2)
        happened = seen(2, factor, 512 * 20)
        assert ("worse" in happened, "kept" in happened) == (worse, not worse)


def test_acceptance_near_nothing_raises_the_alarm():
    rng = random.Random(4)
    watch = Watch(CONFIG, 1)
    feed(watch, stream(rng, 30))
    assert "alarm" in feed(watch, steady(rng, 100, heads=1, factor=0.01))


def test_a_restart_in_the_middle_changes_no_decision(tmp_path):
    records = list(stream(random.Random(3), 60, drop=0.3, from_check=30))
    undisturbed = Watch(CONFIG, 1)
    found = next(i for i, r in enumerate(records) if "degraded" in feed(undisturbed, [r]))
    # After the fall has begun and before it is sure.
    cut = (len(records) // 2 + found) // 2
    assert len(records) // 2 < cut < found
    log = FeedbackLog(tmp_path / "feedback.jsonl")
    log.write("published", {"version": 1, "improving": False})
    for r in records[:cut]:
        log.write("record", r.to_json())
    log.close()
    with (tmp_path / "feedback.jsonl").open("a") as file:
        file.write('{"kind": "record", "at"')  # what a kill leaves
    FeedbackLog(tmp_path / "feedback.jsonl").close()
    restarted, forgetful = recall(tmp_path / "feedback.jsonl", CONFIG, 1).watch, Watch(CONFIG, 1)
    assert next(i for i, r in enumerate(records[cut:], cut) if "degraded" in feed(restarted, [r])) == found
    assert restarted.degraded_since == undisturbed.degraded_since
    assert feed(forgetful, records[cut : found + 1]) == []


def test_what_does_not_lead_to_the_serving_version_is_not_taken_up(tmp_path):
    path = tmp_path / "feedback.jsonl"
    assert recall(path, CONFIG, 3).watch.version == 3
    log = FeedbackLog(path)
    log.write("published", {"version": 1})
    for r in steady(random.Random(4), 64, heads=1):
        log.write("record", r.to_json())
    log.close()
    assert recall(path, CONFIG, 1).watch.records == 64
    assert (recall(path, CONFIG, 2).watch.version, recall(path, CONFIG, 2).watch.records) == (2, 0)
    path.write_text('{"kind": "record"}\n')
    assert recall(path, CONFIG, 1).watch.records == 0
