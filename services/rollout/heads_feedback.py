"""Verifier feedback on its way from the engine to Redis, on a thread of its own: serving never waits for it.

Statistics of every trajectory are kept until Redis has them, as long as the bound allows; training rows are taken from
the scheduler's socket as they come, and dropped where Redis does not answer.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from pathlib import Path

import redis
import zmq

from services.common.keys import RunKeys
from services.common.row_frames import prompt_name
from services.common.row_stream import RowStream
from services.common.streams import StreamFull, StreamLimits, StreamProducer, StreamUnavailable
from services.config import WatcherConfig
from services.rollout.completion import Completion
from services.rollout.sglang_plugin.variables import FEEDBACK_VARIABLE
from specroll.v1 import feedback_pb2
from specroll_core.contracts import SamplingParams, VersionSpan

log = logging.getLogger(__name__)

# Frames that may wait in the scheduler's socket: a few seconds' worth.
_QUEUE_FRAMES = 32
# Trajectories whose statistics may wait for Redis, about 300 bytes each.
_MAX_WAITING = 20_000
_BATCH = 500
_SEND_EVERY_SECONDS = 1.0
_POLL_MS = 200
# Ten thousand trajectories a second for a minute.
FEEDBACK_LIMITS = StreamLimits(max_entries=4096, max_bytes=32 * 2**20)


class FeedbackForwarder:
    """One per rollout process. Start it before the engine: it tells the scheduler where rows go.

    counters: trajectories, dropped_statistics, frames, dropped_frames (here; the scheduler counts its own),
    trimmed_frames.
    """

    def __init__(self, client: redis.Redis, keys: RunKeys, config: WatcherConfig, *, worker_id: str) -> None:
        self._worker_id = worker_id
        self._producer = StreamProducer(client, keys.feedback, FEEDBACK_LIMITS)
        self._rows = RowStream(client, keys.feedback_rows, config.max_row_bytes)
        self._directory = tempfile.TemporaryDirectory(prefix="specroll-feedback-")
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, _QUEUE_FRAMES)
        address = f"ipc://{Path(self._directory.name) / 'rows'}"
        self._socket.bind(address)
        os.environ[FEEDBACK_VARIABLE] = json.dumps(
            {
                "address": address,
                "fraction": config.row_fraction,
                "queue": _QUEUE_FRAMES,
                "rate": config.rows_per_second,
            }
        )
        self._waiting: deque[feedback_pb2.TrajectoryFeedback] = deque()
        self._stop = threading.Event()
        self._numbers = itertools.count()
        self.counters: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="feedback", daemon=True)
        self._thread.start()

    def note(self, request_id: str, prompt: Sequence[int], sampling: SamplingParams, completion: Completion) -> None:
        """`RolloutEngine.observer`: takes the statistics of a finished trajectory. Never waits."""
        if not completion.rounds:
            return
        if len(self._waiting) >= _MAX_WAITING:
            self.counters["dropped_statistics"] += 1
            return
        self.counters["trajectories"] += 1
        self._waiting.append(trajectory_feedback(request_id, prompt, sampling, completion))

    def close(self) -> None:
        """Sends what waits, for a second at most."""
        self._stop.set()
        self._thread.join(5)
        os.environ.pop(FEEDBACK_VARIABLE, None)
        self._socket.close(linger=0)
        self._directory.cleanup()

    def _run(self) -> None:
        send_at = 0.0
        while not self._stop.is_set():
            try:
                if self._socket.poll(_POLL_MS):
                    self._forward_rows(self._socket.recv())
                if time.monotonic() >= send_at:
                    send_at = time.monotonic() + _SEND_EVERY_SECONDS
                    self._send_statistics(deadline_seconds=5.0)
            except Exception:  # the edge of the thread: feedback must not end because of one bad frame
                self.counters["errors"] += 1
                log.exception("feedback could not be forwarded")
                self._stop.wait(1.0)
        self._send_statistics(deadline_seconds=1.0)

    def _forward_rows(self, frame: bytes) -> None:
        try:
            self.counters["trimmed_frames"] += self._rows.append(frame)
            self.counters["frames"] += 1
        except (redis.RedisError, ValueError) as error:
            self.counters["dropped_frames"] += 1
            log.debug("rows were dropped: %s", error)

    def _send_statistics(self, deadline_seconds: float) -> None:
        while self._waiting:
            count = min(_BATCH, len(self._waiting))
            batch = feedback_pb2.FeedbackBatch(
                worker_id=self._worker_id, trajectories=itertools.islice(self._waiting, count)
            )
            key = f"{self._worker_id}/{next(self._numbers)}"
            try:
                self._producer.publish(batch.SerializeToString(), dedup_key=key, deadline_seconds=deadline_seconds)
            except StreamFull:
                # Nobody reads: there is no watcher, or it hangs.
                self.counters["dropped_statistics"] += count
            except StreamUnavailable as error:
                log.warning("statistics wait until Redis answers: %s", error)
                return
            for _ in range(count):
                self._waiting.popleft()


def trajectory_feedback(
    request_id: str, prompt: Sequence[int], sampling: SamplingParams, completion: Completion
) -> feedback_pb2.TrajectoryFeedback:
    """Rounds counted by versions and by nodes drafted; those that drafted nothing say nothing and are left out."""
    cells: dict[tuple[int, int, int], list[int]] = {}
    tokens = len(completion.token_ids)
    for start, drafted, accepted, _ in completion.rounds:
        if drafted < 1 or start >= tokens:
            continue
        heads = _version_at(completion.head_version_spans, start)
        policy = _version_at(completion.policy_version_spans, start)
        counts = cells.setdefault((heads, policy, drafted), [])
        counts.extend([0] * (accepted + 1 - len(counts)))
        counts[accepted] += 1
    return feedback_pb2.TrajectoryFeedback(
        request_id=request_id,
        prompt=prompt_name(prompt),
        temperature=sampling.temperature,
        tokens=tokens,
        finished_at=time.time(),
        rounds=[
            feedback_pb2.RoundCounts(heads_version=h, policy_version=p, drafted=d, accepted=counts)
            for (h, p, d), counts in cells.items()
        ],
    )


def spans_of(marks: Iterable[Sequence[int]], tokens: int) -> tuple[VersionSpan, ...]:
    """Spans that cover [0, tokens), from (version, first token) in the order in which they happened."""
    starts: list[tuple[int, int]] = []
    for version, start in marks:
        while starts and starts[-1][1] >= start:
            starts.pop()  # replaced before a token came
        if start < tokens and not (starts and starts[-1][0] == version):
            starts.append((version, start))
    ends = [*(start for _, start in starts[1:]), tokens][: len(starts)]
    return tuple(VersionSpan(version, start, end) for (version, start), end in zip(starts, ends, strict=True))


def _version_at(spans: Sequence[VersionSpan], token: int) -> int:
    return next((span.version for span in spans if span.start <= token < span.end), 0)
