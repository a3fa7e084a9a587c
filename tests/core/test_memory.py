"""The memory's laws against a computation over all positions, straight from the definition."""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Sequence

import pytest

from specroll_core.memory import ORDERS, MemoryOptions, TrajectoryMemory
from specroll_core.memory_store import BYTES_PER_ENTRY, Stream, TokenStore

EVERYTHING = {"floor": 0.0, "walk": 10**9}
Law = dict[int, tuple[float, int]]


def match_lengths(stream: Sequence[int], context: Sequence[int], path: Sequence[int], inside: bool) -> list[int]:
    """m[j] for every position of one stream, by its recurrence along the drafted path."""
    m = [0] * len(stream)
    for j in range(len(stream)):
        while m[j] < min(ORDERS, j + 1, len(context)) and stream[j - m[j]] == context[-1 - m[j]]:
            m[j] += 1
    for token in path:
        below = [0, *m][: len(m)]
        m = [
            min(ORDERS, before + 1) if t == token and (before or inside) else 0
            for t, before in zip(stream, below, strict=True)
        ]
    return m


def naive_law(
    own: Sequence[int],
    context: Sequence[int],
    path: Sequence[int],
    inside: bool = True,
    far: Sequence[tuple[Sequence[Sequence[int]], float]] = (),
) -> Law:
    """far: several streams at a time, with the weight of their positions."""

    def seen(stream: Sequence[int], weight: float) -> list[tuple[int, int, float]]:
        lengths = match_lengths(stream, context, path, inside)
        return [(stream[j + 1], lengths[j], weight) for j in range(len(stream) - 1)]

    close = [x for x in seen(own, 1.0) if x[1] >= 1]
    distant = [x for streams, weight in far for stream in streams for x in seen(stream, weight) if x[1] >= 2]
    law: Law = {}
    for v in {token for token, _, _ in close + distant}:
        p = 0.0
        for n in range(1, ORDERS + 1):
            for positions in (distant, close) if n > 1 else (close,):
                c = sum(w for token, m, w in positions if token == v and m >= n)
                p = (c + 0.7 * p) / (sum(w for _, m, w in positions if m >= n) + 0.7)
        law[v] = p, max(m for token, m, _ in close + distant if token == v)
    return law


def proposed(memory: TrajectoryMemory, path: Sequence[int]) -> Law:
    state = memory.root()
    for token in path:
        state = memory.descend(state, token)
    return {token: (p, order) for token, p, order in memory.children(state)}


def assert_same(got: Law, expected: Law) -> None:
    assert {v: order for v, (_, order) in got.items()} == {v: order for v, (_, order) in expected.items()}
    for v, (p, _) in expected.items():
        assert got[v][0] == pytest.approx(p, rel=1e-9)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("vocab", [2, 4, 30])
def test_the_law_is_that_of_all_positions(inside: bool, vocab: int) -> None:
    r = random.Random(vocab)
    for _ in range(60):
        history = [r.randrange(vocab) for _ in range(r.randrange(0, 80))]
        store = TokenStore(1000)
        Stream(store, history)
        memory = TrajectoryMemory(store, history, options=MemoryOptions(inside_starts=inside, **EVERYTHING))
        for _ in range(6):
            path = [r.randrange(vocab) for _ in range(r.randrange(0, 9))]
            assert_same(proposed(memory, path), naive_law(history, history, path, inside))


def test_the_floor_leaves_out_what_is_unlikely_and_nothing_else() -> None:
    r = random.Random(1)
    for _ in range(40):
        history = [r.randrange(12) for _ in range(150)]
        store = TokenStore(1000)
        Stream(store, history)
        memory = TrajectoryMemory(store, history, options=MemoryOptions(floor=0.1, walk=10**9))
        for length in range(5):
            path = [r.randrange(12) for _ in range(length)]
            law = naive_law(history, history, path)
            assert_same(proposed(memory, path), {v: x for v, x in law.items() if x[0] >= 0.1})


