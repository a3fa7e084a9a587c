"""Rows in Redis, and what the services of a run tell each other there."""

from __future__ import annotations

import json
import time

import pytest

from services.common.row_stream import RowStream
from services.common.run_board import CurrentHeads, RunBoard


def test_rows_are_bounded_by_bytes_and_the_newest_stay(client, run_keys):
    stream = RowStream(client, run_keys.feedback_rows, max_bytes=1000)
    trimmed = sum(stream.append(bytes([i]) * 100) for i in range(25))
    assert trimmed == 15
    assert stream.bytes == 1000
    entries = stream.read("0", 100)
    assert [data[0] for _, data in entries] == list(range(15, 25))
    assert [data[0] for _, data in stream.read(entries[6][0], 2)] == [22, 23]
    assert stream.append(b"x" * 950) == 10
    assert stream.bytes == 950
    with pytest.raises(ValueError, match="do not fit"):
        stream.append(b"x" * 1001)


def test_rows_survive_the_loss_of_the_stream(client, run_keys):
    stream = RowStream(client, run_keys.feedback_rows, max_bytes=300)
    for _ in range(3):
        stream.append(b"x" * 100)
    client.delete(run_keys.feedback_rows)
    for letter in (b"y", b"z"):
        stream.append(letter * 100)
    assert [data[:1] for _, data in stream.read("0", 10)] == [b"y", b"z"]
    assert stream.bytes == 200


def test_workers_come_and_go(client, run_keys):
    board = RunBoard(client, run_keys)
    board.announce("a", "127.0.0.1:1")
    board.announce("b", "127.0.0.1:2")
    assert board.workers() == {"a": "127.0.0.1:1", "b": "127.0.0.1:2"}
    board.withdraw("a")
    client.hset(run_keys.workers, "c", json.dumps({"address": "127.0.0.1:3", "until": time.time() - 1}))
    assert board.workers() == {"b": "127.0.0.1:2"}
    assert client.hkeys(run_keys.workers) == [b"b"]


def test_the_current_heads(client, run_keys):
    board = RunBoard(client, run_keys)
    assert board.heads() is None
    heads = CurrentHeads(3, "d", "/heads/v00000003", "127.0.0.1:9")
    board.set_heads(heads)
    assert board.heads() == heads
