"""Per-slot state: each request sees what it would see alone, and nothing grows."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from specroll_core.memory import TrajectoryMemory
from specroll_core.memory_store import BYTES_PER_ENTRY
from specroll_core.reflex import Reflex, ReflexOptions
from tests.core.test_memory import assert_same, naive_law, proposed, size_of

ALONE = ReflexOptions(siblings=False)


def answers(memory: TrajectoryMemory, paths: Sequence[Sequence[int]] = ((), (1,), (2, 3), (5, 5, 1))) -> list[object]:
    return [sorted(proposed(memory, path).items()) for path in paths]


def tokens(r: random.Random, count: int) -> list[int]:
    return [r.randrange(8) for _ in range(count)]


def alone(prompt: list[int], own: list[int]) -> list[object]:
    reflex = Reflex(ALONE)
    reflex.open(0, prompt, own_ids=own)
    memory = reflex.proposer(0)
    assert memory is not None
    return answers(memory)


@pytest.mark.parametrize("options", [ALONE, ReflexOptions()], ids=["no siblings", "no group keys"])
def test_a_thousand_interleaved_requests_are_as_each_alone(options: ReflexOptions) -> None:
    """Requests begin, go on, are retracted, aborted and replaced in random order in eight slots."""
    r = random.Random(0)
    reflex = Reflex(options)
    running: dict[int, tuple[list[int], list[int]]] = {}
    begun = 0
    while begun < 1000:
        slot = r.randrange(8)
        event = r.random()
        if slot not in running or event < 0.03:  # a new request, perhaps in a slot that nobody closed
            running[slot] = tokens(r, r.randrange(1, 40)), []
            reflex.open(slot, running[slot][0])
            begun += 1
        elif event < 0.12:
            reflex.close(slot)
            del running[slot]
            assert reflex.proposer(slot) is None
        elif event < 0.16:  # retracted, and taken up in another slot
            request = running.pop(slot)
            reflex.close(slot, ended=False)
            other = r.choice([s for s in range(8) if s not in running])
            reflex.open(other, request[0], own_ids=request[1])
            running[other] = request
        else:
            emitted = tokens(r, r.randrange(1, 5))
            reflex.observe(slot, emitted)
            running[slot][1].extend(emitted)
            if event > 0.9:
                memory = reflex.proposer(slot)
                assert memory is not None
                assert answers(memory) == alone(*running[slot])
    for slot, request in running.items():
        memory = reflex.proposer(slot)
        assert memory is not None
        assert answers(memory) == alone(*request)


def test_siblings_are_seen_as_they_are_generated() -> None:
    r = random.Random(1)
    prompt = tokens(r, 30)
    reflex = Reflex()
    own: list[list[int]] = [[] for _ in range(4)]
    for slot in range(4):
        reflex.open(slot, prompt, "group")
    for _ in range(20):
        for slot in range(4):
            emitted = tokens(r, r.randrange(1, 4))
            reflex.observe(slot, emitted)
            own[slot].extend(emitted)
    memory = reflex.proposer(2)
    assert memory is not None
    siblings = [prompt[-8:] + tail for tail in own]
    for path in ([], [1], [3, 2], [1, 1, 4]):
        law = naive_law(prompt + own[2], prompt + own[2], path, far=[(siblings, 0.1)])
        assert_same(proposed(memory, path), {v: x for v, x in law.items() if x[0] >= 0.02})


def test_a_retracted_sibling_goes_on_where_it_was() -> None:
    """Its tokens are not counted twice, and a slot's next request never takes them up by accident."""
    r = random.Random(2)
    prompt, emitted = tokens(r, 20), [tokens(r, 30) for _ in range(3)]
    after = []
    for interrupted in (False, True):
        reflex = Reflex()
        for slot in range(3):
            reflex.open(slot, prompt, 7)
            reflex.observe(slot, emitted[slot])
        if interrupted:
            for slot in range(3):
                reflex.close(slot, ended=False)
            for slot in range(3):
                reflex.open(slot + 10, prompt, 7, emitted[slot])
        for slot in range(3):
            reflex.observe(slot + 10 * interrupted, [1, 2, 3])
        memory = reflex.proposer(1 + 10 * interrupted)
        assert memory is not None
        after.append(answers(memory))
    assert after[0] == after[1]


def test_groups_keep_apart() -> None:
    reflex = Reflex()
    reflex.open(0, [1, 2, 3], "a")
    reflex.observe(0, [4, 5, 6])
    reflex.open(1, [1, 2, 3], "b")
    reflex.open(2, [9, 2, 3], "a")  # another prompt under a known key: it learns alone
    for slot in (1, 2):
        memory = reflex.proposer(slot)
        assert memory is not None
        assert proposed(memory, [4]) == {}


def test_an_ended_rollout_is_seen_by_other_prompts_through_the_table_only() -> None:
    for table in (False, True):
        reflex = Reflex(ReflexOptions(table=table, siblings=False))
        reflex.open(0, [1, 2], None)
        reflex.observe(0, [30, 31, 32])
        reflex.open(1, [30, 31])
        memory = reflex.proposer(1)
        assert memory is not None
        assert proposed(memory, []) == {}
        reflex.close(0)
        assert set(proposed(memory, [])) == ({32} if table else set())


def test_memory_stays_within_its_bounds_over_many_requests() -> None:
    options = ReflexOptions(
        slot_tokens=256, group_tokens=512, group_bytes=4 * 512 * BYTES_PER_ENTRY, table=True, table_bytes=1 << 20
    )
    r = random.Random(3)
    reflex = Reflex(options)
    sizes = []
    for request in range(2000):
        slot = r.randrange(6)
        reflex.open(slot, [r.randrange(5000) for _ in range(50)], r.randrange(40) if r.random() < 0.7 else None)
        for _ in range(20):
            reflex.observe(slot, [r.randrange(5000) for _ in range(4)])
        if r.random() < 0.5:
            reflex.close(slot)
        if request % 400 == 399:
            sizes.append(held(reflex))
    assert max(sizes) <= options.bytes_bound(slots=6)
    assert sizes[-1] <= 1.1 * max(sizes[:2])
    assert len(reflex._groups) <= 4
    for slot in range(6):
        reflex.close(slot)
    assert len(reflex) == 0


def held(reflex: Reflex) -> int:
    stores = {id(s.own.store): s.own.store for s in reflex._slots.values()}
    stores |= {id(g.store): g.store for g in reflex._groups.values()}
    assert reflex._table is not None
    stores[id(reflex._table)] = reflex._table
    return sum(
        size_of(s.pairs) + sum(map(size_of, (s.token, s.following, s.before, s._after))) for s in stores.values()
    )


def test_off_proposes_nothing_and_bad_bounds_are_refused() -> None:
    reflex = Reflex(ReflexOptions(memory="off"))
    reflex.open(0, [1, 2])
    reflex.observe(0, [3])
    assert reflex.proposer(0) is None
    for settings in ({"slot_tokens": 8}, {"group_bytes": 1000}, {"table_bytes": 10}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            ReflexOptions(**settings)  # type: ignore[arg-type]
