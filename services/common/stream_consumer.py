"""The reading end of a stream: takes over what dead consumers left, then reads what is new."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import redis

from services.common import stream_scripts
from services.common.exclusive_lock import ExclusiveLock, LockLost
from services.common.keys import StreamKeys
from services.common.lifecycle import Deadline
from services.common.stream_base import Delivery, StreamError, StreamLimits, retrying

logger = logging.getLogger(__name__)

# Below the client's socket timeout, so that a quiet stream is not taken for a lost connection.
_MAX_BLOCK_SECONDS = 2.0
_PAGE = 256  # pending entries looked at, or acknowledged, in one command


class StreamConsumer:
    """One member of the stream's consumer group. Safe to use from several threads; reads take turns.

    name: any; a new process may use a new one, as it takes over what dead consumers held. Two living consumers must
    differ. lock: of the role whose holder alone may consume. With it, acknowledging after the lock was lost raises
    LockLost and changes nothing. deadline_seconds: how long each call bears an outage of Redis.

    An entry that this object handed out and that is not yet acknowledged is never handed out again by it, however
    long it takes. Other members take it over once it was not renewed (`extend`) for `limits.reclaim_idle_seconds`.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: StreamKeys,
        limits: StreamLimits,
        name: str,
        *,
        lock: ExclusiveLock | None = None,
        deadline_seconds: float = 30.0,
    ) -> None:
        self._client = client
        self._keys = keys
        self._limits = limits
        self.name = name
        self._lock = lock
        self._deadline_seconds = deadline_seconds
        self._ack = client.register_script(stream_scripts.ACK)
        self._dead_letter = client.register_script(stream_scripts.DEAD_LETTER)
        self._extend = client.register_script(stream_scripts.EXTEND)
        self._forget = client.register_script(stream_scripts.FORGET_IDLE_CONSUMERS)
        self._reading = threading.Lock()
        self._held: set[str] = set()
        self._held_lock = threading.Lock()
        self._scan_at = 0.0
        self.dead_lettered = 0  # entries given up for too many deliveries
        self._create_group()

    def read(self, max_entries: int, block_seconds: float) -> list[Delivery]:
        """Up to `max_entries` deliveries: first what nobody works on any more, then new entries.

        Waits up to `block_seconds` for the first; returns an empty list where none came. Entries that were delivered
        `limits.max_deliveries` times go to the dead letters instead. Raises StreamUnavailable, LockLost.
        """
        if max_entries < 1:
            raise ValueError(f"max_entries must be at least 1, not {max_entries}.")
        wait = Deadline(block_seconds)
        with self._reading:
            while True:
                self._check_lock()
                deliveries = self._abandoned(max_entries)
                if len(deliveries) < max_entries:
                    block = 0.0 if deliveries else min(wait.remaining, _MAX_BLOCK_SECONDS)
                    deliveries += self._new(max_entries - len(deliveries), block)
                if deliveries or wait.expired:
                    return self._hand_out(deliveries)

    def adopt_all(self) -> list[Delivery]:
        """Takes over every pending entry of every consumer at once, in the order of the stream, oldest first.

        For the single consumer of a role, at its start: it must hold the role's lock, else it would take work from the
        living. Nothing becomes a dead letter here however often it was delivered: that consumers were killed says
        nothing against an entry. Raises StreamUnavailable, LockLost.
        """
        if self._lock is None:
            raise ValueError("adopt_all needs a consumer with a lock: without one it would take work from the living.")
        with self._reading:
            self._check_lock()
            pending = [entry for page in self._pending_pages() for entry in page if not self._holds(entry[0])]
            deliveries: list[Delivery] = []
            for start in range(0, len(pending), _PAGE):
                deliveries += self._claim(pending[start : start + _PAGE], idle_ms=0)
            self._call(self._forget, [self._keys.stream], [self._keys.group, self.name], "forget dead consumers of")
            return self._hand_out(deliveries)

    def extend(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Says that these are still being worked on, so that no other consumer takes them over.

        Returns those that are no longer this consumer's: acknowledged, or taken over in the meantime.
        """
        lost: set[str] = set()
        for start in range(0, len(deliveries), _PAGE):
            ids = [d.entry_id for d in deliveries[start : start + _PAGE]]
            args = [self._keys.group, self.name, *ids]
            answer = self._call(self._extend, [self._keys.stream], args, "renew entries of")
            lost.update(entry_id.decode() for entry_id in answer)
        self._drop(lost)
        return [d for d in deliveries if d.entry_id in lost]

    def ack_many(self, deliveries: Sequence[Delivery]) -> int:
        """Deletes entries that have been dealt with for good. Idempotent; returns how many were still there.

        Raises StreamUnavailable, and LockLost, upon which nothing of the failing part was changed.
        """
        removed = 0
        for start in range(0, len(deliveries), _PAGE):
            part = deliveries[start : start + _PAGE]
            args: list[Any] = [self._keys.group, self._token()]
            for d in part:
                args += [d.entry_id, d.size, d.key]
            answer = self._call(self._ack, self._keys_with_lock(), args, "acknowledge entries of")
            self._check_fence(answer)
            removed += int(answer)
            self._drop(d.entry_id for d in part)
        return removed

    def dead_letter(self, delivery: Delivery, reason: str) -> None:
        """Moves an entry to the dead letters. Idempotent. Raises StreamUnavailable, LockLost."""
        limits = self._limits
        args = [self._keys.group, self._token(), delivery.entry_id, reason, delivery.deliveries]
        args += [limits.max_dead, limits.max_dead_bytes]
        keys = [*self._keys_with_lock(), self._keys.dead]
        self._check_fence(self._call(self._dead_letter, keys, args, "set aside an entry of"))
        self._drop([delivery.entry_id])

    def _abandoned(self, max_entries: int) -> list[Delivery]:
        """Entries of dead consumers, and own ones whose reply was lost on the way. Looked for about once a second."""
        idle_ms = int(self._limits.reclaim_idle_seconds * 1000)
        now = time.monotonic()
        if now < self._scan_at:
            return []
        claimed: list[Delivery] = []
        # The own first: whatever this name has pending and this object does not hold was never handed out.
        for consumer, idle in ((self.name, 0), (None, idle_ms)):
            for page in self._pending_pages(idle_ms=idle, consumer=consumer):
                taken = {d.entry_id for d in claimed}
                wanted = [entry for entry in page if entry[0] not in taken and not self._holds(entry[0])]
                wanted = wanted[: max_entries - len(claimed)]
                claimed += self._give_up_on_poison(self._claim(wanted, idle_ms=idle))
                if len(claimed) >= max_entries:
                    return claimed  # there may be more: look again at the next read
        self._scan_at = now + min(1.0, self._limits.reclaim_idle_seconds / 4)
        return claimed

    def _new(self, count: int, block_seconds: float) -> list[Delivery]:
        block = max(1, int(block_seconds * 1000)) if block_seconds > 0 else None
        streams: dict[Any, Any] = {self._keys.stream: ">"}
        answer = self._command(
            lambda: self._client.xreadgroup(self._keys.group, self.name, streams, count=count, block=block),
            "read from",
        )
        return [self._deliver(entry_id, fields, 1) for _, entries in answer for entry_id, fields in entries]

    def _pending_pages(self, idle_ms: int = 0, consumer: str | None = None) -> Iterator[list[tuple[str, int]]]:
        """Pages of (entry id, deliveries so far), oldest first."""
        start = "-"
        while True:
            rows = self._command(partial(self._pending_page, start, idle_ms, consumer), "list pending entries of")
            if rows:
                yield [(row["message_id"].decode(), int(row["times_delivered"])) for row in rows]
            if len(rows) < _PAGE:
                return
            start = f"({rows[-1]['message_id'].decode()}"

    def _pending_page(self, start: str, idle_ms: int, consumer: str | None) -> Any:
        return self._client.xpending_range(
            self._keys.stream, self._keys.group, start, "+", _PAGE, consumername=consumer, idle=idle_ms or None
        )

    def _claim(self, entries: Sequence[tuple[str, int]], idle_ms: int) -> list[Delivery]:
        """Makes entries this consumer's. Those that another one has renewed or claimed in the meantime stay there."""
        if not entries:
            return []
        before = dict(entries)
        rows = self._command(
            lambda: self._client.xclaim(self._keys.stream, self._keys.group, self.name, idle_ms, list(before)),
            "claim entries of",
        )
        # An entry deleted while pending comes back empty; XCLAIM has dropped it from the pending list.
        return [self._deliver(row[0], row[1], before[row[0].decode()] + 1) for row in rows if row[0] and row[1]]

    def _give_up_on_poison(self, deliveries: list[Delivery]) -> list[Delivery]:
        limit = self._limits.max_deliveries
        for d in deliveries:
            if d.deliveries > limit:
                logger.error("Entry %s of %s goes to the dead letters.", d.entry_id, self._keys.stream)
                self.dead_letter(d, f"delivered {d.deliveries - 1} times without an acknowledgement")
                self.dead_lettered += 1
        return [d for d in deliveries if d.deliveries <= limit]

    def _hand_out(self, deliveries: list[Delivery]) -> list[Delivery]:
        """Notes what the caller gets. Not earlier: what a failing call had claimed must be offered again."""
        with self._held_lock:
            self._held.update(d.entry_id for d in deliveries)
        return deliveries

    def _deliver(self, entry_id: bytes, fields: dict[bytes, bytes], deliveries: int) -> Delivery:
        return Delivery(entry_id.decode(), fields[b"p"], fields[b"k"].decode(), deliveries, self)

    def _holds(self, entry_id: str) -> bool:
        with self._held_lock:
            return entry_id in self._held

    def _drop(self, entry_ids: Iterable[str]) -> None:
        with self._held_lock:
            self._held.difference_update(entry_ids)

    def _create_group(self) -> None:
        def command() -> None:
            try:
                # From 0: what was published before the first consumer came is not passed over.
                self._client.xgroup_create(self._keys.stream, self._keys.group, id="0", mkstream=True)
            except redis.ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise

        retrying(command, self._deadline(), f"create the consumer group of {self._keys.stream}")

    def _command(self, send: Callable[[], Any], what: str) -> Any:
        """`send` with retries; an empty list where the consumer group is gone, which is then made anew."""
        what = f"{what} {self._keys.stream}"

        def command() -> Any:
            try:
                return send()
            except (redis.ConnectionError, redis.TimeoutError):
                self._scan_at = 0.0  # a reply may be lost, and with it entries that are now pending for this name
                raise

        try:
            return retrying(command, self._deadline(), what)
        except redis.ResponseError as error:
            if "NOGROUP" not in str(error):
                raise StreamError(f"Redis could not {what}: {error}") from error
            # The server lost its data, or the last second of it, or somebody deleted the stream.
            logger.warning("The consumer group of %s is gone from Redis and is made anew.", self._keys.stream)
            self._create_group()
            return []

    def _call(self, script: Any, keys: list[str], args: list[Any], what: str) -> Any:
        what = f"{what} {self._keys.stream}"
        try:
            return retrying(lambda: script(keys=keys, args=args), self._deadline(), what)
        except redis.ResponseError as error:
            raise StreamError(f"Redis could not {what}: {error}") from error

    def _deadline(self) -> Deadline:
        return Deadline(self._deadline_seconds)

    def _keys_with_lock(self) -> list[str]:
        lock = self._lock.key if self._lock else f"{self._keys.stream}:no-lock"
        return [self._keys.stream, self._keys.dedup, self._keys.state, lock]

    def _token(self) -> str:
        return self._lock.token if self._lock else ""

    def _check_lock(self) -> None:
        if self._lock:
            self._lock.check()

    def _check_fence(self, answer: object) -> None:
        if answer == stream_scripts.FENCED:
            raise LockLost(f"Another process has taken over {self._keys.stream}; what it holds must not be touched.")