@pytest.mark.parametrize("inside", [True, False])
def test_others_count_by_their_weights_one_rung_lower(inside: bool) -> None:
    r = random.Random(2)
    for _ in range(60):
        vocab = r.choice([2, 4, 8])
        own, *others = ([r.randrange(vocab) for _ in range(r.randrange(40))] for _ in range(6))
        groups = [(others[:3], 0.1), (others[3:], 0.4)]
        store = TokenStore(1000)
        Stream(store, own)
        far = []
        for streams, weight in groups:
            far.append((TokenStore(1000), weight))
            writers = [Stream(far[-1][0]) for _ in streams]
            for i in range(40):  # written in turns, as siblings are generated
                for writer, stream in zip(writers, streams, strict=True):
                    writer.extend(stream[i : i + 1])
        memory = TrajectoryMemory(store, own, far, MemoryOptions(inside_starts=inside, **EVERYTHING))
        for length in range(6):
            path = [r.randrange(vocab) for _ in range(length)]
            assert_same(proposed(memory, path), naive_law(own, own, path, inside, groups))


def test_a_match_may_begin_inside_the_draft() -> None:
    history = [1, 2, 3, 4, 9, 9, 7]
    store = TokenStore(100)
    Stream(store, history)
    drafted = [2, 3]  # does not continue the context
    assert proposed(TrajectoryMemory(store, history), drafted) == {4: (pytest.approx((1 + 0.7 / 1.7) / 1.7), 2)}
    assert proposed(TrajectoryMemory(store, history, options=MemoryOptions(inside_starts=False)), drafted) == {}


def test_only_recent_occurrences_are_walked() -> None:
    history = [1, 2, 3] * 50 + [1, 2, 4] * 3 + [1, 2]
    store = TokenStore(1000)
    Stream(store, history)
    memory = TrajectoryMemory(store, history, options=MemoryOptions(walk=2, floor=0.0))
    law = proposed(memory, [])
    assert law[4][1] > law[3][1] == 1
    assert law[4][0] > law[3][0]


@pytest.mark.parametrize("capacity", [2, 3, 17, 64])
def test_a_full_store_is_as_one_that_never_saw_what_it_forgot(capacity: int) -> None:
    r = random.Random(capacity)
    store = TokenStore(capacity)
    writers = [Stream(store) for _ in range(3)]
    entries: list[tuple[int, int, bool]] = []  # writer, token, whether it goes on from the writer's entry before
    last = [-1] * 3
    for step in range(400):
        w = r.randrange(3)
        token = r.randrange(5)
        writers[w].extend([token])
        # The end of a stream is given up one token before the ring comes round to it.
        entries.append((w, token, last[w] >= 0 and step - last[w] < capacity))
        last[w] = step
        kept = entries[-capacity:]
        pairs: dict[tuple[int, int], int] = {}
        previous: dict[int, int] = {}
        for who, t, joined in kept:
            if joined and who in previous:
                pairs[previous[who], t] = pairs.get((previous[who], t), 0) + 1
            previous[who] = t
        assert {(a, b): len(x) for a, d in store.pairs.items() for b, x in d.items()} == pairs
        assert all(store.token[e] == b for d in store.pairs.values() for b, x in d.items() for e in x)
    assert len(store) == capacity


def size_of(value: object) -> int:
    """Bytes of nested dictionaries, lists, arrays and numbers, small numbers left out as Python shares them."""
    if isinstance(value, int):
        return sys.getsizeof(value) if value > 256 else 0
    size = sys.getsizeof(value)
    if isinstance(value, dict):
        size += sum(size_of(k) + size_of(v) for k, v in value.items())
    elif isinstance(value, list):
        size += sum(map(size_of, value))
    return size


@pytest.mark.parametrize("vocab", [3, 200, 10**6])
def test_the_bytes_of_a_store_are_bounded_and_stay_flat(vocab: int) -> None:
    r = random.Random(vocab)
    store = TokenStore(4096)
    stream = Stream(store)
    sizes = []
    for _ in range(9):
        stream.extend(r.randrange(vocab) for _ in range(4096))
        columns: list[array[int]] = [store.token, store.following, store.before, store._after]
        sizes.append(size_of(store.pairs) + sum(map(size_of, columns)))
    assert max(sizes) <= store.bytes_bound == 4096 * BYTES_PER_ENTRY
    assert sizes[-1] <= 1.05 * sizes[4]


def test_impossible_settings_are_refused() -> None:
    for settings in ({"max_depth": 0}, {"walk": 0}, {"floor": 1.0}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            MemoryOptions(**settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="capacity"):
        TokenStore(1)
