from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import redis

from services.common.exclusive_lock import ExclusiveLock, LockHeld, LockLost
from services.common.lifecycle import free_port, wait_until
from services.common.streams import (
    StreamConsumer,
    StreamError,
    StreamFull,
    StreamInspector,
    StreamLimits,
    StreamProducer,
    StreamUnavailable,
)

LIMITS = StreamLimits(max_entries=8, max_bytes=10_000, low_fraction=0.5, reclaim_idle_seconds=0.05, max_deliveries=3)


@pytest.fixture
def stream(client, run_keys):
    """Makes producers, consumers and inspectors of one fresh stream."""

    class Stream:
        keys = run_keys.trajectories
        limits = LIMITS

        def producer(self):
            return StreamProducer(client, self.keys, self.limits)

        def consumer(self, name="a", **kwargs):
            return StreamConsumer(client, self.keys, self.limits, name, **kwargs)

        def inspector(self):
            return StreamInspector(client, self.keys, self.limits)

    return Stream()


def publish(producer, *keys, payload=b"x", deadline=5.0):
    return [producer.publish(payload, dedup_key=key, deadline_seconds=deadline) for key in keys]


def read_all(consumer, count, seconds=10.0):
    got = []
    for _ in range(int(seconds / 0.1)):
        got += consumer.read(count, 0.1)
        if len(got) >= count:
            return got
    raise AssertionError(f"{len(got)} of {count} entries came")


def test_entries_come_in_order_and_are_gone_after_the_acknowledgement(stream, client):
    ids = publish(stream.producer(), "g0", "g1", "g2", payload=b"payload")
    consumer = stream.consumer()
    deliveries = consumer.read(10, 1.0)
    assert [d.entry_id for d in deliveries] == ids
    assert [(d.payload, d.key, d.deliveries) for d in deliveries] == [(b"payload", f"g{i}", 1) for i in range(3)]
    stats = stream.inspector().stats()
    assert (stats.entries, stats.pending, stats.bytes) == (3, 3, 3 * len(b"payload" + b"g0"))
    assert deliveries[0].ack()
    assert not deliveries[0].ack()
    assert consumer.ack_many(deliveries) == 2
    stats = stream.inspector().stats()
    assert (stats.entries, stats.pending, stats.bytes) == (0, 0, 0)
    assert client.hlen(stream.keys.dedup) == 0


def test_what_was_published_before_the_first_consumer_is_delivered(stream):
    publish(stream.producer(), "early")
    assert [d.key for d in stream.consumer().read(1, 1.0)] == ["early"]


def test_a_repeated_publication_adds_nothing_until_its_acknowledgement(stream):
    producer, consumer = stream.producer(), stream.consumer()
    first = publish(producer, "g")
    assert publish(stream.producer(), "g") == first
    (delivery,) = consumer.read(10, 1.0)
    assert publish(producer, "g") == first, "in the hands of a consumer it is still the same entry"
    delivery.ack()
    assert publish(producer, "g") != first


def test_dedup_holds_for_a_full_stream_too(stream):
    producer = stream.producer()
    ids = publish(producer, *map(str, range(8)))
    with pytest.raises(StreamFull):
        publish(producer, "new", deadline=0)
    assert publish(producer, "3", deadline=0) == [ids[3]]


def test_a_full_stream_refuses_with_both_numbers_and_opens_below_the_low_mark(stream):
    producer, consumer = stream.producer(), stream.consumer()
    publish(producer, *map(str, range(8)), payload=b"12345")
    with pytest.raises(StreamFull, match=r"8 entries of at most 8, 48 bytes of at most 10000") as caught:
        publish(producer, "more", deadline=0.05)
    assert (caught.value.entries, caught.value.bytes) == (8, 48)
    deliveries = consumer.read(8, 1.0)
    consumer.ack_many(deliveries[:3])
    with pytest.raises(StreamFull):  # 5 entries: below the high mark, above the low one of 4
        publish(producer, "more", deadline=0)
    assert stream.inspector().stats().closed
    consumer.ack_many(deliveries[3:4])
    publish(producer, "more", deadline=0)
    assert not stream.inspector().stats().closed


