"""How much of the training time rollouts were being generated: the measure of being asynchronous."""

from __future__ import annotations

from collections.abc import Iterable

from specroll_core.contracts import TrajectoryGroup

Interval = tuple[float, float]


class Overlap:
    """Collects the intervals, in seconds since the epoch, in which trajectories were sampled and steps trained.

    Clocks of different machines may differ; on one machine the figures are exact.
    """

    def __init__(self) -> None:
        self._generation: list[Interval] = []
        self._training: list[Interval] = []

    def add(self, groups: Iterable[TrajectoryGroup], step_started: float, step_finished: float) -> None:
        """One training step and the groups that it trained on."""
        spans = [(t.started_at, t.finished_at) for group in groups for t in group.trajectories]
        self._generation = union([*self._generation, *spans])
        self._training.append((step_started, step_finished))

    def summary(self) -> dict[str, float]:
        """Seconds of generation (at least one trajectory being sampled), of training, and of both at once."""
        training = union(self._training)
        return {
            "generation_seconds": length(self._generation),
            "training_seconds": length(training),
            "overlapped_seconds": length(intersection(self._generation, training)),
        }


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """The points in both; each argument disjoint."""
    right = list(right)
    return [(max(a, c), min(b, d)) for a, b in left for c, d in right if max(a, c) < min(b, d)]


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
