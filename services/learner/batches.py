"""From the stream to batches: reads groups, checks and deduplicates them, holds them until a checkpoint has them."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from services.common.streams import Delivery as Entry
from services.common.streams import StreamConsumer, StreamLimits
from services.common.wire import parse_trajectory_group
from services.learner.lease_desk import LeaseDesk
from specroll_core.contracts import ContractError, TrajectoryGroup
from specroll_core.ledger import Delivery

log = logging.getLogger(__name__)

# How long one read blocks: bounds the answer to a stop signal and to an expired lease.
_READ_SECONDS = 0.2
_READ_ENTRIES = 64
# A learner that waits says so this often.
_SAY_SECONDS = 15.0


class BatchAssembler:
    """Consumes the stream `trajectories`; produces batches of whole groups in the ledger's order.

    An entry is acknowledged only by `acknowledge_trained`, which the learner calls once a checkpoint contains
    the step: a learner that dies finds everything since then in the stream again.
    """

    def __init__(
        self, consumer: StreamConsumer, desk: LeaseDesk, limits: StreamLimits, *, batch_timeout: float
    ) -> None:
        self._consumer = consumer
        self._desk = desk
        self._limits = limits
        self._batch_timeout = batch_timeout
        self._held: dict[str, Entry] = {}  # by entry id: read and not acknowledged
        self._ready: dict[str, tuple[Entry, TrajectoryGroup]] = {}  # by group id
        self._trained: list[Entry] = []
        self.counters: Counter[str] = Counter()

    def adopt(self) -> None:
        """Takes over everything that an earlier learner read and did not acknowledge."""
        for entry in self._consumer.adopt_all():
            self._take(entry)

    def next_batch(self, stop: threading.Event, alive: Callable[[], None]) -> list[TrajectoryGroup] | None:
        """The groups of the next step; None when `stop` is set while waiting.

        Waits for groups on the stream. `alive` is called at every turn and raises when waiting is pointless.
        Raises TimeoutError, saying what is missing, after `batch_timeout` seconds.
        """
        started = said = time.monotonic()
        while not stop.is_set():
            alive()
            entries = self._consumer.read(max_entries=_READ_ENTRIES, block_seconds=_READ_SECONDS)
            for entry in entries:
                self._take(entry)
            # A worker renews the lease of what it samples, and not of what it has published. During a step, which may
            # take longer than a lease, nobody reads: only when all is read is a late group a missing one.
            if len(entries) < _READ_ENTRIES:
                self._expire()
            chosen = self._desk.next_batch()
            if chosen is not None:
                return [self._ready[group_id][1] for group_id in chosen]
            now = time.monotonic()
            if now - started > self._batch_timeout:
                raise TimeoutError(
                    f"no batch after {self._batch_timeout:.0f} s (learner.batch_timeout_seconds): "
                    f"{self._desk.waiting_for()}"
                )
            if now - said > _SAY_SECONDS:
                said = now
                log.info("waiting for a batch: %s", self._desk.waiting_for())
        return None

    def _expire(self) -> None:
        for lease in self._desk.expire():
            self.counters["expired"] += 1
            log.warning("the lease of group %d expired: worker %s is not heard of", lease.serial, lease.worker_id)

    def complete(self, groups: list[TrajectoryGroup]) -> None:
        """The step on these groups is done."""
        self._desk.complete([group.group_id for group in groups])
        for group in groups:
            entry, _ = self._ready.pop(group.group_id)
            self._trained.append(entry)

    def queue_needs_room(self) -> bool:
        """Whether trained groups that wait for a checkpoint fill half of the stream.

        They count against its bounds until they are acknowledged: without an early checkpoint the workers would
        wait for room and the learner for groups.
        """
        entries, size = len(self._trained), sum(entry.size for entry in self._trained)
        return 2 * entries >= self._limits.max_entries or 2 * size >= self._limits.max_bytes

    def acknowledge_trained(self) -> int:
        """Acknowledges what has been trained so far: call it when a checkpoint contains those steps."""
        entries, self._trained = self._trained, []
        self._acknowledge(entries)
        return len(entries)

    def _take(self, entry: Entry) -> None:
        if entry.entry_id in self._held:
            return  # the stream offers again what this process already holds
        try:
            group = parse_trajectory_group(entry.payload)
        except ContractError as error:
            self.counters["malformed"] += 1
            log.error("entry %s breaks the contract and goes to the dead letters: %s", entry.entry_id, error)
            self._consumer.dead_letter(entry, str(error))
            return
        verdict = self._desk.deliver(group)
        self.counters[verdict.value] += 1
        if verdict is Delivery.ACCEPTED:
            self._held[entry.entry_id] = entry
            self._ready[group.group_id] = (entry, group)
            return
        log.info("group %s is %s: its prompt is%s trained", group.group_id, verdict.value,
                 " already" if verdict is Delivery.DUPLICATE else " leased again and")  # fmt: skip
        self._acknowledge([entry])

    def _acknowledge(self, entries: list[Entry]) -> None:
        self._consumer.ack_many(entries)
        for entry in entries:
            self._held.pop(entry.entry_id, None)
