"""Which prompt groups may be leased, which may be trained: staleness bounded by counting slots.

`docs/staleness.md` derives the bound. In short, with batches of B groups and the bound eta:

* a worker that has loaded version u is granted a lease only while fewer than (u + eta + 1) * B slots are
  taken, where a slot is a group that is leased, waiting to be trained, or trained, over the whole run;
* a group leased at version u is *due* at step u + eta;
* step t trains B arrived groups, earliest due first, and only if every group still open afterwards can
  meet its own due step: for each s > t at most (s - t) * B open groups are due by s.

The grant rule makes a feasible choice exist, the training rule keeps it so, and nothing is dropped for
age. The ledger does no I/O and reads no clock: times are arguments, so that every schedule can be tested.

A group is named by its serial: the how-manieth prompt that the source gave, over all epochs. A serial is
*waiting* (to be leased again), *leased*, *ready* (its trajectories arrived) or done.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Delivery(StrEnum):
    """What becomes of a group that arrived."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"  # trained already, or waits here to be trained
    STALE = "stale"  # cannot be trained in time, or sampled from a version that this run never made


@dataclass(slots=True)
class Lease:
    """An open lease: `version` is the worker's when it was granted, `deadline` in seconds of the caller's clock."""

    serial: int
    lease_id: str
    worker_id: str
    version: int
    deadline: float


@dataclass(frozen=True, slots=True)
class LedgerState:
    """What a checkpoint keeps: enough to train every prompt exactly once after a restart.

    step: steps done. cursor: serials below it were taken from the source. unfinished: those of them that are
    not trained. ahead: serials at or above the cursor that are trained all the same (they arrived from
    before an earlier restart).
    """

    step: int
    cursor: int
    unfinished: tuple[int, ...] = ()
    ahead: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LedgerState:
        return cls(int(data["step"]), int(data["cursor"]), tuple(data["unfinished"]), tuple(data["ahead"]))


