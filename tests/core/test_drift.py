"""Drift detection: on simulated streams whose truth is known."""

from __future__ import annotations

import json
import math
import random

import pytest

from specroll_core.drift import DriftConfig, DriftDetector, DriftRecord, dispersion, replay, smoothed_ratio

# Conditional acceptance by depth, by stratum: about what a small model's heads do with eight nodes.
RATES = {"T=1": (0.55, 0.45, 0.40), "T=0.6": (0.68, 0.60, 0.55)}
ROUNDS = 32


def stream(rng, checks, *, drop=0.0, from_check=12, noise=0.05, strata=tuple(RATES)):
    """Trajectories of prompts that differ (noise: standard deviation of a prompt's own acceptance), four at a time."""
    total, at = 0, 0.0
    while total < checks * 512:
        prompt, own, stratum = f"p{rng.random():.6f}", rng.gauss(0, noise), rng.choice(strata)
        factor = 1 - drop if total >= from_check * 512 else 1.0
        for _ in range(4):
            at += 0.25
            yield record(rng, at, prompt, stratum, own, factor)
            total += ROUNDS


def record(rng, at, prompt, stratum, own=0.0, factor=1.0, heads=1, rounds=ROUNDS):
    reached, accepted, alive = [], [], rounds
    for rate in RATES[stratum]:
        p = min(max((rate + own) * factor, 0.0), 1.0)
        # The normal approximation of a binomial: a thousand streams of single coins would take minutes.
        hits = min(alive, max(0, round(rng.gauss(alive * p, math.sqrt(alive * p * (1 - p))))))
        reached.append(alive)
        accepted.append(hits)
        alive = hits
    return DriftRecord(at, heads, stratum, prompt, tuple(reached), tuple(accepted))


def triggers(records, config=None):
    return [check for check in replay(records, config, heads=1) if check.triggered]


def test_stationary_streams_seldom_trigger():
    false = sum(bool(triggers(stream(random.Random(seed), 24))) for seed in range(1000))
    assert false < 10


def test_a_drop_of_15_percent_is_detected():
    detected = sum(bool(triggers(stream(random.Random(seed), 32, drop=0.15))) for seed in range(200))
    assert detected > 0.99 * 200


def test_a_drop_is_not_seen_before_it_happens():
    for seed in range(20):
        for check in triggers(stream(random.Random(seed), 30, drop=0.3)):
            assert check.at > 12 * 512 / ROUNDS * 0.25


def test_a_collapse_triggers_at_the_second_check():
    rng = random.Random(0)
    detector = DriftDetector(heads=1)
    for r in stream(rng, 20):
        detector.observe(r)
    checks = []
    for i in range(64):
        check = detector.observe(record(rng, 1e4 + i, f"q{i}", "T=1", factor=0.02))
        checks += [check] if check else []
    first = next(i for i, c in enumerate(checks) if c.collapsed)
    assert checks[first].degraded
    assert sum(c.triggered for c in checks[: first + 2]) == 1


def test_changing_shares_of_strata_are_no_drift():
    """Traffic moves from low to high temperature: the mean falls by 0.13, within strata nothing does."""
    rng = random.Random(1)
    records = list(stream(rng, 16)) + list(stream(rng, 16, strata=("T=1",)))
    assert not triggers(records)


def test_a_stratum_that_appears_later_gets_its_own_reference():
    rng = random.Random(2)
    records = list(stream(rng, 20, strata=("T=0.6",))) + list(stream(rng, 20, strata=("T=1",)))
    checks = list(replay(records, heads=1))
    assert len(checks) >= 16
    assert not any(c.triggered for c in checks)


def test_cooldown_and_reset():
    rng = random.Random(3)
    detector = DriftDetector(DriftConfig(cooldown_seconds=1e9), heads=1)
    fired = 0
    for r in stream(rng, 60, drop=0.4):
        check = detector.observe(r)
        fired += bool(check and check.triggered)
    assert fired == 1
    detector.reset(2)
    assert detector.observe(record(rng, 0.0, "p", "T=1", heads=1)) is None
    assert detector.foreign == 1
    assert math.isnan(detector.reference_acceptance())


