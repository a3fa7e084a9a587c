"""Which rows a drift is learned from, also after the watcher began again."""

from __future__ import annotations

import threading

import torch

from services.common.row_frames import RowFrame, prompt_name
from services.watcher.row_reader import RowReader
from services.watcher.rows import RowBuffer


class Stream:
    """Ten rows an entry; ids grow in digits, as times do not."""

    def __init__(self):
        self.entries = []

    def append(self, tag, policy=0):
        rows = (torch.full((10,), tag, dtype=torch.int32), torch.zeros(10, 2, dtype=torch.bfloat16))
        frame = RowFrame(prompt_name([tag]), policy, 1.0, 1.0, -1, 0.0, *rows)
        self.entries.append((f"{9 + len(self.entries)}-{len(self.entries)}", frame.to_bytes()))

    def read(self, after, count):
        ids = [entry for entry, _ in self.entries]
        first = ids.index(after) + 1 if after in ids else 0
        return self.entries[first : first + count]


def reader(stream, **cuts):
    buffer = RowBuffer(1000, 1000, 0.0)
    return buffer, RowReader(stream, buffer, lambda: None, **cuts)


def read(rows):
    rows._due = 0.0
    rows.read(threading.Event())


def tags(buffer, rows):
    return sorted(set(buffer.training(1000, rows.fresh_from).tokens.tolist()))


def test_rows_since_a_drift_are_the_same_after_a_restart():
    stream = Stream()
    buffer, rows = reader(stream)
    for tag in range(3):
        stream.append(tag)
    read(rows)
    rows.without_doubt()
    for tag in range(3, 6):
        stream.append(tag)
    read(rows)
    rows.drifted()
    assert tags(buffer, rows) == [3, 4, 5]

    again, restarted = reader(stream, healthy=rows.healthy, fresh=rows.fresh)
    restarted.without_doubt()  # before any row was read again: it must not forget what it knew
    read(restarted)
    assert tags(again, restarted) == [3, 4, 5]
    restarted.drifted()
    assert tags(again, restarted) == [3, 4, 5]


def test_a_stream_that_has_lost_its_beginning_leaves_what_came_later():
    stream = Stream()
    for tag in range(6):
        stream.append(tag)
    cut = stream.entries[2][0]
    del stream.entries[:4]
    buffer, rows = reader(stream, fresh=cut)
    read(rows)
    assert tags(buffer, rows) == [4, 5]


def test_where_a_policy_moved_far_its_own_rows_are_learned_from():
    stream = Stream()
    buffer, rows = reader(stream)
    for tag, policy in enumerate((0, 1, 1, 2, 1, 3)):  # one was still under way under an earlier policy
        stream.append(tag, policy)
    read(rows)
    rows.moved_far(3)  # nothing is later
    assert tags(buffer, rows) == [0, 1, 2, 3, 4, 5]
    rows.without_doubt()
    rows.moved_far(1)
    assert tags(buffer, rows) == [3, 4, 5]
    again, restarted = reader(stream, fresh=rows.fresh)
    read(restarted)
    assert tags(again, restarted) == [3, 4, 5]
    # A drift after which nothing was without doubt begins no earlier.
    restarted.drifted()
    assert tags(again, restarted) == [3, 4, 5]
    rows.drifted()
    assert buffer.count(held_out=False, since=rows.fresh_from) == 0
    rows.moved_far(1)  # what came before the drift does not come back
    assert buffer.count(held_out=False, since=rows.fresh_from) == 0
