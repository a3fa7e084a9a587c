"""From verifier feedback to what drift is told from, and a log of it that can be read again."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.common.metrics import JsonlWriter
from specroll.v1 import feedback_pb2
from specroll_core.drift import DriftRecord

# Deeper nodes are reached too seldom to tell anything.
_DEPTHS = 3
_MAX_LOG_BYTES = 64 * 2**20


def drift_records(trajectory: feedback_pb2.TrajectoryFeedback) -> Iterator[DriftRecord]:
    """One record for each version of the heads and number of nodes. Rounds that drafted nothing are left out before.

    The time is when the trajectory ended. A round that accepted a nodes reached depth a + 1 and no deeper. Raises
    ValueError where a worker sent what cannot be.
    """
    if not math.isfinite(trajectory.finished_at):
        raise ValueError(f"a trajectory ended at {trajectory.finished_at}")
    for cell in trajectory.rounds:
        counts = list(cell.accepted)
        depths = min(_DEPTHS, cell.drafted)
        yield DriftRecord(
            at=trajectory.finished_at,
            heads=cell.heads_version,
            stratum=f"T={trajectory.temperature:g} n={cell.drafted}",
            cluster=trajectory.prompt,
            reached=tuple(sum(counts[d:]) for d in range(depths)),
            accepted=tuple(sum(counts[d + 1 :]) for d in range(depths)),
        )


class FeedbackLog:
    """What the watcher saw and decided, one JSON line each: {"kind": ...}. The file is begun anew, the old one kept
    beside it as `.1`, when it has grown to 64 MiB."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer = JsonlWriter(path)

    def write(self, kind: str, value: dict[str, Any]) -> None:
        self._writer.write({"kind": kind, **value})
        if self._path.stat().st_size > _MAX_LOG_BYTES:
            self._writer.close()
            os.replace(self._path, rotated(self._path))
            self._writer = JsonlWriter(self._path)

    def close(self) -> None:
        self._writer.close()


def rotated(path: Path) -> Path:
    """Where the log at `path` is kept that was full before it."""
    return path.with_name(path.name + ".1")


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a `FeedbackLog`. Raises ValueError naming the line that is none."""
    return (line for _, line in numbered_lines(path))


def numbered_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The lines of a `FeedbackLog` with their numbers, from 1. Raises ValueError naming the one that is none."""
    try:
        with path.open("rb") as file:  # a line that is no text has a number too
            for number, raw in enumerate(file, 1):
                try:
                    line = _parsed(raw)
                except (KeyError, ValueError, RecursionError) as error:
                    raise wrong_line(path, number, error) from error
                yield number, line
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error


def wrong_line(path: Path, number: int, error: Exception) -> ValueError:
    """error: what a line that holds something else has led to."""
    reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error).rstrip(".")
    return ValueError(f"{path}, line {number} is no line of recorded feedback: {reason}.")


def _parsed(raw: bytes) -> dict[str, Any]:
    line = json.loads(raw.decode())
    if not isinstance(line, dict) or not isinstance(line["kind"], str):
        raise ValueError("it must be an object whose kind is a text")
    return line
