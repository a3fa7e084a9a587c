"""Statistics out of the stream, where taking a record or acknowledging an entry fails."""

from __future__ import annotations

import pytest

from services.watcher.statistics_reader import StatisticsReader
from specroll.v1 import feedback_pb2


class Entry:
    def __init__(self, payload, log):
        self.payload, self.log, self.fails = payload, log, 0

    def ack(self):
        if self.fails:
            self.fails -= 1
            raise OSError("no answer")
        self.log.append(("ack", self))

    def dead_letter(self, reason):
        self.log.append(("dead", reason))


class Consumer:
    def __init__(self, entries):
        self.entries = entries

    def read(self, _count, _seconds):
        out, self.entries = self.entries, []
        return out


def payload(*prompts, at=1.0):
    batch = feedback_pb2.FeedbackBatch(worker_id="w")
    for prompt in prompts:
        counts = feedback_pb2.RoundCounts(heads_version=1, drafted=4, accepted=[3, 2, 1, 0])
        batch.trajectories.add(prompt=prompt, temperature=1.0, finished_at=at, rounds=[counts])
    return batch.SerializeToString()


def test_what_failed_is_gone_on_with_and_nothing_is_taken_twice():
    log, taken, full = [], [], ["b", "c"]

    def take(record):
        if record.cluster in full:
            full.remove(record.cluster)
            raise OSError("the disk is full")
        taken.append(record.cluster)

    entries = [Entry(payload("a", "b"), log), Entry(payload("c"), log), Entry(payload("d"), log)]
    entries[2].fails = 1
    reader = StatisticsReader(Consumer(entries), take, lambda: None)
    for _ in range(3):
        with pytest.raises(OSError, match="full|answer"):
            reader.read(0.0)
    reader.read(0.0)
    assert taken == ["a", "b", "c", "d"]
    assert log == [("ack", entry) for entry in entries]


def test_what_is_no_feedback_is_set_aside():
    log, taken, malformed = [], [], []
    entries = [Entry(b"\xff", log), Entry(payload("a", at=float("nan")), log), Entry(payload("b"), log)]
    StatisticsReader(Consumer(entries), taken.append, lambda: malformed.append(1)).read(0.0)
    assert [kind for kind, _ in log] == ["dead", "dead", "ack"]
    assert [r.cluster for r in taken] == ["b"]
    assert len(malformed) == 2
