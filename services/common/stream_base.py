"""What producer, consumer and inspection of a stream share: bounds, errors, the delivery, retries."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import redis

from services.common.lifecycle import Deadline

if TYPE_CHECKING:
    from services.common.stream_consumer import StreamConsumer

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A server that restarts answers "loading" first; both pass.
_PASSING = (redis.ConnectionError, redis.TimeoutError, redis.exceptions.BusyLoadingError)
_REFUSED = (redis.AuthenticationError, redis.exceptions.AuthorizationError)


class StreamError(RuntimeError):
    """A stream cannot do what was asked; one sentence."""


class StreamUnavailable(StreamError):
    """Redis did not answer within the deadline; the cause is chained."""


class StreamFull(StreamError):
    """No room until the deadline. entries, bytes: what the stream held at the last look."""

    def __init__(self, message: str, *, entries: int, bytes_held: int) -> None:
        super().__init__(message)
        self.entries = entries
        self.bytes = bytes_held


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Bounds of a stream. At the high mark (`max_*`) it closes to producers, below the low one it opens again.

    low_fraction: the low mark as a part of the high one. max_deliveries: an entry that came so often without being
    acknowledged becomes a dead letter. reclaim_idle_seconds: an entry not renewed for so long belongs to a dead
    consumer. max_dead, max_dead_bytes: bounds of the dead letters, of which the oldest are dropped and counted.
    """

    max_entries: int = 1024
    max_bytes: int = 256 * 2**20
    low_fraction: float = 0.75
    max_deliveries: int = 3
    reclaim_idle_seconds: float = 30.0
    max_dead: int = 1000
    max_dead_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        if min(self.max_entries, self.max_bytes, self.max_deliveries, self.max_dead, self.max_dead_bytes) < 1:
            raise ValueError("Every bound of a stream must be at least 1.")
        if not 0 <= self.low_fraction < 1:
            raise ValueError(f"low_fraction must be at least 0 and below 1, not {self.low_fraction}.")
        if not self.reclaim_idle_seconds > 0:
            raise ValueError(f"reclaim_idle_seconds must be above 0, not {self.reclaim_idle_seconds}.")

    @property
    def low_entries(self) -> int:
        return int(self.max_entries * self.low_fraction)

    @property
    def low_bytes(self) -> int:
        return int(self.max_bytes * self.low_fraction)


@dataclass(frozen=True, slots=True)
class Delivery:
    """One entry in the hands of a consumer.

    deliveries: how often it was handed out, this time included. key: its deduplication key.
    """

    entry_id: str
    payload: bytes = field(repr=False)
    key: str
    deliveries: int
    _consumer: StreamConsumer = field(repr=False, compare=False)

    @property
    def size(self) -> int:
        """Bytes that the entry counts for in the stream's bound."""
        return len(self.payload) + len(self.key.encode())

    def ack(self) -> bool:
        """Deletes the entry: it has been dealt with for good. Idempotent; False where it was gone already."""
        return self._consumer.ack_many([self]) == 1

    def dead_letter(self, reason: str) -> None:
        """Moves the entry to the dead letters, for an operator to look at. Idempotent."""
        self._consumer.dead_letter(self, reason)


def retrying(command: Callable[[], T], deadline: Deadline, what: str) -> T:
    """Runs a command that may be sent twice, again and again through connection losses until the deadline.

    Raises StreamUnavailable with the last cause; a server's refusal (memory, password) is raised at once, as it does
    not pass.
    """
    pause = 0.05
    while True:
        try:
            return command()
        except _REFUSED as error:
            raise StreamUnavailable(f"Redis refuses to {what}: {error}") from error
        except _PASSING as error:
            if deadline.expired:
                raise StreamUnavailable(
                    f"Redis was out of reach for {deadline.seconds:g} s, so it could not {what}: {error}"
                ) from error
            logger.debug("Redis is out of reach (%s); trying again to %s", error, what)
        except redis.OutOfMemoryError as error:
            raise StreamUnavailable(f"Redis has reached its maxmemory, so it could not {what}: {error}") from error
        time.sleep(min(pause, deadline.remaining))
        pause = min(2 * pause, 1.0)
