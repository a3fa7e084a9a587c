"""Training rows out of their stream, and from which of them on a drift is learned.

A drift begins before it is sure: what came since the last check without any doubt belongs to it. A policy that has
moved far begins with its first row. Cuts are noted as ids of stream entries as well, since a restarted watcher reads
the stream from its beginning.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import redis

from services.common.row_frames import RowFrame
from services.common.row_stream import RowStream
from services.watcher.rows import RowBuffer

log = logging.getLogger(__name__)

_SECONDS = 1.0
_FRAMES = 64
BEGINNING = "0"


class RowReader:
    """malformed: called for every entry that is none. healthy, fresh: cuts from before a restart, ids of the last
    entries before them.

    fresh_from: rows that `buffer` had received before those that are learned from.
    """

    def __init__(
        self,
        stream: RowStream,
        buffer: RowBuffer,
        malformed: Callable[[], None],
        *,
        healthy: str = BEGINNING,
        fresh: str = BEGINNING,
    ) -> None:
        self._stream = stream
        self._buffer = buffer
        self._malformed = malformed
        self.last = BEGINNING  # id of the newest entry that was read
        self.healthy, self.fresh = healthy, fresh
        self._healthy_at = self.fresh_from = 0
        self._begun: list[tuple[int, str, int]] = []  # (policy, cut as an id, and in rows) where each one's rows begin
        self._due = 0.0

    def without_doubt(self) -> None:
        """Acceptance is as it should be: a drift that comes is learned from later rows."""
        if _number(self.last) >= _number(self.healthy):
            self.healthy, self._healthy_at = self.last, self._buffer.received

    def drifted(self) -> None:
        """What came since acceptance was last as it should be is what is learned from."""
        if _number(self.healthy) > _number(self.fresh):
            self.fresh, self.fresh_from = self.healthy, self._healthy_at

    def moved_far(self, covered: int) -> None:
        """What came since the first row of a policy later than `covered` is what is learned from."""
        for policy, entry, received in self._begun:
            if policy > covered:
                if _number(entry) > _number(self.fresh):
                    self.fresh, self.fresh_from = entry, received
                return

    def read(self, stop: threading.Event) -> None:
        """Takes in what is there, once a second at most."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _SECONDS
        while not stop.is_set():
            try:
                frames = self._stream.read(self.last, _FRAMES)
            except redis.RedisError as error:
                log.debug("rows cannot be read: %s", error)
                return
            for entry, data in frames:
                self._take(entry, data)
            if len(frames) < _FRAMES:
                return

    def _take(self, entry: str, data: bytes) -> None:
        before, self.last = self.last, entry
        try:
            frame = RowFrame.from_bytes(data)
            if not self._begun or frame.policy > self._begun[-1][0]:
                self._begun.append((frame.policy, before, self._buffer.received))
            self._buffer.add(frame)
        except ValueError as error:
            self._malformed()
            log.debug("rows are left out: %s", error)
        if _number(entry) <= _number(self.healthy):
            self._healthy_at = self._buffer.received
        if _number(entry) <= _number(self.fresh):
            self.fresh_from = self._buffer.received


def _number(entry: str) -> tuple[int, int]:
    milliseconds, _, sequence = entry.partition("-")
    return int(milliseconds), int(sequence or 0)