def test_bytes_bound_the_stream_as_entries_do(stream):
    producer = stream.producer()
    publish(producer, "a", "b", payload=bytes(4_000))
    with pytest.raises(StreamFull, match="2 entries of at most 8, 8002 bytes"):
        publish(producer, "c", payload=bytes(4_000), deadline=0)
    with pytest.raises(ValueError, match="can never fit"):
        publish(producer, "d", payload=bytes(10_000))


def test_a_waiting_producer_goes_on_when_there_is_room_and_gives_up_when_stopped(stream):
    producer, consumer = stream.producer(), stream.consumer()
    publish(producer, *map(str, range(8)))
    done = []
    thread = threading.Thread(target=lambda: done.extend(publish(producer, "late", deadline=30)))
    thread.start()
    wait_until(lambda: stream.inspector().stats().closed, 10, "the stream to close")
    consumer.ack_many(consumer.read(8, 1.0))
    thread.join(10)
    assert len(done) == 1
    publish(producer, *map(str, range(7)))
    stop = threading.Event()
    stop.set()
    with pytest.raises(StreamFull):
        producer.publish(b"x", dedup_key="z", deadline_seconds=60, stop=stop)


def test_a_flood_loses_nothing_and_keeps_its_bounds(stream):
    """Four producers against one slow consumer: every entry arrives once, and the bounds hold at every look."""
    stream.limits = replace(LIMITS, max_entries=50, max_bytes=20_000, reclaim_idle_seconds=60.0)
    total, inspector, consumer = 400, stream.inspector(), stream.consumer()

    def produce(part):
        producer = stream.producer()
        for i in range(part, total, 4):
            producer.publish(bytes(600 + i), dedup_key=str(i), deadline_seconds=60)

    threads = [threading.Thread(target=produce, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    seen = []
    while len(seen) < total:
        deliveries = consumer.read(7, 5.0)
        assert deliveries, f"only {len(seen)} of {total} entries came"
        stats = inspector.stats()
        assert stats.entries <= 50
        assert stats.bytes <= 20_000
        seen += [(int(d.key), len(d.payload)) for d in deliveries]
        consumer.ack_many(deliveries)
    for thread in threads:
        thread.join(10)
    assert sorted(seen) == [(i, 600 + i) for i in range(total)]
    assert inspector.stats().bytes == 0


def test_memory_stays_bounded_over_many_messages(stream, client):
    """1e5 small messages pass through; used_memory after them is that of an empty stream."""
    stream.limits = StreamLimits(max_entries=2_000, max_bytes=2**20)
    keys, consumer, total = stream.keys, stream.consumer(), 100_000
    producer = stream.producer()
    before = client.info("memory")["used_memory"]
    peak = 0
    for start in range(0, total, 1000):
        # The producer's own script, pipelined: a hundred thousand round trips would only measure the machine.
        pipe = client.pipeline(transaction=False)
        for i in range(start, start + 1000):
            producer._publish(
                keys=[keys.stream, keys.dedup, keys.state],
                args=[b"0123456789", i, 2_000, 2**20, 1_500, 2**19],
                client=pipe,
            )
        assert all(status == 1 for status, *_ in pipe.execute())
        deliveries = consumer.read(1000, 5.0)
        assert len(deliveries) == 1000
        peak = max(peak, client.info("memory")["used_memory"])
        assert consumer.ack_many(deliveries) == 1000
    after = client.info("memory")["used_memory"]
    stats = stream.inspector().stats()
    assert (stats.entries, stats.pending, stats.bytes) == (0, 0, 0)
    assert peak - before < 4 * 2**20
    assert after - before < 2**20


def test_idle_entries_go_to_another_consumer_with_a_new_name(stream):
    publish(stream.producer(), "g0", "g1")
    dead = stream.consumer("dead")
    assert len(dead.read(2, 1.0)) == 2
    fresh = stream.consumer("fresh")
    deliveries = read_all(fresh, 2)
    assert [(d.key, d.deliveries) for d in deliveries] == [("g0", 2), ("g1", 2)]
    assert fresh.ack_many(deliveries) == 2
    assert stream.inspector().stats().pending == 0


def test_work_in_progress_is_not_handed_out_twice(stream):
    """Renewed entries stay with their consumer, whose own reads do not offer them again even when not renewed."""
    stream.limits = replace(LIMITS, reclaim_idle_seconds=0.5)
    publish(stream.producer(), "g0")
    slow, other = stream.consumer("slow"), stream.consumer("other")
    held = slow.read(1, 1.0)
    stop = threading.Event()

    def renew():
        while not stop.wait(0.1):
            assert slow.extend(held) == []

    thread = threading.Thread(target=renew)
    thread.start()
    assert other.read(1, 1.5) == []
    stop.set()
    thread.join(5)
    assert slow.read(1, 1.5) == []
    (taken,) = read_all(other, 1)
    assert [d.key for d in slow.extend(held)] == ["g0"], "it is told that the entry is no longer its own"
    assert taken.ack()
    assert held[0].ack() is False


def test_entries_whose_reply_was_lost_come_again_at_once(stream, client):
    """What the server handed to this name without the process seeing it is pending, and must not wait for idleness."""
    stream.limits = replace(LIMITS, reclaim_idle_seconds=3600.0)
    publish(stream.producer(), "g0")
    consumer = stream.consumer("a")
    client.xreadgroup(stream.keys.group, "a", {stream.keys.stream: ">"})
    assert [(d.key, d.deliveries) for d in consumer.read(1, 1.0)] == [("g0", 2)]


def test_what_a_failing_read_had_claimed_is_offered_again(stream, monkeypatch):
    """The read takes over a dead consumer's entry and then loses the connection: the entry must not be forgotten."""
    publish(stream.producer(), "g0")
    stream.consumer("dead").read(1, 1.0)
    fresh = stream.consumer("fresh", deadline_seconds=0.1)

    def cut(*args, **kwargs):
        raise redis.ConnectionError("cut")

    with monkeypatch.context() as patch:
        patch.setattr(fresh._client, "xreadgroup", cut)
        for _ in range(100):
            with pytest.raises(StreamUnavailable):
                fresh.read(2, 0.05)
            if stream.inspector().stats().consumers == {"fresh": 1}:
                break
    assert [d.key for d in read_all(fresh, 1)] == ["g0"]


def test_too_many_deliveries_make_a_dead_letter_which_can_be_requeued(stream):
    inspector = stream.inspector()
    publish(stream.producer(), "poison", payload=b"bad")
    for life in range(LIMITS.max_deliveries):
        (delivery,) = read_all(stream.consumer(f"life-{life}"), 1)
        assert delivery.deliveries == life + 1
    last = stream.consumer("last")
    for _ in range(100):
        assert last.read(1, 0.1) == []
        if last.dead_lettered:
            break
    stats = inspector.stats()
    assert (stats.entries, stats.pending, stats.bytes, stats.dead, stats.dead_bytes) == (0, 0, 0, 1, len("poisonbad"))
    (letter,) = inspector.dead_letters()
    assert letter.reason == "delivered 3 times without an acknowledgement"
    assert (letter.key, letter.payload, letter.origin) == ("poison", b"bad", delivery.entry_id)
    inspector.requeue(letter.entry_id)
    (again,) = last.read(1, 1.0)
    assert (again.key, again.payload, again.deliveries) == ("poison", b"bad", 1)
    again.dead_letter("it breaks the contract")
    again.dead_letter("it breaks the contract")
    (letter,) = inspector.dead_letters()
    assert inspector.show_dead(letter.entry_id).reason == "it breaks the contract"
    assert inspector.drop_dead(letter.entry_id)
    assert inspector.stats().dead_bytes == 0
    with pytest.raises(StreamError, match="There is no dead letter"):
        inspector.requeue(letter.entry_id)


def test_requeue_refuses_a_key_that_is_in_the_stream_and_a_full_stream(stream):
    producer, consumer, inspector = stream.producer(), stream.consumer(), stream.inspector()
    publish(producer, "g")
    consumer.read(1, 1.0)[0].dead_letter("first")
    publish(producer, "g")
    (letter,) = inspector.dead_letters()
    with pytest.raises(StreamError, match=r"is in .* again"):
        inspector.requeue(letter.entry_id)
    consumer.read(1, 1.0)[0].ack()
    publish(producer, *map(str, range(8)))
    with pytest.raises(StreamFull, match="stays where it is"):
        inspector.requeue(letter.entry_id)


def test_dead_letters_are_bounded_and_losses_counted(stream):
    stream.limits = replace(LIMITS, max_dead=3)
    producer, consumer, inspector = stream.producer(), stream.consumer(), stream.inspector()
    for i in range(5):
        publish(producer, f"g{i}")
        consumer.read(1, 1.0)[0].dead_letter("bad")
    stats = inspector.stats()
    assert (stats.dead, stats.dead_dropped, stats.dead_bytes) == (3, 2, 3 * len("xg0"))
    assert [letter.key for letter in inspector.dead_letters()] == ["g2", "g3", "g4"]


def test_inspection_shows_who_holds_an_entry(stream):
    first, second = publish(stream.producer(), "g0", "g1")
    assert stream.inspector().show(first).consumer is None
    stream.consumer("me").read(1, 1.0)
    assert [(e.key, e.consumer, e.deliveries) for e in stream.inspector().entries()] == [
        ("g0", "me", 1),
        ("g1", None, 0),
    ]
    assert stream.inspector().show(second).payload == b"x"
    assert stream.inspector().stats().consumers == {"me": 1}


def test_the_consumer_group_is_made_anew_when_the_server_lost_it(stream, client):
    consumer = stream.consumer()
    client.delete(stream.keys.stream)
    publish(stream.producer(), "g")
    assert [d.key for d in read_all(consumer, 1)] == ["g"]


def test_an_unreachable_server_is_reported_with_its_cause(client, run_keys):
    consumer = StreamConsumer(client, run_keys.trajectories, LIMITS, "a", deadline_seconds=0.2)
    consumer._client = redis.Redis(port=free_port(), retry=None)
    with pytest.raises(StreamUnavailable, match=r"out of reach for 0.2 s, so it could not .*refused"):
        consumer.read(1, 0)


def test_a_successor_adopts_everything_at_once_and_the_predecessor_is_fenced_off(stream, client, run_keys):
    stream.limits = replace(LIMITS, reclaim_idle_seconds=3600.0, max_deliveries=1)
    publish(stream.producer(), *map(str, range(4)))
    old_lock = ExclusiveLock(client, run_keys, "learner", lifetime_seconds=0.5)
    old_lock.acquire()
    old = stream.consumer("old", lock=old_lock)
    held = old.read(3, 1.0)
    # The predecessor is frozen: nobody renews its lock.
    old_lock._ended.set()
    old_lock._thread.join(5)
    with ExclusiveLock(client, run_keys, "learner", lifetime_seconds=5.0) as lock:
        assert lock.fence == old_lock.fence + 1
        new = stream.consumer("new", lock=lock)
        adopted = new.adopt_all()
        assert [(d.key, d.deliveries) for d in adopted] == [("0", 2), ("1", 2), ("2", 2)]
        assert stream.inspector().stats().consumers == {"new": 3}
        with pytest.raises(LockLost):
            old.ack_many(held)
        with pytest.raises(LockLost):
            old.dead_letter(held[0], "no")
        with pytest.raises(LockLost):
            old.read(1, 0)
        assert stream.inspector().stats().entries == 4
        assert new.ack_many(adopted) == 3
        assert new.adopt_all() == []


def test_adopting_without_a_lock_is_refused(stream):
    with pytest.raises(ValueError, match="needs a consumer with a lock"):
        stream.consumer().adopt_all()


def test_a_second_holder_is_refused_while_the_first_lives(client, run_keys):
    with ExclusiveLock(client, run_keys, "learner", lifetime_seconds=0.3) as first:
        # Longer than one lifetime: the first one's renewals keep it out.
        with pytest.raises(LockHeld, match="Another learner of this run is alive"):
            ExclusiveLock(client, run_keys, "learner").acquire(deadline_seconds=0.7)
        first.check()
        with ExclusiveLock(client, run_keys, "watcher"):
            pass
    with ExclusiveLock(client, run_keys, "learner") as second:
        second.check()
    with pytest.raises(LockLost):
        second.check()


def test_an_expired_lock_is_renewed_where_nobody_took_it(client, run_keys):
    """An outage longer than the lifetime: the key is gone, but the fencing number says that nobody came in between."""
    with ExclusiveLock(client, run_keys, "learner", lifetime_seconds=60.0) as lock:
        client.delete(lock.key)
        lock._valid_until = 0.0
        lock.check()
        assert client.get(lock.key).decode() == lock.token


@pytest.mark.parametrize(
    ("change", "message"),
    [({"max_entries": 0}, "at least 1"), ({"low_fraction": 1.0}, "below 1"), ({"reclaim_idle_seconds": 0}, "above 0")],
)
def test_limits_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        replace(LIMITS, **change)
