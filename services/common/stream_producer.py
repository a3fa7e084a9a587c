"""The writing end of a stream: idempotent, bounded, and patient before it refuses."""

from __future__ import annotations

import threading
from typing import Any

import redis

from services.common import stream_scripts
from services.common.keys import StreamKeys
from services.common.lifecycle import Deadline
from services.common.stream_base import StreamError, StreamFull, StreamLimits, retrying

_FIRST_POLL_SECONDS = 0.02
_LAST_POLL_SECONDS = 0.25


class StreamProducer:
    """Appends entries to one stream. Safe to use from several threads and processes.

    All producers of a stream must have the same limits: the marks are theirs, the counts are kept in Redis.
    """

    def __init__(self, client: redis.Redis, keys: StreamKeys, limits: StreamLimits) -> None:
        self._client = client
        self._keys = keys
        self._limits = limits
        self._publish = client.register_script(stream_scripts.PUBLISH)

    def publish(
        self, payload: bytes, *, dedup_key: str, deadline_seconds: float, stop: threading.Event | None = None
    ) -> str:
        """Appends one entry and returns its id; with the key of an entry that is in the stream, that one's id.

        So a retry after a lost reply adds nothing. The mark of a key goes with its entry's acknowledgement: who reads
        must know what it has dealt with before. Waits while the stream is full. `stop` ends that wait as a deadline
        does. Raises StreamFull, StreamUnavailable, and ValueError for an entry that can never fit.
        """
        if not dedup_key:
            raise ValueError("dedup_key must not be empty.")
        limits, deadline = self._limits, Deadline(deadline_seconds)
        size = len(payload) + len(dedup_key.encode())
        if size > limits.max_bytes:
            raise ValueError(f"An entry of {size} bytes can never fit into a stream of {limits.max_bytes} bytes.")
        args = [payload, dedup_key, limits.max_entries, limits.max_bytes, limits.low_entries, limits.low_bytes]
        pause, waiter = _FIRST_POLL_SECONDS, stop or threading.Event()
        while True:
            status, entry_id, entries, held = self._run(args, deadline)
            if status != stream_scripts.FULL:
                return str(entry_id.decode())
            # The payload is not sent again before there is room for it.
            while not self._may_try(deadline):
                if deadline.expired or waiter.wait(min(pause, deadline.remaining)):
                    raise self._full(entries, held, deadline_seconds)
                pause = min(2 * pause, _LAST_POLL_SECONDS)
            if deadline.expired or waiter.wait(min(pause, deadline.remaining)):
                raise self._full(entries, held, deadline_seconds)

    def _run(self, args: list[Any], deadline: Deadline) -> tuple[int, bytes, int, int]:
        keys = [self._keys.stream, self._keys.dedup, self._keys.state]
        try:
            status, entry_id, entries, held = retrying(
                lambda: self._publish(keys=keys, args=args), deadline, f"append to {self._keys.stream}"
            )
        except redis.ResponseError as error:
            raise StreamError(f"Redis could not append to {self._keys.stream}: {error}") from error
        return int(status), entry_id, int(entries), int(held)

    def _may_try(self, deadline: Deadline) -> bool:
        """Whether the stream is open or has fallen below its low mark. A hint: the script decides."""

        def look() -> list[Any]:
            pipe = self._client.pipeline(transaction=False)
            pipe.xlen(self._keys.stream)
            pipe.hmget(self._keys.state, ["bytes", "closed"])
            return pipe.execute()

        entries, (held, closed) = retrying(look, deadline, f"look at {self._keys.stream}")
        below = entries <= self._limits.low_entries and int(held or 0) <= self._limits.low_bytes
        return closed != b"1" or below

    def _full(self, entries: int, held: int, waited: float) -> StreamFull:
        return StreamFull(
            f"{self._keys.stream} is full: {entries} entries of at most {self._limits.max_entries}, {held} bytes of at "
            f"most {self._limits.max_bytes}, and did not fall below its low mark within {waited:g} s.",
            entries=entries,
            bytes_held=held,
        )
