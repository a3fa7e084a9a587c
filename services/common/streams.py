"""Durable, bounded queues on Redis streams: the names that services use.

An entry is published once per deduplication key, waits until there is room, is handed to one consumer at a time,
comes back when that consumer dies, and is deleted by its acknowledgement. Delivery is at least once: who consumes
deduplicates by key.
"""

from services.common.exclusive_lock import ExclusiveLock, LockHeld, LockLost
from services.common.stream_base import Delivery, StreamError, StreamFull, StreamLimits, StreamUnavailable
from services.common.stream_consumer import StreamConsumer
from services.common.stream_inspect import DeadLetter, StoredEntry, StreamInspector, StreamStats
from services.common.stream_producer import StreamProducer

__all__ = [
    "DeadLetter",
    "Delivery",
    "ExclusiveLock",
    "LockHeld",
    "LockLost",
    "StoredEntry",
    "StreamConsumer",
    "StreamError",
    "StreamFull",
    "StreamInspector",
    "StreamLimits",
    "StreamProducer",
    "StreamStats",
    "StreamUnavailable",
]
