"""Statistics of trajectories out of the stream `feedback`, one record at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from google.protobuf.message import DecodeError

from services.common.streams import Delivery, StreamConsumer
from services.watcher.records import drift_records
from specroll.v1 import feedback_pb2
from specroll_core.drift import DriftRecord

_DELIVERIES = 64


class StatisticsReader:
    """take: called with every record; where it raises, or the acknowledgement does, the next `read` goes on with what
    is left, so that nothing that was handed out waits for a restart and no record that was taken is taken again.
    malformed: called for every entry that is none."""

    def __init__(
        self,
        consumer: StreamConsumer,
        take: Callable[[DriftRecord], None],
        malformed: Callable[[], None],
    ) -> None:
        self._consumer = consumer
        self._take = take
        self._malformed = malformed
        self._waiting: deque[Delivery] = deque()
        self._records: deque[DriftRecord] | None = None  # what is left of the first that waits, None before it was read

    def read(self, wait_seconds: float) -> None:
        """Raises StreamError, LockLost, and whatever `take` does."""
        if not self._waiting:
            self._waiting.extend(self._consumer.read(_DELIVERIES, wait_seconds))
        while self._waiting:
            self._deal_with(self._waiting[0])
            self._waiting.popleft()
            self._records = None

    def _deal_with(self, delivery: Delivery) -> None:
        if self._records is None:
            try:
                batch = feedback_pb2.FeedbackBatch.FromString(delivery.payload)
                self._records = deque(r for trajectory in batch.trajectories for r in drift_records(trajectory))
            except (DecodeError, ValueError) as error:
                delivery.dead_letter(f"no verifier feedback: {error}")
                self._malformed()
                return
        while self._records:
            self._take(self._records[0])
            self._records.popleft()
        delivery.ack()
