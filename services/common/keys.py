"""Every key that this system writes to Redis.

All begin with `specroll:{RUN_ID}:`. The braces are Redis Cluster's hash tag: all keys of a run lie in one slot, which
scripts over several keys need.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

TRAJECTORIES = "trajectories"
FEEDBACK = "feedback"

_RUN_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True)
class StreamKeys:
    """The keys of one stream.

    stream: the entries. group: name of its consumer group. dead: stream of dead letters.
    dedup: hash, deduplication key -> entry id, of the entries in the stream.
    state: hash of counters: bytes, closed, dead_bytes, dead_dropped.
    """

    stream: str
    group: str
    dedup: str
    state: str
    dead: str


@dataclass(frozen=True, slots=True)
class RunKeys:
    """The keys of one run. Raises ValueError where the run id holds other than letters, digits, `.`, `_` and `-`."""

    run_id: str

    def __post_init__(self) -> None:
        if not _RUN_ID.fullmatch(self.run_id):
            raise ValueError(
                f"The run id {self.run_id!r} must be 1 to 128 characters out of letters, digits, '.', '_' and '-'."
            )

    @property
    def prefix(self) -> str:
        return f"specroll:{{{self.run_id}}}:"

    def stream(self, name: str, group: str) -> StreamKeys:
        base = f"{self.prefix}{name}"
        return StreamKeys(base, group, f"{base}:dedup", f"{base}:state", f"{base}:dead")

    @property
    def trajectories(self) -> StreamKeys:
        """Groups from the rollout workers to the learner."""
        return self.stream(TRAJECTORIES, "learner")

    @property
    def feedback(self) -> StreamKeys:
        """Verifier feedback from the rollout workers to the watcher."""
        return self.stream(FEEDBACK, "watcher")

    @property
    def feedback_rows(self) -> str:
        """Training rows for heads, bounded by bytes: see `row_stream`."""
        return f"{self.prefix}feedback:rows"

    @property
    def workers(self) -> str:
        """Hash of the rollout workers that live, and their addresses."""
        return f"{self.prefix}workers"

    @property
    def heads(self) -> str:
        """The heads that every worker should serve, as JSON."""
        return f"{self.prefix}heads"

    def lock(self, role: str) -> str:
        """Who holds `role` ("learner", "watcher"): at most one process at a time."""
        return f"{self.prefix}lock:{role}"

    def fence(self, role: str) -> str:
        """How often `role` was taken: the fencing token of its holder."""
        return f"{self.prefix}fence:{role}"