class Ledger:
    """Slot accounting for one run.

    Args:
        batch_groups: B, groups per step.
        max_staleness: eta, in versions.
        total_steps: no slot is granted beyond total_steps * B.
        incarnation: differs between two starts of the same run; lease ids carry it.
        state: of the checkpoint to continue from; None starts at step 0.
    """

    def __init__(
        self,
        *,
        batch_groups: int,
        max_staleness: int,
        total_steps: int,
        incarnation: str,
        state: LedgerState | None = None,
    ) -> None:
        assert batch_groups >= 1
        assert max_staleness >= 0
        state = state or LedgerState(step=0, cursor=0)
        self._batch = batch_groups
        self._eta = max_staleness
        self._total_steps = total_steps
        self._incarnation = incarnation
        self._first_step = state.step
        self._step = state.step
        self._cursor = state.cursor
        # Lowest serial first, so that prompts given back are leased again in the source's order.
        self._waiting: list[int] = sorted(state.unfinished)
        self._leased: dict[int, Lease] = {}
        self._ready: dict[int, int] = {}  # serial -> due step
        self._ahead: set[int] = set(state.ahead)
        self._leases_made = 0
        self.expired_total = 0
        self.returned_total = 0

    @property
    def step(self) -> int:
        """The step to be trained next; equally the steps done, and the policy version that they made."""
        return self._step

    @property
    def granted_total(self) -> int:
        """Slots taken over the whole run: trained, ready and leased groups."""
        return self._step * self._batch + len(self._ready) + len(self._leased)

    @property
    def leased(self) -> int:
        return len(self._leased)

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def finished(self) -> bool:
        return self._step >= self._total_steps

    def capacity(self, version: int) -> int:
        """Slots that may be granted now to a worker that has loaded `version`."""
        return max(0, min(version + self._eta + 1, self._total_steps) * self._batch - self.granted_total)

    def grant(self, worker_id: str, count: int, *, version: int, deadline: float) -> list[Lease]:
        """Up to `count` leases for a worker that has loaded `version`; fewer, or none, where the bound says so.

        Consumes a slot each; a slot opens when a step completes, a lease is given back, or one expires.
        """
        assert version <= self._step, f"worker {worker_id} says it loaded version {version}, which does not exist yet"
        leases = []
        for _ in range(min(count, self.capacity(version))):
            serial = self._next_serial()
            self._leases_made += 1
            lease_id = f"{self._incarnation}:{serial}:{self._leases_made}"
            self._leased[serial] = Lease(serial, lease_id, worker_id, version, deadline)
            leases.append(self._leased[serial])
        return leases

    def renew(self, worker_id: str, lease_ids: Iterable[str], deadline: float) -> list[str]:
        """Moves the deadlines of the worker's leases; returns the ids that are not open any more."""
        mine = {lease.lease_id: lease for lease in self._leased.values() if lease.worker_id == worker_id}
        gone = []
        for lease_id in lease_ids:
            if lease_id in mine:
                mine[lease_id].deadline = deadline
            else:
                gone.append(lease_id)
        return gone

    def give_back(self, worker_id: str, lease_ids: Iterable[str]) -> int:
        """Leases that their worker could not serve; their prompts are leased again. Returns how many were open."""
        wanted = set(lease_ids)
        found = [x for x in self._leased.values() if x.worker_id == worker_id and x.lease_id in wanted]
        self._reopen(found)
        self.returned_total += len(found)
        return len(found)

    def expire(self, now: float) -> list[Lease]:
        """Takes leases back whose deadline has passed."""
        late = [lease for lease in self._leased.values() if lease.deadline < now]
        self._reopen(late)
        self.expired_total += len(late)
        return late

    def release_worker(self, worker_id: str) -> int:
        """Takes back every lease of a worker that started anew: what it worked on is gone."""
        mine = [lease for lease in self._leased.values() if lease.worker_id == worker_id]
        self._reopen(mine)
        self.returned_total += len(mine)
        return len(mine)

    def deliver(self, serial: int, lease_id: str, *, oldest_version: int, newest_version: int) -> Delivery:
        """A group's trajectories arrived, sampled from versions oldest_version..newest_version.

        A group whose lease is not open any more (it expired, or the learner restarted) is still welcome as long
        as it can be trained in time: it is due when its oldest token says.
        """
        lease = self._leased.get(serial)
        if lease is not None and lease.lease_id == lease_id:
            assert oldest_version >= lease.version, (
                f"group {serial} was sampled from an older policy than its worker said"
            )
            del self._leased[serial]
            self._ready[serial] = lease.version + self._eta
            return Delivery.ACCEPTED
        if lease is None and serial not in self._waiting and (serial < self._cursor or serial in self._ahead):
            return Delivery.DUPLICATE
        # Versions made after the checkpoint by an earlier incarnation are gone, and their numbers are used again.
        foreign = lease_id.partition(":")[0] != self._incarnation
        newest_known = self._first_step if foreign else self._step
        due = oldest_version + self._eta
        if newest_version > newest_known or not self._fits(due, instead_of=lease):
            return Delivery.STALE
        if lease is not None:
            del self._leased[serial]
        elif serial in self._waiting:
            self._waiting.remove(serial)
            heapq.heapify(self._waiting)
        else:
            self._ahead.add(serial)
        self._ready[serial] = due
        return Delivery.ACCEPTED

    def next_batch(self) -> list[int] | None:
        """The serials to train in this step, or None while they are not all there.

        Choosing changes nothing: call `complete` when the step is done.
        """
        if self.finished or len(self._ready) < self._batch:
            return None
        by_due = sorted(self._ready, key=lambda serial: (self._ready[serial], serial))
        chosen, rest = by_due[: self._batch], by_due[self._batch :]
        still_open = [self._ready[s] for s in rest] + [lease.version + self._eta for lease in self._leased.values()]
        return chosen if self._feasible(still_open, from_step=self._step + 1) else None

    def complete(self, serials: Sequence[int]) -> None:
        """The step that trained these groups is done: the version becomes step + 1 and B slots move on."""
        assert len(serials) == self._batch
        for serial in serials:
            due = self._ready.pop(serial)
            assert due >= self._step, f"group {serial} was due at step {due} and is trained at {self._step}"
        self._step += 1

    def waiting_for(self) -> list[Lease]:
        """Open leases, earliest due first: what a learner that waits is waiting for."""
        return sorted(self._leased.values(), key=lambda lease: (lease.version, lease.deadline))

    def state(self) -> LedgerState:
        """What is trained and what is not. Ready groups count as unfinished: their step is not in a checkpoint yet."""
        unfinished = [*self._waiting, *self._leased, *(s for s in self._ready if s not in self._ahead)]
        ahead = (s for s in self._ahead if s not in self._ready)
        return LedgerState(self._step, self._cursor, tuple(sorted(unfinished)), tuple(sorted(ahead)))

    def _feasible(self, dues: Iterable[int], *, from_step: int) -> bool:
        """Whether groups with these due steps can all be trained in time, B a step, beginning with `from_step`."""
        return all(due >= from_step + n // self._batch for n, due in enumerate(sorted(dues)))

    def _fits(self, due: int, instead_of: Lease | None) -> bool:
        """Whether one more group with this due step leaves every open group trainable in time."""
        others = [lease.version + self._eta for lease in self._leased.values() if lease is not instead_of]
        in_bound = self.granted_total - (instead_of is not None) < self._total_steps * self._batch
        return in_bound and self._feasible([*self._ready.values(), *others, due], from_step=self._step)

    def _next_serial(self) -> int:
        if self._waiting:
            return heapq.heappop(self._waiting)
        while self._cursor in self._ahead:
            self._ahead.discard(self._cursor)
            self._cursor += 1
        serial = self._cursor
        self._cursor += 1
        return serial

    def _reopen(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            del self._leased[lease.serial]
            heapq.heappush(self._waiting, lease.serial)
