"""Compiled stores and memories hold and answer what the Python ones do, over random operations."""

from __future__ import annotations

import gc
import random
import weakref

import pytest

from services.rollout.sglang_plugin.native_growth import load
from specroll_core.memory import MemoryOptions, TrajectoryMemory
from specroll_core.memory_store import BYTES_PER_ENTRY, Stream, TokenStore
from specroll_core.reflex import _SLOT_BYTES, MemoryClasses, Reflex, ReflexOptions


@pytest.fixture
def native():
    found = load()
    assert found is not None, "the tests need a C++ compiler"
    return found.classes


def contents(store):
    """With the order of each token's followers: children are suggested in it."""
    pairs = {first: [(second, list(entries)) for second, entries in of.items()] for first, of in store.pairs.items()}
    return len(store), store.written, list(store.token), list(store.following), list(store.before), pairs


@pytest.mark.parametrize("vocab", [1, 3, 40, 10**6])
@pytest.mark.parametrize("capacity", [2, 3, 17, 64, 5000])
def test_stores_hold_the_same(native, capacity, vocab):
    r = random.Random(capacity + vocab)
    stores = TokenStore(capacity), native.store(capacity)
    writers = [[Stream(store) for store in stores] for _ in range(4)]
    for step in range(300):
        tokens = [r.randrange(vocab) for _ in range(r.choice([0, 1, 1, 3, 30]))]
        for stream in (writer := r.choice(writers)):
            stream.extend(tokens)
        assert writer[0].last(12) == writer[1].last(12)
        assert writer[0].fingerprint == writer[1].fingerprint
        if step % 7 == 0:
            assert contents(stores[0]) == contents(stores[1])
    assert contents(stores[0]) == contents(stores[1])
    assert stores[0].bytes_bound == stores[1].bytes_bound


def both_memories(native, r, vocab, capacity, options):
    """A memory of each kind over streams that are written in turns, with up to two stores of others."""
    streams = [[r.randrange(vocab) for _ in range(r.randrange(120))] for _ in range(6)]
    others = r.randrange(3)
    made = []
    for classes in (MemoryClasses(), native):
        own, *far = (classes.store(capacity) for _ in range(3))
        Stream(own, streams[0])
        for store, some in zip(far, (streams[1:4], streams[4:]), strict=True):
            writers = [Stream(store) for _ in some]
            for i in range(0, 120, 5):
                for writer, stream in zip(writers, some, strict=True):
                    writer.extend(stream[i : i + 5])
        weighted = list(zip(far, (0.1, 0.03), strict=True))[:others]
        made.append(classes.memory(own, streams[0], weighted, options))
    return made


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("walk", [2, 32, 10**12])
@pytest.mark.parametrize("floor", [0.0, 0.02, 0.3])
def test_memories_suggest_the_same_in_the_same_order(native, floor, walk, inside):
    r = random.Random(walk + inside)
    suggested = 0
    for case in range(60):
        vocab, capacity = r.choice([2, 4, 12, 60]), r.choice([8, 50, 1000])
        options = MemoryOptions(inside_starts=inside, walk=walk, floor=floor)
        memories = both_memories(native, random.Random(case), vocab, capacity, options)
        for _ in range(4):
            states = [[memory.root() for memory in memories]]
            for _ in range(12):
                # Any state of the round, not the last one only.
                above, token = r.choice(states), r.randrange(vocab)
                states.append([memory.descend(of, token) for memory, of in zip(memories, above, strict=True)])
                assert states[-1][0] == states[-1][1]
            for one, other in states:
                # Equal to the last bit: trees depend on which of two scores is larger.
                laws = memories[0].children(one), memories[1].children(other)
                assert laws[0] == laws[1]
                suggested += len(laws[0])
            moved = [r.randrange(vocab) for _ in range(r.randrange(4))]
            for memory in memories:
                memory.observe(moved)
            assert memories[0].context == memories[1].context
    assert suggested > 500


def test_slots_that_come_and_go_answer_the_same(native):
    """Groups, tables, interrupted requests that are taken up again, slots that are opened over others."""
    options = ReflexOptions(slot_tokens=64, group_tokens=64, group_bytes=2 * 64 * 512, table=True, table_bytes=80 * 512)
    r = random.Random(5)
    both = Reflex(options), Reflex(options, native)
    known: dict[int, tuple[list[int], str | None, list[int]]] = {}
    left = []
    compared = 0
    for _ in range(600):
        what, slot = r.random(), r.randrange(5)
        if what < 0.15:
            prompt, group, emitted = (
                left.pop(r.randrange(len(left)))
                if left and r.random() < 0.6
                else ([r.randrange(6) for _ in range(12)], r.choice([None, "a", "b", "c"]), [])
            )
            if group is not None:
                prompt = [ord(group) % 6] * 3 + [1, 2, 3]
            for reflex in both:
                reflex.open(slot, prompt, group, emitted)
            known[slot] = prompt, group, list(emitted)
        elif what < 0.8:
            tokens = [r.randrange(6) for _ in range(r.randrange(5))]
            for reflex in both:
                reflex.observe(slot, tokens)
            if slot in known:
                known[slot][2].extend(tokens)
        elif what < 0.9:
            ended = r.random() < 0.5
            for reflex in both:
                reflex.close(slot, ended)
            if (state := known.pop(slot, None)) and not ended:
                left.append(state)
        one, other = (reflex.proposer(slot) for reflex in both)
        assert (one is None) == (other is None)
        if one is None or other is None:
            continue
        assert isinstance(one, TrajectoryMemory)
        assert one.context == other.context
        states = one.root(), other.root()
        for _ in range(4):
            token = r.randrange(6)
            states = one.descend(states[0], token), other.descend(states[1], token)
            assert one.children(states[0]) == other.children(states[1])
            compared += 1
    assert compared > 500


def test_a_memory_keeps_its_stores_and_nothing_stays_behind_it(native):
    store = native.store(64)
    Stream(store, [1, 2, 3, 1, 2])
    memory = native.memory(store, [1, 2])
    watched = weakref.ref(store)
    del store
    gc.collect()
    assert watched() is not None
    assert memory.children(memory.root())[-1][0] == 3
    del memory
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize("vocab", [3, 200, 10**6])
def test_the_bytes_of_a_store_are_bounded_and_stay_flat(native, vocab):
    r = random.Random(vocab)
    for capacity in (64, 4096, 5000):
        store = native.store(capacity)
        stream = Stream(store)
        held = []
        for _ in range(9):
            stream.extend([r.randrange(vocab) for _ in range(capacity)])
            held.append(store.bytes_held)
        assert max(held) <= store.bytes_bound == capacity * BYTES_PER_ENTRY
        assert held[-1] == held[4]


def test_the_bytes_of_a_round_are_bounded(native):
    """Of the largest trees, over texts whose every pair of tokens has stood there before."""
    r = random.Random(0)
    for vocab in (2, 5, 40):
        own, *others = (native.store(8192) for _ in range(3))
        for store in (own, *others):
            Stream(store, [r.randrange(vocab) for _ in range(8000)])
        memory = native.memory(own, [0, 1], [(others[0], 0.1), (others[1], 0.03)])
        for _ in range(3):
            states = [memory.root()]
            for _ in range(62):
                memory.children(states[-1])
                states.append(memory.descend(r.choice(states), r.randrange(vocab)))
            assert memory.bytes_held <= _SLOT_BYTES
            memory.observe([r.randrange(vocab)])


def test_impossible_capacities_are_refused(native):
    with pytest.raises(ValueError, match="capacity"):
        native.store(1)
