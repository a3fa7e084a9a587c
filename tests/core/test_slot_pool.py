from __future__ import annotations

from specroll_core.slot_pool import IDLE_ROUNDS, SlotPool


def test_a_key_keeps_its_slot_until_it_ends() -> None:
    pool = SlotPool(2)
    first, second = pool.take("a"), pool.take("b")
    assert {first[0], second[0]} == {0, 1}
    assert first[1]
    assert pool.take("a") == (first[0], False)
    assert pool.take("c") == (-1, False)
    pool.release("a")
    pool.release("a")
    pool.release("unknown")
    assert pool.take("c") == (first[0], True)
    assert len(pool) == 2


def test_a_key_that_is_not_used_for_long_gives_way() -> None:
    pool = SlotPool(2)
    pool.take("silent")
    for _ in range(IDLE_ROUNDS):
        pool.next_round()
        pool.take("busy")
    assert pool.take("new")[1]
    assert pool.take("other") == (-1, False)
    for _ in range(IDLE_ROUNDS):
        pool.next_round()
    slot, new = pool.take("silent")
    assert new  # it begins anew
    assert slot in (0, 1)


def test_nothing_fits_into_no_slots() -> None:
    assert SlotPool(0).take("a") == (-1, False)
