"""`specroll watcher --replay`: the decisions that were recorded, or a word about which are not."""

from __future__ import annotations

import json
import random

import pytest
from typer.testing import CliRunner

from services.cli import app
from services.watcher.gate import decide
from services.watcher.records import FeedbackLog
from services.watcher.watch import Watch
from specroll_core.drift import DriftConfig
from tests.core.test_drift import record, stream

# As the configuration below has it: a reference is four checks long.
CONFIG = DriftConfig(check_records=512, reference_records=2048, cooldown_seconds=10.0)
SETTINGS = "[watcher]\ncheck_records = 512\ncooldown_seconds = 10.0\n"
# (tokens, steps of the new heads, steps of the old ones): fewer steps on every prompt, and more on every prompt.
BETTER = [[100, 50.0, 80.0], [90, 45.0, 75.0], [110, 52.0, 90.0], [95, 50.0, 79.0]]
WORSE = [[tokens, old, new] for tokens, new, old in BETTER]
RECORD = {"at": 1.0, "heads": 1, "stratum": "T=1", "cluster": "p", "reached": [4], "accepted": [2], "distances": []}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The lines of a log as the watcher writes it: a fall, a gate that passes, new heads, a fall of those as well."""
    path = tmp_path_factory.mktemp("log") / "feedback.jsonl"
    log, watch = FeedbackLog(path), Watch(CONFIG, 1)
    rng = random.Random(0)

    def observe(records):
        for one in records:
            log.write("record", one.to_json())
            for kind, facts in watch.observe(one).happened:
                log.write(kind, facts | {"time": one.at, "added_later": 1})

    def gate(prompts, passed):
        report = decide(prompts, nodes=4, temperature=1.0)
        assert report.passed is passed  # told by the numbers, not by this code
        log.write("gate", {"serving": watch.version, **report.to_json(), "time": 1e4})

    observe(stream(rng, 60, drop=0.3))
    gate(WORSE, False)
    gate(BETTER, True)
    watch.swapped(2)
    log.write("published", {"version": 2, "rows": 9, "predicted": 2.0, "improving": True, "time": 1e4})
    observe(record(rng, 1e4 + i, f"n{i // 4}", "T=1", rng.gauss(0, 0.05), 0.5, heads=2) for i in range(300))
    log.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def again(tmp_path):
    """Replays lines, given as values or as bytes: (exit code, what was printed, what was complained about)."""

    def run(lines):
        path, config = tmp_path / "feedback.jsonl", tmp_path / "run.toml"
        raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        path.write_bytes(b"".join(line + b"\n" for line in raw))
        config.write_text(SETTINGS)
        done = CliRunner().invoke(app, ["watcher", "--replay", str(path), "--config", str(config)])
        return done.exit_code, done.stdout, done.stderr

    return run


def place(recorded, kind):
    return next(i for i, line in enumerate(recorded) if line["kind"] == kind)


def test_what_was_recorded_is_decided_again(recorded, again):
    code, out, err = again(recorded)
    assert (code, err) == (0, "")
    kinds = [line["kind"] for line in recorded]
    assert min(kinds.count("degraded"), kinds.count("worse"), kinds.count("gate")) >= 1
    told = out.splitlines()[-1]
    assert f"{kinds.count('record')} records" in told
    assert f"{kinds.count('degraded')} triggers, {kinds.count('worse')} new versions found worse, 2 gates" in told


@pytest.mark.parametrize("nth", [0, 1])
def test_another_outcome_of_a_gate_is_told(recorded, again, nth):
    at = [i for i, line in enumerate(recorded) if line["kind"] == "gate"][nth]
    line = recorded[at]
    code, out, _ = again([*recorded[:at], line | {"passed": not line["passed"]}, *recorded[at + 1 :]])
    assert code == 1
    assert f"line {at + 1}: the gate was" in out


@pytest.mark.parametrize("kind", ["degraded", "worse"])
def test_a_decision_that_was_not_recorded_is_told(recorded, again, kind):
    at = place(recorded, kind)
    cause = max(i for i in range(at) if recorded[i]["kind"] == "record")
    code, out, _ = again(recorded[:at] + recorded[at + 1 :])
    assert code == 1
    assert f"line {cause + 1}: {kind} of version {recorded[at]['version']} is decided now" in out


@pytest.mark.parametrize("kind", ["degraded", "worse"])
def test_a_decision_that_records_do_not_lead_to_is_told(recorded, again, kind):
    code, out, _ = again([recorded[0], {"kind": kind, "version": 1}, *recorded[1:]])
    assert code == 1
    assert f"line 2: {kind} of version 1 was decided then" in out


def test_the_last_decision_counts_too(recorded, again):
    at = place(recorded, "degraded")
    assert again(recorded[: at + 1])[0] == 0
    assert again(recorded[:at])[0] == 1


GATE = {"kind": "gate", "prompts": BETTER, "nodes": 4, "temperature": 1.0, "passed": True}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"kind": "record"}, "lacks 'at'"),
        ({"kind": "record", **RECORD, "accepted": [5]}, "between 0 and reached"),
        ({"kind": "record", **RECORD, "stratum": []}, "line 2"),
        ({"kind": "gate"}, "lacks 'passed'"),
        (GATE | {"prompts": []}, "there are none"),
        (GATE | {"prompts": [[0, 0, 0]]}, "above 0"),
        (GATE | {"prompts": [[1]]}, "line 2"),
        (GATE | {"passed": "yes"}, "true or false"),
        ({"kind": "published"}, "lacks 'version'"),
        ({"kind": "refused"}, "lacks 'stale'"),
        ({"kind": "degraded"}, "lacks 'version'"),
        ({"kind": "rolled_back", "to": 1}, "lacks 'reason'"),
        ({"kind": 5}, "whose kind is a text"),
        ({}, "lacks 'kind'"),
        ([], "must be an object"),
        (b"\xff\xfe", "utf-8"),
        (b"nothing", "Expecting value"),
    ],
)
def test_a_line_that_is_none_is_refused_with_its_number(again, tmp_path, line, reason):
    code, _, err = again([{"kind": "record", **RECORD}, line])
    assert code == 2
    assert err.startswith(f"specroll: {tmp_path / 'feedback.jsonl'}, line 2 is no line of recorded feedback: ")
    assert reason in err
    assert err.count("\n") == 1


def test_thresholds_that_are_not_the_run_s_own_are_pointed_at(recorded, tmp_path):
    path = tmp_path / "feedback.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in recorded))
    done = CliRunner().invoke(app, ["watcher", "--replay", str(path), "--set", "watcher.check_records=2048"])
    assert done.exit_code == 1
    assert "name the run's with --config" in done.stdout


def test_a_file_without_lines_is_refused(again):
    code, out, err = again([])
    assert (code, out) == (2, "")
    assert "is empty" in err
    assert err.count("\n") == 1
