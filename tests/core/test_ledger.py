"""The slot accounting against a naive simulation: whatever the schedule, the bound holds and nothing is lost."""

import random

import pytest

from specroll_core.ledger import Delivery, Ledger, LedgerState


def make(batch: int, eta: int, steps: int, *, incarnation: str = "a", state: LedgerState | None = None) -> Ledger:
    return Ledger(batch_groups=batch, max_staleness=eta, total_steps=steps, incarnation=incarnation, state=state)


class World:
    """A learner and workers that finish, fail and lag at random. Records the step in which each serial is trained."""

    def __init__(self, rng: random.Random, batch: int, eta: int, steps: int) -> None:
        self.rng, self.batch, self.eta, self.steps = rng, batch, eta, steps
        self.ledger = make(batch, eta, steps)
        self.in_flight: dict[str, tuple[int, int]] = {}  # lease id -> serial, version
        self.loaded = 0
        self.trained: dict[int, int] = {}
        self.versions: dict[int, int] = {}  # serial -> version of its oldest token
        self.incarnation = 0
        self.now = 0.0

    def turn(self) -> None:
        self.now += 1
        kind = self.rng.random()
        if kind < 0.3:
            for lease in self.ledger.grant(
                "w", self.rng.randint(1, 4), version=self.loaded, deadline=self.now + self.rng.choice([5, 1000])
            ):
                self.in_flight[lease.lease_id] = (lease.serial, self.loaded)
        elif kind < 0.6 and self.in_flight:
            lease_id = self.rng.choice(list(self.in_flight))
            serial, version = self.in_flight.pop(lease_id)
            newest = self.rng.randint(version, self.loaded)
            got = self.ledger.deliver(serial, lease_id, oldest_version=version, newest_version=newest)
            if got is Delivery.ACCEPTED:
                self.versions[serial] = version
        elif kind < 0.65 and self.in_flight:
            lease_id = self.rng.choice(list(self.in_flight))
            self.in_flight.pop(lease_id)
            self.ledger.give_back("w", [lease_id])
        elif kind < 0.7:
            self.ledger.expire(self.now)
        elif kind < 0.85:
            self.loaded = min(self.ledger.step, self.loaded + self.rng.randint(0, 2))
        else:
            batch = self.ledger.next_batch()
            if batch is not None:
                step = self.ledger.step
                for serial in batch:
                    assert serial not in self.trained
                    assert step - self.versions[serial] <= self.eta
                    self.trained[serial] = step
                self.ledger.complete(batch)


@pytest.mark.parametrize("eta", [0, 1, 2, 5])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_every_schedule_keeps_the_bound_and_ends(batch: int, eta: int) -> None:
    for seed in range(15):
        world = World(random.Random(seed), batch, eta, steps=12)
        for _ in range(20_000):
            if world.ledger.finished:
                break
            world.turn()
        assert world.ledger.finished, "the schedule got stuck"
        assert len(world.trained) == 12 * batch
        assert max(world.trained.values()) == 11


def test_grants_follow_the_formula() -> None:
    ledger = make(4, 2, 100)
    assert len(ledger.grant("w", 1000, version=0, deadline=9)) == (0 + 2 + 1) * 4
    assert ledger.capacity(0) == 0
    assert ledger.granted_total == 12


def test_zero_staleness_is_synchronous() -> None:
    ledger = make(3, 0, 2)
    leases = ledger.grant("w", 9, version=0, deadline=9)
    assert [lease.serial for lease in leases] == [0, 1, 2]
    for lease in leases:
        assert ledger.next_batch() is None
        assert ledger.grant("w", 9, version=0, deadline=9) == []
        ledger.deliver(lease.serial, lease.lease_id, oldest_version=0, newest_version=0)
    batch = ledger.next_batch()
    assert batch == [0, 1, 2]
    ledger.complete(batch)
    assert ledger.capacity(0) == 0, "a worker that has not loaded the new policy gets nothing"
    assert ledger.capacity(1) == 3


def test_a_newer_group_never_pushes_an_older_one_past_its_step() -> None:
    """Six slots at version 0 with eta 2: training newer groups first would leave four groups for the one step 2."""
    ledger = make(2, 2, 100)
    first = ledger.grant("w", 6, version=0, deadline=9)
    for lease in first[:2]:
        ledger.deliver(lease.serial, lease.lease_id, oldest_version=0, newest_version=0)
    ledger.complete(ledger.next_batch() or [])
    newer = ledger.grant("w", 2, version=1, deadline=9)
    for lease in newer:
        ledger.deliver(lease.serial, lease.lease_id, oldest_version=1, newest_version=1)
    assert ledger.next_batch() is None
    ledger.deliver(first[2].serial, first[2].lease_id, oldest_version=0, newest_version=0)
    assert ledger.next_batch() is None, "one older and one newer would leave three for step 2"
    ledger.deliver(first[3].serial, first[3].lease_id, oldest_version=0, newest_version=0)
    assert ledger.next_batch() == [2, 3]


