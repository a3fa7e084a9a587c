"""The ledger behind one lock: gRPC threads lease prompts, the training loop takes batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

from services.config import Config
from services.learner.prompts import PromptSet
from specroll_core.contracts import PromptGroup, TrajectoryGroup
from specroll_core.ledger import Delivery, Lease, Ledger, LedgerState


class LeaseDesk:
    """Hands prompt groups out and takes finished ones in.

    Closed until `open` is called: evaluation before training has the workers to itself.
    Every public method may be called from any thread.
    """

    def __init__(self, config: Config, prompts: PromptSet, *, incarnation: str, state: LedgerState | None) -> None:
        learner = config.learner
        self._config = config
        self._prompts = prompts
        self._sampling = config.sampling.to_params()
        self._ledger = Ledger(
            batch_groups=learner.batch_groups,
            max_staleness=learner.max_staleness,
            total_steps=learner.steps,
            incarnation=incarnation,
            state=state,
        )
        self._changed = threading.Condition()
        self._open = False
        self._order: tuple[int, list[int]] | None = None

    def open(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()

    @property
    def step(self) -> int:
        with self._changed:
            return self._ledger.step

    @property
    def finished(self) -> bool:
        with self._changed:
            return self._ledger.finished

    def counts(self) -> dict[str, int]:
        """Slots by state, for metrics and status."""
        with self._changed:
            return {
                "leased": self._ledger.leased,
                "ready": self._ledger.ready,
                "granted_total": self._ledger.granted_total,
                "expired_total": self._ledger.expired_total,
                "returned_total": self._ledger.returned_total,
            }

    def lease(self, worker_id: str, capacity: int, *, version: int, wait_seconds: float) -> list[PromptGroup]:
        """Prompt groups for a worker that has loaded `version`.

        Waits for a slot, at most `wait_seconds`; unblocked by a finished step, a returned or expired lease, the
        end of the run; returns none when there is none.
        """
        end = time.monotonic() + wait_seconds
        with self._changed:
            while True:
                if self._open:
                    leases = self._ledger.grant(
                        worker_id, capacity, version=version, deadline=time.time() + self._config.learner.lease_seconds
                    )
                    if leases or self._ledger.finished:
                        return [self._prompt_group(lease) for lease in leases]
                left = end - time.monotonic()
                if left <= 0:
                    return []
                self._changed.wait(left)

    def renew(self, worker_id: str, lease_ids: Iterable[str]) -> list[str]:
        """Renews the worker's leases; returns those that are not open any more."""
        with self._changed:
            return self._ledger.renew(worker_id, lease_ids, time.time() + self._config.learner.lease_seconds)

    def give_back(self, worker_id: str, lease_ids: Iterable[str]) -> int:
        with self._changed:
            count = self._ledger.give_back(worker_id, lease_ids)
            self._changed.notify_all()
            return count

    def release_worker(self, worker_id: str) -> int:
        with self._changed:
            count = self._ledger.release_worker(worker_id)
            self._changed.notify_all()
            return count

    def expire(self) -> list[Lease]:
        with self._changed:
            late = self._ledger.expire(time.time())
            if late:
                self._changed.notify_all()
            return late

    def deliver(self, group: TrajectoryGroup) -> Delivery:
        with self._changed:
            return self._ledger.deliver(
                int(group.group_id),
                group.lease_id,
                oldest_version=group.oldest_policy_version,
                newest_version=max(s.version for t in group.trajectories for s in t.policy_version_spans),
            )

    def next_batch(self) -> list[str] | None:
        """Group ids of the step that can be trained now, or None."""
        with self._changed:
            batch = self._ledger.next_batch()
            return None if batch is None else [str(serial) for serial in batch]

    def complete(self, group_ids: Sequence[str]) -> None:
        with self._changed:
            self._ledger.complete([int(g) for g in group_ids])
            self._changed.notify_all()

    def state(self) -> LedgerState:
        with self._changed:
            return self._ledger.state()

    def waiting_for(self) -> str:
        """One sentence on what the training loop is waiting for."""
        with self._changed:
            leases = self._ledger.waiting_for()
            ready, batch = self._ledger.ready, self._config.learner.batch_groups
        if not leases:
            return f"{ready} of {batch} groups are here and no group is leased: no worker is asking for prompts"
        workers = sorted({lease.worker_id for lease in leases})
        return f"{ready} of {batch} groups are here, {len(leases)} are being sampled by {', '.join(workers)}"

    def _prompt_group(self, lease: Lease) -> PromptGroup:
        epoch, position = divmod(lease.serial, len(self._prompts.train))
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._prompts.order(epoch))
        prompt = self._prompts.train[self._order[1][position]]
        return PromptGroup(
            group_id=str(lease.serial),
            lease_id=lease.lease_id,
            prompt_index=prompt.index,
            epoch=epoch,
            policy_version=lease.version,
            prompt_ids=prompt.ids,
            answer=prompt.answer,
            group_size=self._config.learner.group_size,
            sampling=self._sampling,
            deadline=lease.deadline,
        )
