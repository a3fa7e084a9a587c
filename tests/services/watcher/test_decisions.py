"""What the watcher makes of a result, of a trigger and of too few rows; on a real Redis, nothing is trained."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from services.common.lifecycle import wait_until
from services.heads.artifact import HeadsManifest, TrainedOn
from services.heads.fingerprint import ModelFingerprint, output_weights
from services.rollout.heads_file import save_heads
from services.watcher.job import JobDirectory
from services.watcher.service import Watcher
from services.watcher.trainer import Trainer
from specroll_core.heads import FutureTokenHeads, HeadsSpec
from tests.core.test_drift import stream
from tests.services.watcher.test_heads_trainer import buffer  # noqa: F401
from tests.services.watcher.test_rows import frame
from tests.services.watcher.test_watcher import events, server, setting  # noqa: F401

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def at_rest(setting, tiny_dir):  # noqa: F811
    """Makes watchers whose loop does not run, of a run that serves version 1."""
    made = []
    vocabulary, hidden = output_weights(tiny_dir)[0].shape
    spec = HeadsSpec(2, hidden, 32, vocabulary)

    def start(**settings):
        changed = setting.config.watcher.model_copy(update=settings)
        config = setting.config.model_copy(update={"watcher": changed})
        watcher = Watcher(config, setting.run_dir.run_id, stop=threading.Event())
        made.append(watcher)
        if watcher.current is None:
            manifest = HeadsManifest(ModelFingerprint.of(tiny_dir), TrainedOn(0, 0, "none"))
            watcher.current = watcher.registry.publish(FutureTokenHeads(spec), manifest)
            watcher.watch.swapped(1)
            watcher.watch.improving = False
        return watcher

    start.spec = spec
    yield start
    for watcher in made:
        watcher.close()


def degrade(watcher, seed=0):
    for r in stream(random.Random(seed), 60, drop=0.3):
        watcher._take_record(r)
    assert watcher.watch.degraded_since is not None


def result(tiny_dir, *, rows, seen, passed=False, high=0.0, degraded=None, serving=1, later=0, policy=0, gain=0.0):
    gate = {"passed": passed, "high": high, "low": -1.0, "old": 1.0, "new": 1.0, "difference": gain, "prompts": []}
    return {
        "gate": gate, "rows": rows, "prompts": 3, "temperature": 1.0, "policy_versions": [0, policy],
        "held_out_rows": 1, "steps": 1, "train_seconds": 1.0, "cpu_seconds": 1.0,
        "model": asdict(ModelFingerprint.of(tiny_dir)),
        "job": {"serving": serving, "seen": seen, "degraded": degraded, "later": later},
    }  # fmt: skip


def files(tmp_path, spec):
    made = JobDirectory(tmp_path / "job")
    made.path.mkdir(exist_ok=True)
    save_heads(FutureTokenHeads(spec), made.heads_file)
    return made


def test_more_rows_are_waited_for_by_the_count_that_they_are_waited_with(at_rest, tiny_dir, tmp_path):
    """Of 1,000 rows 300 were chosen: the next training begins at 2,000 of the same count, and 600 are no news."""
    watcher = at_rest(max_rows=3000)
    degrade(watcher)
    degraded = watcher.watch.degraded_since
    watcher._judge(files(tmp_path, at_rest.spec), result(tiny_dir, rows=300, seen=1000, high=0.5, degraded=degraded))
    assert (watcher.job_rows.needed, watcher.watch.degraded_since) == (2000, degraded)
    watcher._judge(files(tmp_path, at_rest.spec), result(tiny_dir, rows=300, seen=3000, high=0.5, degraded=degraded))
    assert watcher.watch.degraded_since is None  # there will never be more rows

    for seen, improving in ((1000, True), (3000, False)):
        found = result(tiny_dir, rows=300, seen=seen, passed=True, serving=watcher.watch.version)
        watcher._judge(files(tmp_path, at_rest.spec), found)
        assert watcher.job_rows.needed == 2 * seen
        assert watcher.watch.improving == improving


@pytest.mark.parametrize("high", [0.0, 0.5])
def test_a_training_from_before_a_trigger_does_not_answer_it(at_rest, tiny_dir, tmp_path, setting, high):  # noqa: F811
    watcher = at_rest()
    degrade(watcher)
    degraded = watcher.watch.degraded_since
    watcher._judge(files(tmp_path, at_rest.spec), result(tiny_dir, rows=900, seen=900, high=high))
    assert watcher.watch.degraded_since == degraded
    assert watcher.job_rows.needed == watcher.config.watcher.min_rows
    assert events(setting, "refused")[-1]["stale"]

    # Better heads are taken all the same, and training goes on with the rows since.
    watcher._judge(files(tmp_path, at_rest.spec), result(tiny_dir, rows=900, seen=900, passed=True))
    assert watcher.watch.version == 2
    assert watcher.watch.improving
    assert watcher.job_rows.needed == watcher.config.watcher.min_rows


def test_a_result_that_cannot_be_used_is_a_failure_and_leaves_nothing(at_rest, tiny_dir, tmp_path, monkeypatch):
    watcher = at_rest()
    degrade(watcher)
    found = result(tiny_dir, rows=9, seen=9, passed=True), files(tmp_path, at_rest.spec)
    found[1].heads_file.write_bytes(b"nothing")
    monkeypatch.setattr(watcher.trainer, "poll", lambda: found[::-1])
    with pytest.raises(Exception, match=r"."):
        watcher._take_result()
    assert not found[1].path.exists()
    assert not watcher.watch.wants_training(watcher.watch.degraded_since)


def test_a_policy_that_cannot_be_had_is_asked_for_again_after_a_pause(at_rest, setting, monkeypatch):  # noqa: F811
    watcher = at_rest(cooldown_seconds=1000.0)
    degrade(watcher)

    def nowhere():
        raise ValueError("there is none")

    monkeypatch.setattr(watcher.policies, "current", nowhere)
    monkeypatch.setattr(watcher.job_rows, "missing", lambda **_: "")
    for _ in range(3):
        watcher._tend_training()
    assert len(events(setting, "training_postponed")) == 1


def arrive(watcher, prompts, *, policy, length=10):
    """Rows of so many prompts of their own, all of them training rows."""
    watcher.buffer._holdout = 0.0
    for prompt in range(prompts):
        watcher.buffer.add(frame(1000 * policy + prompt, policy=policy, length=length))


def test_a_policy_that_moves_is_followed_and_less_often_where_that_brings_nothing(at_rest, setting, tiny_dir, tmp_path):  # noqa: F811
    watcher = at_rest(min_rows=400, max_rows=3200, gate_rows=4000)
    watcher.job_rows.needed = 999

    def moved():
        watcher._tend_training()
        return watcher.watch.moved

    def judge(policy, **how):
        found = result(tiny_dir, rows=100, seen=100, later=50, policy=policy, serving=watcher.watch.version, **how)
        watcher._judge(files(tmp_path, at_rest.spec), found)

    arrive(watcher, 90, policy=0)
    assert not moved()  # 900 rows, of the policy that the heads came with
    arrive(watcher, 9, policy=1)
    assert not moved()
    arrive(watcher, 1, policy=2)
    assert moved()
    assert (events(setting, "moved")[-1]["rows"], events(setting, "moved")[-1]["policy"]) == (100, 2)
    assert watcher._waits_for == "256 rows of prompts that are held out"
    kept = setting.run_dir.root / "watcher" / "jobs" / "kept.safetensors"
    judge(2, high=0.5)  # undecided or not, later rows decide
    assert not watcher.watch.moved
    assert kept.exists()
    assert watcher.job_rows.needed == 999
    arrive(watcher, 19, policy=3)
    assert not moved()
    arrive(watcher, 1, policy=3)
    assert moved()  # twice as many
    judge(3)  # surely no better: nothing goes on from there
    assert not kept.exists()
    arrive(watcher, 39, policy=4)
    assert not moved()
    arrive(watcher, 1, policy=4)
    assert moved()
    kept.write_bytes(b"")
    judge(4, passed=True)
    assert watcher.watch.version == 2
    assert not kept.exists()
    assert watcher.job_rows.needed == 999
    arrive(watcher, 9, policy=5)
    assert not moved()
    arrive(watcher, 1, policy=5)
    assert moved()  # as few as at first
    assert len(events(setting, "moved")) == 4
    watcher.close()

    again = at_rest(min_rows=400, max_rows=3200)
    assert again.watch.moved
    assert (again.progress.covered, again.progress.stride) == (4, 100)


@pytest.mark.parametrize(("gain", "far"), [(0.04, False), (0.06, True)])
def test_what_came_before_a_policy_that_moved_far_is_left_out(at_rest, setting, tiny_dir, tmp_path, gain, far):  # noqa: F811
    watcher = at_rest(min_rows=40, max_rows=3200, holdout=0.0001)
    for policy in (0, 0, 0, 1, 2):
        watcher.rows._stream.append(frame(policy, policy=policy, length=10).to_bytes())
    watcher.rows._due = 0.0
    watcher.rows.read(watcher.stop)
    watcher._tend_training()
    assert watcher.watch.moved
    found = result(tiny_dir, rows=40, seen=50, later=20, policy=2, passed=True, gain=gain)
    watcher._judge(files(tmp_path, at_rest.spec), found)
    assert (watcher.job_rows.seen, watcher.job_rows.needed) == ((20, 40) if far else (50, 40))
    assert watcher.watch.improving  # on all rows, of which this one took the newest alone
    watcher.close()

    again = at_rest(min_rows=40, max_rows=3200, holdout=0.0001)
    again.rows._due = 0.0
    again.rows.read(again.stop)
    assert (again.job_rows.seen, again.job_rows.needed) == ((20, 40) if far else (50, 40))


def test_a_moving_policy_is_learned_from_where_it_is(at_rest):
    watcher = at_rest(min_rows=40, max_rows=3200, gate_rows=400, holdout=0.0)
    rows = watcher.job_rows
    assert (rows.of_later_policies(), rows.missing(moved=True)) == (0, "100 rows of prompts that are held out")
    arrive(watcher, 30, policy=0)
    arrive(watcher, 3, policy=1)
    watcher.buffer._holdout = 1.0
    for policy in (0, 0, 0, 0, 0, 1):
        for prompt in range(12):
            watcher.buffer.add(frame(prompt, policy=policy, length=10))
    assert (rows.of_later_policies(), rows.missing(moved=True)) == (30, "")
    assert rows.missing(moved=False) == ""
    training, held_out = rows.choose(moved=True)
    assert (len(training), training.policies) == (60, (0, 1))  # and as many from before
    assert (len(held_out), held_out.policies) == (120, (1, 1))
    arrive(watcher, 10, policy=2)
    watcher.progress.tried(1, better=True)
    training, held_out = rows.choose(moved=True)
    assert (len(training), training.policies) == (80, (2, 2))  # min_rows of them, and the newest of the others
    everything, _ = rows.choose(moved=False)
    assert len(everything) > 300


def test_where_no_later_rows_are_left_nothing_is_tried_for_them(at_rest):
    watcher = at_rest(min_rows=40)
    arrive(watcher, 1, policy=3)
    watcher.watch.policy_moved()
    watcher._tend_training()
    assert not watcher.watch.moved


def test_heads_from_before_are_brought_up_to_the_policy_again(at_rest, monkeypatch):
    watcher = at_rest(min_rows=40)
    arrive(watcher, 1, policy=0)
    arrive(watcher, 1, policy=1)
    watcher.progress.tried(1, better=True)
    watcher._tend_training()
    assert not watcher.watch.moved
    watcher._roll_back("worse")
    watcher.watch.version = 1
    watcher._tend_training()
    assert watcher.watch.moved


def test_a_degradation_is_answered_before_a_policy_that_moves(at_rest, tiny_dir, tmp_path):
    watcher = at_rest(min_rows=40, max_rows=3200, gate_rows=4)
    arrive(watcher, 1, policy=0)
    arrive(watcher, 1, policy=1)
    degrade(watcher)
    arrive(watcher, 1, policy=1)
    watcher._tend_training()
    assert not watcher.watch.moved
    degraded = watcher.watch.degraded_since
    # A training for the policy that began before the trigger does not answer it.
    watcher.watch.moved = True
    assert not watcher._for_policy
    watcher._judge(files(tmp_path, at_rest.spec), result(tiny_dir, rows=9, seen=9, later=5, policy=1))
    assert watcher.watch.degraded_since == degraded
    # The one that does answers the policy's moving too, since it has learned from the newest rows.
    watcher._judge(files(tmp_path, at_rest.spec), result(tiny_dir, rows=9, seen=9, degraded=degraded, policy=1))
    assert watcher.watch.degraded_since is None
    assert not watcher.watch.moved
    assert watcher.progress.covered == 1


def test_what_training_waits_for_is_said_once(at_rest, caplog, buffer):  # noqa: F811
    watcher = at_rest(min_rows=10, gate_rows=10)
    degrade(watcher)
    said = []
    with caplog.at_level(logging.INFO, logger="services.watcher.service"):
        for _ in range(3):
            watcher._tend_training()
        frames = [frame for side in (False, True) for _, frame in buffer._frames[side]]
        watcher.buffer._holdout = 0.0
        watcher.buffer.add(frames[0])
        watcher._tend_training()
        watcher.buffer._holdout = 1.0
        watcher.buffer.add(frames[1])
        for _ in range(3):
            watcher._tend_training()
        said = [r.getMessage() for r in caplog.records if "waits for" in r.getMessage()]
    assert [text.split(" waits for ")[1].split(" (")[0] for text in said] == [
        "10 rows",
        "2 rows of prompts that are held out",
        "6 different prompts that are held out, a share of 0.3 of all prompts",
    ]


def test_a_restart_learns_from_the_rows_since_the_drift(at_rest, setting, buffer):  # noqa: F811
    watcher = at_rest(check_records=512)
    frames = [frame for _, frame in buffer._frames[False]]
    watcher.log.write("published", {"version": 1, "improving": False, "needed": 5000})

    def send(some):
        for one in some:
            watcher_rows.append(one.to_bytes())
        watcher.rows._due = 0.0
        watcher.rows.read(watcher.stop)

    watcher_rows = watcher.rows._stream
    send(frames[:4])
    records = list(stream(random.Random(0), 60, drop=0.3, from_check=30))
    for r in records[: len(records) // 2]:
        watcher._take_record(r)
    send(frames[4:7])
    for r in records[len(records) // 2 :]:
        watcher._take_record(r)
    assert watcher.watch.degraded_since is not None
    since = watcher.buffer.count(held_out=False, since=watcher.rows.fresh_from)
    assert since == sum(len(frame.tokens) for frame in frames[4:7])
    degraded = watcher.watch.degraded_since
    watcher.close()

    again = at_rest(check_records=512)
    again.rows.read(again.stop)
    assert again.watch.degraded_since == degraded
    assert again.job_rows.needed == again.config.watcher.min_rows
    assert again.buffer.count(held_out=False, since=again.rows.fresh_from) == since


def follow(watcher, count):
    watcher.fleet.follow(watcher.board.workers())
    assert len(watcher.fleet.workers()) == count


def test_copies_are_looked_at_once_and_while_a_training_runs(at_rest, setting, monkeypatch):  # noqa: F811
    watcher = at_rest()
    good, old = setting.worker("good"), setting.worker("old")
    old.control.refuses = "no room"
    follow(watcher, 2)
    watcher._swap_everybody()
    assert (good.control.served.version, old.control.served.version) == (1, 0)
    follow(watcher, 2)
    degrade(watcher)
    asked = []
    disturbed = watcher.fleet.disturbed
    monkeypatch.setattr(watcher.fleet, "disturbed", lambda *a: asked.append(1) or disturbed(*a))
    for _ in range(3):
        watcher._tend_training()
    # The one that serves something else is not a copy gone wrong, and is asked for nothing.
    assert asked == [1]
    assert not events(setting, "repaired") + events(setting, "repair_failed")
    assert watcher._waits_for

    good.control.disturbed, good.control.refuses = True, "no room"
    watcher._looked_at = None
    for _ in range(3):
        watcher._tend_training()
    assert (len(events(setting, "repair_failed")), len(events(setting, "repaired"))) == (1, 0)
    assert watcher.watch.degraded_since is not None

    good.control.refuses = ""
    wait_until(lambda: all(w.retry_at < time.monotonic() for w in watcher.fleet.workers()), 10, "retry")
    watcher._looked_at = None
    watcher.trainer._files, watcher.trainer._process = SimpleNamespace(), SimpleNamespace(poll=lambda: None)
    watcher._tend_training()
    watcher.trainer._files = watcher.trainer._process = None
    assert len(events(setting, "repaired")) == 1
    assert not good.control.disturbed
    assert watcher.watch.degraded_since is None


def test_a_worker_that_was_not_asked_in_time_gets_heads_without_delay(at_rest, setting, monkeypatch):  # noqa: F811
    watcher = at_rest()
    worker = setting.worker("w")
    follow(watcher, 1)
    (known,) = watcher.fleet.workers()
    worker.stop()
    follow(watcher, 1)
    assert known.silence
    assert not known.failure
    assert watcher.fleet.behind(watcher.current) == [known]
    assert watcher.fleet.swaps_failed == 0
    setting.workers.remove(worker)


def test_a_finished_training_is_taken_up_after_a_restart(tiny_dir, tmp_path):
    for number in (1, 2):
        path = tmp_path / f"job-{number:06d}"
        path.mkdir()
        (path / "result.json").write_text(json.dumps({"number": number}))
    trainer = Trainer(tmp_path, threads=1, nice=5)
    assert trainer.resume()
    assert trainer.running
    trainer.stop()  # before it was looked at: it is there the next time
    trainer = Trainer(tmp_path, threads=1, nice=5)
    assert trainer.resume()
    found, taken = trainer.poll()
    assert taken == {"number": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["job-000002"]
    trainer.discard(found)
    assert not trainer.resume()
