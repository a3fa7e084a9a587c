"""Looking into a stream and its dead letters, for operators and metrics. Only `requeue` and `drop_dead` change it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import redis

from services.common import stream_scripts
from services.common.keys import StreamKeys
from services.common.stream_base import StreamError, StreamFull, StreamLimits


@dataclass(frozen=True, slots=True)
class StreamStats:
    """entries: not yet acknowledged, `pending` of them in the hands of a consumer. bytes: of their payloads and keys.

    closed: whether producers wait for the low mark. dead_dropped: dead letters lost to their bound, ever.
    """

    entries: int
    pending: int
    bytes: int
    closed: bool
    dead: int
    dead_bytes: int
    dead_dropped: int
    consumers: dict[str, int]


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """An entry in the stream.

    consumer: who holds it, None where nobody does. idle_seconds: since it was handed out or renewed.
    """

    entry_id: str
    key: str
    payload: bytes = field(repr=False)
    consumer: str | None
    deliveries: int
    idle_seconds: float


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An entry set aside. origin: its id in the stream."""

    entry_id: str
    key: str
    payload: bytes = field(repr=False)
    reason: str
    deliveries: int
    origin: str


class StreamInspector:
    """Reads one stream. Connection errors are redis-py's own: the caller is a command that an operator repeats."""

    def __init__(self, client: redis.Redis, keys: StreamKeys, limits: StreamLimits) -> None:
        self._client = client
        self._keys = keys
        self._limits = limits
        self._requeue = client.register_script(stream_scripts.REQUEUE)
        self._drop_dead = client.register_script(stream_scripts.DROP_DEAD)

    def stats(self) -> StreamStats:
        """Counts as of one moment, from one transaction."""
        pipe = self._client.pipeline(transaction=True)
        pipe.xlen(self._keys.stream)
        pipe.hmget(self._keys.state, ["bytes", "closed", "dead_bytes", "dead_dropped"])
        pipe.xlen(self._keys.dead)
        pipe.xpending(self._keys.stream, self._keys.group)
        entries, (held, closed, dead_bytes, dropped), dead, pending = pipe.execute(raise_on_error=False)
        # No group yet: nobody has ever read, so nothing is pending.
        summary: dict[str, Any] = {} if isinstance(pending, redis.ResponseError) else pending
        return StreamStats(
            entries=int(entries),
            pending=int(summary.get("pending") or 0),
            bytes=int(held or 0),
            closed=closed == b"1",
            dead=int(dead),
            dead_bytes=int(dead_bytes or 0),
            dead_dropped=int(dropped or 0),
            consumers={c["name"].decode(): int(c["pending"]) for c in summary.get("consumers") or ()},
        )

    def entries(self, limit: int = 100) -> list[StoredEntry]:
        """The oldest entries, at most `limit`."""
        rows: Any = self._client.xrange(self._keys.stream, count=limit)
        return [self._stored(row) for row in rows]

    def show(self, entry_id: str) -> StoredEntry | None:
        """One entry; None where there is no such."""
        rows: Any = self._client.xrange(self._keys.stream, entry_id, entry_id)
        return self._stored(rows[0]) if rows else None

    def dead_letters(self, limit: int = 100) -> list[DeadLetter]:
        """The oldest dead letters, at most `limit`."""
        rows: Any = self._client.xrange(self._keys.dead, count=limit)
        return [_dead(row) for row in rows]

    def show_dead(self, entry_id: str) -> DeadLetter | None:
        """One dead letter; None where there is no such."""
        rows: Any = self._client.xrange(self._keys.dead, entry_id, entry_id)
        return _dead(rows[0]) if rows else None

    def requeue(self, entry_id: str) -> str:
        """Puts a dead letter back at the end of the stream, its deliveries counted from 0; returns its new id there.

        Raises StreamError where there is no such letter or its key is in the stream already, StreamFull.
        """
        keys = [self._keys.stream, self._keys.dedup, self._keys.state, self._keys.dead]
        args: list[str | int] = [entry_id, self._limits.max_entries, self._limits.max_bytes]
        status, new_id = self._requeue(keys=keys, args=args)
        if status == stream_scripts.MISSING:
            raise StreamError(f"There is no dead letter {entry_id} in {self._keys.dead}.")
        if status == stream_scripts.DUPLICATE:
            raise StreamError(
                f"The key of dead letter {entry_id} is in {self._keys.stream} again, as entry {new_id.decode()}."
            )
        if status == stream_scripts.FULL:
            now = self.stats()
            raise StreamFull(
                f"{self._keys.stream} is full ({now.entries} entries, {now.bytes} bytes), so dead letter {entry_id} "
                "stays where it is.",
                entries=now.entries,
                bytes_held=now.bytes,
            )
        return str(new_id.decode())

    def drop_dead(self, entry_id: str) -> bool:
        """Deletes a dead letter for good; False where there is no such."""
        return bool(self._drop_dead(keys=[self._keys.dead, self._keys.state], args=[entry_id]))

    def _stored(self, row: tuple[bytes, dict[bytes, bytes]]) -> StoredEntry:
        entry_id, fields = row
        held = self._pending_row(entry_id)
        return StoredEntry(
            entry_id.decode(),
            fields[b"k"].decode(),
            fields[b"p"],
            held["consumer"].decode() if held else None,
            int(held["times_delivered"]) if held else 0,
            held["time_since_delivered"] / 1000 if held else 0.0,
        )

    def _pending_row(self, entry_id: bytes) -> dict[str, Any] | None:
        try:
            rows: Any = self._client.xpending_range(self._keys.stream, self._keys.group, entry_id, entry_id, 1)
        except redis.ResponseError:
            return None  # no group yet
        return rows[0] if rows else None


def _dead(row: tuple[bytes, dict[bytes, bytes]]) -> DeadLetter:
    entry_id, fields = row
    return DeadLetter(
        entry_id.decode(),
        fields[b"k"].decode(),
        fields[b"p"],
        fields[b"reason"].decode(),
        int(fields[b"deliveries"]),
        fields[b"origin"].decode(),
    )