def test_a_successor_is_judged_by_what_its_predecessor_did_of_late():
    """The old heads have fallen by 30 %. New ones that fall no further are kept, worse ones are found out."""
    rng = random.Random(6)
    old = DriftDetector(heads=1)
    for r in stream(rng, 40, drop=0.3):
        old.observe(r)

    def found(factor):
        new = old.successor(2)
        checks = []
        for i in range(400):
            check = new.observe(record(rng, 1e4 + i, f"n{i // 4}", "T=1", rng.gauss(0, 0.05), factor, heads=2))
            checks += [check] if check else []
        assert len(checks) > 20
        return any(c.triggered for c in checks)

    assert not found(0.7)
    assert found(0.5)


@pytest.mark.parametrize("marked", [True, False])
def test_heads_for_a_policy_that_moved_are_not_asked_for_what_the_old_ones_did_before(marked):
    """Acceptance falls by 30 % with the policy, which is noticed by its rows before anything is sure of a fall."""
    rng = random.Random(9)
    old = DriftDetector(DriftConfig(patience=1000), heads=1)
    for part in (stream(rng, 26), stream(rng, 4, from_check=0, drop=0.3)):
        if marked:
            old.mark()
        for r in part:
            old.observe(r)
    new = old.successor(2, drifted=marked)
    worse = False
    for i in range(400):
        check = new.observe(record(rng, 1e4 + i, f"n{i // 4}", "T=1", rng.gauss(0, 0.05), 0.7, heads=2))
        worse |= check is not None and check.streak >= 2
    assert worse == (not marked)


def test_windows_can_be_forgotten_and_the_reference_kept():
    rng = random.Random(7)
    detector = DriftDetector(heads=1)
    for r in stream(rng, 20, drop=0.4):
        detector.observe(r)
    before = detector.reference_acceptance()
    assert detector.streak > 0
    detector.restart_windows()
    assert detector.streak == 0
    assert detector.reference_acceptance() == before


def test_replay_of_a_written_log_gives_the_same_checks():
    records = list(stream(random.Random(4), 20, drop=0.2))
    again = [DriftRecord.from_json(json.loads(json.dumps(r.to_json()))) for r in records]
    assert again == records
    assert list(replay(again)) == list(replay(records))


def test_distances_support_a_fall_that_alone_is_not_significant():
    """The same fall at one depth, with and without a rise of the distances."""

    def run(shift):
        rng = random.Random(5)
        detector = DriftDetector(DriftConfig(significance=50.0), heads=1)
        found = []
        for i, r in enumerate(stream(rng, 24, drop=0.15)):
            value = rng.gauss(0.3 + (shift if i > 192 else 0.0), 0.02)
            noted = DriftRecord(r.at, 1, r.stratum, r.cluster, r.reached, r.accepted, (value,))
            check = detector.observe(noted)
            found += [check] if check and check.triggered else []
        return found

    assert run(0.15)
    assert not run(0.0)


def test_dispersion_against_the_beta_binomial():
    """Clusters of n trials whose own rates have variance v: 1 + (n - 1) v / (r (1 - r))."""
    rng, n, deviation = random.Random(0), 50, 0.1
    cells = []
    for _ in range(4000):
        p = 0.5 + rng.choice((-deviation, deviation))
        cells.append((n, sum(rng.random() < p for _ in range(n))))
    assert dispersion([cells]) == pytest.approx(1 + (n - 1) * deviation**2 / 0.25, rel=0.05)
    assert dispersion([[(10, 5)] * 40]) == 1.0
    assert dispersion([]) == 1.0
    assert smoothed_ratio([(3, 3)]) == pytest.approx(0.8)


def test_impossible_records_are_refused():
    with pytest.raises(ValueError, match="accepted"):
        DriftRecord(0.0, 1, "s", "p", (1,), (2,))
    with pytest.raises(ValueError, match="depths"):
        DriftRecord(0.0, 1, "s", "p", (1, 1), (1,))
    with pytest.raises(ValueError, match="no record"):
        DriftRecord.from_json({"at": 0})