def test_duplicates_and_foreign_versions_are_told_apart() -> None:
    ledger = make(1, 1, 10, incarnation="b", state=LedgerState(step=3, cursor=5, unfinished=(4,)))
    assert ledger.deliver(2, "a:2:9", oldest_version=2, newest_version=2) is Delivery.DUPLICATE
    # Version 4 was made by the incarnation that died; this one will make another 4.
    assert ledger.deliver(6, "a:6:9", oldest_version=3, newest_version=4) is Delivery.STALE
    assert ledger.deliver(4, "a:4:8", oldest_version=1, newest_version=3) is Delivery.STALE, "due at step 2, now is 3"
    assert ledger.deliver(6, "a:6:9", oldest_version=3, newest_version=3) is Delivery.ACCEPTED
    assert ledger.deliver(6, "a:6:9", oldest_version=3, newest_version=3) is Delivery.DUPLICATE
    leases = ledger.grant("w", 1, version=3, deadline=9)
    assert [lease.serial for lease in leases] == [4], "what was taken and not trained is leased first"


@pytest.mark.parametrize("seed", range(30))
def test_each_prompt_is_trained_once_across_restarts(seed: int) -> None:
    """Restarts from random checkpoints. A model of the truth: what the surviving checkpoint line has trained."""
    rng = random.Random(seed)
    batch, eta, steps = rng.randint(1, 4), rng.randint(0, 3), 15
    ledger = make(batch, eta, steps, incarnation="0")
    trained: list[int] = []  # in the line of the current process
    saved, saved_trained = ledger.state(), list(trained)
    queue: dict[int, tuple[str, int]] = {}  # un-acknowledged entries: serial -> lease id, version
    in_flight: dict[str, tuple[int, int]] = {}
    restarts = 0
    for _ in range(50_000):
        if ledger.finished:
            break
        kind = rng.random()
        if kind < 0.3:
            for lease in ledger.grant("w", 3, version=ledger.step, deadline=1e9):
                in_flight[lease.lease_id] = (lease.serial, lease.version)
        elif kind < 0.6 and in_flight:
            lease_id = rng.choice(list(in_flight))
            serial, version = in_flight.pop(lease_id)
            queue[serial] = (lease_id, version)
            ledger.deliver(serial, lease_id, oldest_version=version, newest_version=version)
        elif kind < 0.85:
            chosen = ledger.next_batch()
            if chosen:
                trained += chosen
                ledger.complete(chosen)
        elif kind < 0.95:
            saved, saved_trained = LedgerState.from_json(ledger.state().to_json()), list(trained)
            for serial in saved_trained:
                queue.pop(serial, None)
        elif restarts < 6:
            restarts += 1
            ledger = make(batch, eta, steps, incarnation=str(restarts), state=saved)
            trained = list(saved_trained)
            in_flight.clear()
            assert ledger.granted_total == saved.step * batch
            for serial, (lease_id, version) in queue.items():
                ledger.deliver(serial, lease_id, oldest_version=version, newest_version=version)
    assert ledger.finished
    assert len(trained) == len(set(trained)) == steps * batch
    # Nothing is skipped: every serial below the cursor is trained or known to be open.
    state = ledger.state()
    assert set(range(state.cursor)) == {s for s in trained if s < state.cursor} | set(state.unfinished)


def test_a_worker_that_starts_anew_gives_its_slots_back() -> None:
    ledger = make(2, 0, 4)
    ledger.grant("w", 2, version=0, deadline=9)
    assert ledger.capacity(0) == 0
    assert ledger.release_worker("w") == 2
    assert [lease.serial for lease in ledger.grant("w", 2, version=0, deadline=9)] == [0, 1]


def test_renewal_and_expiry() -> None:
    ledger = make(2, 0, 4)
    a, b = ledger.grant("w", 2, version=0, deadline=10)
    assert ledger.renew("w", [a.lease_id, "unknown"], deadline=20) == ["unknown"]
    assert ledger.renew("other", [b.lease_id], deadline=20) == [b.lease_id], "a lease belongs to its worker"
    assert [lease.serial for lease in ledger.expire(15)] == [b.serial]
    assert ledger.expired_total == 1
    assert ledger.capacity(0) == 1
